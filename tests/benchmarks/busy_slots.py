"""How short trials may be for many slots to stay busy: 24 drivers with 8 slots each on one study in PostgreSQL.

A driver is a process with the real `Driver` and a store of its own; its executor's slots sleep for as long as a trial
lasts, a fifth more or less, and report 20 evaluations on the way. All drivers and the server share the cores of one
machine, where a cluster has some for each: what limits is printed as the processor time that a trial takes of the
drivers and of the server. A slot is busy from its trial's start to its end; the share is that of the last two trials'
time of all slots.

Bar: at trials of 20 s at least 95 % of the slots are busy. Run: python tests/benchmarks/busy_slots.py
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bssearch.executors.base import Event, Observed
from bssearch.records import TrialRequest
from bssearch.search.driver import Driver
from bssearch.storage.repository import open_store
from tests.benchmarks.driver_overhead import OBSERVATIONS
from tests.benchmarks.harness import script
from tests.benchmarks.many_starters import (
    CONNECTIONS,
    SearchIsOverError,
    UntilTheEnd,
    import_all,
    in_processes,
    prepare,
    spec_of,
)
from tests.factories import make_environment
from tests.postgres import running_postgres
from tests.search import law

NODES, SLOTS = 24, 8
SECONDS_BAR, SHARE_BAR = 20.0, 0.95
SPREAD = 0.2
WARM_UP_S = 60.0


@dataclass
class Running:
    """A trial in a slot: its events, each with the moment at which it happens."""

    request: TrialRequest
    began: float
    due: list[tuple[float, Event]]


@dataclass
class SleepingTrials(law.LawExecutor):
    """Slots that sleep for about ``seconds`` a trial; it ends the run at ``deadline``."""

    seconds: float = 20.0
    deadline: float = 0.0
    rng: random.Random = field(default_factory=random.Random)
    asleep: list[Running] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def submit(self, request: TrialRequest) -> None:
        lasts = self.seconds * self.rng.uniform(1 - SPREAD, 1 + SPREAD)
        self.running.append(request)
        [*_, end] = super().events(0.0)
        total = law.steps_needed(request.configuration) * law.step_seconds(request.configuration.batch_size)
        began, shares = time.monotonic(), [n / (OBSERVATIONS - 1) for n in range(OBSERVATIONS)]
        due = [
            (began + share * lasts, Observed(request.number, self.observe(request, share, total))) for share in shares
        ]
        self.asleep.append(Running(request, began, [*due, (began + lasts, end)]))

    def events(self, timeout: float) -> list[Event]:
        if time.monotonic() > self.deadline:
            self.spans += [(one.began, self.deadline) for one in self.asleep]
            raise SearchIsOverError
        next_due = min((one.due[0][0] for one in self.asleep), default=float("inf"))
        time.sleep(max(0.0, min(timeout, next_due - time.monotonic())))
        now, found = time.monotonic(), []
        for one in list(self.asleep):
            while one.due and one.due[0][0] <= now:
                found.append(one.due.pop(0)[1])
            if not one.due:
                self.asleep.remove(one)
                self.spans.append((one.began, now))
        return found


def drive(barrier: Any, index: int, url: str, seconds: float) -> tuple[float, list[tuple[float, float]], float]:
    """Run one driver; return its deadline, when its slots were busy, and its processor time."""
    executor = SleepingTrials(slots=SLOTS, slots_apart=True, seconds=seconds, rng=random.Random(index))
    with open_store(url) as store:
        driver = Driver(spec_of("tpe", 100_000), store, executor, make_environment(), UntilTheEnd())
        executor.deadline = float("inf")
        barrier.wait()
        executor.deadline = time.monotonic() + WARM_UP_S + 3 * seconds
        with suppress(SearchIsOverError):
            driver.run()
    return executor.deadline, executor.spans, sum(os.times()[:2])


def server_seconds(folder: Path) -> float:
    """Return the processor time of a server so far, that of its processes which have ended included."""
    server: Any = psutil.Process(int((folder / "postmaster.pid").read_text().splitlines()[0]))
    times = [server.cpu_times(), *(one.cpu_times() for one in server.children())]
    ended: float = times[0].children_user + times[0].children_system
    of_all: float = sum(one.user + one.system for one in times)
    return ended + of_all


def busy_share(seconds: float) -> float:
    """Run all drivers with trials of so many seconds; print and return the share of busy slots."""
    with running_postgres(CONNECTIONS) as server:
        url = server.create_database()
        in_processes(1, prepare, url, "tpe")
        before = server_seconds(server.folder)
        found = in_processes(NODES, drive, url, seconds)
        of_server = server_seconds(server.folder) - before
    end: float = min(deadline for deadline, _, _ in found)
    since = end - 2 * seconds
    spans = [(max(since, began), min(end, ended)) for _, own, _ in found for began, ended in own]
    busy: float = sum(max(0.0, ended - began) for began, ended in spans)
    share: float = busy / (NODES * SLOTS * (end - since))
    trials = sum(len(own) for _, own, _ in found)
    of_drivers = sum(own for _, _, own in found)
    print(
        f"trials of {seconds:g} s: {share:.1%} of {NODES * SLOTS} slots busy; {trials} trials; processor time a trial: "
        f"drivers {1e3 * of_drivers / trials:.0f} ms, server {1e3 * of_server / trials:.0f} ms",
        flush=True,
    )
    return share


def main(seconds: list[float] | None = None) -> bool:
    """Measure and print; return False below the bar."""
    import_all()
    shares = {one: busy_share(one) for one in seconds or [SECONDS_BAR, 2 * SECONDS_BAR]}
    return shares.get(SECONDS_BAR, 0.0) >= SHARE_BAR


if __name__ == "__main__":
    script(main, __doc__)
