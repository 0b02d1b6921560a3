"""The probability that a recommendation costs at most 5 % more than the best batch size."""

# A confirmed configuration costs more than the batch size's level by the gain of better tuning. Two batch sizes with
# equal values share most of this gain, so such pairs compare best.
#
# Gains from a better learning rate: log figure = level(B) + κ (x − μ − ρ b)², with x and b in octaves of learning rate
# and batch size. All batch sizes share κ, μ and ρ. A grid integrates over these parameters and the noise.

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.batches import are_of_one_model, timed_probes
from bssearch.analysis.law.batch_model import log_gap
from bssearch.analysis.objectives import Objective
from bssearch.analysis.optimum import Candidate, Settles, Verdict
from bssearch.analysis.posterior import DRAWS, Indices, Numbers, Runs, infer
from bssearch.records import FEWEST_SIZES, FLAT_RATIO, UNDISTURBED, Configuration, Phase, ProbeRecord, TrialRecord
from bssearch.spec import StudySpec

CURVATURES = tuple(0.02 * 2 ** (step / 2) for step in range(11))  # κ: log cost of twice or half the best learning rate
POWERS = tuple(step / 4 for step in range(-1, 6))  # ρ: powers of the batch size that scale the best learning rate
BOTTOM_STEP = 0.25  # octaves
BEYOND = 2.0  # the best learning rate may be this many octaves beyond the tried rates
FEWEST_MORE = 4  # trials in addition to one per batch size, for three parameters and the noise
LEAST_SQUARES = 1e-12

# The share of badly tuned batch sizes, and mean log gaps (exponential) of badly and of well tuned sizes. On simulated
# studies a third of the batch sizes gained more than 3 % by tuning, 0.16 on average. The share here is lower, because
# only contenders matter.
BADLY_TUNED = 0.12
TUNING_GAP = 0.12
WELL_TUNED_GAP = 0.01


def heights(
    verdict: Verdict, trials: Sequence[TrialRecord], configurations: Sequence[Configuration]
) -> tuple[Numbers, Numbers]:
    """Return the log gains of each configuration from a better learning rate: means (c,) and covariances (c, c).

    The gains are 0 if trials or learning rates are too few, or the optimizer is not the recommended optimizer. Trials
    that missed the target give lower bounds.
    """
    objective, optimizer = verdict.optimal.objective, verdict.optimal.configuration.optimizer
    count = len(configurations)
    counted = [one for one in trials if one.phase is Phase.SEARCH and one.configuration.optimizer == optimizer]
    reached = [(one, log) for one in counted if (log := objective.log_figure(one)) is not None]
    sizes = sorted({one.configuration.batch_size for one, _ in reached})
    rates = {one.configuration.learning_rate for one, _ in reached}
    if len(reached) < len(sizes) + FEWEST_MORE or len(rates) < FEWEST_MORE:
        return np.zeros(count), np.zeros((count, count))
    missed = [
        (one, log)
        for one in counted
        if one.configuration.batch_size in sizes and objective.figure(one) is None
        if (log := objective.log_bound(one)) is not None
    ]
    middle = (math.log2(sizes[0]) + math.log2(sizes[-1])) / 2
    tried = [_rate(one) for one, _ in reached]
    bottoms = np.arange(min(tried) - BEYOND, max(tried) + BEYOND, BOTTOM_STEP)
    valleys = np.stack([one.ravel() for one in np.meshgrid(CURVATURES, POWERS, bottoms)], axis=1)
    logs = _log_likelihoods(valleys, {size: math.log2(size) - middle for size in sizes}, reached, missed)

    def above(one: Configuration) -> Numbers:
        if one.optimizer != optimizer:
            return np.zeros(len(valleys))
        return _height(valleys, math.log2(one.learning_rate), math.log2(one.batch_size) - middle)

    best = (one.configuration for one in verdict.by_batch.values())
    logs += sum(_log_density(above(one)) for one in best if one.optimizer == optimizer)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    found = np.array([above(one) for one in configurations])
    means: Numbers = found @ weights
    return means, (found * weights) @ found.T - np.outer(means, means)


