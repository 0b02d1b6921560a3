"""How many runs confirmation needs until an answer is settled, and whether its claims are true.

Run as ``python tests/benchmarks/settling.py [--studies 300] [--runs 7] [--most 45]``: about ten minutes on two cores.
The searches are made up: sixty trials over batch size, learning rate and dropout on a law whose truth is known.
Confirmation and answer are the product's. The generator is not the model of the analysis: noise is gamma or log-normal,
seeds are shared, some runs are outliers, laws bend, noise may rise with the batch size, and step times have errors.

Even cells are to tune by, odd ones to publish. Prints, by cell, how many studies settle, their seconds of confirmation
(relative to one run of the best configuration), and how often the claims hold. With ``--follow``, confirmation ends
after ``--runs``; then the command that the answer proposes is followed for up to half more runs than it announces.
"""

if not __package__:
    __import__("from_clone")

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer

from bssearch.analysis.objectives import TIME, least_of
from bssearch.errors import TargetNotReachedError
from bssearch.records import Configuration, ParameterValue, Phase, ProbeRecord, StepTimeError, TrialPlan, TrialRecord
from bssearch.records.intervals import FLAT_RATIO
from bssearch.search import confirmation
from bssearch.search.history import History
from bssearch.spec import StudySpec
from tests.benchmarks.harness import script
from tests.benchmarks.simulate.processes import PROCESSES, repeating
from tests.benchmarks.simulate.studies import answer_of
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
    tuning: bool = True


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


@dataclass(frozen=True)
class Followed:
    """What the proposed command came to; ``announced``: runs of each contender; None if more would not settle it."""

    reason: str
    announced: int | None = None
    settled: bool = False
    most: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a study came to; ``costs``: seconds of confirmation over those of one best run, and the number of runs."""

    cell: str
    settled: bool
    claimed: float
    size_is_right: bool
    configuration_is_right: bool
    cost: float
    runs: int
    optimum_held: bool | None
    optimum_width: float
    flat_is_true: bool | None
    steps_held: tuple[bool, ...]
    b_crit_held: bool | None
    ratio_held: bool | None
    rise: tuple[float, int]
    followed: Followed | None = None


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
        """Trial of a configuration: steps by truth and noise, seconds by a pace that the reference sees in part."""
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


class _Clock:
    def __init__(self, history: History) -> None:
        self.engine = self
        self.history = history


def spec_of(runs: int, most: int | None) -> StudySpec:
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


def study(shared: tuple[tuple[str, ...], int, int | None], _sampler: str, _pruner: str, index: int) -> Outcome:
    """Search, confirm and answer one study; without a maximum of runs, follow the answer's proposal."""
    names, runs, most = shared
    name = names[index % len(names)]
    lab = Lab(CELLS[name], np.random.default_rng((11, index)), index)
    history = History(spec_of(runs, most), lab.search(), lab.probes())
    claims = _confirm(lab, history)
    found = held(name, lab.truth, history, _rise(claims, history))
    return found if most is not None else replace(found, followed=_follow(lab, history, runs))


def _confirm(lab: Lab, history: History) -> list[tuple[int, float]]:
    """Run confirmation to its end; return the numbers of trials at some looks, and what was claimed then."""
    claims = []
    while (plan := confirmation.next_run(history)) is not None:
        trial = lab.run(len(history.all_trials) + 1, plan.configuration, plan.seed, Phase.CONFIRM)
        history.take(_planned(trial, plan))
        if len(history.all_trials) % 10 == 0 and (claim := _claim(history)):
            claims.append((len(history.all_trials), claim))
    return claims


def _rise(claims: Sequence[tuple[int, float]], history: History) -> tuple[float, int]:
    """Rise of the claim from the first look to the last, and the runs between."""
    first = next(iter(claims), (len(history.all_trials), _claim(history)))
    return _claim(history) - first[1], len(history.all_trials) - first[0]


def _follow(lab: Lab, history: History, runs: int) -> Followed | None:
    answer = answer_of(history.spec, history.all_trials, _Clock(history))  # type: ignore[arg-type]
    if not answer.provisional:
        return None
    reason = answer.would_settle or "nothing"
    if answer.runs_to_settle is None:
        return Followed(reason)
    longer = History(
        spec_of(runs, math.ceil(1.5 * answer.runs_to_settle)), list(history.all_trials), dict(history.probes)
    )
    _confirm(lab, longer)
    after = answer_of(longer.spec, longer.all_trials, _Clock(longer))  # type: ignore[arg-type]
    counts = Counter(one.configuration.key for one in longer.all_trials if one.phase is Phase.CONFIRM)
    return Followed(after.would_settle or "nothing", answer.runs_to_settle, not after.provisional, max(counts.values()))


def _planned(trial: TrialRecord, plan: TrialPlan) -> TrialRecord:
    return replace(trial, seed=plan.seed, configuration=plan.configuration, sampled=plan.sampled)


def _claim(history: History) -> float:
    try:
        found = answer_of(history.spec, history.all_trials, _Clock(history))  # type: ignore[arg-type]
    except TargetNotReachedError:
        return 0.0
    return found.within_5_percent or 0.0


