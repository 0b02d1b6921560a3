"""A fake CUDA device: kernels that take seconds of a fake time, a queue of launches, events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from bssearch.training.clock import CudaClock
from tests.training.toys import FakeTime

DEVICE = torch.device("cuda", 0)


@dataclass
class FakeCuda:
    """A device that runs kernels in order; with ``depth`` kernels in its queue, the host waits inside a launch."""

    time: FakeTime = field(default_factory=FakeTime)
    busy_until: float = 0.0
    depth: int = 1000
    _pending: deque[float] = field(default_factory=deque)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions of `torch.cuda` that a clock calls."""
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait_until(self.busy_until))

    def clock(self) -> CudaClock:
        """Return a clock of the device."""
        return CudaClock(DEVICE, now=lambda: self.time.seconds)

    def wait_until(self, moment: float) -> None:
        """Let the host wait."""
        self.time.pass_by(max(0.0, moment - self.time.seconds))

    def launch(self, host_seconds: float, device_seconds: float, launches: int = 1) -> None:
        """Launch kernels that together take ``host_seconds`` and ``device_seconds``."""
        for _ in range(launches):
            self.time.pass_by(host_seconds / launches)
            while self._pending and self._pending[0] <= self.time.seconds:
                self._pending.popleft()
            if len(self._pending) >= self.depth:
                self.wait_until(self._pending.popleft())
            self.busy_until = max(self.busy_until, self.time.seconds) + device_seconds / launches
            self._pending.append(self.busy_until)


@dataclass
class FakeEvent:
    """An event that is done when all earlier kernels are done."""

    cuda: FakeCuda
    done_at: float = 0.0

    def record(self, stream: object) -> None:
        """Record the event behind all launched kernels."""
        self.done_at = max(self.cuda.busy_until, self.cuda.time.seconds)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self.cuda.wait_until(self.done_at)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (end.done_at - self.done_at)