def _log_density(height: Numbers) -> Numbers:
    tuned = math.log((1 - BADLY_TUNED) / WELL_TUNED_GAP) - height / WELL_TUNED_GAP
    return np.logaddexp(tuned, math.log(BADLY_TUNED / TUNING_GAP) - height / TUNING_GAP)


def _log_likelihoods(
    valleys: Numbers,
    octaves: Mapping[int, float],
    reached: Sequence[tuple[TrialRecord, float]],
    missed: Sequence[tuple[TrialRecord, float]],
) -> Numbers:
    # integrated over the noise σ with prior 1 / σ
    squares = np.zeros(len(valleys))
    for size, octave in octaves.items():
        here = [(one, log) for one, log in reached if one.configuration.batch_size == size]
        above = np.array([log - _height(valleys, _rate(one), octave) for one, log in here])
        level = above.mean(axis=0)
        squares += ((above - level) ** 2).sum(axis=0)
        for one, bound in missed:
            if one.configuration.batch_size == size:
                squares += np.maximum(0.0, bound - level - _height(valleys, _rate(one), octave)) ** 2
    return -(len(reached) - len(octaves)) / 2 * np.log(np.maximum(squares, LEAST_SQUARES))


def _height(valleys: Numbers, rate: float, octave: float) -> Numbers:
    curvature, power, bottom = valleys.T
    return np.asarray(curvature * (rate - bottom - power * octave) ** 2)


def _rate(trial: TrialRecord) -> float:
    return math.log2(trial.configuration.learning_rate)


ENOUGH = 0.9  # an answer with a lower probability is provisional
SHOWN = 0.95  # the least probability that shows a batch size to be within 5 % of the best

# The deviation and mean of hidden tuning gains, because a search with single runs sees no gain below the noise.
# `HIDDEN_BY_NOISE` is in deviations of a run. Of three pairs, this pair gave the best claims on digits-like studies.
HIDDEN = 0.03
HIDDEN_BY_NOISE = 0.2

OWN_SHARE = 0.1  # the share of a hidden gain's variance that two batch sizes with equal values do not share
SEEN_ALONE = 0.01  # the deviation of hidden gains if only learning rates vary; trials at other rates show most gains

# At most `MOST_COUNTED` / configurations runs count, but at least `FEWEST_COUNTED`; the cost is quadratic
MOST_COUNTED = 1_000
FEWEST_COUNTED = 30

NEAR = 0.15  # the posterior ignores configurations slower than the batch size's best by more than this log ratio
FAR = math.log(2)  # no tuning makes up for this log ratio; a badly tuned batch size gains `TUNING_GAP` on average
UNTIMED_ERROR = 0.15  # the standard error of an interpolated log step time
CONTENDER = 0.02  # a rival gets another run if the rival is better by 5 % with at least this probability
MOST_RUNS = 100  # of a batch size
MORE = 1.3  # the factor between tried numbers of runs
FUTURES = 64  # simulated outcomes of more runs
FUTURE_DRAWS = 500  # draws per outcome
SURE_FUTURES = 1 / 3  # least share of sure outcomes; checks after each run find up to twice this (reflection principle)
TAILS = 0.025, 0.975
ALONE_SHARE = UNDISTURBED / 30  # below this share of uncontended runs, 30 more runs give too few for `pool_paces`
LEAST_GAIN = 0.01  # a smaller difference of probabilities does not count

