"""How much time bssearch's training loop adds to a bare PyTorch loop of the same steps.

Run as ``python tests/benchmarks/loop_overhead.py``; exits 1 where the median is above 3 %.

Both loops train the digits at one batch size on one CPU thread, with the same seed, data order and learning rate, and
end with bit-equal weights. They take turns in one process, segment by segment, in alternating order. The product's
segment is what a trial runs between two evaluations: ledger, stop check, limit check, progress, schedule and loss
bookkeeping. The A/A row is a second bare loop against the first: what it shows is the noise of the method.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

from bssearch.records import Configuration, Target, TrialRequest, TrialState
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.loop import Trial
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import Data
from bssearch.workloads.digits import Digits

BAR = 0.03
SEED = 1
LEARNING_RATE = 0.02


class BareLoop:
    """What one writes by hand: momentum SGD over shuffled epochs, the incomplete batch dropped."""

    def __init__(self, digits: Digits, data: Data, batch_size: int) -> None:
        torch.manual_seed(SEED)
        self.model = digits.build_model(dropout=0.0)
        self.digits, self.data, self.batch_size = digits, data, batch_size
        self.optimizer = torch.optim.SGD(
            [
                {"params": [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]},
                {"params": [parameter for parameter in self.model.parameters() if parameter.ndim < 2]},
            ],
            lr=LEARNING_RATE,
            momentum=0.9,
            nesterov=True,
        )
        self.generator = torch.Generator().manual_seed(SEED)
        self.order = torch.empty(0, dtype=torch.int64)

    def segment(self, steps: int) -> None:
        inputs, targets, size = self.data.train.inputs, self.data.train.targets, self.batch_size
        for _ in range(steps):
            if len(self.order) < size:
                self.order = torch.randperm(len(inputs), generator=self.generator)
            batch, self.order = self.order[:size], self.order[size:]
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.digits.loss(self.model, inputs[batch], targets[batch], label_smoothing=0.0)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()


def product(digits: Digits, data: Data, batch_size: int, steps: int) -> tuple[Trial, Trainer]:
    """Return a prepared trial whose segments are ``steps`` long, and its trainer."""
    request = TrialRequest(
        number=0,
        configuration=Configuration(batch_size=batch_size, micro_batch_size=batch_size, learning_rate=LEARNING_RATE),
        seed=SEED,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=steps,
    )
    computation = Computation(torch.device("cpu"))
    asked: list[tuple[TrialState, str]] = []
    trial = Trial(
        request,
        digits,
        data,
        computation,
        clock=clock_for(computation.device),
        on_observation=lambda observation: None,
        stop=lambda: asked[0] if asked else None,
        on_progress=lambda: None,
    )
    return trial, trial.prepare()


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(name: str, ratios: list[float]) -> float:
    """Print the median overhead with a 95 % bootstrap interval, and return it."""
    draws = np.random.default_rng(0).choice(ratios, size=(2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975]) - 1
    median = statistics.median(ratios) - 1
    print(f"{name:<14} {median:+7.2%}   [{low:+.2%}, {high:+.2%}]")
    return median


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="per segment")
    parser.add_argument("--pairs", type=int, default=150)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    digits = Digits()
    data = digits.load(torch.device("cpu"))
    trial, trainer = product(digits, data, arguments.batch_size, arguments.steps)
    bare, second_bare = (BareLoop(digits, data, arguments.batch_size) for _ in range(2))
    work: dict[str, Callable[[], object]] = {
        "bare": lambda: bare.segment(arguments.steps),
        "A/A": lambda: second_bare.segment(arguments.steps),
        "bssearch": lambda: trial.train_segment(trainer),
    }
    for segment in work.values():
        segment()
    times: dict[str, list[float]] = {name: [] for name in work}
    for pair in range(arguments.pairs):
        names = list(work)[pair % 3 :] + list(work)[: pair % 3]
        for name in names if pair % 2 else reversed(names):
            times[name].append(seconds_of(work[name]))
    same = torch.equal(*(parameters_to_vector(model.parameters()) for model in (bare.model, trainer.model)))
    step_seconds = statistics.median(times["bare"]) / arguments.steps
    print(
        f"batch size {arguments.batch_size}, {step_seconds * 1e3:.2f} ms a step, "
        f"{arguments.pairs} pairs of {arguments.steps} steps, 1 thread; weights bit-equal: {same}"
    )
    overhead = {
        name: row(name, [mine / bare for mine, bare in zip(times[name], times["bare"], strict=True)])
        for name in ("A/A", "bssearch")
    }
    if not same:
        print("the two loops did not take the same steps", file=sys.stderr)
        return 1
    if step_seconds < 0.005:
        print("a step takes less than 5 ms: the bar does not apply; choose a larger --batch-size", file=sys.stderr)
    return int(overhead["bssearch"] > BAR)


if __name__ == "__main__":
    sys.exit(main())
