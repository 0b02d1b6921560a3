"""Shares of a queue: `python tests/benchmarks/fair_queue.py [SECONDS]`.

Four worker processes, each with a folder of its own, serve six studies of three owners over PostgreSQL, for some
minutes, in turns of some seconds. Trials sleep nearly all the time, so that two cores are enough. A share is a study's
slot seconds over those of all; beside it that of its trials alone (their wall seconds), and what is stated: owners
alike, the studies of one owner by their priorities. The bar: each owner and each study within 10 % of its share.
Counted is from when all have been served once, and no study ends meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from bssearch.commands.queue.submitting import submit_study
from bssearch.storage.repository import Store, open_store
from tests.cli.worker_process import make_node, worker
from tests.postgres import running_postgres

WORKERS = 4
TURN_SECONDS = 6.0
SECONDS = 600.0
STUDIES = {"a1": ("ann", 1), "a2": ("ann", 2), "b1": ("bob", 1), "b2": ("bob", 1), "b3": ("bob", 2), "c1": ("cy", 5)}
SPEC = {
    "workload_settings": {"step_seconds": 0.02},
    "target": {"metric": "accuracy", "value": 1.0},
    "space": {"batch_size": [32, 64], "learning_rate": 0.002},
    "default": {"batch_size": 32, "learning_rate": 0.002},
    "sampler": {"name": "random"},
    "pruner": {"name": "none"},
    "confirm": {"runs": 0},
    "budget": {"trials": 5000, "trial_train_seconds": 1.0},
}
BAR = 0.10


def used(store: Store) -> tuple[dict[str, float], dict[str, float]]:
    """Return the slot seconds that each study has had, and the wall seconds of its trials."""
    slots = {one.name: one.served_seconds for one in store.submissions()}
    known = {one.name for one in store.studies()}
    trials = {
        name: sum(one.outcome.wall_seconds for one in store.trials(name) if one.outcome) if name in known else 0.0
        for name in slots
    }
    return slots, trials


def shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each in what came between."""
    had = {name: after[name] - before[name] for name in after}
    return {name: one / sum(had.values()) for name, one in had.items()}


def by_owner(found: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of owners."""
    owners: dict[str, float] = {}
    for name, share in found.items():
        owners[STUDIES[name][0]] = owners.get(STUDIES[name][0], 0.0) + share
    return owners


def meets_bar(found: Mapping[str, float], stated: Mapping[str, float]) -> bool:
    """Return whether each is within 10 % of what is stated."""
    return all(abs(found[name] / stated[name] - 1) <= BAR for name in stated)


def main(seconds: float = SECONDS) -> bool:
    """Run the benchmark and print its table; return whether it meets its bar."""
    with running_postgres() as server, tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        url, folder = server.create_database(), Path(name)
        store = stack.enter_context(open_store(url))
        for study, (owner, priority) in STUDIES.items():
            submit_study(store, "task", {}, name=study, owner=owner, priority=priority)
        stated = store.ledger().shares()
        nodes = [make_node(folder / f"node-{number}", **SPEC) for number in range(WORKERS)]
        turns = ("--turn-seconds", str(TURN_SECONDS))
        for node in nodes:
            stack.enter_context(worker(node, url, folder / "checkpoints", *turns))
        while not all(one.served_seconds > 0 for one in store.submissions()):
            time.sleep(1)
        before = used(store)
        time.sleep(seconds)
        after = used(store)
    slots, trials = (shares(*both) for both in zip(before, after, strict=True))
    print(f"{WORKERS} workers, turns of {TURN_SECONDS:g} s, {seconds:g} s, git {_revision()}")
    print("study  owner  priority  stated  slot seconds  trials alone")
    for study, (owner, priority) in STUDIES.items():
        print(f"{study:5}  {owner:5}  {priority:8}  {_three(stated[study], slots[study], trials[study])}")
    owners = [by_owner(found) for found in (stated, slots, trials)]
    for owner in owners[0]:
        print(f"all    {owner:5}            {_three(*(found[owner] for found in owners))}")
    is_met = meets_bar(slots, stated) and meets_bar(owners[1], owners[0])
    counted = sum(after[0].values()) - sum(before[0].values())
    print(f"{counted:.0f} slot seconds; bar of ± 10 %: {'met' if is_met else 'MISSED'}")
    return is_met


def _three(stated: float, slots: float, trials: float) -> str:
    return f"{stated:6.1%}  {slots:6.1%} {slots / stated - 1:+5.0%}  {trials:6.1%} {trials / stated - 1:+5.0%}"


def _revision() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(0 if main(*map(float, sys.argv[1:])) else 1)
