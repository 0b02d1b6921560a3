"""Two drivers on one study against one, on PostgreSQL: `python tests/benchmarks/two_drivers.py`.

60 trials of about a second each, which mostly sleep, so that two cores are enough for both drivers. The ratio is that
of wall times from the first process's start to the last one's end, start-up and step times included. It also counts:
no number twice, no trial lost.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import os
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from bssearch.records import TrialState
from bssearch.settings import DATABASE_URL_VARIABLE
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import script
from tests.cli.task import command, environment, write_task
from tests.postgres import running_postgres

TRIALS = 60
ROUNDS = 2
STUDY = {
    "workload_settings": {"step_seconds": 0.02},
    "target": {"metric": "accuracy", "value": 1.0},
    "space": {"batch_size": [16, 32, 64], "learning_rate": 0.02},
    "default": {"batch_size": 32, "learning_rate": 0.02},
    "pruner": {"name": "none"},
    "confirm": {"runs": 0},
    "budget": {"trials": TRIALS, "trial_train_seconds": 1.0},
}
DONE_OR_TARGET_NOT_REACHED = {0, 5}
ENDED = {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.DIVERGED}


def run(drivers: int, folder: Path, url: str) -> float:
    """Return the wall seconds that so many drivers take for one study; check what they left."""
    write_task(folder, **STUDY)
    started = time.perf_counter()
    processes = [
        subprocess.Popen(
            command("run", "task.yaml"),
            cwd=folder,
            env={**environment(), DATABASE_URL_VARIABLE: url},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(drivers)
    ]
    codes = {process.wait() for process in processes}
    seconds = time.perf_counter() - started
    assert codes <= DONE_OR_TARGET_NOT_REACHED, codes
    with open_store(url, write=False) as store:
        trials = store.trials("task")
    assert [trial.number for trial in trials] == list(range(1, TRIALS + 1)), "a number twice, or a trial too many"
    assert {trial.state for trial in trials} <= ENDED, Counter(trial.state for trial in trials)
    shares = Counter(trial.lease_owner for trial in trials)
    print(f"  {drivers} driver{'s' * (drivers > 1)}: {seconds:.1f} s, trials {sorted(shares.values())}")
    return seconds


def main() -> None:
    """Print the ratio of each round."""
    print(f"{TRIALS} trials, {os.cpu_count()} cores")
    with running_postgres() as server, tempfile.TemporaryDirectory() as folder:
        for round_number in range(ROUNDS):
            seconds = {drivers: run(drivers, Path(folder), server.create_database()) for drivers in (1, 2)}
            print(f"round {round_number + 1}: two drivers / one driver = {seconds[2] / seconds[1]:.2f}")


if __name__ == "__main__":
    script(main, __doc__)
