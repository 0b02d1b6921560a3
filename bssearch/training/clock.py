"""The clock of a trial: the ledgers train, evaluation, warmup and other add up to about the wall time.

Only ``train`` counts toward the time to the target.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bssearch.records.text import percent
from bssearch.training.nvml import DeviceMeter

Ledger = Literal["train", "evaluation", "warmup", "other"]
LEDGERS: tuple[Ledger, ...] = ("train", "evaluation", "warmup", "other")

# The host's seconds of train segments; its CPU seconds; without waits for a CPU; without waits for the device.
_OF_TRAIN = ("host", "cpu", "undelayed", "working")

# Warn if the time outside all ledgers exceeds both bounds; short trials spend a larger share outside.
LEDGER_GAP_SHARE = 0.01
LEDGER_GAP_SECONDS = 0.005

# After each PACE micro-batches, in whole steps, the host waits for all but the last PACE. At most RUN_AHEAD
# micro-batches are in flight, unless a single step has more.
PACE = 8
RUN_AHEAD = 2 * PACE

MINIMUM_CPU_SHARE = 0.9  # a single-threaded trial below this share of processor time was contended

LOOKS = 10  # attempts to read the time and the waits without a new wait between the two readings


class Clock:
    """Times a trial on the CPU.

    ``now`` returns wall seconds, and ``cpu_now`` this thread's CPU seconds. ``delay_now`` returns this thread's seconds
    of waits for a CPU, or None if unknown.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        cpu_now: Callable[[], float] = time.thread_time,
        delay_now: Callable[[], float | None] | None = None,
    ) -> None:
        self._now = now
        self._cpu_now = cpu_now
        self._delay_now = delay_now or RUN_DELAY.seconds
        self.meter: DeviceMeter | None = None  # read before and after train segments, off the clock
        self.start()

    def start(self) -> None:
        self._started = self._now()
        self._seconds: dict[Ledger, float] = dict.fromkeys(LEDGERS, 0.0)
        self._of_train = dict.fromkeys(_OF_TRAIN, 0.0)
        self._train_entered: float | None = None
        self._delay_entered: float | None = None
        self._delay = self._delay_now()  # as last read
        self._knows_delays = self._delay is not None

    def state(self) -> dict[str, Any]:
        return {"seconds": dict(self._seconds), "of_train": dict(self._of_train), "wall_seconds": self.wall_seconds}

    def restore(self, state: dict[str, Any]) -> None:
        for name in LEDGERS:
            self._seconds[name] += state["seconds"][name]
        for kind in _OF_TRAIN:
            self._of_train[kind] += state["of_train"][kind]
        self._started -= state["wall_seconds"]

    def ledger(self, name: Ledger) -> AbstractContextManager[None]:
        """Return a context manager that adds the block's seconds to a ledger, even if the block raises.

        Do not nest blocks.
        """
        return self._train() if name == "train" else self._untrained(name)

    @contextmanager
    def _untrained(self, name: Ledger) -> Iterator[None]:
        entered = self._now()
        try:
            yield
        finally:
            self.synchronize()
            self._seconds[name] += self._now() - entered

    def seconds(self, name: Ledger) -> float:
        """Return the seconds of a ledger's closed blocks."""
        return self._seconds[name]

    @property
    def wall_seconds(self) -> float:
        return self._now() - self._started

    def warnings(self, wall: float) -> list[str]:
        """Return a warning if over `LEDGER_GAP_SECONDS` and `LEDGER_GAP_SHARE` × ``wall`` were not measured."""
        gap = wall - sum(self._seconds.values())
        if gap <= max(LEDGER_GAP_SHARE * wall, LEDGER_GAP_SECONDS):
            return []
        return [f"{gap:.3g} s of the trial's {wall:.3g} s were not measured ({percent(gap / wall, 1)})"]

    def pace(self, micro_batches: int = 1) -> None:
        """Limit how far the host runs ahead of a GPU. Call after every step."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def host_bound_share(self) -> float | None:
        return None

    @property
    def train_seconds_so_far(self) -> float:
        """The train seconds, plus the seconds of an open block by the host's clock."""
        open_seconds = 0.0 if self._train_entered is None else self._now() - self._train_entered
        return self._seconds["train"] + open_seconds

    @property
    def cpu_share(self) -> float | None:
        """The share of train seconds in which this thread ran on a CPU, or None if unknown."""
        return self._share_of_train("cpu", "host")

    def _share_of_train(self, part: str, whole: str) -> float | None:
        return self._of_train[part] / self._of_train[whole] if self._of_train[whole] > 0 else None

    def undelayed_train_seconds(self, threads: int) -> float | None:
        """Return the train seconds without waits for a CPU.

        Return None before training, with several threads, or on a GPU. If the kernel does not count waits, return CPU
        seconds.
        """
        return self._of_train["undelayed"] if threads == 1 and self.cpu_share is not None else None

    def counted_train_seconds(self, threads: int) -> float:
        """Return the train seconds so far. With one thread, known waits for a CPU do not count."""
        if not self._knows_delays or threads != 1:
            return self.train_seconds_so_far
        seconds, delayed = self._seconds["train"], self._of_train["host"] - self._of_train["undelayed"]
        if self._train_entered is not None:
            now, delay = self._look()
            seconds += now - self._train_entered
            if delay is not None and self._delay_entered is not None:
                delayed += delay - self._delay_entered
        return max(0.0, seconds - delayed)

    def is_contended(self, threads: int) -> bool:
        """True if other programs took the CPU. Always False with several threads or a GPU."""
        share = self.cpu_share
        if share is not None and self._knows_delays:
            share = self._share_of_train("undelayed", "host")
        return threads == 1 and share is not None and share < MINIMUM_CPU_SHARE

    @contextmanager
    def _train(self) -> Iterator[None]:
        if self.meter is not None:
            self.meter.begin()
        device_start = self._mark()
        cpu_entered = self._cpu_now()
        entered, delay_entered = self._look()
        self._train_entered, self._delay_entered = entered, delay_entered
        try:
            yield
        finally:
            device_end = self._mark()
            self.synchronize()
            left, delayed = self._look()
            host_seconds, cpu_seconds = left - entered, self._cpu_now() - cpu_entered
            self._of_train["host"] += host_seconds
            self._of_train["cpu"] += cpu_seconds
            if delayed is None or delay_entered is None:
                self._of_train["undelayed"] += cpu_seconds
            else:
                self._of_train["undelayed"] += max(0.0, host_seconds - (delayed - delay_entered))
            self._train_entered = self._delay_entered = None
            self._seconds["train"] += self._between(device_start, device_end, host_seconds)
            if self.meter is not None:
                self.meter.end()

    def _look(self) -> tuple[float, float | None]:
        # Retry, because a wait between the two readings may exceed a short segment.
        for _ in range(LOOKS):
            before, now, self._delay = self._delay, self._now(), self._delay_now()
            if self._delay == before:
                break
        return now, self._delay

    def _mark(self) -> torch.cuda.Event | None:
        return None

    def _between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None, host_seconds: float) -> float:
        return host_seconds

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class _Segment:
    steps: int = 0
    first_step_seconds: float = 0.0
    waited_seconds: float = 0.0
    last_wait_seconds: float = 0.0

    def working_seconds(self, seconds: float) -> float:
        # seconds without waits; see `CudaClock.host_bound_share`
        working = seconds - self.waited_seconds
        if self.steps and self.last_wait_seconds > seconds / self.steps:
            working = min(working, self.steps * self.first_step_seconds)
        return min(max(0.0, working), seconds)


