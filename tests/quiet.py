"""Whether a machine is quiet, and processes that keep it busy: for benchmarks that measure in either state."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from bssearch.history import History
from bssearch.records import TrialRecord
from bssearch.search.listener import Listener
from bssearch.training.clock import MINIMUM_CPU_SHARE, RUN_DELAY
from bssearch.training.contention import LEAST_OTHERS, SLOW, SLOW_SHARE, CpuUse, ReferenceKernel, cpu_use
from tests.benchmarks.repeatability import BUSY_PRODUCTS, busy_process
from tests.frozen import Results

LOOK_SECONDS = 3.0
"""Seconds of looking before a measurement begins: a choice."""

WATCHED_SECONDS = 60.0
"""Seconds of trials after which a measurement is given up where others use too much: a choice."""

LEAST_BUSY = 0.25
"""CPUs that a busy process must have had beside the trials, else it kept nothing busy: a choice."""


class NotMeasuredError(Exception):
    """The machine did not allow to measure."""


@dataclass(frozen=True)
class Quietness:
    """What a thread sees that does a fixed piece of work over and over.

    ``others_cpus`` are used by other processes, ``delay_share`` is the share of the time in which the thread waited for
    a CPU, ``slow_share`` that of the looks at the reference kernel that were slow, ``load`` the load average of the
    last minute, which is for people: it remembers our own work.
    """

    others_cpus: float
    delay_share: float
    slow_share: float
    load: float

    def is_quiet(self, tolerance: float) -> bool:
        """Return whether nothing disturbs more than ``tolerance`` times what is allowed."""
        return (
            self.others_cpus <= tolerance * LEAST_OTHERS
            and self.delay_share <= tolerance * (1 - MINIMUM_CPU_SHARE)
            and self.slow_share <= tolerance * SLOW_SHARE
        )

    def __str__(self) -> str:
        return (
            f"others use {self.others_cpus:.2f} CPUs (at most {LEAST_OTHERS:g}), {self.delay_share:.0%} of the time "
            f"is spent waiting for a CPU (at most {1 - MINIMUM_CPU_SHARE:.0%}), {self.slow_share:.0%} of the looks at "
            f"the reference kernel are slow (at most {SLOW_SHARE:.0%}); load average {self.load:.2f}"
        )


def quietness(seconds: float) -> Quietness:
    """Look at the machine for so many seconds."""
    kernel = ReferenceKernel(period=0.0)
    before, delayed, started = used_cpus(), RUN_DELAY.seconds() or 0.0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        kernel.look()
    delay = (RUN_DELAY.seconds() or 0.0) - delayed
    looks: list[float] = kernel.state()["looks"]
    fast = float(np.quantile(looks, 0.1))
    return Quietness(
        others_cpus=others_seconds(before, used_cpus()) / elapsed,
        delay_share=delay / elapsed,
        slow_share=sum(look > SLOW * fast for look in looks) / len(looks),
        load=os.getloadavg()[0],
    )


def used_cpus() -> CpuUse:
    """Return the use of the CPUs so far."""
    use = cpu_use()
    if use is None:
        raise NotMeasuredError("the kernel keeps no account of its CPUs, so that nothing shows whether it is quiet")
    return use


def others_seconds(before: CpuUse, after: CpuUse) -> float:
    """Return the CPU seconds between two moments that were neither ours, our children's nor our parent's."""
    used = after.less(before)
    return used.busy - used.ours - used.parent


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a busy process; raise `NotMeasuredError` where it has ended."""
    try:
        times = process.cpu_times()
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(times.user + times.system)
    except psutil.NoSuchProcess:
        pass
    raise NotMeasuredError(f"the busy process {process.pid} has ended")


@contextmanager
def condition(name: str, tolerance: float, look_seconds: float = LOOK_SECONDS) -> Iterator[list[psutil.Process]]:
    """Give the busy processes that run inside the block, none where it is to be quiet; look at the machine before.

    Raises `NotMeasuredError` where the machine is not quiet before.
    """
    found = quietness(look_seconds)
    print(f"{name}: {found}", flush=True)
    if not found.is_quiet(tolerance):
        raise NotMeasuredError(f"the machine is not quiet: {found}")
    with ExitStack() as stack:
        codes = [BUSY_PRODUCTS] * len(os.sched_getaffinity(0)) if name == "busy" else []
        yield [psutil.Process(stack.enter_context(busy_process(code))) for code in codes]


class Watch(Listener):
    """Watches what uses the CPUs while trials run, adding to what a measurement that was cut off has seen.

    ``seen`` is written into the results after every trial.
    """

    def __init__(self, results: Results, key: str, busy: Sequence[psutil.Process], tolerance: float) -> None:
        zero = {"trials": 0, "contended": 0, "seconds": 0.0, "others_cpu_seconds": 0.0, "busy_cpu_seconds": 0.0}
        self.seen: dict[str, Any] = results.found.setdefault("watched", {}).setdefault(key, zero)
        self._results = results
        self._busy = busy
        self._tolerance = tolerance
        self._before: tuple[CpuUse, float] | None = None

    def started(self, trial: TrialRecord, history: History) -> None:
        """Begin to watch."""
        self._before = used_cpus(), self._busy_seconds()

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Add what the trial had beside it; raise `NotMeasuredError` where that has been too much, or too little."""
        assert self._before is not None, "one trial runs at a time, and has started"
        (before, busy), after = self._before, used_cpus()
        self.seen["trials"] += 1
        self.seen["contended"] += trial.outcome is not None and trial.outcome.contended
        self.seen["seconds"] += after.wall - before.wall
        self.seen["others_cpu_seconds"] += others_seconds(before, after)
        self.seen["busy_cpu_seconds"] += self._busy_seconds() - busy
        self._results.save()
        if self.seen["seconds"] >= WATCHED_SECONDS:
            self.check()

    def check(self) -> None:
        """Raise `NotMeasuredError` where others used too much on the average, or a busy process too little."""
        if not self.seen["seconds"]:
            return
        others = self.seen["others_cpu_seconds"] / self.seen["seconds"]
        if others > self._tolerance * LEAST_OTHERS:
            raise NotMeasuredError(
                f"the machine is not quiet: others used {others:.2f} CPUs beside the trials (at most {LEAST_OTHERS:g})"
            )
        busy, least = self.seen["busy_cpu_seconds"] / self.seen["seconds"], LEAST_BUSY * len(self._busy)
        if busy < least / self._tolerance:
            raise NotMeasuredError(
                f"the machine is not busy: {len(self._busy)} busy processes had {busy:.2f} CPUs in all beside the "
                f"trials (at least {least:g})"
            )

    def _busy_seconds(self) -> float:
        return math.fsum(map(cpu_seconds, self._busy))