def held(name: str, truth: Truth, history: History, rise: tuple[float, int]) -> Outcome:
    """Compare the answer with the truth."""
    trials = history.all_trials
    answer = answer_of(history.spec, trials, _Clock(history))  # type: ignore[arg-type]
    least = {size: truth.least(size) for size in SIZES}
    best = min(least.values())
    by_number = {one.number: one for one in trials}
    printed = by_number[answer.optimal.trial_numbers[0]].configuration
    confirmed = [one for one in trials if one.phase is Phase.CONFIRM]
    over = answer.speedup.over_largest
    largest = next(row.best for row in answer.batches if row.batch_size == answer.largest_that_fits.batch_size)
    ratio = (
        math.inf if largest is None else truth.seconds(by_number[largest.trial].configuration) / truth.seconds(printed)
    )
    optimum, width, flat, steps, b_crit = None, math.nan, None, [], None
    if answer.fit is not None and (predicted := answer.fit.predicted) is not None and predicted.interval is not None:
        fine = {size: truth.least(size) for size in range(*SIZES[:: len(SIZES) - 1])}
        low, high = predicted.interval
        true = min(fine, key=lambda size: fine[size])
        optimum, width = low <= true <= high, math.log2(high / low)
        if predicted.surely_flat is not None:
            ends = predicted.surely_flat
            flat = all(truth.least(size) <= FLAT_RATIO * 1.001 * min(fine.values()) for size in ends)
    if answer.fit is not None:
        known = answer.fit.b_crit
        if known.low is not None and known.high is not None and CELLS[name].bend == 1:
            b_crit = known.low <= truth.b_crit <= known.high
        for row in answer.batches:
            if row.predicted_s is not None and row.predicted_s.low is not None and row.predicted_s.high is not None:
                steps.append(row.predicted_s.low <= least[row.batch_size] <= row.predicted_s.high)
    return Outcome(
        cell=name,
        settled=not answer.provisional,
        claimed=answer.within_5_percent or 0.0,
        size_is_right=least[answer.optimal.batch_size] <= FLAT_RATIO * best,
        configuration_is_right=truth.seconds(printed) <= FLAT_RATIO * best,
        cost=sum(one.outcome.train_seconds for one in confirmed if one.outcome) / best,
        runs=len(confirmed),
        optimum_held=optimum,
        optimum_width=width,
        flat_is_true=flat,
        steps_held=tuple(steps),
        b_crit_held=b_crit,
        ratio_held=None if over is None or over.low is None or over.high is None else over.low <= ratio <= over.high,
        rise=rise,
    )


def share(values: Sequence[bool | None]) -> float:
    known = [one for one in values if one is not None]
    return statistics.fmean(known) if known else math.nan


BINS = (0.0, 0.5, 0.7, 0.9, 0.95, 1.01)


def main(
    cells: Annotated[list[str] | None, typer.Argument(help="cells; all without any")] = None,
    studies: int = 300,
    runs: int = 7,
    most: int = 45,
    *,
    follow: bool = False,
    processes: int = PROCESSES,
) -> bool:
    """Simulate the studies of each cell and print a row for each."""
    names = tuple(cells or CELLS)
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with repeating(study, (names, runs, None if follow else most), processes) as mapped:
        for one in mapped("", "", range(studies * len(names))):
            outcomes[one.cell].append(one)
    outcomes["all"] = [one for found in list(outcomes.values()) for one in found]
    columns = (
        "settled",
        "right",
        "config",
        "r|sure",
        "cost",
        "runs",
        "B* in",
        "octaves",
        "flat",
        "law",
        "B_crit",
        "ratio",
    )
    print(f"{'':12s} {'studies':>7s} " + " ".join(f"{one:>7s}" for one in columns))
    for name, found in outcomes.items():
        sure = [one for one in found if one.settled]
        shares = (
            share([one.settled for one in found]),
            share([one.size_is_right for one in found]),
            share([one.configuration_is_right for one in found]),
            share([one.size_is_right for one in sure]),
        )
        widths = [one.optimum_width for one in found if not math.isnan(one.optimum_width)]
        more = (
            f"{share([one.optimum_held for one in found]):7.0%} {statistics.fmean(widths or [0]):7.2f} "
            f"{share([one.flat_is_true for one in found]):7.0%} "
            f"{share([held for one in found for held in one.steps_held]):7.0%} "
            f"{share([one.b_crit_held for one in found]):7.0%} {share([one.ratio_held for one in found]):7.0%}"
        )
        print(
            f"{name:12s} {len(found):7d} "
            + " ".join(f"{one:7.1%}" for one in shares)
            + f" {statistics.fmean(one.cost for one in found):7.1f} {statistics.fmean(one.runs for one in found):7.1f} "
            + more
        )
    print("claimed when it stops: size right (configuration right), studies")
    for low, high in itertools.pairwise(BINS):
        here = [one for one in outcomes["all"] if low <= one.claimed < high]
        if here:
            right, printed = (
                share([one.size_is_right for one in here]),
                share([one.configuration_is_right for one in here]),
            )
            mean = statistics.fmean(one.claimed for one in here)
            print(f"{low:.2f}–{min(high, 1):.2f} (mean {mean:.2f}): {right:.1%} ({printed:.1%}), {len(here)}")
    rises = [one.rise for one in outcomes["all"]]
    change = sum(rise for rise, _ in rises) / max(1, sum(runs for _, runs in rises))
    print(f"mean change of the claim per added run: {change:+.4f}")
    if follow:
        _print_followed([one.followed for one in outcomes["all"] if one.followed is not None])
    return True


def _print_followed(found: Sequence[Followed]) -> None:
    refused = Counter(one.reason for one in found if one.announced is None)
    print(f"provisional: {len(found)}; of these, more runs would not settle it, but: {dict(refused)}")
    known = [(one, one.announced) for one in found if one.announced is not None]
    near = sum(one.settled and announced / 2 <= one.most for one, announced in known)
    soon = sum(one.settled and one.most < announced / 2 for one, announced in known)
    ends = Counter(one.reason for one, _ in known if not one.settled)
    print(f"followed: {len(known)}; settled in the announced runs ± 50 %: {near}, sooner: {soon}; else: {dict(ends)}")


if __name__ == "__main__":
    script(main, __doc__)
