"""How much time `trial.batches` adds to a plain PyTorch loop of the same steps.

Run as ``python tests/benchmarks/own_loop_overhead.py``. Exits 1 where the median is above 2 %, for steps of at least
5 ms.

Both loops train the shipped digits at one batch size on one CPU thread, over the same `DataLoader`. They take turns in
one process, segment by segment, in alternating order; a segment is what a trial runs between two evaluations, which are
in neither's time. The trial's has its clock, its line to a worker (a real socket), its check of whether to stop and
of its limit. Its first 23 steps, which are timed one by one, lie before the pairs. The A/A row is a second plain loop
against the first: what it shows is the noise of the method.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

from bssearch.integrations.current import SocketLine
from bssearch.integrations.own_loop import LoopTrial
from bssearch.integrations.trial_run import TIMED_STEPS, TrialRun
from bssearch.records import Configuration, Target, TrialRequest, TrialState
from bssearch.workloads.digits import Digits
from tests.benchmarks.harness import ratio, script, turned
from tests.benchmarks.loop_overhead import misses_bar

BAR = 0.02


class Training:
    """The digits, a step at a time."""

    def __init__(self, batch_size: int) -> None:
        torch.manual_seed(1)
        self.digits = Digits()
        data = self.digits.load(torch.device("cpu"))
        self.model = self.digits.build_model(dropout=0.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        train = TensorDataset(data.train.inputs, data.train.targets)
        self.loader: DataLoader[Any] = DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True)

    def step(self, batch: Any) -> None:
        """Take an optimizer step."""
        inputs, targets = batch
        loss = self.digits.loss(self.model, inputs, targets, label_smoothing=0.0)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def plain(batch_size: int, steps: int) -> Iterator[float]:
    """Yield the seconds of each segment of a plain loop."""
    training, done = Training(batch_size), 0
    began = time.perf_counter()
    while True:
        for batch in training.loader:
            training.step(batch)
            done += 1
            if done % steps == 0:
                yield time.perf_counter() - began
                began = time.perf_counter()


def script_trial(batch_size: int) -> tuple[LoopTrial, socket.socket]:
    """Return a script's trial that is evaluated before its first step alone, and the worker's end of its line.

    That end must stay open as long as the trial lasts.
    """
    request = TrialRequest(
        number=1,
        configuration=Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.02),
        seed=1,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=10**9,
    )
    worker, script = socket.socketpair()
    trial = LoopTrial(TrialRun(request, {}, "cpu", SocketLine(script.detach()), "benchmark"))
    assert (trial.batch_size, trial.learning_rate) == (batch_size, 0.02)
    return trial, worker


def own_loop(batch_size: int, steps: int) -> Iterator[float]:
    """Yield the seconds of each segment of a trial's loop, which ends where it would be evaluated."""
    trial, worker = script_trial(batch_size)
    training = Training(batch_size)
    began = 0.0
    for done, batch in enumerate(trial.batches(training.loader, lambda: {"accuracy": 0.0})):
        if done % steps == 0 and done:
            yield time.perf_counter() - began
        if done % steps == 0:
            began = time.perf_counter()
        training.step(batch)
    worker.close()


def measure(batch_size: int, steps: int, pairs: int) -> dict[str, Any]:
    """Let the loops take turns ``pairs`` times, a segment of ``steps`` each."""
    makers: dict[str, Callable[[int, int], Iterator[float]]] = {"bare": plain, "again": plain, "bssearch": own_loop}
    loops = {name: make(batch_size, steps) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TIMED_STEPS // steps + 1):
        for loop in loops.values():
            next(loop)
    for pair in range(pairs):
        for name in turned(list(loops), pair):
            times[name].append(next(loops[name]))
    return {
        "batch_size": batch_size,
        "step_seconds": statistics.median(times["bare"]) / steps,
        "pairs": pairs,
        "again": ratio(times["again"], times["bare"]),
        "bssearch": ratio(times["bssearch"], times["bare"]),
    }


def main(
    batch_size: int = 256,
    steps: Annotated[int, typer.Option(help="per segment")] = 4,
    pairs: int = 150,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> bool:
    """Measure, print and judge."""
    torch.set_num_threads(1)
    return not misses_bar(measure(batch_size, steps, pairs), "trial.batches", BAR, as_json=as_json)


if __name__ == "__main__":
    script(main, __doc__)
