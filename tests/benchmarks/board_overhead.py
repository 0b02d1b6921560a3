"""How much longer a trial's steps take while its study is reported to a board.

Run as ``python tests/benchmarks/board_overhead.py [--board tensorboard|mlflow|wandb]``. Exits 1 if the median is
above 1 %. Afterwards it prints the seconds until a board has imported its library and taken two reports.

A worker process trains the shipped digits in one long trial, and evaluates every few steps. What is told of it changes
with each window of some evaluations: nothing, nothing again, or every evaluation to one of the boards. The processes of
a board whose window it is not are stopped (SIGSTOP), so that nothing of one kind falls into another's window, and what
a board could not take in its window is there in its next: the faster evaluations come, the more it is a board at work
throughout. A round has a window of each kind, in an order that changes, within seconds: what a neighbour does to caches
and clocks for longer is the same for all of them. The step time of a window is its train seconds over its steps, as
bssearch measures them; waits for a CPU are no part of it. The A/A row is one kind without reports against the other:
what it shows is the noise of the method.
"""

if not __package__:
    __import__("from_clone")

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer

from bssearch import registry
from bssearch.exchange.boards.base import BoardProcess
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.slots import LocalExecutor
from bssearch.records import (
    Configuration,
    Observation,
    Target,
    TrialObserved,
    TrialPlan,
    TrialState,
)
from tests.benchmarks.harness import one_of, ratio, script, turned
from tests.benchmarks.loop_overhead import print_rows
from tests.factories import make_plan, make_request

BAR = 0.01
FOREVER_S = 1e6
TRIAL = 1
BOARDS = sorted(registry.BUILT_IN["boards"])


def main(
    board: Annotated[list[str] | None, one_of(BOARDS, "default: each")] = None,
    batch_size: int = 256,
    steps: Annotated[int, typer.Option(help="between two evaluations")] = 4,
    window: Annotated[int, typer.Option(help="evaluations of a window")] = 20,
    rounds: int = 200,
) -> bool:
    """Measure, print and judge."""
    names = board or BOARDS
    configuration = Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.02)
    plan = make_plan(configuration=configuration, eval_every_steps=steps)
    with _boards(names) as (boards, ready), _evaluations(plan) as evaluations:
        times: dict[str, list[float]] = {kind: [] for kind in ("bare", "again", *names)}
        for number in range(rounds):
            for kind in turned(list(times), number):
                times[kind].append(_window(evaluations, boards.get(kind), window))
        notes = [note for one in boards.values() for note in one.notes]
    bare, again = times.pop("bare"), times.pop("again")
    print(f"batch size {batch_size}, {statistics.median(bare) * 1e3:.2f} ms a step, {len(bare)} rounds")
    found = {name: ratio(one, bare) for name, one in times.items()}
    for name, one in found.items():
        print_rows(ratio(again, bare), name, one)
    print("ready after", ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in ready.items()))
    print(*notes, sep="\n", end="\n" if notes else "")
    return all(median <= 1 + BAR for median, _, _ in found.values())


@contextmanager
def _boards(names: list[str]) -> Iterator[tuple[dict[str, BoardProcess], dict[str, float]]]:
    """Give the boards, stopped, told of a trial that has begun, and the seconds of each until its first two reports.

    They write into a folder that goes with them.
    """
    ready: dict[str, float] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= {
            "BSSEARCH_TENSORBOARD_DIR": f"{folder}/runs",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "WANDB_MODE": "offline",
            "WANDB_DIR": folder,
        }
        boards = {}
        about = dict.fromkeys(("target", "objective", "device", "spec"), "none")
        try:
            for name in names:
                began = time.perf_counter()
                board = boards[name] = BoardProcess([name])
                board.report("opened", name="benchmark", mark="0123", metric="accuracy", about=about)
                board.report("started", number=TRIAL, at=began, parameters={"phase": "search", "seed": 1})
                while board.delivered[name] < board.asked:
                    time.sleep(0.05)
                ready[name] = time.perf_counter() - began
                _signal(board, signal.SIGSTOP)
            yield boards, ready
        finally:
            for board in boards.values():
                _signal(board, signal.SIGKILL)
                board.close()


def _signal(board: BoardProcess, number: signal.Signals) -> None:
    """Signal a board's process and those of its library, where there are any."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(board.pid)
        for process in (family, *family.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextmanager
def _evaluations(plan: TrialPlan) -> Iterator[Iterator[Observation]]:
    """Give the evaluations of a trial that goes on for as long as it is asked for them."""
    settings = ExecutorSettings(workload="bssearch.workloads.digits:Digits", folder=Path(), device="cpu")
    executor = LocalExecutor(settings)
    request = make_request(
        number=TRIAL,
        configuration=plan.configuration,
        seed=1,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=FOREVER_S,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=plan.eval_every_steps,
    )
    try:
        executor.describe()
        executor.submit(request)
        yield _observed(executor)
    finally:
        executor.kill()
        executor.close()


def _observed(executor: LocalExecutor) -> Iterator[Observation]:
    while True:
        for event in executor.events(timeout=0.2):
            if not isinstance(event, TrialObserved):
                raise RuntimeError(f"the trial has ended: {event}")
            yield event.observation


def _window(evaluations: Iterator[Observation], board: BoardProcess | None, length: int) -> float:
    """Return the seconds a step of so many evaluations, told to a board; that in which it is woken is left out."""
    if board is not None:
        _signal(board, signal.SIGCONT)
    seen = []
    for _ in range(length + 1):
        seen.append(one := next(evaluations))
        if board is not None:
            figures = {"train_seconds": one.train_seconds, "samples": one.samples, "learning_rate": one.learning_rate}
            board.report(
                "observed", number=TRIAL, points=[(one.step, time.time(), {"accuracy": one.metric, **figures})]
            )
    if board is not None:
        _signal(board, signal.SIGSTOP)
    first, last = seen[0], seen[-1]
    return (last.train_seconds - first.train_seconds) / (last.step - first.step)


if __name__ == "__main__":
    script(main, __doc__)
