"""The clock of a loop that is not ours: training is what happens between two of its evaluations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch

from bssearch.training.clock import Clock, Ledger
from bssearch.training.contention import ContentionMeter, cpu_use
from bssearch.training.core_pace import CorePace

WARM_UP_STEPS = 3
"""The steps at the start of a loop whose excess over the later ones is no training: a choice."""

TIMED_STEPS = WARM_UP_STEPS + 20
"""The steps that are timed one by one to tell that excess: a choice; on a GPU each of them is waited for."""

RUN_PROCESSES = 3
"""The processes above that of a script which are its run's: its server, the worker and the driver."""


def contention_meter(device: torch.device, threads: int, core: CorePace | None) -> ContentionMeter:
    """Return what tells whether others use the machine: none of the processes that started this one for its run."""
    above = [one.pid for one in psutil.Process().parents()[:RUN_PROCESSES]]
    return ContentionMeter(device, threads, core, lambda: cpu_use(parents=above))


class HostClock(Clock):
    """Times a loop by the host between two synchronisations, on whichever device and streams it computes.

    Events on one stream, as for bssearch's own loop, would miss what the user's code puts on others.
    """

    def __init__(
        self,
        device: torch.device,
        now: Callable[[], float] = time.perf_counter,
        cpu_now: Callable[[], float] = time.thread_time,
        delay_now: Callable[[], float | None] | None = None,
    ) -> None:
        self._device = device
        super().__init__(now, cpu_now, delay_now)

    def start(self) -> None:
        """Set the wall time and every ledger to zero."""
        super().start()
        self._knows_delays = self._knows_delays and self._device.type == "cpu"

    @property
    def cpu_share(self) -> float | None:
        """Return the share of the train seconds in which this thread had a processor; None on a GPU."""
        return super().cpu_share if self._device.type == "cpu" else None

    def book_rest(self, name: Ledger) -> None:
        """Add to a ledger the wall time up to now that is in none."""
        self._seconds[name] += max(0.0, self.wall_seconds - sum(self._seconds.values()))

    def wait(self) -> None:
        """Wait until the device has done what was asked of it."""
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        elif self._device.type == "mps":
            torch.mps.synchronize()


class LoopClock:
    """Books a loop's time: training goes on unless something else is timed.

    ``excess`` is by how much the first steps (`WARM_UP_STEPS`) took longer than the median of the later ones:
    compilation, autotuning, caches. It is booked as warm-up, of each part of a trial that was paused. All are the
    seconds that count of a training on ``threads``, see `Clock.counted_train_seconds`.
    """

    def __init__(self, clock: HostClock, threads: int) -> None:
        self.clock = clock
        self._threads = threads
        self.excess = 0.0
        self._excess_before = 0.0
        self._opened: AbstractContextManager[None] | None = None
        self._name: Ledger | None = None
        self._steps: list[float] = []
        self._step_began = 0.0
        self._told = 0.0

    def train(self) -> None:
        """Go on timing the training; nothing changes where it is timed already."""
        if self._name != "train":
            self._enter("train")
            self._step_began = self._counted

    def evaluate(self) -> None:
        """Time an evaluation from now on."""
        self._enter("evaluation")

    def rest(self) -> None:
        """Time what is neither from now on."""
        self._enter("other")

    def pause(self) -> None:
        """Wait for the device and close what is being timed."""
        opened, self._opened, self._name = self._opened, None, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def _enter(self, name: Ledger) -> None:
        self.pause()
        self._opened, self._name = self.clock.ledger(name), name
        self._opened.__enter__()

    def stepped(self) -> None:
        """Take note that a step has ended, while its training is timed or just after."""
        if len(self._steps) >= TIMED_STEPS:
            return
        if self._name == "train":
            self.clock.wait()
        now = self._counted
        self._steps.append(now - self._step_began)
        self._step_began = now
        self.excess = self._excess_before + _excess(self._steps)

    def state(self) -> dict[str, Any]:
        """Return what the first steps took too long, to be saved."""
        return {"excess": self.excess, "told": self._told}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was saved: the first steps of this process are warm-up again."""
        self.excess = self._excess_before = state["excess"]
        self._told = state["told"]

    @property
    def _counted(self) -> float:
        return self.clock.counted_train_seconds(self._threads)

    def train_seconds(self, *, is_hit: bool = False) -> float:
        """Return the train seconds that count, without the excess of the first steps; they never run backwards.

        While that excess is not known, in the first steps, they stand still: less than it was is a bound of when the
        target was missed. It is none of when it was met (``is_hit``).
        """
        if len(self._steps) <= WARM_UP_STEPS and not is_hit:
            return self._told
        self._told = max(self._told, self._counted - self.excess)
        return self._told


def _excess(steps: list[float]) -> float:
    later = steps[WARM_UP_STEPS:] or steps[1:]
    if not later:
        return 0.0
    typical = statistics.median(later)
    return sum(max(0.0, seconds - typical) for seconds in steps[:WARM_UP_STEPS])
