"""How probably a recommendation costs at most 5 % more than the best batch size.

Gains from a better learning rate: log figure = level(B) + κ (x − μ − ρ b)², x and b the octaves of learning rate and
batch size. All batch sizes share κ, μ and ρ, so trials elsewhere inform a size with few. They are integrated over a
grid, noise unknown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.batches import are_of_one_model, timed_probes
from bssearch.analysis.law.batch_model import log_gap
from bssearch.analysis.objectives import Objective
from bssearch.analysis.optimum import Candidate, Settles, Verdict
from bssearch.analysis.posterior import DRAWS, Numbers, Runs, infer
from bssearch.records import Phase, ProbeRecord, TrialRecord
from bssearch.records.intervals import FEWEST_SIZES, FLAT_RATIO
from bssearch.spec import StudySpec

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

SHOWN = 0.95
"""Probability from which a batch size counts as shown to be within 5 % of the best."""

OPTIMUM_GAP = 0.08
"""Mean log gain from better tuning of the recommended batch size; `TUNING_GAP` for the others.

With it, 95 % of firm verdicts are within 5 % of the best (``tests/benchmarks/verdicts.py``).
"""

FAR = math.log(2)
"""Tuning gains less: the mean gain of a badly tuned batch size is `TUNING_GAP`."""

PROPOSALS = 8
LEAST_DEPARTURE = 0.03
"""Each shortfall is drawn from `PROPOSALS` candidates, weighted by how well it explains the departure from the law."""

UNTIMED_ERROR = 0.15
"""Standard error of an interpolated log step time."""

CONTENDER = 0.02
"""Least probability of being the better batch size by 5 % to get another run."""

MOST_RUNS = 100
MORE = 1.3
"""Of a batch size, and the factor between the numbers tried: the expected number is known to a third."""

TAILS = 0.025, 0.975

LEAST_GAIN = 0.01
"""Differences of probabilities below it count as none."""

StepFigures = Mapping[int, tuple[float, float]]
"""Figure of one step by batch size, and its standard error (logarithm)."""


@dataclass(frozen=True, slots=True)
class Certainty:
    """Probability that the recommended batch size is within 5 % of the best, and the same of each batch size.

    All batch sizes are compared fully tuned. ``configuration_within_5_percent``: the same of the recommended values as
    they are. ``runs``: total runs of each contending batch size, if ``settles`` is ``runs``.
    """

    within_5_percent: float
    by_batch: Mapping[int, float]
    settles: Settles | None = None
    runs: int | None = None
    configuration_within_5_percent: float | None = None

    @property
    def is_provisional(self) -> bool:
        """True below `ENOUGH`."""
        return self.within_5_percent < ENOUGH


@dataclass(frozen=True, eq=False)
class Beliefs:
    """Draws (`DRAWS`, sizes) of each batch size's log figure, as configured now and fully tuned.

    ``of_runs``: without the errors of step times. ``unshared`` (sizes,): deviation of a run beside others of its seed;
    ``log_cost``: log seconds of a run, up to a constant.
    Batch sizes without confirmation runs are ``is_confirmed`` False.
    """

    sizes: tuple[int, ...]
    figures: Numbers
    tuned: Numbers
    of_runs: Numbers
    unshared: Numbers
    log_cost: Numbers
    runs: NDArray[np.int64]
    is_confirmed: NDArray[np.bool_]

    @cached_property
    def near(self) -> NDArray[np.bool_]:
        """True for each draw and batch size that is within 5 % of the best, all fully tuned."""
        near: NDArray[np.bool_] = self.tuned <= self.tuned.min(axis=1, keepdims=True) + math.log(FLAT_RATIO)
        return near

    @cached_property
    def shares(self) -> Numbers:
        """Probability of each batch size to be within 5 % of the best (sizes,)."""
        shares: Numbers = self.near.mean(axis=0)
        return shares

    @cached_property
    def best(self) -> int:
        """Confirmed batch size with the least expected log figure."""
        return self.sizes[int(np.where(self.is_confirmed, self.tuned.mean(axis=0), math.inf).argmin())]

    @property
    def recommended(self) -> int:
        """Smallest `tied` batch size that is as surely within 5 % of the best as the `best`."""
        least = min(SHOWN, float(self.shares[self._place(self.best)]) - LEAST_GAIN)
        return min([self.best, *(size for size in self.tied if self.shares[self._place(size)] >= least)])

    @property
    def tied(self) -> list[int]:
        """Confirmed batch sizes `SHOWN` to be within 5 % of the `best`, and the best."""
        return self._of(1 - self._worse() >= SHOWN)

    @property
    def worse(self) -> list[int]:
        """Confirmed batch sizes `SHOWN` to be more than 5 % from the `best`."""
        return self._of(self._worse() >= SHOWN)

    def _worse(self) -> Numbers:
        best = self.figures[:, [self._place(self.best)]]
        worse: Numbers = (self.figures - best > math.log(FLAT_RATIO)).mean(axis=0)
        return worse

    def _of(self, holds: NDArray[np.bool_]) -> list[int]:
        return [size for size, one in zip(self.sizes, holds & self.is_confirmed, strict=True) if one]

    @property
    def share(self) -> float:
        """Probability that the recommended batch size is within 5 % of the best."""
        return float(self.shares[self._place(self.recommended)])

    @property
    def are_sure(self) -> bool:
        """True from a probability of `ENOUGH`."""
        return self.share >= ENOUGH

    @property
    def runs_help(self) -> bool:
        """True if more runs are expected to make the answer sure."""
        return self._what_settles().get("settles") == "runs"

    def contenders(self) -> list[int]:
        """Confirmed batch sizes that another run may help, the most helpful first; empty if none contends.

        A rival contends if it beats the recommended one by 5 % with a probability of `CONTENDER`. Of the likeliest
        rival and the recommended size, the one comes first whose next run lessens the variance most per second.
        """
        own, beaten = self._place(self.recommended), self._beaten()
        rivals = [int(one) for one in np.argsort(-beaten) if beaten[one] >= CONTENDER and self.is_confirmed[one]]
        if not rivals:
            return []
        gain = 2 * np.log(self.unshared) - np.log(self.runs * (self.runs + 1)) - self.log_cost
        pair = sorted((own, rivals[0]), key=lambda one: -gain[one])
        return [self.sizes[one] for one in [*pair, *rivals[1:]]]

    def log_ratio(self, size: int, other: int) -> tuple[float, float] | None:
        """95 % interval of the log ratio of two confirmed batch sizes, as configured; None if either is not."""
        if not all(one in self.sizes and self.is_confirmed[self._place(one)] for one in (size, other)):
            return None
        low, high = np.quantile(self.figures[:, self._place(size)] - self.figures[:, self._place(other)], TAILS)
        return float(low), float(high)

    def certainty(self) -> Certainty:
        """How sure the recommendation is, and what would settle it."""
        own = self._place(self.recommended)
        least = self.tuned.min(axis=1)
        found = Certainty(
            self.share,
            dict(zip(self.sizes, self.shares.tolist(), strict=True)),
            configuration_within_5_percent=float((self.figures[:, own] <= least + math.log(FLAT_RATIO)).mean()),
        )
        return found if not found.is_provisional else replace(found, **self._what_settles())

    def _what_settles(self) -> dict[str, Any]:
        contending = {self._place(one) for one in self.contenders()}
        had = int(self.runs[list(contending)].max(initial=0))
        more = 1
        while contending and had + more <= MOST_RUNS:
            if self._share_after(contending, more) >= ENOUGH:
                return {"settles": "runs", "runs": had + more}
            more = math.ceil(more * MORE)
        tuned = replace(self, tuned=self.figures)._share_after(contending, MOST_RUNS)
        without = self.of_runs - self.figures
        timed = replace(self, figures=self.of_runs, tuned=self.tuned + without)._share_after(contending, MOST_RUNS)
        if max(tuned, timed) < self.share + LEAST_GAIN:
            is_rival = self._beaten() >= CONTENDER
            return {"settles": "tuning"} if (is_rival & ~self.is_confirmed).any() else {}
        return {"settles": "tuning" if tuned >= timed else "step_times"}

    def _share_after(self, contending: Collection[int], more: int) -> float:
        """How often the batch size with the best mean is within 5 % of the best after ``more`` runs of contenders."""
        rng = np.random.default_rng(2)
        mean, variance = self.figures.mean(axis=0), self.figures.var(axis=0)
        # The runs time the steps, too.
        error = np.sqrt((self.unshared**2 + self.runs * (self.figures - self.of_runs).var(axis=0)) / more)
        weight = np.zeros(len(self.sizes))
        places = list(contending)
        weight[places] = (variance / (variance + error**2))[places]
        seen = self.figures + error * rng.standard_normal(self.figures.shape)
        expected = mean + weight * (seen - mean) - (self.figures - self.tuned).mean(axis=0)
        chosen = np.where(self.is_confirmed, expected, math.inf).argmin(axis=1)
        return float(self.near[np.arange(DRAWS), chosen].mean())

    def _beaten(self) -> Numbers:
        """Probability of each batch size to be better than the recommended one by more than 5 % (sizes,)."""
        own = self.tuned[:, [self._place(self.recommended)]]
        beaten: Numbers = (own - self.tuned > math.log(FLAT_RATIO)).mean(axis=0)
        return beaten

    def _place(self, size: int) -> int:
        return self.sizes.index(size)


def beliefs(
    verdict: Verdict,
    steps: StepFigures = MappingProxyType({}),
    trials: Sequence[TrialRecord] = (),
    batch_sizes: Sequence[int] = (),
) -> Beliefs | None:
    """Beliefs over all batch sizes; None without confirmation runs or without known noise.

    ``steps``: for the law, if known. Each draw allows for gains from better tuning, seen in the learning-rate valley of
    ``trials`` or hidden (`BADLY_TUNED`).
    """
    # Runs that all diverged or ran out of memory bound nothing.
    known = {size: one for size, one in verdict.by_batch.items() if any(_log(one, run) is not None for run in one.runs)}
    ran = {size: one for size, one in known.items() if not _is_far(one, verdict.least)}
    runs = _runs(ran.values())
    if not verdict.confirmed or not runs.deviation:
        return None
    sizes = sorted({*ran, *batch_sizes} - (verdict.by_batch.keys() - ran.keys()))
    by_law = _base(verdict.optimal.objective, steps, sizes)
    base, errors = by_law or (None, np.zeros(len(sizes)))
    places = np.array([sizes.index(size) for size in ran])
    drawn = infer(replace(runs, of=places[runs.of]), np.log(np.array(sizes, dtype=float)), base, errors)
    rng = np.random.default_rng(0)
    figures, shortfalls = drawn.levels.copy(), np.zeros(drawn.levels.shape)
    least_excess = min(one.estimate.excess for one in ran.values())
    for place, one in zip(places, ran.values(), strict=True):
        left = one.estimate.excess - least_excess
        figures[:, place] += one.estimate.step_time_error * rng.standard_normal(DRAWS)
        figures[:, place] -= left * (rng.random(DRAWS) - 0.5)
    reached = [place for place, one in zip(places, ran.values(), strict=True) if one.estimate.reached]
    fits = drawn.departure[:, None] if base is not None else None
    shortfalls[:, reached] = _shortfalls(
        verdict, trials, [sizes[place] for place in reached], drawn.off[:, reached], fits
    )
    counts = np.zeros(len(sizes), dtype=int)
    counts[places] = [one.estimate.reached for one in ran.values()]
    confirmed = np.zeros(len(sizes), dtype=bool)
    confirmed[places] = [one.is_confirmed and math.isfinite(one.value) for one in ran.values()]
    return Beliefs(
        sizes=tuple(sizes),
        figures=figures,
        tuned=figures - shortfalls,
        of_runs=drawn.levels,
        unshared=drawn.unshared,
        log_cost=drawn.levels.mean(axis=0) if verdict.optimal.objective.stops_at_target else np.zeros(len(sizes)),
        runs=np.maximum(counts, 1),
        is_confirmed=confirmed,
    )


def step_figures(spec: StudySpec, verdict: Verdict, probes: Mapping[int, ProbeRecord]) -> StepFigures:
    """Figure of a step at each timed batch size, with its error; empty if the law does not apply."""
    objective, timed = verdict.optimal.objective, timed_probes(spec, verdict, probes)
    if not are_of_one_model(spec, verdict):
        return {}
    found = {}
    for size, probe in timed.items():
        figure = objective.predicted(1.0, size, probe.step_seconds)
        if figure is not None:
            error = 0.0 if probe.error is None or not objective.trials_race else probe.error.own
            found[size] = figure, error
    return found


def _is_far(one: Candidate, least: Candidate) -> bool:
    """True for a search trial so slow that tuning makes its batch size no rival; nor does it tell of the law."""
    logs = [log for run in one.runs if (log := _log(one, run)) is not None]
    return not one.is_confirmed and min(logs) > least.estimate.log_mean + FAR


def _runs(candidates: Iterable[Candidate]) -> Runs:
    rows = []
    for place, one in enumerate(candidates):
        for run in one.runs:
            if (log := _log(one, run)) is not None:
                # Only confirmation shares seeds.
                seed = run.seed if one.is_confirmed else -1 - place
                gap = log_gap(run) if one.objective.stops_at_target else 0.0
                rows.append((place, seed, log, gap, one.objective.figure(run) is None))
    return Runs.of_rows(rows)


def _log(candidate: Candidate, run: TrialRecord) -> float | None:
    """Log figure of a run, or of its last miss."""
    figure = candidate.objective.figure(run)
    value = candidate.objective.bound(run) if figure is None else figure
    return None if value is None else candidate.objective.log(value)


def _base(objective: Objective, steps: StepFigures, sizes: Sequence[int]) -> tuple[Numbers, Numbers] | None:
    known = {size: log for size, (figure, _) in steps.items() if (log := objective.log(figure)) is not None}
    if len(known) < FEWEST_SIZES:
        return None
    timed = sorted(known)
    logs = np.log(np.array(sizes, dtype=float))
    base = np.interp(logs, np.log(np.array(timed, dtype=float)), [known[size] for size in timed])
    errors = np.array([steps[size][1] if size in known else UNTIMED_ERROR for size in sizes])
    return base, errors


def _shortfalls(
    verdict: Verdict, trials: Sequence[TrialRecord], sizes: Sequence[int], off: Numbers, departure: Numbers | None
) -> Numbers:
    """Draws of gains from better tuning (`DRAWS`, sizes), likelier ``off`` the law by more than its ``departure``."""
    rng = np.random.default_rng(1)
    shape = PROPOSALS if departure is not None else 1, DRAWS, len(sizes)
    seen = heights(verdict, trials, DRAWS, rng)
    unseen = np.where(np.array(sizes) == verdict.least.configuration.batch_size, OPTIMUM_GAP, TUNING_GAP)
    if not _others_vary(trials):
        unseen *= np.array([size not in seen for size in sizes])
    found = (rng.random(shape) < BADLY_TUNED) * rng.exponential(np.broadcast_to(unseen, shape))
    for place, size in enumerate(sizes):
        found[..., place] += seen.get(size, 0.0)
    if departure is None:
        alone: Numbers = found[0]
        return alone
    logs = -(((off - found) / np.maximum(departure, LEAST_DEPARTURE)) ** 2) / 2 + rng.gumbel(size=shape)
    chosen: Numbers = np.take_along_axis(found, logs.argmax(axis=0)[None], axis=0)[0]
    return chosen


def _others_vary(trials: Sequence[TrialRecord]) -> bool:
    searched = (one.configuration for one in trials if one.phase is Phase.SEARCH)
    alike = (
        replace(one, learning_rate=1.0, batch_size=1, micro_batch_size=1, accumulation_steps=1) for one in searched
    )
    return len({one.key for one in alike}) > 1
