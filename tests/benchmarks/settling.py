"""How many runs confirmation needs until an answer is settled, and whether its claims are true.

Run as ``python tests/benchmarks/settling.py [--studies 300] [--runs 7] [--most 45]``: about ten minutes on two cores.
The searches are synthetic: sixty trials over batch size, learning rate and dropout on a law with a known truth.
Confirmation and answer are the product's. The generator differs from the model of the analysis: noise is gamma or
log-normal, seeds are shared, some runs are outliers, laws bend, noise may rise with the batch size, and step times have
errors.

Prints, by cell, the share of settled studies, the seconds of confirmation relative to one run of the best
configuration, and the shares of true claims.
"""

if not __package__:
    __import__("from_clone")

import math
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from bssearch.analysis.objectives import TIME, least_of
from bssearch.records import FLAT_RATIO, Configuration, ParameterValue, Phase, ProbeRecord, StepTimeError, TrialRecord
from bssearch.search import confirmation
from bssearch.search.history import History
from bssearch.spec import StudySpec
from tests.benchmarks.harness import answer_of, holds, script
from tests.benchmarks.simulate.processes import PROCESSES, repeating
from tests.factories import make_probe, make_spec, make_trial, with_outcome

SIZES = tuple(2**power for power in range(3, 11))
SEARCHED = 60
VISITS = 3
REFERENCE = 1e-4
REFERENCE_BATCH = 64
EVERY = 0.04
"""Evaluations are this share of the time to the target apart."""

PENALTY = 0.6
"""Log cost of dropout 1; the best is 0."""

VALLEY = 0.12
"""Log cost of twice or half the best learning rate."""


@dataclass(frozen=True)
class Cell:
    """A kind of study: noise of a run, its share due to the seed, error of a step time, exponent of the law's bend."""

    noise: float = 0.15
    shared: float = 0.3
    step_error: float = 0.03
    bend: float = 1.0
    rising: float = 0.0
    outliers: float = 0.0


CELLS = {
    "digits": Cell(noise=0.26, shared=0.4, step_error=0.06),
    "quiet": Cell(noise=0.04, step_error=0.02),
    "plain": Cell(noise=0.10),
    "noisy": Cell(noise=0.20, shared=0.0),
    "very noisy": Cell(noise=0.30, shared=0.2),
    "correlated": Cell(noise=0.15, shared=0.6),
    "rising": Cell(noise=0.12, rising=0.2),
    "outliers": Cell(noise=0.10, outliers=0.1),
    "bent": Cell(noise=0.10, bend=0.7),
    "step times": Cell(noise=0.10, step_error=0.10),
}


@dataclass(frozen=True)
class Truth:
    """A study's law: log seconds of a batch size at its best, and of a configuration."""

    cell: Cell
    b_crit: float
    knee: float
    rate: float
    power: float

    def steps(self, size: int) -> float:
        ratio = float((self.b_crit / size) ** self.cell.bend)
        return float(200 * (1 + ratio) ** (1 / self.cell.bend))

    def step_seconds(self, size: int) -> float:
        return 1e-3 * (1 + size / self.knee)

    def least(self, size: int) -> float:
        return self.steps(size) * self.step_seconds(size)

    def excess(self, one: Configuration) -> float:
        """Log cost of a configuration over the best of its batch size."""
        best = self.rate * (1 + self.b_crit / one.batch_size) ** -self.power
        off = math.log2(one.learning_rate / best)
        return VALLEY * off * off + PENALTY * one.dropout

    def seconds(self, one: Configuration) -> float:
        return self.least(one.batch_size) * math.exp(self.excess(one))


