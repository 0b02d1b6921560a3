"""How a schedule of the learning rate changes learning curves: where they cross late, and what pruning makes of that.

Run as ``python tests/benchmarks/schedules.py [--seeds 5] [--epochs 4]``: some twenty minutes on one core. The
perceptron of the shipped Fashion-MNIST trains at batch 128 with every schedule, all to one horizon, at each of four
learning rates; a schedule's own rate is the one with the best mean accuracy at its end. Seconds play no part: a step
takes as long with each, so curves are compared by their samples.

The first table says how far each has come by a share of the horizon. *Crosses* is the share at which its mean curve
gets past that of the constant rate for good. *To the target* are the median samples to the mean accuracy that the
constant rate has over the last fifth of the horizon. The second table replays pruning: with the constant rate's runs as
those that have reached the target so far, how many of the runs of a decay that gets there sooner a pruner lets wait, or
stops, before they do. There is no bar.
"""

from __future__ import annotations

if not __package__:
    __import__("from_clone")

import math
import statistics
from dataclasses import dataclass

import numpy as np
import torch

from bssearch.curves import Progress
from bssearch.pruners.base import Action, Pruner, Standings, slack_for
from bssearch.pruners.pace import Balanced, Fast, Safe
from bssearch.pruners.race import Race
from bssearch.records import Configuration, Observation, Target, TrainingSettings, TrialRequest, TrialState
from bssearch.training.clock import clock_for
from bssearch.training.computation import Computation
from bssearch.training.loop import Trial
from bssearch.workloads.base import Data
from bssearch.workloads.fashion_mnist import FashionMnist
from tests.benchmarks.harness import script

BATCH_SIZE = 128
LEARNING_RATES = (0.0125, 0.025, 0.05, 0.1)
SCHEDULES = ("constant", "linear", "cosine", "one_cycle", "warmup_stable_decay")
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)
EVALUATIONS = 60
"""Over the horizon, of each run."""

PRUNERS: dict[str, Pruner] = {"lag-2": Race(2.0), "safe": Safe(), "balanced": Balanced(), "fast": Fast()}
EPOCH = 55_000


@dataclass(frozen=True)
class Runs:
    """The accuracies of one schedule's runs, (seeds, evaluations), at the same samples each."""

    learning_rate: float
    samples: np.ndarray
    accuracies: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.accuracies.mean(axis=0))

    def to(self, target: float) -> list[float]:
        """Return the samples to an accuracy of each run, ∞ where it is missed; between evaluations by a line."""
        return [_first(self.samples, run, target) for run in self.accuracies]

    def curves(self) -> list[Progress]:
        """Return the runs as a pruner sees them, with samples for seconds."""
        found = []
        for run in self.accuracies:
            curve = Progress()
            for samples, accuracy in zip(self.samples, run, strict=True):
                curve.add(float(samples), float(accuracy))
            found.append(curve)
        return found


def _first(samples: np.ndarray, run: np.ndarray, target: float) -> float:
    hits = np.flatnonzero(run >= target)
    if not len(hits):
        return math.inf
    hit = int(hits[0])
    if hit == 0:
        return float(samples[0])
    share = (target - run[hit - 1]) / (run[hit] - run[hit - 1])
    return float(samples[hit - 1] + share * (samples[hit] - samples[hit - 1]))


