"""A CUDA device that is none: kernels that take seconds of a fake time, a queue of launches, events."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from bssearch.training.clock import CudaClock
from tests.training.toys import FakeTime

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """A device that runs kernels in order; the host launches up to ``depth`` ahead and then waits inside a launch."""

    def __init__(self, depth: int = 1000) -> None:
        self.time = FakeTime()
        self.busy_until = 0.0
        self._depth = depth
        self._pending: deque[float] = deque()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of what a clock asks of `torch.cuda`."""
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
        """Launch so many kernels that take the host and the device so long together."""
        for _ in range(launches):
            self.time.pass_by(host_seconds / launches)
            while self._pending and self._pending[0] <= self.time.seconds:
                self._pending.popleft()
            if len(self._pending) >= self._depth:
                self.wait_until(self._pending.popleft())
            self.busy_until = max(self.busy_until, self.time.seconds) + device_seconds / launches
            self._pending.append(self.busy_until)


class FakeEvent:
    """An event: done when the device has done what was launched before it was recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.done_at = 0.0

    def record(self, stream: object) -> None:
        """Record the event behind all that was launched."""
        self.done_at = max(self._cuda.busy_until, self._cuda.time.seconds)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self._cuda.wait_until(self.done_at)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (end.done_at - self.done_at)
