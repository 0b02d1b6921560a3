"""Claims: the sampler `auto` takes at most 50 ms per ask at 1,000 trials, 100 ms at 10,000; the adapter for samplers of
Optuna takes at most 10 ms per choice at 1,000 trials.

Run as ``python tests/benchmarks/sampler_time.py``, a minute on two cores. Synthetic trials follow the law of batch
size; a third reach the target, the others are stopped early. `Planner.next_trial` is timed after the history has taken
one more trial, and compared with Optuna's TPE over the same parameters. The adapter's CPU seconds are those of a choice
without ``optuna.Study.ask``. Medians of 9 asks in one process, with default threads. Exits 1 over a bar.
"""

if not __package__:
    __import__("from_clone")

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import optuna
import pytest

from bssearch.records import TrialState
from bssearch.search.engine import Planner
from bssearch.search.history import History
from bssearch.search.pruners.base import PruningController
from bssearch.search.samplers.base import make_sampler
from bssearch.search.samplers.optuna import distribution
from bssearch.spec import StudySpec
from tests.benchmarks.harness import script, seconds_of
from tests.factories import make_probe, make_spec, make_trial

COUNTS = (100, 1_000, 10_000)
BARS = {1_000: 0.050, 10_000: 0.100}
ADAPTER_BAR, ADAPTER_COUNT = 0.010, 1_000
ADAPTED = ("tpe", "random", "optuna:TPESampler")
ASKS = 9
EVALUATIONS = 20
TARGET = 0.9
SIZES = tuple(2**power for power in range(3, 12))


def spec(sampler: str = "auto") -> StudySpec:
    """Return the spec of the continuous space, with a budget that never ends the search."""
    space = {
        "batch_size": {"low": SIZES[0], "high": SIZES[-1]},
        "learning_rate": {"reference_batch": 32, "low": 0.001, "high": 1.0, "rule": "sqrt"},
        "weight_decay": [0.0, 1e-4, 1e-3],
        "dropout": {"low": 0.0, "high": 0.5},
    }
    budget = {"trials": 1_000_000, "trial_train_seconds": 100.0, "least_improvement": 0.0}
    return make_spec(space=space, budget=budget, sampler={"name": sampler}, pruner={"name": "balanced"})


def step_seconds(batch_size: float) -> float:
    """Return the seconds of a step, affine in the batch size."""
    return 1e-3 * (1 + batch_size / 128)


def law_seconds(batch_size: float, learning_rate: float, rng: np.random.Generator) -> float:
    """Return a time to the target by a law with B_crit = 256 and a best learning rate that grows as √B."""
    off = math.log(learning_rate / (0.05 * math.sqrt(batch_size / 32)))
    steps = 300 * (1 + 256 / batch_size) * math.exp(min(0.3 * off**2, 3.0))
    return step_seconds(batch_size) * steps * math.exp(0.1 * rng.standard_normal())


def curve(seconds: float, state: TrialState) -> list[tuple[float, float]]:
    """Return a metric over train seconds that is `TARGET` after ``seconds``; a stopped trial has half the curve."""
    end = seconds if state is TrialState.REACHED else seconds / 2
    moments = np.linspace(0.0, end, EVALUATIONS)
    gains = 0.1 + (TARGET - 0.1) * np.minimum(moments / seconds, 1.0) ** 0.5
    return list(zip(moments.tolist(), gains.tolist(), strict=True))


def state_of(number: int, count: int) -> TrialState:
    """Return a trial's state; the last two run."""
    if number >= count - 2:
        return TrialState.RUNNING
    kinds = (TrialState.REACHED, TrialState.PRUNED, TrialState.CAPPED)
    return TrialState.DIVERGED if number % 10 == 9 else kinds[number % 3]


