"""How much time bssearch adds to a training loop of one's own: `trial.batches` against the plain loop.

Run as ``python tests/benchmarks/own_loop_overhead.py``. Exits 1 if the median is above 2 %, for steps of at least 5 ms.

Both train the shipped digits at one batch size on one CPU thread, segment by segment, in an order that changes. A
segment is what a trial runs between two evaluations, which are in nobody's time. The trial's segment has its clock, its
line to a worker (a real socket), its check of whether to stop and of its limit. Its first 23 steps, which are timed one
by one, lie before the segments. The A/A row is one kind of plain segments against another: it shows the noise.
"""

if not __package__:
    __import__("from_clone")

import math
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

from bssearch.executors.base import Assign, Program
from bssearch.executors.loops.current import SocketLine
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.trial_run import TIMED_STEPS, TrialRun
from bssearch.records import Configuration, Target, TrialState
from bssearch.workloads.digits import Digits
from tests.benchmarks.harness import ratio, script, turned
from tests.benchmarks.loop_overhead import SHORTEST_STEP, print_rows
from tests.factories import make_request

BAR = 0.02
KINDS = ("bare", "again", "bssearch")
Times = dict[str, list[float]]
"""Seconds of the segments of each kind."""


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


def script_trial(batch_size: int) -> tuple[Trial, socket.socket]:
    """Return a script's trial that is evaluated before its first step alone, and the worker's end of its line.

    That end must stay open as long as the trial lasts.
    """
    request = make_request(
        number=1,
        configuration=Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=0.02),
        seed=1,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=10**9,
    )
    worker, script = socket.socketpair()
    program = Program(default=request.plan.configuration, metric=request.target.metric)
    assign = Assign(work=request, program=program, device="cpu", revision="benchmark")
    trial = Trial(TrialRun(request, assign, SocketLine(script.detach())))
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


def time_batches(batch_size: int, steps: int, rounds: int) -> Times:
    """Let a trial's loop and two plain ones take turns."""
    loops = {kind: (own_loop if kind == "bssearch" else plain)(batch_size, steps) for kind in KINDS}
    times: Times = {kind: [] for kind in KINDS}
    for _ in range(TIMED_STEPS // steps + 1):
        for loop in loops.values():
            next(loop)
    for one in range(rounds):
        for kind in turned(KINDS, one):
            times[kind].append(next(loops[kind]))
    return times


def main(
    batch_size: int = 256,
    steps: Annotated[int, typer.Option(help="per segment")] = 4,
    pairs: int = 200,
) -> bool:
    """Measure, print and judge."""
    torch.set_num_threads(1)
    times = time_batches(batch_size, steps, pairs)
    step_seconds = statistics.median(times["bare"]) / steps
    found = ratio(times["bssearch"], times["bare"])
    print(f"batch size {batch_size}, {step_seconds * 1e3:.2f} ms a step, {pairs} pairs")
    print_rows(ratio(times["again"], times["bare"]), "batches", found)
    if step_seconds < SHORTEST_STEP:
        print(f"a step takes less than {SHORTEST_STEP * 1e3:g} ms: the bar does not apply")
    return step_seconds < SHORTEST_STEP or found[0] <= 1 + BAR


if __name__ == "__main__":
    script(main, __doc__)
