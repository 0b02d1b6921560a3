"""The clock of a trial: four ledgers, each timed on its own, and the wall time they must add up to.

Only the ``train`` ledger counts toward a time-to-target. It is entered once per segment between two evaluations. On
CUDA a segment is timed by two events and ends in one synchronisation; there is none per step. The host may be
`RUN_AHEAD` micro-batches ahead of the device: so late a stop, or a limit of train seconds, can take effect.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

Ledger = Literal["train", "evaluation", "warmup", "other"]
LEDGERS: tuple[Ledger, ...] = ("train", "evaluation", "warmup", "other")

LEDGER_GAP_SHARE = 0.01
LEDGER_GAP_SECONDS = 0.005
"""Wall time in no ledger is warned of above this share of the trial's (the bar of the design), and above this many
seconds (a choice): a trial of milliseconds spends a larger share between its ledgers."""

PACE = 8
RUN_AHEAD = 2 * PACE
"""After `PACE` micro-batches, in whole steps, the host waits until the device has done those before the last `PACE`.
More than `RUN_AHEAD` are on their way only where a single step has as many."""

MINIMUM_CPU_SHARE = 0.9
"""A single-threaded trial that had the processor for less of its train seconds than this was contended."""

LOOKS = 10
"""How often the time is looked at until no wait for a CPU falls between it and the account of waits: a choice."""


class SegmentMeter(Protocol):
    """What is read at the two ends of each train segment, outside what is timed."""

    def begin(self) -> None:
        """Read before the segment."""

    def end(self) -> None:
        """Read after it, when the device has done its work."""


class Clock:
    """Times a trial on the CPU; a ``meter`` is read at the ends of each train segment.

    ``now`` gives wall seconds, ``cpu_now`` the seconds of CPU this thread has had, ``delay_now`` those that it was
    ready and had none, None where the kernel does not tell.
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
        self.meter: SegmentMeter | None = None
        self.start()

    def start(self) -> None:
        """Set the wall time and every ledger to zero."""
        self._started = self._now()
        self._seconds: dict[Ledger, float] = dict.fromkeys(LEDGERS, 0.0)
        self._cpu_seconds = 0.0
        self._undelayed_seconds = 0.0
        self._host_train_seconds = 0.0
        self._train_entered: float | None = None
        self._delay_entered: float | None = None
        self._knows_delays = self._delay_now() is not None

    def state(self) -> dict[str, Any]:
        """Return what has been booked so far, and the wall time, to be saved; an open block is not in it."""
        return {
            "seconds": dict(self._seconds),
            "cpu_seconds": self._cpu_seconds,
            "undelayed_seconds": self._undelayed_seconds,
            "host_train_seconds": self._host_train_seconds,
            "wall_seconds": self.wall_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Add what was booked in an earlier part of the trial; the time between the parts is in no account."""
        for name in LEDGERS:
            self._seconds[name] += state["seconds"][name]
        self._cpu_seconds += state["cpu_seconds"]
        self._undelayed_seconds += state["undelayed_seconds"]
        self._host_train_seconds += state["host_train_seconds"]
        self._started -= state["wall_seconds"]

    @contextmanager
    def ledger(self, name: Ledger) -> Iterator[None]:
        """Book the seconds of the block in a ledger, also where the block raises. Ledgers do not nest."""
        if name == "train":
            with self._train():
                yield
            return
        entered = self._now()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[name] += self._now() - entered

    def seconds(self, name: Ledger) -> float:
        """Return what has been booked in a ledger so far; an open block is not in it."""
        return self._seconds[name]

    @property
    def wall_seconds(self) -> float:
        """Return the seconds since the start, whatever was booked."""
        return self._now() - self._started

    def warnings(self, wall: float) -> list[str]:
        """Return the warning of wall seconds that no ledger owns, if they are many; ``wall`` is all of the trial's."""
        gap = wall - sum(self._seconds.values())
        if gap <= max(LEDGER_GAP_SHARE * wall, LEDGER_GAP_SECONDS):
            return []
        return [f"{gap:.3g} s of the trial's {wall:.3g} s are in no ledger ({gap / wall:.1%})"]

    def pace(self, micro_batches: int = 1) -> None:
        """Keep the host from running far ahead of the device; called after every step. Nothing to do on the CPU."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return what to put around that which waits for the device inside a train segment."""
        return nullcontext()

    @property
    def host_bound_share(self) -> float | None:
        """Return the host-bound share of the train segments, see `CudaClock.host_bound_share`; None on the CPU."""
        return None

    @property
    def train_seconds_so_far(self) -> float:
        """Return the train seconds including those of the open block, by the host's clock: no synchronisation."""
        open_seconds = 0.0 if self._train_entered is None else self._now() - self._train_entered
        return self._seconds["train"] + open_seconds

    @property
    def cpu_share(self) -> float | None:
        """Return the share of the train seconds in which this thread had a processor; None before any."""
        return self._cpu_seconds / self._host_train_seconds if self._host_train_seconds > 0 else None

    def undelayed_train_seconds(self, threads: int) -> float | None:
        """Return the train seconds less those that this thread was ready and had no CPU.

        Waiting for data counts. Where the kernel does not tell, it is the seconds of CPU. None where several threads,
        or a GPU, did the work.
        """
        return self._undelayed_seconds if threads == 1 and self.cpu_share is not None else None

    def counted_train_seconds(self, threads: int) -> float:
        """Return the train seconds by which trials race, those of the open block included: no synchronisation.

        They are `undelayed_train_seconds` where the kernel tells the waits for a CPU, so that a busy neighbour neither
        prunes a trial nor makes one look slower; else all train seconds.
        """
        if not self._knows_delays or threads != 1:
            return self.train_seconds_so_far
        seconds, delayed = self._seconds["train"], self._host_train_seconds - self._undelayed_seconds
        if self._train_entered is not None:
            now, delay = self._look()
            seconds += now - self._train_entered
            if delay is not None and self._delay_entered is not None:
                delayed += delay - self._delay_entered
        return max(0.0, seconds - delayed)

    def is_contended(self, threads: int) -> bool:
        """Return whether another program took the processor from a single-threaded trial.

        Where the kernel tells the waits for a CPU, waits for data or a disk are none. With more threads the main one
        also waits for the others, so its share says nothing: False.
        """
        share = self.cpu_share
        if share is not None and self._knows_delays:
            share = self._undelayed_seconds / self._host_train_seconds
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
            self._synchronize()
            left, delayed = self._look()
            host_seconds, cpu_seconds = left - entered, self._cpu_now() - cpu_entered
            self._cpu_seconds += cpu_seconds
            if delayed is None or delay_entered is None:
                self._undelayed_seconds += cpu_seconds
            else:
                self._undelayed_seconds += max(0.0, host_seconds - (delayed - delay_entered))
            self._host_train_seconds += host_seconds
            self._train_entered = self._delay_entered = None
            self._seconds["train"] += self._between(device_start, device_end, host_seconds)
            if self.meter is not None:
                self.meter.end()

    def _look(self) -> tuple[float, float | None]:
        """Return the time, and the waits for a CPU up to that moment.

        The kernel often takes the CPU away as its account is read. Such a wait, in one of the two and not in the other,
        may be longer than a short segment.
        """
        delay = self._delay_now()
        for _ in range(LOOKS):
            before, now, delay = delay, self._now(), self._delay_now()
            if delay == before:
                break
        return now, delay

    def _mark(self) -> torch.cuda.Event | None:
        return None

    def _between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None, host_seconds: float) -> float:
        return host_seconds

    def _synchronize(self) -> None:
        """Wait until the device has done what was asked of it; nothing to do on the CPU."""