class Study:
    """A study over the spec's space that grows by a trial between asks."""

    def __init__(self, count: int, sampler: str = "auto") -> None:
        self.spec = spec(sampler)
        self._rng = np.random.default_rng(0)
        probes = {size: make_probe(size, step_seconds=step_seconds(size)) for size in SIZES}
        self.history = History(self.spec, (), probes)
        self._pruning = PruningController(self.spec, self.history)
        self.sampler = make_sampler(self.spec)
        self._planner = Planner(self.spec, self.history, self._pruning, self.sampler)
        for number in range(count):
            self._add(number + 1, state_of(number, count))

    def grow(self) -> None:
        """Let one more trial end."""
        self._add(self.history.length + 1, TrialState.REACHED)

    def ask(self) -> None:
        """Plan the next trial, as the driver does."""
        assert self._planner.next_trial()[0] is not None, "the budget is large"

    def _add(self, number: int, state: TrialState) -> None:
        rng = self._rng
        size = int(rng.choice(SIZES))
        sampled = {
            "reference_learning_rate": float(math.exp(rng.uniform(math.log(0.001), 0.0))),
            "weight_decay": float(rng.choice((0.0, 1e-4, 1e-3))),
            "dropout": float(rng.uniform(0.0, 0.5)),
        }
        if number == 1:
            size, default = 32, self.spec.space.encode(self.spec.default_configuration)
            assert default is not None, "it lies in the space"
            sampled = dict(default)  # type: ignore[arg-type]
        configuration = self.spec.space.decode(size, sampled)
        points = curve(law_seconds(size, configuration.learning_rate, rng), state)
        trial = make_trial(number, state=state, seconds=points[-1][0], sampled=sampled, configuration=configuration)
        self.history.observe(number, points)
        self.history.take(trial)
        self._pruning.take(trial)


def tpe_ask(count: int) -> Callable[[], object]:
    """Return the ask of Optuna's TPE over the same space, with as many completed trials."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rng = np.random.default_rng(0)
    distributions = {one.name: distribution(one) for one in spec().space.dimensions()}
    distributions["batch_size"] = optuna.distributions.IntDistribution(0, len(SIZES) - 1)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))

    for _ in range(count):
        place, rate = int(rng.integers(len(SIZES))), float(math.exp(rng.uniform(math.log(0.001), 0.0)))
        params = {
            "batch_size": place,
            "reference_learning_rate": rate,
            "weight_decay": int(rng.integers(3)),
            "dropout": float(rng.uniform(0.0, 0.5)),
        }
        value = law_seconds(SIZES[place], rate, rng)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    return partial(study.ask, distributions)


def space_seconds(count: int) -> tuple[float, float]:
    """Return the median time of an ask over the spec's space, and of the first ask after a restart."""
    study = Study(count)
    times = []
    for _ in range(ASKS + 1):
        study.grow()
        times.append(seconds_of(study.ask))
    return statistics.median(times[1:]), times[0]


def adapter_seconds(name: str) -> float:
    """Return the adapter's CPU seconds of a choice, without those of Optuna's ``ask``."""
    study = Study(ADAPTER_COUNT, name)
    inside, ask = 0.0, optuna.Study.ask

    def timed(one: optuna.Study, distributions: Any) -> optuna.Trial:
        nonlocal inside
        began = time.process_time()
        trial = ask(one, distributions)
        inside += time.process_time() - began
        return trial

    choices = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.Study, "ask", timed)
        for _ in range(ASKS + 1):
            study.grow()
            inside = 0.0
            choices.append(seconds_of(lambda: study.sampler.choose(study.history), time.process_time) - inside)
    return statistics.median(choices[1:])


def main() -> bool:
    """Print the medians and the bars; return whether all are met."""
    print(f"{'trials':>8} {'auto':>9} {'its first':>9} {'TPE':>9}   ms per ask")
    is_met = True
    for count in COUNTS:
        space, first = space_seconds(count)
        ask = tpe_ask(count)
        tpe = statistics.median([seconds_of(ask) for _ in range(ASKS + 1)][1:])
        line = " ".join(f"{1e3 * one:9.1f}" for one in (space, first, tpe))
        bar = BARS.get(count)
        if bar is not None:
            met = space <= bar
            is_met = is_met and met
            line += f"   {'met' if met else 'NOT MET'}: at most {1e3 * bar:g} ms"
        print(f"{count:>8,} {line}")
    print(f"the adapter at {ADAPTER_COUNT:,} trials, in ms per choice beside the sampler's own time")
    for name in ADAPTED:
        choice = adapter_seconds(name)
        met = choice <= ADAPTER_BAR
        is_met = is_met and met
        print(f"{name:>18}: {1e3 * choice:.1f}   {'met' if met else 'NOT MET'}: at most {1e3 * ADAPTER_BAR:g} ms")
    return is_met


if __name__ == "__main__":
    script(main, __doc__)
