"""How much longer a trial's steps take while its study is reported to a board.

Run as ``python tests/benchmarks/board_overhead.py [--board tensorboard|mlflow|wandb]``. Exits 1 where the median is
above 1 %. Afterwards it prints what a board takes to be ready, for which the first trial waits.

A worker process trains the shipped digits at one batch size, trial after trial, and evaluates every few steps. A round
has a pair of trials for each board, with its reports, and two kinds without any, in an order that changes. Of a pair
the second trial counts: while it trains the board writes what it was told of both. Then it is waited for, so that
nothing of it falls into another kind's trials. The step time is the train seconds over the steps, as bssearch measures
them: waits for a CPU are no part of it, what a neighbour does to caches and clocks is. All boards' processes are there
throughout, idle but for their own trials. The A/A row is one kind without reports against the other: what it shows is
the noise of the method.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bssearch.boards.events import Event
from bssearch.boards.named import TARGETS
from bssearch.boards.process import BoardProcess
from bssearch.boards.reports import study_opened, trial_ended, trial_observed, trial_started
from bssearch.executors.base import Ended, ExecutorSettings, Observed
from bssearch.executors.local import LocalExecutor
from bssearch.records import Configuration, Lease, StudyRecord, Target, TrialPlan, TrialRecord, TrialRequest, TrialState
from tests.benchmarks.loop_overhead import print_rows, ratio, turned
from tests.factories import make_plan, make_spec

BAR = 0.01
_NOW = datetime.now(UTC)
READY_WITHIN_S = 120.0


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--board", choices=sorted(TARGETS), action="append", help="default: each")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="between two evaluations")
    parser.add_argument("--seconds", type=float, default=0.6, help="of training, per trial")
    parser.add_argument("--pairs", type=int, default=40)
    arguments = parser.parse_args()
    names = arguments.board or sorted(TARGETS)
    with _boards(names) as (boards, ready), _trials(arguments) as train:
        times: dict[str, list[float]] = {kind: [] for kind in ("bare", "again", *names)}
        for number in range(arguments.pairs):
            for kind in turned(list(times), number):
                times[kind].append(_second_of_a_pair(train, boards.get(kind)))
    notes = [note for board in boards.values() for note in board.take_notes()]
    bare, again = times.pop("bare"), times.pop("again")
    print(f"batch size {arguments.batch_size}, {statistics.median(bare) * 1e3:.2f} ms a step, {len(bare)} pairs")
    found = {name: ratio(one, bare) for name, one in times.items()}
    for name, one in found.items():
        print_rows(ratio(again, bare), name, one)
    print("ready after", ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in ready.items()))
    print(*notes, sep="\n", end="\n" if notes else "")
    return int(bool(notes) or any(median > 1 + BAR for median, _, _ in found.values()))


Report = Callable[[Event], None]
Train = Callable[[Report], float]
"""Trains the next trial, and returns its seconds a step."""


@contextmanager
def _boards(names: list[str]) -> Iterator[tuple[dict[str, BoardProcess], dict[str, float]]]:
    """Give the boards, writing into a folder that goes with them, and the seconds each alone took to be ready."""
    ready: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "BSSEARCH_TENSORBOARD_DIR": f"{folder}/runs",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "WANDB_MODE": "offline",
            "WANDB_DIR": folder,
        }
        boards = {}
        for name in names:
            began = time.perf_counter()
            boards[name] = BoardProcess(name, TARGETS[name])
            boards[name].wait_until_ready(time.monotonic() + READY_WITHIN_S)
            ready[name] = time.perf_counter() - began
        study = StudyRecord.created(make_spec().new_study("benchmark"), _NOW)
        try:
            for board in boards.values():
                board.report(study_opened(study, make_spec()))
            yield boards, ready
        finally:
            for board in boards.values():
                board.close()


@contextmanager
def _trials(arguments: argparse.Namespace) -> Iterator[Train]:
    """Give what trains trial after trial, in one worker process."""
    size = arguments.batch_size
    plan = make_plan(
        configuration=Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.02),
        eval_every_steps=arguments.steps,
    )
    settings = ExecutorSettings(workload="bssearch.workloads.digits:Digits", folder=Path(), device="cpu")
    executor = LocalExecutor(settings)
    numbers = iter(range(1, sys.maxsize))
    try:
        executor.describe()
        yield lambda report: _trained(executor, plan, next(numbers), arguments.seconds, report)
    finally:
        executor.close()


def _trained(executor: LocalExecutor, plan: TrialPlan, number: int, seconds: float, report: Report) -> float:
    request = TrialRequest(
        number=number,
        configuration=plan.configuration,
        seed=1,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=seconds,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=plan.eval_every_steps,
    )
    trial = TrialRecord.planned(plan, number=number, lease=Lease(owner="me", seconds=60.0), created_at=_NOW)
    executor.submit(request)
    report(trial_started(trial))
    while True:
        for event in executor.events(timeout=0.2):
            match event:
                case Observed(_, observation):
                    report(trial_observed(number, observation, None))
                case Ended(_, outcome):
                    report(trial_ended(replace(trial, state=outcome.state, outcome=outcome)))
                    if outcome.state is not TrialState.EXHAUSTED:
                        raise RuntimeError(outcome.reason)
                    return outcome.train_seconds / outcome.steps


def _second_of_a_pair(train: Train, board: BoardProcess | None) -> float:
    report: Report = (lambda event: None) if board is None else board.report
    train(report)
    seconds = train(report)
    if board is not None:
        while not board.is_idle:
            time.sleep(0.05)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
