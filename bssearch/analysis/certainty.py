"""How probably a recommendation costs at most 5 % more than the best batch size.

Gains from a better learning rate: log figure = level(B) + κ (x − μ − ρ b)², x and b the octaves of learning rate and
batch size. All batch sizes share κ, μ and ρ, so trials elsewhere inform a size with few. They are integrated over a
grid, noise unknown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.optimum import LAW_MISFIT, Candidate, Verdict, is_shown_flat
from bssearch.analysis.time_to_target import ratio_interval
from bssearch.records import Phase, TrialRecord
from bssearch.records.intervals import FLAT_RATIO

Numbers = NDArray[np.float64]

CURVATURES = tuple(0.02 * 2 ** (step / 2) for step in range(11))
"""Log cost of twice or half the best learning rate."""

POWERS = tuple(step / 4 for step in range(-1, 6))
"""Powers of the batch size by which the best learning rate grows."""

BOTTOM_STEP = 0.25

BEYOND = 2.0
"""Octaves beyond the tried learning rates."""

FEWEST_MORE = 4
"""Beyond one trial per batch size: three parameters and the noise."""

LEAST_SQUARES = 1e-12

BADLY_TUNED = 0.12
TUNING_GAP = 0.12
WELL_TUNED_GAP = 0.01
"""Share of badly tuned batch sizes, and mean log gaps of badly and well tuned ones (exponential).

Measured (``tests/benchmarks/verdicts.py``): a third could be bettered by more than 3 %, by 0.16 on average; the share
is lower because only contenders matter.
"""


def heights(
    verdict: Verdict, trials: Sequence[TrialRecord], draws: int, rng: np.random.Generator
) -> Mapping[int, Numbers]:
    """Draws (``draws``,) of each candidate's log height above its valley's bottom; empty with too few trials.

    Only for the recommended optimizer. Missed trials count as lower bounds.
    """
    objective, optimizer = verdict.optimal.objective, verdict.optimal.configuration.optimizer
    counted = [one for one in trials if one.phase is Phase.SEARCH and one.configuration.optimizer == optimizer]
    reached = [(one, log) for one in counted if (log := _log_figure(objective, objective.figure(one))) is not None]
    sizes = sorted({one.configuration.batch_size for one, _ in reached})
    rates = {one.configuration.learning_rate for one, _ in reached}
    if len(reached) < len(sizes) + FEWEST_MORE or len(rates) < FEWEST_MORE:
        return {}
    missed = [
        (one, log)
        for one in counted
        if one.configuration.batch_size in sizes and (log := _log_figure(objective, objective.bound(one))) is not None
    ]
    middle = (math.log2(sizes[0]) + math.log2(sizes[-1])) / 2
    valleys = _valleys([_rate(one) for one, _ in reached])
    logs = _log_likelihoods(valleys, {size: math.log2(size) - middle for size in sizes}, reached, missed)
    above = {
        size: _height(valleys, math.log2(candidate.configuration.learning_rate), math.log2(size) - middle)
        for size, candidate in verdict.by_batch.items()
        if candidate.configuration.optimizer == optimizer
    }
    logs += sum(_log_density(height) for height in above.values())
    weights = np.exp(logs - logs.max())
    chosen = rng.choice(len(valleys), size=draws, p=weights / weights.sum())
    return {size: height[chosen] for size, height in above.items()}


def _log_density(height: Numbers) -> Numbers:
    tuned = math.log((1 - BADLY_TUNED) / WELL_TUNED_GAP) - height / WELL_TUNED_GAP
    found: Numbers = np.logaddexp(tuned, math.log(BADLY_TUNED / TUNING_GAP) - height / TUNING_GAP)
    return found


def _valleys(rates: Sequence[float]) -> Numbers:
    bottoms = np.arange(min(rates) - BEYOND, max(rates) + BEYOND, BOTTOM_STEP)
    return np.stack([one.ravel() for one in np.meshgrid(CURVATURES, POWERS, bottoms)], axis=1)


def _log_likelihoods(
    valleys: Numbers,
    octaves: Mapping[int, float],
    reached: Sequence[tuple[TrialRecord, float]],
    missed: Sequence[tuple[TrialRecord, float]],
) -> Numbers:
    """The noise is integrated with prior 1 / σ."""
    squares = np.zeros(len(valleys))
    for size, octave in octaves.items():
        here = [(one, log) for one, log in reached if one.configuration.batch_size == size]
        above = np.array([log - _height(valleys, _rate(one), octave) for one, log in here])
        level = above.mean(axis=0)
        squares += ((above - level) ** 2).sum(axis=0)
        for one, bound in missed:
            if one.configuration.batch_size == size:
                squares += np.maximum(0.0, bound - level - _height(valleys, _rate(one), octave)) ** 2
    freedom = len(reached) - len(octaves)
    found: Numbers = -freedom / 2 * np.log(np.maximum(squares, LEAST_SQUARES))
    return found


def _height(valleys: Numbers, rate: float, octave: float) -> Numbers:
    curvature, power, bottom = valleys.T
    found: Numbers = curvature * (rate - bottom - power * octave) ** 2
    return found


def _rate(trial: TrialRecord) -> float:
    return math.log2(trial.configuration.learning_rate)


def _log_figure(objective: Objective, figure: float | None) -> float | None:
    return None if figure is None else objective.log(figure)


ENOUGH = 0.9
"""Below, an answer is provisional."""

DRAWS = 4000
"""A probability of 0.9 is known to half a percent."""

OPTIMUM_GAP = 0.08
"""Mean log gain from better tuning of the recommended batch size; `TUNING_GAP` for the others.

