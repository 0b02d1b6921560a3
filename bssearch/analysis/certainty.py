"""How sure a recommendation is: the probability that it costs at most 5 % more than the best batch size."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.law.learning_rate_valley import BADLY_TUNED, TUNING_GAP, heights
from bssearch.analysis.optimum import LAW_MISFIT, Candidate, Verdict, is_shown_flat
from bssearch.analysis.time_to_target import ratio_interval
from bssearch.records import Phase, TrialRecord
from bssearch.records.intervals import FLAT_RATIO

ENOUGH = 0.9
"""Below this probability an answer is provisional: a choice."""

DRAWS = 4000
"""Draws from the posterior: a probability of 0.9 is then known to half a percent."""

OPTIMUM_GAP = 0.08
"""By how much the recommended batch size could be bettered on the average where it could be (`TUNING_GAP` of the
others): a choice. 95 % of the verdicts that are not provisional are within 5 % of the best in studies with a known
truth (``tests/benchmarks/verdicts.py``)."""

UNTRIED_DEVIATION = 0.15
"""How far the log figure of a batch size that no trial reached the target at may lie from the line between the two
beside it, as a standard deviation: a choice."""

LEAST_DEVIATION = 1e-6
"""Runs without any spread are no more exact than this."""

FEWEST_FOR_LAW = 4
"""Batch sizes from which on the law's own misfit can be told from the seeds' noise: it has two parameters."""

MOST_RUNS = 100
"""More runs than this of a batch size are proposed to nobody: a choice."""

MORE = 1.3
"""Numbers of runs are looked at in steps of this factor: a choice."""

Numbers = NDArray[np.float64]

Settles = Literal["runs", "tuning", "step_times"]
"""What a provisional answer would need: more confirmation runs, more search trials, or more visits to step times."""


@dataclass(frozen=True, slots=True)
class Certainty:
    """The probability that the recommended batch size is within 5 % of the best, and that of each contender.

    Where it is not `ENOUGH`, ``settles`` says what would tell most: ``runs`` of each batch size in all, or something
    that more runs cannot tell.
    """

    within_5_percent: float
    by_batch: Mapping[int, float]
    settles: Settles | None = None
    runs: int | None = None

    @property
    def is_provisional(self) -> bool:
        """Return whether the recommendation is less sure than an answer has to be."""
        return self.within_5_percent < ENOUGH


def certainty(
    verdict: Verdict,
    predicted: Mapping[int, float],
    trials: Sequence[TrialRecord] = (),
    batch_sizes: Sequence[int] = (),
) -> Certainty | None:
    """Return how sure a verdict is, None where no confirmation runs decide or they tell nothing of their noise.

    The mean log figure of each batch size has a posterior around that of its runs, with the deviation of all runs
    pooled (Student's t) and the error of its step time; one that was not confirmed has its best search trial alone.
    With ``predicted``, the law's figures by batch size, means are drawn towards the law by as much as their distances
    from it are noise (empirical Bayes, as of James & Stein 1961): neighbours then tell of each other. A level that the
    predictions share, as that of their step times, does not matter. What counts is what a batch size could reach: from
    each draw is taken what its tuning may be short of, by the valley over the learning rate that the ``trials`` show,
    and by what they do not show (`BADLY_TUNED`). Those of the study's ``batch_sizes`` that have no figure at all may be
    better than the straight line between the two beside them, or than the last and what the law adds to it
    (`UNTRIED_DEVIATION`).
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
    """Return what would bring the answer to `ENOUGH`, and how many runs of each batch size where these would.

    More runs, if no more than `MOST_RUNS` do; else whichever is in the way more: what tuning may be short of, or what
    step times may be off by.
    """
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
    """What is believed of the log figure of each batch size (sizes,): means, and the errors of seeds and step times.

    ``shortfalls`` are draws (`DRAWS`, sizes) of what better tuning would take off. ``untried`` are the batch sizes
    without a figure: the places of those on either side, the share of the way from the first to the second, and by how
    much the law says that it is worse. ``deviation`` is that of a single run over seeds.
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
        """Return draws (`DRAWS`, sizes) of the log figures as they are tuned now, the same ones at each call."""
        rng = np.random.default_rng(0)
        scale = np.sqrt(self.freedom / rng.chisquare(self.freedom, (DRAWS, 1)))
        off = rng.standard_normal((DRAWS, len(self.means)))
        return self.means + np.hypot(self.of_seeds, self.of_steps) * scale * off

    def near(self, truth: Numbers) -> NDArray[np.bool_]:
        """Return for each draw which batch sizes are within 5 % of the best that each could reach, tuned in full."""
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
        """Return how often the batch size that is least after so many runs of each is within 5 % of the best.

        The runs still to be made are drawn around the truth; they tell nothing of the error of a step time.
        """
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
    """Return the batch sizes beyond those with a figure that missed the target for longer than the best one takes."""
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
    """Return between which of the known batch sizes, ascending, each other lies, and where, on a logarithmic scale.

    One beyond them lies at the last: it is taken for as good, or for worse by as much as the ``law``'s log figures say,
    which is the fourth.
    """
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
    """Return draws (`DRAWS`, sizes) of the logarithm by which better tuning would better each batch size.

    It is what the valley over the learning rate shows and, where other hyperparameters were searched too or no valley
    is seen, what may be hidden.
    """
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
    """Return whether search trials differ in more than their batch size and learning rate."""
    searched = (one.configuration for one in trials if one.phase is Phase.SEARCH)
    alike = (
        replace(one, learning_rate=1.0, batch_size=1, micro_batch_size=1, accumulation_steps=1) for one in searched
    )
    return len({one.key for one in alike}) > 1


def _error(candidate: Candidate, deviation: float, least_excess: float) -> float:
    """Return the standard error of a candidate's mean log figure, its runs' own deviation where that is larger."""
    known = candidate.estimate
    of_seeds = max(deviation, known.log_deviation, LEAST_DEVIATION) / math.sqrt(known.reached)
    return math.hypot(of_seeds, known.unresolved, _step_time_error(candidate, least_excess))


def _step_time_error(candidate: Candidate, least_excess: float) -> float:
    """Return the standard error of the logarithm of a candidate's step time against those of the others.

    What other work may have left in it, more than in that which had the least, is somewhere between nothing and all.
    """
    known = candidate.estimate
    return math.hypot(known.step_time_error, (known.excess - least_excess) / math.sqrt(12))


def _log(candidate: Candidate, figure: float) -> float:
    value = candidate.objective.log(figure)
    assert value is not None, "a predicted figure is positive"
    return value


def _drawn_to_law(means: Numbers, errors: Numbers, law: Numbers) -> tuple[Numbers, Numbers]:
    """Return means and standard errors (sizes,) drawn to the law, whose level is theirs."""
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
    """The state of the confirmation: the recommendation so far, and the candidates that could still change it.

    ``least`` has the least median, ``recommended`` is the smallest batch size shown to be within 5 % of it (else the
    least itself), ``undecided`` are the best candidates of the other batch sizes that could change that, ascending.
    """

    least: Candidate
    recommended: Candidate
    undecided: tuple[Candidate, ...]

    @property
    def is_settled(self) -> bool:
        """Return whether no batch size is left that could change the recommendation."""
        return not self.undecided

    @property
    def undecided_batch_sizes(self) -> list[int]:
        """Return the batch sizes that could still change the recommendation, ascending."""
        return [one.configuration.batch_size for one in self.undecided]

    @property
    def to_run(self) -> list[Candidate]:
        """Return the candidates to run with another seed: the undecided, and those that they are compared with.

        A candidate of which a run missed the target has no interval, however many runs follow: it is left out, and so
        are all where the least is one.
        """
        open_ones = [one for one in self.undecided if not _has_missed(one)]
        if not open_ones or _has_missed(self.least):
            return []
        compared = [self.least] if self.recommended is self.least else [self.least, self.recommended]
        return compared + [one for one in open_ones if one is not self.recommended]


def standing(verdict: Verdict) -> Standing | None:
    """Return where the confirmation stands, None where no confirmation run decides yet.

    Of each batch size its best candidate counts, and only where fresh seeds reached the target in more than half of its
    runs. With the 95 % interval [low, high] of the ratio of two figures (Welch, on logarithms), L the least and R the
    recommended, a batch size b is undecided

    * where it is smaller than R and low(b / L) ≤ 1.05 < high(b / L): neither shown to be within 5 %, which would make
      it the recommended, nor shown not to be;
    * where it could be the least, low(b / L) < 1, and R is not shown to be within 5 % of it, high(R / b) > 1.05: the
      least would then be b, and R perhaps not within 5 % of it;
    * where there is no interval: below three runs, or where one missed the target.

    The recommendation is settled where no batch size is undecided. Two batch sizes that are as good as each other
    settle once each is shown to be within 5 % of the other, though none is ever shown to be the better one.
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
