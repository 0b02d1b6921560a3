"""A study of 10,000 trials with 200,000 observations: what a trial costs its driver, memory, and `best`.

A real driver and a SQLite file, as in `driver_overhead.py`: a trial's cost is the time from its submission to that of
the next one, with the sampler's choice made beforehand, so its start, its observations and its end stored, the pruner
asked, the answer kept where it is due. The driver has a process of its own, without torch, whose largest resident
memory is measured. `bssearch best` is a whole process, once with the answer that is stored and once after a trial has
been stored since, so that the answer is made anew from all trials.

Bars: 60 ms a trial in the median; `best` 1.5 s, as the answer is stored; 500 MB. Run: python
tests/benchmarks/many_trials.py
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import multiprocessing
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bssearch.records import Lease
from bssearch.storage.repository import open_store
from tests.benchmarks.driver_overhead import TEMPLATES, multiply, run
from tests.benchmarks.harness import script
from tests.benchmarks.query_scale import run_seconds
from tests.factories import make_environment, make_plan

TRIALS, MEASURED, QUERIES = 10_000, 40, 5
OVERHEAD_BAR_S, BEST_BAR_S, MEMORY_BAR_MB = 0.060, 1.5, 500.0


def drive(results: Any, url: str) -> None:
    """Run some trials; report the first look, each trial's seconds, and the driver's memory in MB."""
    first_look, seconds = run(url, TRIALS + MEASURED)
    results.put((first_look, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000))


def best_seconds(url: str) -> float:
    """Return the median of some queries' seconds."""
    return statistics.median(run_seconds(url) for _ in range(QUERIES))


def make_stale(url: str) -> None:
    """Store the start of a trial: the answer that is stored counts no more."""
    with open_store(url) as store:
        store.start("toy", make_plan(), environment=make_environment(), lease=Lease(owner="benchmark", seconds=60.0))


def main() -> bool:
    """Measure and print; return 1 above a bar."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.db"
        url = f"sqlite:///{file}"
        run(url, TEMPLATES)
        multiply(file, TRIALS)
        results = processes.SimpleQueue()
        driver = processes.Process(target=drive, args=(results, url))
        driver.start()
        first_look, seconds, megabytes = results.get()
        driver.join()
        fresh = best_seconds(url)
        make_stale(url)
        stale = best_seconds(url)
    median = statistics.median(seconds)
    print(f"{TRIALS:,} trials: {median * 1e3:.1f} ms a trial (median of {len(seconds)}; bar {OVERHEAD_BAR_S * 1e3:g})")
    print(f"first look {first_look:.2f} s, driver {megabytes:.0f} MB (bar {MEMORY_BAR_MB:g})")
    print(f"best: {fresh:.2f} s as it is stored (bar {BEST_BAR_S:g}), {stale:.2f} s made anew")
    return median <= OVERHEAD_BAR_S and fresh <= BEST_BAR_S and megabytes <= MEMORY_BAR_MB


if __name__ == "__main__":
    script(main, __doc__)