class Lab:
    """Makes the trials of one study."""

    def __init__(self, cell: Cell, rng: np.random.Generator, index: int) -> None:
        self.cell, self.rng, self.index = cell, rng, index
        self.truth = Truth(
            cell,
            b_crit=2 ** rng.uniform(4.5, 8.5),
            knee=2 ** rng.uniform(5, 8.5),
            rate=2 ** rng.uniform(-4.5, -2.5),
            power=float(rng.choice([0.5, 1.0])),
        )
        self.is_gamma = bool(rng.integers(2))
        self.space = spec_of(1, 1).space

    def run(self, number: int, configuration: Configuration, seed: int, phase: Phase) -> TrialRecord:
        """Trial of a configuration: steps by truth and noise, seconds by a pace that the reference kernel partly
        measures.
        """
        size, rng = configuration.batch_size, self.rng
        log = self._noise(size, seed)
        steps = self.truth.steps(size) * math.exp(self.truth.excess(configuration) + log)
        hit = max(2, math.ceil(steps * (1 + EVERY * rng.uniform())))
        miss = max(1, min(hit - 1, round(hit - EVERY * steps)))
        pace, unseen = rng.normal(0, 0.1), rng.normal(0, self.cell.step_error * math.sqrt(VISITS))
        step = self.truth.step_seconds(size) * math.exp(unseen)
        trial = make_trial(
            number,
            seconds=steps * step,
            steps=round(steps),
            seed=seed,
            phase=phase,
            configuration=configuration,
            samples=hit * size,
            sampled=self.space.encode(configuration) if phase is Phase.SEARCH else None,
        )
        return with_outcome(
            trial,
            steps=hit,
            train_seconds=hit * step * math.exp(pace),
            undelayed_train_seconds=hit * step * math.exp(pace),
            reference_seconds=REFERENCE * math.exp(pace),
            first_hit_step=hit,
            last_miss_step=miss,
            first_hit_seconds=hit * step,
            last_miss_seconds=miss * step,
        )

    def _noise(self, size: int, seed: int) -> float:
        cell = self.cell
        scale = cell.noise * (size / SIZES[len(SIZES) // 2]) ** cell.rising
        effect = np.random.default_rng((self.index, seed % 2**31)).normal(0, math.sqrt(cell.shared))
        rest = math.sqrt(1 - cell.shared) * scale
        own = self.rng.normal(0, 1)
        if self.is_gamma:
            own = math.log(self.rng.gamma(1 / rest**2, rest**2)) / rest
        late = self.rng.uniform(0.4, 0.8) if self.rng.uniform() < cell.outliers else 0.0
        return float(scale * effect + rest * own + late)

    def search(self) -> list[TrialRecord]:
        """Trials at random, then near the best so far."""
        trials: list[TrialRecord] = []
        for number in range(1, SEARCHED + 1):
            best = least_of(trials, TIME)
            size = int(self.rng.choice(SIZES))
            rate, dropout = self.truth.rate * 2 ** self.rng.uniform(-3, 3), self.rng.uniform(0, 0.3)
            if best is not None and number > SEARCHED // 3:
                near = best.configuration
                place = SIZES.index(near.batch_size) + int(self.rng.choice([-2, -1, 0, 0, 1, 2]))
                size = SIZES[min(len(SIZES) - 1, max(0, place))]
                rate = near.learning_rate * math.sqrt(size / near.batch_size) * 2 ** self.rng.normal(0, 0.6)
                dropout = max(0.0, near.dropout + self.rng.normal(0, 0.05))
            sampled: dict[str, ParameterValue] = {
                "reference_learning_rate": float(rate) / math.sqrt(size / REFERENCE_BATCH),
                "dropout": float(min(0.9, dropout)),
            }
            configuration = self.space.decode(size, sampled)
            trials.append(self.run(number, configuration, 10**6 + number, Phase.SEARCH))
        return trials

    def probes(self) -> dict[int, ProbeRecord]:
        found = {}
        for size in SIZES:
            own = max(0.003, self.cell.step_error)
            seconds = self.truth.step_seconds(size) * math.exp(self.rng.normal(0, self.cell.step_error))
            error = StepTimeError(own=own, common=own, freedom=10.0, visits=VISITS)
            found[size] = replace(make_probe(size, step_seconds=seconds), error=error)
        return found


def spec_of(runs: int, most: int) -> StudySpec:
    return make_spec(
        space={
            "batch_size": list(SIZES),
            "learning_rate": {"reference_batch": REFERENCE_BATCH, "low": 1e-4, "high": 100.0, "rule": "sqrt"},
            "dropout": {"low": 0.0, "high": 0.9},
        },
        default={"batch_size": 256, "learning_rate": 0.1, "dropout": 0.1},
        confirm={"top": 3, "runs": runs, "max_runs": most},
        budget={"trials": SEARCHED, "trial_train_seconds": 1000.0},
    )


def study(shared: tuple[tuple[str, ...], int, int], index: int) -> dict[str, object]:
    """Search, confirm and answer one study; return its comparison with the truth."""
    names, runs, most = shared
    name = names[index % len(names)]
    lab = Lab(CELLS[name], np.random.default_rng((11, index)), index)
    history = History(spec_of(runs, most), lab.search(), lab.probes())
    while (plan := confirmation.next_run(history)) is not None:
        trial = lab.run(len(history.all_trials) + 1, plan.configuration, plan.seed, Phase.CONFIRM)
        history.take(replace(trial, seed=plan.seed, configuration=plan.configuration, sampled=plan.sampled))
    return {"cell": name, **held(lab.truth, history)}


def held(truth: Truth, history: History) -> dict[str, float | None]:
    """Compare the answer with the truth. Costs are seconds of confirmation over one run of the best configuration."""
    trials = list(history.all_trials)
    answer = answer_of(history.spec, trials, history.probes)
    least = {size: truth.least(size) for size in SIZES}
    best = min(least.values())
    by_number = {one.number: one for one in trials}
    printed = truth.seconds(by_number[answer.optimal.trial_numbers[0]].configuration)
    confirmed = [one for one in trials if one.phase is Phase.CONFIRM]
    largest = next(row.best for row in answer.batches if row.batch_size == answer.largest_that_fits.batch_size)
    is_right = least[answer.optimal.batch_size] <= FLAT_RATIO * best
    found: dict[str, float | None] = {
        "settled": not answer.provisional,
        "claimed": answer.within_5_percent or 0.0,
        "right": is_right,
        "config": printed <= FLAT_RATIO * best,
        "r|sure": None if answer.provisional else is_right,
        "cost": sum(one.outcome.train_seconds for one in confirmed if one.outcome) / best,
        "runs": len(confirmed),
    }
    if largest is not None:
        ratio = truth.seconds(by_number[largest.trial].configuration) / printed
        found["ratio"] = holds(answer.speedup.over_largest, ratio)
    if answer.fit is None:
        return found
    if truth.cell.bend == 1:
        found["B_crit"] = holds(answer.fit.b_crit, truth.b_crit)
    laws = pd.Series([holds(row.predicted_s, least[row.batch_size]) for row in answer.batches], dtype=float)
    found["law"] = float(laws.mean())
    predicted = answer.fit.predicted
    if predicted is not None and predicted.interval is not None:
        fine = {size: truth.least(size) for size in range(*SIZES[:: len(SIZES) - 1])}
        low, high = predicted.interval
        found["B* in"] = low <= min(fine, key=fine.__getitem__) <= high
        found["octaves"] = math.log2(high / low)
        if predicted.surely_flat is not None:
            found["flat"] = all(
                truth.least(size) <= FLAT_RATIO * 1.001 * min(fine.values()) for size in predicted.surely_flat
            )
    return found


BINS = (0.0, 0.5, 0.7, 0.9, 0.95, 1.01)


def main(
    cells: Annotated[list[str] | None, typer.Argument(help="cells; all without any")] = None,
    studies: int = 300,
    runs: int = 7,
    most: int = 45,
    processes: int = PROCESSES,
) -> None:
    """Simulate the studies of each cell and print a row for each; then the truth of the claims, by probability."""
    names = tuple(cells or CELLS)
    with repeating(study, (names, runs, most), processes) as mapped:
        frame = pd.DataFrame(list(mapped(range(studies * len(names))))).set_index("cell").astype(float)
    table = frame.groupby("cell", sort=False).mean()
    table.loc["all"] = frame.mean()
    claims = frame.groupby(pd.cut(frame["claimed"], BINS, right=False), observed=True)[["right", "config"]]
    for shown in (table, claims.agg(["mean", "count"])):
        print(shown.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    script(main, __doc__)