# The figure of a step and the standard error of the figure's logarithm, by batch size
StepFigures = Mapping[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Certainty:
    """The probability that the recommended batch size is within 5 % of the best, if all sizes are fully tuned.

    Attributes:
        configuration_within_5_percent: See `Answer`.
        runs: Runs per contending batch size that would settle the answer, on an idle machine if ``settles`` is
            ``idle_machine``.
    """

    within_5_percent: float
    settles: Settles | None = None
    runs: int | None = None
    configuration_within_5_percent: float | None = None


@dataclass(frozen=True, eq=False)
class Beliefs:
    """Draws (`DRAWS`, sizes) of each batch size's log objective value.

    ``unshared``, ``log_cost`` and ``runs`` describe the configuration to run next at each batch size.

    Attributes:
        figures: Draws with the best configuration so far.
        tuned: Draws with full tuning.
        next_figures: Draws with the configuration to run next, without ``of_load``.
        of_steps: Errors of step times; more runs reduce these errors.
        of_load: Errors from other work on the machine; more runs do not reduce these errors.
        unshared: `Posterior.unshared`.
        log_cost: Log seconds per run, up to a constant.
    """

    sizes: tuple[int, ...]
    figures: Numbers
    tuned: Numbers
    next_figures: Numbers
    of_steps: Numbers
    of_load: Numbers
    unshared: Numbers
    log_cost: Numbers
    runs: NDArray[np.int64]
    is_confirmed: NDArray[np.bool_]

    @cached_property
    def near(self) -> NDArray[np.bool_]:
        """True if a fully tuned batch size is within 5 % of the draw's best (`DRAWS`, sizes)."""
        return np.asarray(self.tuned <= self.tuned.min(axis=1, keepdims=True) + math.log(FLAT_RATIO))

    @cached_property
    def shares(self) -> Numbers:
        """For each batch size, the probability of being within 5 % of the best; shape (sizes,)."""
        return np.asarray(self.near.mean(axis=0))

    @cached_property
    def best(self) -> int:
        """The confirmed batch size with the least expected log objective value."""
        return self.sizes[int(np.where(self.is_confirmed, self.tuned.mean(axis=0), math.inf).argmin())]

    @property
    def recommended(self) -> int:
        """The smallest `tied` batch size about as likely as `best` to be within 5 % of the optimum."""
        least = min(SHOWN, float(self.shares[self._place(self.best)]) - LEAST_GAIN)
        return min([self.best, *(size for size in self.tied if self.shares[self._place(size)] >= least)])

    @property
    def tied(self) -> list[int]:
        """Confirmed batch sizes at most 5 % worse than `best`, with probability >= `SHOWN`."""
        return self._of(1 - self._worse() >= SHOWN)

    @property
    def worse(self) -> list[int]:
        """Confirmed batch sizes more than 5 % worse than `best`, with probability >= `SHOWN`."""
        return self._of(self._worse() >= SHOWN)

    def _worse(self) -> Numbers:
        best = self.figures[:, [self._place(self.best)]]
        return np.asarray((self.figures - best > math.log(FLAT_RATIO)).mean(axis=0))

    def _of(self, holds: NDArray[np.bool_]) -> list[int]:
        return [size for size, one in zip(self.sizes, holds & self.is_confirmed, strict=True) if one]

    @property
    def share(self) -> float:
        return float(self.shares[self._place(self.recommended)])

    @property
    def are_sure(self) -> bool:
        return self.share >= ENOUGH

    @property
    def runs_help(self) -> bool:
        return self._what_settles().get("settles") == "runs"

    def contenders(self) -> list[int]:
        """Return the confirmed batch sizes to run next, the most useful first; empty if no rival contends.

        A rival contends if the rival beats the recommended size by 5 % with a probability of at least `CONTENDER`. The
        likeliest rival and the recommended size come first, ordered by the variance that a run removes per second.
        """
        own, beaten = self._place(self.recommended), self._beaten()
        rivals = [int(one) for one in np.argsort(-beaten) if beaten[one] >= CONTENDER and self.is_confirmed[one]]
        if not rivals:
            return []
        gain = 2 * np.log(self.unshared) - np.log(self.runs * (self.runs + 1)) - self.log_cost
        pair = sorted((own, rivals[0]), key=lambda one: -gain[one])
        return [self.sizes[one] for one in [*pair, *rivals[1:]]]

    def log_ratio(self, size: int, other: int) -> tuple[float, float] | None:
        """Return the 95 % interval of the log ratio of two batch sizes; None unless both sizes are confirmed."""
        if not all(one in self.sizes and self.is_confirmed[self._place(one)] for one in (size, other)):
            return None
        low, high = np.quantile(self.figures[:, self._place(size)] - self.figures[:, self._place(other)], TAILS)
        return float(low), float(high)

    def certainty(self) -> Certainty:
        own = self.figures[:, self._place(self.recommended)]
        return Certainty(
            self.share,
            configuration_within_5_percent=float((own <= self.tuned.min(axis=1) + math.log(FLAT_RATIO)).mean()),
            **({} if self.are_sure else self._what_settles()),
        )

    def _what_settles(self) -> dict[str, Any]:
        contending = {self._place(one) for one in self.contenders()}
        had = int(self.runs[list(contending)].max(initial=0))
        more = 1
        while contending and had + more <= MOST_RUNS:
            if self._are_sure_after(contending, more):
                return {"settles": "runs", "runs": had + more}
            more = math.ceil(more * MORE)
        tuned = replace(self, tuned=self.figures)._share_after(contending, MOST_RUNS)
        timed = self._timed()._share_after(contending, MOST_RUNS)
        if max(tuned, timed) < max(self.share, self._share_after(contending, MOST_RUNS)) + LEAST_GAIN:
            return {"settles": "tuning"} if ((self._beaten() >= CONTENDER) & ~self.is_confirmed).any() else {}
        if tuned >= timed:
            return {"settles": "tuning"}
        if self.of_load.any():
            return {"settles": "idle_machine", "runs": had + UNDISTURBED}
        return {"settles": "step_times"}

    def _timed(self) -> Beliefs:
        # Beliefs after twice as many step-time measurements on an idle machine
        left = math.sqrt(0.5) * self.of_steps
        known = self.of_steps - left
        return replace(
            self,
            figures=self.figures - known - self.of_load,
            tuned=self.tuned - known - self.of_load,
            next_figures=self.next_figures - known,
            of_steps=left,
            of_load=np.zeros_like(left),
        )

    def _share_after(self, contending: Collection[int], more: int) -> float:
        # The probability that the best mean's batch size is within 5 % of the best, after `more` runs of each contender
        expected = self.tuned.mean(axis=0) + self._shifts(contending, more)[0]
        return float(self.near[np.arange(DRAWS), np.where(self.is_confirmed, expected, math.inf).argmin(axis=1)].mean())

    def _are_sure_after(self, contending: Collection[int], more: int) -> bool:
        # True if `more` runs of each contender make the answer sure in `SURE_FUTURES` of the simulated outcomes
        shifts, left = self._shifts(contending, more)
        # given an outcome, the draws are `left` plus the shift (Matheron's rule)
        figures = left[:: DRAWS // FUTURE_DRAWS] + shifts[:FUTURES, None]
        near = figures <= figures.min(axis=2, keepdims=True) + math.log(FLAT_RATIO)
        return float((np.where(self.is_confirmed, near.mean(axis=1), 0.0).max(axis=1) >= ENOUGH).mean()) >= SURE_FUTURES

    def _shifts(self, contending: Collection[int], more: int) -> tuple[Numbers, Numbers]:
        # Draws of the shift of expected figures by `more` runs of each contender, and of the remaining error
        rng = np.random.default_rng(2)
        places = sorted(contending)
        known, tuned = self.next_figures[:, places], self.tuned - self.tuned.mean(axis=0)
        # the runs also time the steps
        errors = (self.unshared**2 + self.runs * self.of_steps.var(axis=0))[places] / more
        seen = known - known.mean(axis=0)
        gain = np.linalg.solve(seen.T @ seen / DRAWS + np.diag(errors), seen.T @ tuned / DRAWS)
        shifts = (seen + np.sqrt(errors) * rng.standard_normal(seen.shape)) @ gain
        return shifts, self.tuned - shifts

    def _beaten(self) -> Numbers:
        # Each batch size's probability to beat the recommended size by more than 5 % (sizes,)
        own = self.tuned[:, [self._place(self.recommended)]]
        return np.asarray((own - self.tuned > math.log(FLAT_RATIO)).mean(axis=0))

    def _place(self, size: int) -> int:
        return self.sizes.index(size)


def beliefs(
    verdict: Verdict,
    steps: StepFigures = MappingProxyType({}),
    trials: Sequence[TrialRecord] = (),
    batch_sizes: Sequence[int] = (),
) -> Beliefs | None:
    """Draw each batch size's log objective value from the posterior.

    The result is None if no confirmation run decides, the noise is unknown, or an objective value is 0. `step_figures`
    gives ``steps``. Full tuning adds the gain of a better learning rate (`heights`) and a gain that noise hides
    (`HIDDEN`).
    """
    # a batch size has no bound if all runs diverged or ran out of memory
    known = {size: one for size, one in verdict.by_batch.items() if one.log_bounds}
    ran = {size: one for size, one in known.items() if not _is_far(one, verdict.least)}
    noise = _runs(ran.values()).deviation
    others = [one for one in verdict.others if one.configuration.batch_size in ran and one.log_bounds]
    candidates = [*ran.values(), *(one for one in others if _is_near(one, ran[one.configuration.batch_size], noise))]
    runs = _runs(candidates)
    took_no_time = any(one.objective.figure(run) == 0 for one in verdict.by_batch.values() for run in one.runs)
    if not verdict.confirmed or not runs.deviation or took_no_time:
        return None
    sizes = sorted({*ran, *batch_sizes} - (verdict.by_batch.keys() - ran.keys()))
    count, place_of = len(sizes), {size: place for place, size in enumerate(sizes)}
    columns = _Columns.of(verdict, trials, candidates, place_of, runs.deviation)
    base, errors = _base(verdict.optimal.objective, steps, sizes) or (None, np.zeros(count))
    drawn = infer(
        replace(runs, of=runs.of + count),
        np.log(np.array(sizes, dtype=float))[columns.of_size],
        None if base is None else base[columns.of_size],
        errors[columns.of_size],
        tuning=columns.tuning,
    )
    of_steps, of_load, confirmed = np.zeros((DRAWS, count)), np.zeros((DRAWS, count)), np.zeros(count, dtype=bool)
    rng = np.random.default_rng(0)
    least_excess = min(one.estimate.excess for one in ran.values())
    for size, one in ran.items():
        of_steps[:, place_of[size]] = one.estimate.step_time_error * rng.standard_normal(DRAWS)
        of_load[:, place_of[size]] = (least_excess - one.estimate.excess) * (rng.random(DRAWS) - 0.5)
        confirmed[place_of[size]] = one.is_confirmed and math.isfinite(one.value)
    if _were_alone([run for one in ran.values() for run in one.runs]):
        of_steps, of_load = of_steps + of_load, np.zeros_like(of_load)
    following = drawn.levels[:, columns.following]
    return Beliefs(
        sizes=tuple(sizes),
        figures=drawn.levels[:, columns.printed] + of_steps + of_load,
        tuned=drawn.levels[:, :count] + of_steps + of_load - columns.hidden,
        next_figures=following + of_steps,
        of_steps=of_steps,
        of_load=of_load,
        unshared=drawn.unshared[columns.following],
        log_cost=following.mean(axis=0) if verdict.optimal.objective.stops_at_target else np.zeros(count),
        runs=np.maximum(columns.reached[columns.following], 1),
        is_confirmed=confirmed,
    )


@dataclass(frozen=True, eq=False)
class _Columns:
    # The posterior's columns: each batch size's level, then each configuration. ``of_size``: index of each column's
    # batch size. ``printed`` and ``following`` (sizes,): columns of the recommended and of the next configuration.
    # ``hidden``: deviation of hidden gains.

    of_size: Indices
    printed: Indices
    following: Indices
    reached: Indices
    hidden: float
    tuning: tuple[Numbers, Numbers]

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        trials: Sequence[TrialRecord],
        candidates: Sequence[Candidate],
        place_of: Mapping[int, int],
        deviation: float,
    ) -> Self:
        # A batch size's first candidate is the best. The next runs use the values of `verdict.least` at every confirmed
        # batch size, so a configuration with these values gets a column even without runs.
        seen, covariances = heights(verdict, trials, [one.configuration for one in candidates])
        hidden = HIDDEN + HIDDEN_BY_NOISE * deviation if _others_vary(trials) or not seen.any() else SEEN_ALONE
        names, sizes = [_values(one) for one in candidates], [one.configuration.batch_size for one in candidates]
        least = sizes.index(verdict.least.configuration.batch_size)
        have = {size for size, name in zip(sizes, names, strict=True) if name == names[least]}
        confirmed = {size for size, one in zip(sizes, candidates, strict=True) if one.is_confirmed}
        lacking = sorted(confirmed - have) if carries(verdict.least) else []
        rows = [*range(len(candidates)), *[least] * len(lacking)]
        of_size = np.array([place_of[size] for size in [*sizes, *lacking]])
        alike = np.array(names)[rows]
        shared = OWN_SHARE * np.eye(len(rows)) + (1 - OWN_SHARE) * (alike[:, None] == alike)
        count = len(place_of)
        printed = np.arange(count)
        printed[of_size[: len(candidates)][::-1]] = count + np.arange(len(candidates))[::-1]
        following = printed.copy()
        following[of_size[alike == alike[least]]] = count + np.flatnonzero(alike == alike[least])
        return cls(
            of_size=np.concatenate([np.arange(count), of_size]),
            printed=printed,
            following=following,
            reached=np.array([*[0] * count, *(one.estimate.reached for one in candidates), *[0] * len(lacking)]),
            hidden=hidden,
            tuning=(
                np.pad(seen[rows], (count, 0)),
                np.pad(covariances[np.ix_(rows, rows)] + hidden**2 * shared, ((count, 0), (count, 0))),
            ),
        )


def carries(candidate: Candidate) -> bool:
    """True if other batch sizes can run with the candidate's values."""
    return candidate.runs[0].sampled is not None and candidate.objective.stops_at_target


def _values(candidate: Candidate) -> str:
    # The key of the sampled values, equal at all batch sizes with the same values
    if (sampled := candidate.runs[0].sampled) is None:
        return candidate.configuration.key
    return repr(sorted((name, f"{one:.5g}" if isinstance(one, float) else one) for name, one in sampled.items()))


def step_figures(spec: StudySpec, verdict: Verdict, probes: Mapping[int, ProbeRecord]) -> StepFigures:
    """Return the objective value and error of a step at each timed batch size; empty if the models differ."""
    objective, timed = verdict.optimal.objective, timed_probes(spec, verdict, probes)
    if not are_of_one_model(spec, verdict):
        return {}
    found = {}
    for size, probe in timed.items():
        if (figure := objective.predicted(1.0, size, probe.step_seconds)) is not None:
            error = 0.0 if probe.error is None or not objective.trials_race else probe.error.own
            found[size] = figure, error
    return found


def _were_alone(runs: Sequence[TrialRecord]) -> bool:
    # True if the share of runs without other work on the machine is at least `ALONE_SHARE`
    return sum(run.outcome is not None and not run.outcome.contended for run in runs) >= ALONE_SHARE * len(runs)


def _is_far(one: Candidate, least: Candidate) -> bool:
    # True for a search trial so slow that no tuning makes the batch size a rival. The law ignores such trials, too.
    return not one.is_confirmed and min(one.log_bounds) > least.estimate.log_mean + FAR


def _is_near(one: Candidate, best: Candidate, noise: float) -> bool:
    # False if the configuration is surely slower than the batch size's best by more than `NEAR`
    (mean, own), (least, its) = ((each.estimate.log_mean, each.estimate.reached) for each in (one, best))
    return bool(own and its) and mean - least < NEAR + 2 * noise * math.sqrt(1 / own + 1 / its)


def _runs(candidates: Collection[Candidate]) -> Runs:
    rows = []
    most = max(FEWEST_COUNTED, MOST_COUNTED // max(1, len(candidates)))
    for place, one in enumerate(candidates):
        for run in one.runs[:most]:
            if (log := one.objective.log_bound(run)) is not None:
                # only confirmation runs share seeds
                seed = run.seed if one.is_confirmed else -1 - place
                gap = log_gap(run) if one.objective.stops_at_target else 0.0
                rows.append((place, seed, log, gap, one.objective.figure(run) is None))
    return Runs.of_rows(rows)


def _base(objective: Objective, steps: StepFigures, sizes: Sequence[int]) -> tuple[Numbers, Numbers] | None:
    known = {size: log for size, (figure, _) in steps.items() if (log := objective.log(figure)) is not None}
    if len(known) < FEWEST_SIZES:
        return None
    timed = sorted(known)
    base = np.interp(
        np.log(np.array(sizes, dtype=float)), np.log(np.array(timed, dtype=float)), [known[size] for size in timed]
    )
    return base, np.array([steps[size][1] if size in known else UNTIMED_ERROR for size in sizes])


def _others_vary(trials: Sequence[TrialRecord]) -> bool:
    searched = (one.configuration for one in trials if one.phase is Phase.SEARCH)
    alike = (
        replace(one, learning_rate=1.0, batch_size=1, micro_batch_size=1, accumulation_steps=1) for one in searched
    )
    return len({one.key for one in alike}) > 1