def trained(data: Data, schedule: str, learning_rate: float, seed: int, horizon: int) -> list[Observation]:
    """Return the evaluations of a run to the horizon."""
    parameters: dict[str, bool | float | str] = {
        "momentum": 0.9,
        "nesterov": True,
        "schedule": schedule,
        "horizon_samples": float(horizon),
    }
    request = TrialRequest(
        number=0,
        configuration=Configuration(
            batch_size=BATCH_SIZE,
            micro_batch_size=BATCH_SIZE,
            learning_rate=learning_rate,
            parameters=parameters,
        ),
        seed=seed,
        target=Target(metric="accuracy", value=2.0),
        train_seconds_limit=math.inf,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=max(1, horizon // BATCH_SIZE // EVALUATIONS),
    )
    cpu = torch.device("cpu")
    computation = Computation(cpu, TrainingSettings(measure_noise=False))
    trial = Trial(request, FashionMnist(model="mlp"), data, computation, clock=clock_for(cpu), stop=lambda: None)
    found: list[Observation] = []
    trial.run(found.append)
    return found


def runs_of(data: Data, schedule: str, seeds: int, horizon: int) -> Runs:
    """Return the runs of a schedule at its own learning rate."""
    found = []
    for learning_rate in LEARNING_RATES:
        curves = [trained(data, schedule, learning_rate, seed, horizon) for seed in range(seeds)]
        samples = np.array([one.samples for one in curves[0]])
        found.append(Runs(learning_rate, samples, np.array([[one.metric for one in curve] for curve in curves])))
    return max(found, key=lambda one: float(one.mean[-1]))


def late_accuracy(constant: Runs) -> float:
    """Return the mean accuracy of the constant rate over the last fifth of the horizon, to three digits."""
    return round(float(constant.mean[-EVALUATIONS // 5 :].mean()), 3)


def crosses(runs: Runs, constant: Runs) -> float | None:
    """Return the share of the horizon at which a mean curve gets past that of the constant rate for good."""
    behind = np.flatnonzero(runs.mean[1:] <= constant.mean[1:]) + 1
    if not len(behind):
        return 0.0
    last = int(behind[-1])
    return None if last == len(runs.samples) - 1 else float(runs.samples[last + 1] / runs.samples[-1])


def print_curves(found: dict[str, Runs], target: float) -> None:
    """Print how far each schedule has come by shares of the horizon."""
    print(
        f"{'schedule':<20} {'rate':>6}  " + "".join(f"{share:>8.0%}" for share in SHARES) + "  crosses  to the target"
    )
    for name, runs in found.items():
        at = [runs.mean[round(share * (len(runs.samples) - 1))] for share in SHARES]
        place = crosses(runs, found["constant"]) if name != "constant" else None
        median = statistics.median(runs.to(target))
        print(
            f"{name:<20} {runs.learning_rate:>6g}  "
            + "".join(f"{one:>8.4f}" for one in at)
            + f"  {'–' if place is None else f'{place:.0%}':>7}  "
            + (f"{median:>13,.0f}" if math.isfinite(median) else f"{'–':>13}")
        )


def held_back(pruner: Pruner, curve: Progress, end: float, standings: Standings) -> bool:
    """Return whether a pruner lets a run wait, or stops it, before it reaches the target."""
    so_far = Progress()
    standings.curves = {0: so_far}
    for now, gain in zip(curve.train_seconds, curve.gains, strict=True):
        if now >= end:
            return False
        so_far.add(now, gain)
        if pruner.judge(0, standings) is not Action.GO_ON or now > standings.cap:
            return True
    return False


def print_pruning(found: dict[str, Runs], target: float) -> None:
    """Print how many of a decay's faster runs each pruner holds back."""
    constant = found["constant"]
    times = constant.to(target)
    winners = sorted(
        ((curve, end) for curve, end in zip(constant.curves(), times, strict=True) if math.isfinite(end)),
        key=lambda one: one[1],
    )
    if not winners:
        print(f"\nthe constant rate never reaches {target:g}: there is nothing to race against")
        return
    noise = statistics.stdev([math.log(end) for _, end in winners]) if len(winners) > 1 else 0.0
    print(f"\n{'held back':<20} {'faster runs':>12}  " + "".join(f"{name:>10}" for name in PRUNERS))
    for name, runs in found.items():
        if name == "constant":
            continue
        ends = runs.to(target)
        faster = [
            (curve, end)
            for curve, end in zip(runs.curves(), ends, strict=True)
            if end < statistics.median([seconds for _, seconds in winners])
        ]
        cells = []
        for pruner in PRUNERS.values():
            standings = Standings(limit=math.inf, slack=slack_for(noise), winners=winners)
            cells.append(sum(held_back(pruner, curve, end, standings) for curve, end in faster))
        print(f"{name:<20} {len(faster):>12}  " + "".join(f"{cell:>10}" for cell in cells))


def main(seeds: int = 5, epochs: int = 4) -> None:
    """Train, and print both tables."""
    torch.set_num_threads(1)
    data = FashionMnist(model="mlp").load(torch.device("cpu"))
    horizon = epochs * EPOCH
    found = {schedule: runs_of(data, schedule, seeds, horizon) for schedule in SCHEDULES}
    target = late_accuracy(found["constant"])
    print(f"batch {BATCH_SIZE}, {horizon:,} samples, {seeds} seeds, target {target:g}\n")
    print_curves(found, target)
    print_pruning(found, target)


if __name__ == "__main__":
    script(main, __doc__)