With it, 95 % of firm verdicts are within 5 % of the best (``tests/benchmarks/verdicts.py``).
"""

UNTRIED_DEVIATION = 0.15
"""Standard deviation of an untried log figure about the line between its neighbours."""

LEAST_DEVIATION = 1e-6

FEWEST_FOR_LAW = 4
"""To estimate the misfit; the law has two parameters."""

MOST_RUNS = 100

MORE = 1.3


Settles = Literal["runs", "tuning", "step_times"]


@dataclass(frozen=True, slots=True)
class Certainty:
    """Probability that the recommendation is within 5 % of the best, and the same by batch size.

    ``runs``: total runs of each batch size, if ``settles`` is ``runs``.
    """

    within_5_percent: float
    by_batch: Mapping[int, float]
    settles: Settles | None = None
    runs: int | None = None

    @property
    def is_provisional(self) -> bool:
        """True below `ENOUGH`."""
        return self.within_5_percent < ENOUGH


def certainty(
    verdict: Verdict,
    predicted: Mapping[int, float],
    trials: Sequence[TrialRecord] = (),
    batch_sizes: Sequence[int] = (),
) -> Certainty | None:
    """How sure a verdict is; None without confirmation runs or without known noise.

    The mean log figure of each batch size has a Student-t posterior: pooled deviation of the runs and step-time error.
    ``predicted`` figures shrink the means towards the law by empirical Bayes (James & Stein 1961). Each draw allows for
    gains from better tuning, seen in the learning-rate valley of ``trials`` or hidden (`BADLY_TUNED`).
    """
    known = {size: one for size, one in verdict.by_batch.items() if math.isfinite(one.value)}
    optimal = verdict.optimal.configuration.batch_size
    if not verdict.confirmed or optimal not in known:
        return None
    logs = {size: _log(verdict.optimal, figure) for size, figure in predicted.items()}
    untried = _untried(list(known), {*batch_sizes, *verdict.by_batch} - _slower(verdict), logs)
    if len(known) == 1 and not untried:
        return Certainty(1.0, {optimal: 1.0})
    freedom = sum(one.estimate.reached - 1 for one in known.values() if one.is_confirmed)
    deviation = verdict.seed_deviation
    if not deviation or freedom < 1:
        return None
    sizes = list(known)
    means = np.array([known[size].estimate.log_mean for size in sizes])
    least_excess = min(one.estimate.excess for one in known.values())
    errors = np.array([_error(known[size], deviation, least_excess) for size in sizes])
    if len(sizes) >= FEWEST_FOR_LAW and set(sizes) <= set(predicted):
        law = np.array([_log(known[size], predicted[size]) for size in sizes])
        means, errors = _drawn_to_law(means, errors, law)
    of_steps = np.array([_step_time_error(known[size], least_excess) for size in sizes])
    posterior = _Posterior(
        means=means,
        of_seeds=np.sqrt(np.maximum(errors**2 - of_steps**2, LEAST_DEVIATION**2)),
        of_steps=np.minimum(of_steps, errors),
        runs=np.array([known[size].estimate.reached for size in sizes], dtype=float),
        shortfalls=_shortfalls(verdict, trials, sizes),
        untried=untried,
        freedom=freedom,
        deviation=deviation,
    )
    shares = dict(zip(sizes, posterior.near(posterior.truth()).mean(axis=0).tolist(), strict=True))
    if shares[optimal] >= ENOUGH:
        return Certainty(shares[optimal], shares)
    return Certainty(shares[optimal], shares, *_what_settles(posterior))


def _what_settles(posterior: _Posterior) -> tuple[Settles, int | None]:
    runs = float(posterior.runs.max()) + 1
    while runs <= MOST_RUNS:
        if posterior.share_after(runs) >= ENOUGH:
            return "runs", round(runs)
        runs = math.ceil(runs * MORE)
    tuned = replace(posterior, shortfalls=np.zeros_like(posterior.shortfalls)).share_after(MOST_RUNS)
    timed = replace(posterior, of_steps=np.zeros_like(posterior.of_steps)).share_after(MOST_RUNS)
    return ("tuning" if tuned >= timed else "step_times"), None


@dataclass(frozen=True, eq=False)
class _Posterior:
    """Posterior of the log figure of each batch size: means, and errors from seeds and step times, each (sizes,).

    ``shortfalls`` (`DRAWS`, sizes): gains from better tuning. ``untried``, per batch size without a figure: indices of
    both neighbours, share of the way between them, the law's penalty. ``deviation``: of one run.
    """

    means: Numbers
    of_seeds: Numbers
    of_steps: Numbers
    runs: Numbers
    shortfalls: Numbers
    untried: Sequence[tuple[int, int, float, float]]
    freedom: int
    deviation: float

    def truth(self) -> Numbers:
        """Draws (`DRAWS`, sizes) of the log figures as tuned now; equal at each call."""
        rng = np.random.default_rng(0)
        scale = np.sqrt(self.freedom / rng.chisquare(self.freedom, (DRAWS, 1)))
        off = rng.standard_normal((DRAWS, len(self.means)))
        return self.means + np.hypot(self.of_seeds, self.of_steps) * scale * off

    def near(self, truth: Numbers) -> NDArray[np.bool_]:
        """True for each draw and batch size within 5 % of the best after full tuning."""
        reached = truth - self.shortfalls
        rng = np.random.default_rng(3)
        others = [
            (1 - share) * truth[:, low] + share * truth[:, high] + worse + rng.normal(0, UNTRIED_DEVIATION, DRAWS)
            for low, high, share, worse in self.untried
        ]
        least = np.column_stack([reached, *others]).min(axis=1, keepdims=True)
        near: NDArray[np.bool_] = reached <= least + math.log(FLAT_RATIO)
        return near

    def share_after(self, runs: float) -> float:
        """How often the least of ``runs`` runs is within 5 % of the best; step-time errors stay."""
        rng = np.random.default_rng(2)
        shape = DRAWS, len(self.means)
        of_seeds = self.of_seeds * rng.standard_normal(shape)
        truth = self.means + of_seeds + self.of_steps * rng.standard_normal(shape)
        more = np.maximum(0.0, runs - self.runs)
        single = np.maximum(self.deviation, self.of_seeds * np.sqrt(self.runs))
        new = of_seeds + single / np.sqrt(np.maximum(more, 1.0)) * rng.standard_normal(shape)
        chosen = (self.means + new * more / (self.runs + more)).argmin(axis=1)
        return float(self.near(truth)[np.arange(DRAWS), chosen].mean())


def _slower(verdict: Verdict) -> set[int]:
    known = [size for size, one in verdict.by_batch.items() if math.isfinite(one.value)]
    best = verdict.optimal.value
    return {
        size
        for size, one in verdict.by_batch.items()
        if not min(known) <= size <= max(known) and one.lower_bound is not None and one.lower_bound >= best
    }


def _untried(
    known: Sequence[int], batch_sizes: Collection[int], law: Mapping[int, float]
) -> list[tuple[int, int, float, float]]:
    found = []
    for size in sorted({*batch_sizes} - {*known}):
        high = sum(one < size for one in known)
        if 0 < high < len(known):
            below, above = known[high - 1], known[high]
            found.append((high - 1, high, math.log(size / below) / math.log(above / below), 0.0))
        else:
            end = max(0, high - 1)
            worse = max(0.0, law[size] - law[known[end]]) if {size, known[end]} <= law.keys() else 0.0
            found.append((end, end, 0.0, worse))
    return found


def _shortfalls(verdict: Verdict, trials: Sequence[TrialRecord], sizes: Sequence[int]) -> Numbers:
    rng = np.random.default_rng(1)
    seen = heights(verdict, trials, DRAWS, rng)
    unseen = np.where(np.array(sizes) == _batch_size(verdict.optimal), OPTIMUM_GAP, TUNING_GAP)
    if not _others_vary(trials):
        unseen *= np.array([size not in seen for size in sizes])
    found = (rng.random((DRAWS, len(sizes))) < BADLY_TUNED) * rng.exponential(unseen, (DRAWS, len(sizes)))
    for place, size in enumerate(sizes):
        found[:, place] += seen.get(size, 0.0)
    return found


def _others_vary(trials: Sequence[TrialRecord]) -> bool:
    searched = (one.configuration for one in trials if one.phase is Phase.SEARCH)
    alike = (
        replace(one, learning_rate=1.0, batch_size=1, micro_batch_size=1, accumulation_steps=1) for one in searched
    )
    return len({one.key for one in alike}) > 1


def _error(candidate: Candidate, deviation: float, least_excess: float) -> float:
    known = candidate.estimate
    of_seeds = max(deviation, known.log_deviation, LEAST_DEVIATION) / math.sqrt(known.reached)
    return math.hypot(of_seeds, known.unresolved, _step_time_error(candidate, least_excess))


def _step_time_error(candidate: Candidate, least_excess: float) -> float:
    """The excess is uniform on its range."""
    known = candidate.estimate
    return math.hypot(known.step_time_error, (known.excess - least_excess) / math.sqrt(12))


def _log(candidate: Candidate, figure: float) -> float:
    value = candidate.objective.log(figure)
    assert value is not None, "a predicted figure is positive"
    return value


def _drawn_to_law(means: Numbers, errors: Numbers, law: Numbers) -> tuple[Numbers, Numbers]:
    law = law + float(np.average(means - law, weights=1 / errors**2))
    off = means - law
    misfit = float((off**2).sum()) / (len(means) - 2) - float((errors**2).mean())
    misfit = max(misfit, LAW_MISFIT**2)
    share = misfit / (misfit + errors**2)
    # Of the law itself no more is known than its two parameters leave of the runs' noise.
    of_law = 2 * float((errors**2).mean()) / len(means)
    return law + share * off, np.sqrt(share * errors**2 + (1 - share) ** 2 * of_law)


@dataclass(frozen=True)
class Standing:
    """The recommendation so far, and the candidates that could change it."""

    least: Candidate
    recommended: Candidate
    undecided: tuple[Candidate, ...]

    @property
    def is_settled(self) -> bool:
        """True if no batch size could change the recommendation."""
        return not self.undecided

    @property
    def undecided_batch_sizes(self) -> list[int]:
        """Batch sizes that could change the recommendation."""
        return [one.configuration.batch_size for one in self.undecided]

    @property
    def to_run(self) -> list[Candidate]:
        """The undecided candidates and those they are compared with.

        Candidates with a missed run never get an interval: left out; if the least has one, all are.
        """
        open_ones = [one for one in self.undecided if not _has_missed(one)]
        if not open_ones or _has_missed(self.least):
            return []
        compared = [self.least] if self.recommended is self.least else [self.least, self.recommended]
        return compared + [one for one in open_ones if one is not self.recommended]


def standing(verdict: Verdict) -> Standing | None:
    """State of the confirmation; None before any confirmation run decides.

    L is the least, R the recommended batch size, [low, high] the 95 % interval of a ratio. Undecided is b if

    * b < R and low(b / L) ≤ 1.05 < high(b / L): b could become the recommendation;
    * low(b / L) < 1 and high(R / b) > 1.05: b could be the least, with R not within 5 %;
    * b has no interval: fewer than three runs, or a missed run.
    """
    if not verdict.confirmed:
        return None
    least = verdict.least
    confirmed = [one for one in verdict.by_batch.values() if one.is_confirmed and math.isfinite(one.value)]
    flat = [one for one in confirmed if one is not least and is_shown_flat(one, least)]
    recommended = min([least, *flat], key=_batch_size)
    undecided = [one for one in confirmed if one is not least and _is_undecided(one, least, recommended)]
    return Standing(least, recommended, tuple(sorted(undecided, key=_batch_size)))


def _is_undecided(one: Candidate, least: Candidate, recommended: Candidate) -> bool:
    to_least = ratio_interval(one.estimate, least.estimate)
    if to_least is None:
        return True
    low, high = to_least
    if _batch_size(one) < _batch_size(recommended) and low <= FLAT_RATIO < high:
        return True
    return low < 1 and one is not recommended and not is_shown_flat(recommended, one)


def _batch_size(candidate: Candidate) -> int:
    return candidate.configuration.batch_size


def _has_missed(candidate: Candidate) -> bool:
    return candidate.estimate.reached < candidate.estimate.runs