class CudaClock(Clock):
    """Times train segments by CUDA events, and other work by the host's clock."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        super().__init__(now)

    def start(self) -> None:
        super().start()
        self._knows_delays = False  # the device does the work while the host waits
        self._launched = 0
        self._last_pace: torch.cuda.Event | None = None
        self._segment: _Segment | None = None

    def pace(self, micro_batches: int = 1) -> None:
        if self._segment is not None:
            self._segment.steps += 1
            if self._segment.steps == 1:
                self._segment.first_step_seconds = self.train_seconds_so_far - self._seconds["train"]
        self._launched += micro_batches
        if self._launched < PACE:
            return
        self._launched = 0
        last, self._last_pace = self._last_pace, self._mark()
        if last is not None:
            with self.waiting():
                last.synchronize()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        entered = self._now()
        try:
            yield
        finally:
            if self._segment is not None:
                self._segment.last_wait_seconds = self._now() - entered
                self._segment.waited_seconds += self._segment.last_wait_seconds

    @property
    def host_bound_share(self) -> float | None:
        """The share of train seconds in which the host does not wait for the device.

        A faster host saves at most about this share.
        """
        # Waits outside `pace`, `waiting` and a segment's end (reading a loss, fp16's loss scaling) count as work.
        # The last step's kernels also run while the host waits, so segments of a few steps understate the share, by at
        # most one step of the device each. The driver blocks unseen after about a thousand queued launches (as users
        # report; not measured here). So if the device lags more than a step at the end, each step counts as long as the
        # first step, which met an empty queue. A single step with more launches still overstates the share.
        return self._share_of_train("working", "host")

    @contextmanager
    def _train(self) -> Iterator[None]:
        self._segment = segment = _Segment()
        before = self._of_train["host"]
        try:
            with super()._train():
                yield
        finally:
            self._segment = None
            self._of_train["working"] += segment.working_seconds(self._of_train["host"] - before)

    @property
    def cpu_share(self) -> float | None:
        return None

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None, host_seconds: float) -> float:
        assert start is not None and end is not None
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        with self.waiting():
            torch.cuda.synchronize(self._device)


class RunDelay(threading.local):
    """The kernel's account of this thread's waits for a CPU."""

    _process: int | None = None
    _file: int | None = None

    def seconds(self, schedstat: Path = Path("/proc/thread-self/schedstat")) -> float | None:
        """Return this thread's seconds of waits for a CPU, if known (proc_pid_schedstat(5), second number)."""
        if self._process != os.getpid():  # after a fork, the open file describes the parent
            self._process, self._file = os.getpid(), None
            with suppress(OSError):
                self._file = os.open(schedstat, os.O_RDONLY | os.O_CLOEXEC)
        if self._file is None:
            return None
        _, delay, slices = map(int, os.pread(self._file, 64, 0).split())
        return delay / 1e9 if slices else None  # all zeros: the kernel keeps no account


RUN_DELAY = RunDelay()


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else Clock()