@dataclass(slots=True)
class _Segment:
    """What the host did in a train segment: the steps it launched, its seconds of waiting, and the last wait's."""

    steps: int = 0
    first_step_seconds: float = 0.0
    waited_seconds: float = 0.0
    last_wait_seconds: float = 0.0

    def working_seconds(self, seconds: float) -> float:
        """Return the seconds in which the host did not wait, of a segment of so many; see `host_bound_share`."""
        working = seconds - self.waited_seconds
        if self.steps and self.last_wait_seconds > seconds / self.steps:
            working = min(working, self.steps * self.first_step_seconds)
        return min(max(0.0, working), seconds)


class CudaClock(Clock):
    """Times a trial on a CUDA device: train segments by events, the rest by the host after a synchronisation."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        super().__init__(now)

    def start(self) -> None:
        """Set the wall time and every ledger to zero."""
        super().start()
        self._knows_delays = False  # The device does the work; its host waits for it.
        self._launched = 0
        self._last_pace: torch.cuda.Event | None = None
        self._segment: _Segment | None = None
        self._working_seconds = self._watched_seconds = 0.0

    def state(self) -> dict[str, Any]:
        """Return what `Clock.state` returns, and the seconds behind `host_bound_share`."""
        own = {"working_seconds": self._working_seconds, "watched_seconds": self._watched_seconds}
        return {**super().state(), **own}

    def restore(self, state: dict[str, Any]) -> None:
        """Add what was booked in an earlier part; of one that an older version saved, the host's share is not known."""
        super().restore(state)
        self._working_seconds += state["working_seconds"]
        self._watched_seconds += state["watched_seconds"]

    def pace(self, micro_batches: int = 1) -> None:
        """Wait for the device where the host is far ahead of it (`RUN_AHEAD`)."""
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
        """Count the seconds of the block as waits for the device, where a train segment is open."""
        entered = self._now()
        try:
            yield
        finally:
            if self._segment is not None:
                self._segment.last_wait_seconds = self._now() - entered
                self._segment.waited_seconds += self._segment.last_wait_seconds

    @property
    def host_bound_share(self) -> float | None:
        """Return 1 − the seconds that the host waited for the device ÷ those of the train segments; None before any.

        It is the share in which the host was at work: near 0 where the device is slow and the host fast, near 1 where
        the device waits for launches, or for data. While the host waits the device works, so that no more than this
        share of the seconds would go if the host took no time. Waits are those of `pace`, of `waiting`, and of the end
        of a segment; others, as in a loss that reads a number or in fp16's loss scaling, count as work.

        A segment of fewer than `RUN_AHEAD` micro-batches has its waits at its end, which changes nothing: all are
        counted. The last step's kernels that are still to run at that end are waited for too, so that in segments of a
        few steps the share of a host-bound step is too small, by at most a step of the device in each segment.

        A driver takes about a thousand launches ahead (as users report; not measured here); the next one waits inside,
        where no clock sees it. So where the device is more than a whole step behind at the end of a segment, the host
        has worked no longer in each step than in the first, which met an empty queue. A single step of more launches
        than that still shows too large a share.
        """
        if self._watched_seconds == 0:
            return None
        return min(max(0.0, self._working_seconds / self._watched_seconds), 1.0)

    @contextmanager
    def _train(self) -> Iterator[None]:
        self._segment = segment = _Segment()
        before = self._host_train_seconds
        try:
            with super()._train():
                yield
        finally:
            self._segment = None
            seconds = self._host_train_seconds - before
            self._working_seconds += segment.working_seconds(seconds)
            self._watched_seconds += seconds

    @property
    def cpu_share(self) -> float | None:
        """Return None: the host's thread waits for the device most of the time."""
        return None

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None, host_seconds: float) -> float:
        assert start is not None and end is not None
        return float(start.elapsed_time(end)) / 1e3

    def _synchronize(self) -> None:
        with self.waiting():
            torch.cuda.synchronize(self._device)


class RunDelay(threading.local):
    """The kernel's account of this thread's waits for a CPU; its file stays open, to be read in microseconds."""

    def __init__(self) -> None:
        self._process: int | None = None
        self._file: int | None = None

    def seconds(self, schedstat: Path = Path("/proc/thread-self/schedstat")) -> float | None:
        """Return the seconds that this thread was ready to run and had no CPU, None where the kernel does not tell.

        The second number of proc_pid_schedstat(5), in nanoseconds.
        """
        if self._process != os.getpid():  # The file of a process that has forked is its parent's.
            self._process, self._file = os.getpid(), None
            with suppress(OSError):
                self._file = os.open(schedstat, os.O_RDONLY | os.O_CLOEXEC)
        if self._file is None:
            return None
        try:
            _, delay, slices = map(int, os.pread(self._file, 64, 0).split())
        except (OSError, ValueError):
            return None
        return delay / 1e9 if slices else None  # A kernel that keeps no account says 0 of all.


RUN_DELAY = RunDelay()


def clock_for(device: torch.device) -> Clock:
    """Return the clock that times work on a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
