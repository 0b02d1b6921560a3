"""The optimal batch size and the confirmation runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

import numpy as np

from bssearch.analysis.law.batch_model import around, log_gap
from bssearch.analysis.objectives import (
    LARGEST_LOG_RATIO,
    TIME,
    Basis,
    Kind,
    Objective,
    bounded_ratio,
    samples_after,
    seconds_to_target,
)
from bssearch.records import (
    Configuration,
    Phase,
    PooledStepTime,
    StepSeconds,
    TrialOutcome,
    TrialRecord,
    TrialState,
    grouped,
)
from bssearch.records.intervals import CONFIDENCE, FEWEST_RUNS, FLAT_RATIO, at_most, student_t
from bssearch.records.text import percent

FEWEST_ALIKE = 3  # this many equal runs show that the training ignores seeds

HALF = 0.5  # a median needs a larger share of runs that reach the target

BEATEN_MARGIN = 0.17  # log ratio that neither the range of interest (5 %) nor better tuning (12 % on average) makes up

FAR_BEHIND = math.log(2)  # log ratio from which more runs come last, when the noise is known

BEATEN_FREEDOM = 4  # degrees of freedom from which repeats show the noise

BEATEN_CONFIDENCE = 0.95  # two-sided; `BEATEN_MARGIN` makes up for the repeated tests


def plain_misses(trials: Iterable[TrialRecord], objective: Objective = TIME) -> list[Candidate]:
    """Return configurations that surely miss the target in most confirmation runs, the oldest first.

    With 95 % confidence, fewer than half of the runs reach the target (Clopper & Pearson 1934).
    """
    return [one for one in _confirmed(trials, objective) if at_most(_reached(one), len(one.runs)) < HALF]


def _reached(one: Candidate) -> int:
    return sum(run.state is TrialState.REACHED or one.objective.figure(run) is not None for run in one.runs)


def beaten(trials: Iterable[TrialRecord], objective: Objective = TIME) -> set[str]:
    """Return the keys of configurations shown to be worse by over `BEATEN_MARGIN` than the best repeated configuration.

    A missed run counts with the objective value at the last evaluation. Contended runs count only if the objective
    value is steps × step time.
    """
    # One run may suffice, because all repeats share one noise estimate.
    known = _on_a_quiet_device(trials, objective)
    complete = [one for one in known if one.estimate.has_only_hits and len(one.runs) >= FEWEST_RUNS]
    noise = _pooled_noise(one.estimate for one in known)
    if noise is None or noise[1] < BEATEN_FREEDOM or not complete:
        return set()
    least = min(complete, key=lambda one: one.mean)
    error = noise[0] * student_t(noise[1], BEATEN_CONFIDENCE)
    return {
        one.configuration.key
        for one in known
        if statistics.fmean(one.log_bounds) - least.mean
        > BEATEN_MARGIN + error * math.sqrt(1 / len(one.log_bounds) + 1 / len(least.runs))
    }


def far_behind(trials: Iterable[TrialRecord], objective: Objective = TIME) -> set[str]:
    """Return the keys of configurations worse by over `FAR_BEHIND` than the best configuration without missed runs."""
    known = _on_a_quiet_device(trials, objective)
    least = min((one.mean for one in known if one.estimate.has_only_hits), default=math.inf)
    return {one.configuration.key for one in known if statistics.fmean(one.log_bounds) > least + FAR_BEHIND}


def without_early_ends(trials: Sequence[TrialRecord], objective: Objective) -> list[TrialRecord]:
    """Turn runs of `beaten` configurations with fewer than `FEWEST_RUNS` confirmation runs into search trials."""
    # At another target or device, a beaten configuration may be the best, but its few runs are no confirmation.
    runs = _runs_by_configuration(trials)
    few = {key for key in beaten(trials, compared(trials, objective)) if len(_had(runs[key])) < FEWEST_RUNS}
    early = {one.number for key in few for one in runs[key]}
    return [replace(one, phase=Phase.SEARCH) if one.number in early else one for one in trials]


def compared(
    trials: Sequence[TrialRecord], objective: Objective, step_seconds: StepSeconds = MappingProxyType({})
) -> Objective:
    counted = [trial for trial in trials if trial.state.has_result]
    return objective.between([one for one in counted if one.phase is Phase.CONFIRM], step_seconds, counted)


def _on_a_quiet_device(trials: Iterable[TrialRecord], objective: Objective) -> list[Candidate]:
    def is_disturbed(run: TrialRecord) -> bool:
        return run.outcome is not None and run.outcome.contended and objective.basis(run) != "steps_x_step_time"

    return [one for one in _confirmed(itertools.filterfalse(is_disturbed, trials), objective) if one.log_bounds]


def _confirmed(trials: Iterable[TrialRecord], objective: Objective) -> list[Candidate]:
    confirming = (one for one in trials if one.phase is Phase.CONFIRM and says_something(one))
    return repeats(sorted(confirming, key=lambda one: one.number), objective)


def ignore_their_seeds(groups: Iterable[Sequence[TrialRecord]]) -> bool:
    """True if other seeds never change the steps or the metric, in at least `FEWEST_ALIKE` repeats."""
    alike = 0
    for runs in groups:
        ended = {run.seed: (run.outcome.steps, run.outcome.final_metric) for run in runs if run.outcome is not None}
        if len(set(ended.values())) > 1:
            return False
        alike += max(0, len(ended) - 1)
    return alike >= FEWEST_ALIKE


def plainly_missed(miss: Candidate) -> str:
    one, reached, runs = miss.configuration, _reached(miss), len(miss.runs)
    return (
        f"batch {one.batch_size} (lr {one.learning_rate:.3g}) reached the target in {reached} of {runs} runs with "
        f"fresh seeds, so at most {percent(at_most(reached, runs))} of runs reach the target (95 % confidence)"
    )


def says_something(trial: TrialRecord) -> bool:
    """True if a trial has a result and is neither paused nor out of memory."""
    return trial.state.has_result and trial.state not in {TrialState.OOM, TrialState.PAUSED}


def fewest_runs(trials: Sequence[TrialRecord], confirmation_runs: int, objective: Objective = TIME) -> int:
    """Return the smallest number of ended confirmation runs of a configuration.

    `plain_misses` and `beaten` configurations do not count. If no configuration remains, the result is
    ``confirmation_runs``.
    """
    excluded = _need_no_more(trials, objective)
    had = [len(_had(runs)) for key, runs in _runs_by_configuration(trials).items() if key not in excluded]
    return min(had, default=confirmation_runs)


def begun_late(trials: Sequence[TrialRecord], confirmation_runs: int, objective: Objective = TIME) -> dict[str, int]:
    """Return incomplete configurations that began after all others were complete, as {key: batch size}.

    Empty if an incomplete configuration began earlier.
    """
    by_configuration = _runs_by_configuration(trials)
    enough, excluded = min(confirmation_runs, FEWEST_RUNS), _need_no_more(trials, objective)
    counted = {key: runs for key, runs in by_configuration.items() if key not in excluded}
    lacking = {key: runs for key, runs in counted.items() if len(_had(runs)) < enough}
    if confirmation_runs < 2 or not lacking or len(lacking) == len(counted):
        return {}
    complete = max(_complete_at(runs, confirmation_runs) for key, runs in counted.items() if key not in lacking)
    if any(runs[0].number < complete for runs in lacking.values()):
        return {}
    return {key: runs[0].configuration.batch_size for key, runs in lacking.items()}


def _need_no_more(trials: Sequence[TrialRecord], objective: Objective) -> set[str]:
    return {one.configuration.key for one in plain_misses(trials, objective)} | beaten(trials, objective)


def _runs_by_configuration(trials: Iterable[TrialRecord]) -> dict[str, list[TrialRecord]]:
    ordered = sorted((one for one in trials if one.phase is Phase.CONFIRM), key=lambda one: one.number)
    return grouped((one.configuration.key, one) for one in ordered)


def _had(runs: Sequence[TrialRecord]) -> dict[int, int]:
    ended = [run for run in runs if run.state.is_finished and run.state not in {TrialState.LOST, TrialState.CANCELLED}]
    return {run.seed: run.number for run in reversed(ended)}


def _complete_at(runs: Sequence[TrialRecord], wanted: int) -> float:
    numbers = sorted(_had(runs).values())
    return numbers[wanted - 1] if len(numbers) >= wanted else math.inf


KNOWN = 1e9  # degrees of freedom of an error of known size


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median objective value over seeds with the 95 % interval.

    The median is None if at least half of the runs missed the target. The interval is None if fewer than three runs
    exist, and may be None if runs are equal. If a run missed the target, the interval needs at least six runs. More
    runs do not reduce ``unresolved`` or the error of ``step_time``.
    """

    median: float | None
    low: float | None
    high: float | None
    runs: int
    reached: int
    basis: Basis
    log_mean: float
    log_deviation: float
    unresolved: float = 0.0
    step_time: PooledStepTime[Kind] | None = None

    @property
    def step_time_error(self) -> float:
        return 0.0 if self.step_time is None else self.step_time.error

    @property
    def excess(self) -> float:
        return 0.0 if self.step_time is None else self.step_time.excess

    @property
    def has_only_hits(self) -> bool:
        return self.reached == self.runs > 0

    @property
    def variation(self) -> float | None:
        """The log-normal coefficient of variation over seeds; None unless two runs reached the target."""
        return coefficient_of_variation(self.log_deviation) if self.reached > 1 else None


def estimate(runs: Sequence[TrialRecord], objective: Objective = TIME) -> Estimate:
    """Estimate a configuration's objective value from repeats.

    Student's t on `Objective.log` gives the interval, or order statistics if a run missed the target.
    """
    # Logarithms, because seed noise is multiplicative. The interval includes the errors of the shared step time. The
    # lower end includes `PooledStepTime.excess` and, for imported runs, the gap to the last miss.
    basis, step_time = _basis(runs, objective), objective.step_time(runs[0]) if runs else None
    values = [one for run in runs if (one := objective.figure(run)) is not None and objective.log(one) is not None]
    logs = [log for run in runs if (log := objective.log_figure(run)) is not None]
    mean = statistics.fmean(logs) if logs else math.nan
    deviation, unresolved = _deviation_of(logs, runs, is_crossing=objective.stops_at_target)
    earlier = _gaps(runs)[1] if len(logs) > 1 and objective.stops_at_target else 0.0
    missed = [math.inf] * (len(runs) - len(logs))
    median = statistics.median([*values, *missed]) if runs else math.inf
    of_steps = [] if step_time is None else [*_of_step_time(step_time), (step_time.common**2, step_time.freedom)]
    is_spread = deviation > 0 or step_time is not None or not objective.stops_at_target
    ends = low = high = None
    if missed:
        ends = _ends_of_median([*sorted(logs), *missed], half_width(of_steps))
    elif len(logs) >= FEWEST_RUNS and is_spread:
        half = half_width([*of_runs(deviation, unresolved, len(runs)), *of_steps])
        ends = mean - half, mean + half
    if ends is not None:
        excess = 0.0 if step_time is None else step_time.excess
        low = min(median * math.exp(-earlier), objective.from_log(ends[0] - excess))
        high = max(median, objective.from_log(ends[1]))
    return Estimate(
        median=median if math.isfinite(median) else None,
        low=low,
        high=high,
        runs=len(runs),
        reached=len(logs),
        basis=basis,
        log_mean=mean,
        log_deviation=deviation,
        unresolved=unresolved,
        step_time=step_time,
    )


def _ends_of_median(ordered: Sequence[float], half: float) -> tuple[float, float] | None:
    # The 95 % interval of the median by order statistics, wider by `half`; None if missed runs (inf) leave the interval
    # open. Below six values, the whole range covers less than 95 %.
    from scipy.special import bdtr

    count = len(ordered)
    outside = int((bdtr(np.arange(count), count, 0.5) <= (1 - CONFIDENCE) / 2).sum())
    if not outside or not math.isfinite(ordered[-outside]):
        return None
    return ordered[outside - 1] - half, ordered[-outside] + half


def _pooled_noise(estimates: Iterable[Estimate]) -> tuple[float, float] | None:
    # The pooled standard deviation of log figures over seeds, and the degrees of freedom; None without repeats
    known = [one for one in estimates if one.reached > 1]
    freedom = sum(one.reached - 1 for one in known)
    squares = math.fsum((one.reached - 1) * one.log_deviation**2 for one in known)
    return (math.sqrt(squares / freedom), float(freedom)) if freedom else None


def _basis(runs: Sequence[TrialRecord], objective: Objective) -> Basis:
    others = sorted(
        (count, basis) for basis, count in Counter(objective.basis(run) for run in runs).items() if basis != "measured"
    )
    return others[-1][1] if others and 2 * others[-1][0] >= len(runs) else "measured"


def _deviation_of(
    logs: Sequence[float], runs: Sequence[TrialRecord], *, is_crossing: bool = True
) -> tuple[float, float]:
    # The deviation of log figures over seeds, and the part that more runs do not reduce. The deviation is at least the
    # deviation of a uniform hit between two evaluations.
    if len(logs) < 2:
        return 0.0, 0.0
    spread, gap = statistics.stdev(logs), _gaps(runs)[0] if is_crossing else 0.0
    return max(spread, gap), math.sqrt(max(0.0, gap**2 - spread**2) * (1 - 1 / len(logs)))


def _gaps(runs: Sequence[TrialRecord]) -> tuple[float, float]:
    # The standard deviation due to the gaps between last misses and hits, and the gap of hits without interpolation
    gaps = [(gap, run.outcome) for run in runs if (gap := log_gap(run)) and run.outcome is not None]
    whole = [gap for gap, one in gaps if one.steps_to_target == one.first_hit_step and one.last_miss_seconds is None]
    deviation = statistics.median(gap for gap, _ in gaps) / math.sqrt(12) if gaps else 0.0
    return deviation, statistics.median(whole) if whole else 0.0


def ratio_interval(
    slower: Estimate, faster: Estimate, pooled: tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Return the 95 % interval of slower / faster by Welch's t-test on logarithms.

    An estimate without an interval takes the deviation and degrees of freedom of ``pooled``. The result is None if a
    run missed the target, or if ``pooled`` is necessary but None or 0.
    """
    # The interval includes step-time errors and the difference of `PooledStepTime.excess`.
    parts = list[tuple[float, float]]()
    for one in (slower, faster):
        if one.low is not None and one.has_only_hits:
            parts += of_runs(one.log_deviation, one.unresolved, one.runs)
        elif pooled is not None and pooled[0] > 0 and one.has_only_hits:
            parts.append((pooled[0] ** 2 / one.runs, pooled[1]))
        else:
            return None
    if slower.step_time is None or slower.step_time != faster.step_time:
        parts += [*_of_step_time(slower.step_time), *_of_step_time(faster.step_time)]
    half = half_width(parts)
    difference = slower.log_mean - faster.log_mean
    left = slower.excess - faster.excess
    return bounded_ratio(difference - half - max(0.0, left)), bounded_ratio(difference + half + max(0.0, -left))


def half_width(parts: Sequence[tuple[float, float]]) -> float:
    """Return half the width of the 95 % interval of a sum of errors (Welch 1947).

    ``parts`` has each error's variance and degrees of freedom.
    """
    total = math.fsum(variance for variance, _ in parts)
    if total == 0:
        return 0.0
    return student_t(total**2 / math.fsum(variance**2 / freedom for variance, freedom in parts)) * math.sqrt(total)


def of_runs(deviation: float, unresolved: float, runs: int) -> list[tuple[float, float]]:
    parts = [(deviation**2 / runs, float(runs - 1))]
    return [*parts, (unresolved**2, KNOWN)] if unresolved else parts


def _of_step_time(known: PooledStepTime[Kind] | None) -> list[tuple[float, float]]:
    return [] if known is None else [(known.error**2, known.freedom)]


def coefficient_of_variation(log_deviation: float) -> float:
    return math.sqrt(math.expm1(min(log_deviation**2, LARGEST_LOG_RATIO)))


BOOTSTRAPS = 1000  # a bias of a few per cent has an error of a tenth of a per cent

Rule = Literal["least", "smallest_shown_within_5_percent", "law"]

Settles = Literal["runs", "tuning", "step_times", "idle_machine"]  # remedies of a provisional answer


@dataclass(frozen=True)
class Candidate:
    """A configuration with repeats or a single search trial.

    ``selection`` is the bias of the log objective value from choosing the least value.
    """

    configuration: Configuration
    runs: tuple[TrialRecord, ...]
    objective: Objective = TIME
    selection: float = 0.0

    @property
    def outcomes(self) -> list[TrialOutcome]:
        return [run.outcome for run in self.runs if run.outcome is not None]

    @property
    def hits(self) -> list[TrialOutcome]:
        return [one for one in self.outcomes if one.state is TrialState.REACHED]

    @property
    def log_bounds(self) -> list[float]:
        known = (self.objective.log_bound(run) for run in self.runs)
        return [log for log in known if log is not None]

    @cached_property
    def estimate(self) -> Estimate:
        """The objective value over the runs; the upper end includes `selection`."""
        known, objective = estimate(self.runs, self.objective), self.objective
        high = objective.log(known.high) if known.high is not None and self.selection else None
        return known if high is None else replace(known, high=objective.from_log(high + self.selection))

    @cached_property
    def time(self) -> Estimate:
        return self.estimate if self.objective.name == TIME.name else estimate(self.runs, self._times)

    @property
    def _times(self) -> Objective:
        return replace(TIME, common=self.objective.common)

    @property
    def is_confirmed(self) -> bool:
        return self.runs[0].phase is Phase.CONFIRM

    @property
    def value(self) -> float:
        """The median objective value; infinite unless most runs reached the target."""
        return math.inf if self.estimate.median is None else self.estimate.median

    @property
    def mean(self) -> float:
        """The mean log objective value; infinite if no run reached the target."""
        return self.estimate.log_mean if self.estimate.reached else math.inf

    @property
    def watched_seconds(self) -> float:
        """Most train seconds at the last evaluation of any censored run; 0 if unknown."""
        return max((self._times.bound(run) or 0.0 for run in self.runs), default=0.0)

    @property
    def lower_bound(self) -> float | None:
        return self._lower_bound(self.objective, self.estimate)

    @property
    def lower_bound_s(self) -> float | None:
        return self._lower_bound(self._times, self.time)

    def _lower_bound(self, objective: Objective, known: Estimate) -> float | None:
        if known.median is not None:
            return None
        values = [
            seconds_to_target(run, "measured") if objective == TIME else objective.figure(run) for run in self.runs
        ]
        ends = [objective.bound(run) if one is None else one for one, run in zip(values, self.runs, strict=True)]
        known_ends = [one for one in ends if one is not None]
        return statistics.median(known_ends) if len(known_ends) == len(ends) else None


@dataclass(frozen=True)
class Verdict:
    """The optimum, and the best candidate of each batch size in ascending order.

    ``least`` has the least median. ``confirmed`` is True if confirmation runs decided.
    """

    optimal: Candidate
    least: Candidate
    rule: Rule
    by_batch: Mapping[int, Candidate]
    confirmed: bool
    others: tuple[Candidate, ...] = ()

    @cached_property
    def flat_range(self) -> tuple[int, int]:
        """The smallest and largest batch size around the optimum with a median within 5 % of the least median."""
        sizes = list(self.by_batch)
        own = sizes.index(self.optimal.configuration.batch_size)
        first, last = around(own, np.array([self._is_flat(size) for size in sizes])) or (own, own)
        return sizes[first], sizes[last]

    @cached_property
    def tied(self) -> list[int]:
        """Batch sizes *shown* to be within 5 % of ``least``, by the upper end of `ratio_interval`."""
        least = self.least
        return [size for size, one in self.by_batch.items() if one is least or _is_shown_flat(one, least)]

    @cached_property
    def worse(self) -> list[int]:
        """Batch sizes *shown* to be more than 5 % worse than ``least``, by the lower end of `ratio_interval`."""
        found = {size: ratio_interval(one.estimate, self.least.estimate) for size, one in self.by_batch.items()}
        return [size for size, ratio in found.items() if ratio is not None and ratio[0] > FLAT_RATIO]

    @cached_property
    def pooled_noise(self) -> tuple[float, float] | None:
        """The pooled seed-to-seed standard deviation of the log objective value, and the degrees of freedom."""
        return _pooled_noise(one.estimate for one in self.by_batch.values() if one.is_confirmed)

    @property
    def seed_deviation(self) -> float | None:
        return None if self.pooled_noise is None else self.pooled_noise[0]

    @cached_property
    def ignores_seeds(self) -> bool:
        return ignore_their_seeds(one.runs for one in self.by_batch.values() if one.is_confirmed)

    def recommending(self, batch_size: int, best: int) -> Verdict:
        """The verdict with ``batch_size`` as the optimum; ``best`` has the least expected objective value."""
        if batch_size == self.optimal.configuration.batch_size:
            return self
        least = self.least.configuration.batch_size
        smaller: Rule = "smallest_shown_within_5_percent" if batch_size < best == least else "law"
        return replace(self, optimal=self.by_batch[batch_size], rule="least" if batch_size == least else smaller)

    def seconds_of(self, trials: Iterable[TrialRecord]) -> dict[int, CountedSeconds]:
        times = replace(TIME, common=self.optimal.objective.common)
        counted = {run.number for one in self.by_batch.values() for run in one.runs}
        return {
            one.number: CountedSeconds(times.figure(one), times.basis(one), one.number in counted) for one in trials
        }

    def _is_flat(self, batch_size: int) -> bool:
        candidate = self.by_batch[batch_size]
        return (candidate.is_confirmed or not self.confirmed) and candidate.objective.is_flat(
            candidate.value, self.least.value
        )


@dataclass(frozen=True, slots=True)
class CountedSeconds:
    """A trial's seconds to the target; ``counts`` is True if the batch size's median includes the trial."""

    seconds: float | None
    basis: Basis
    counts: bool


def _is_shown_flat(one: Candidate, least: Candidate) -> bool:
    # True if the ratio's interval shows that a candidate is within 5 % of `least`
    interval = ratio_interval(one.estimate, least.estimate)
    return interval is not None and interval[1] <= FLAT_RATIO


def repeats(trials: Iterable[TrialRecord], objective: Objective = TIME) -> list[Candidate]:
    """Return one candidate per configuration, with one run per seed."""
    return [Candidate(runs[0].configuration, runs, objective) for runs in first_runs(trials)]


def first_runs(
    trials: Iterable[TrialRecord], key: Callable[[Configuration], str] = attrgetter("key")
) -> list[tuple[TrialRecord, ...]]:
    """Return the first run of each seed, grouped by configurations with an equal ``key``."""
    by_seed = grouped(((key(one.configuration), one.seed), one) for one in trials)
    return list(map(tuple, grouped((name, runs[0]) for (name, _), runs in by_seed.items()).values()))


def decide(
    trials: Sequence[TrialRecord],
    confirmation_runs: int,
    objective: Objective = TIME,
    step_seconds: StepSeconds = MappingProxyType({}),
) -> Verdict | None:
    """Decide the optimum; None unless a configuration reached the target in most runs.

    Search trials decide until `fewest_runs` is `FEWEST_RUNS`, or ``confirmation_runs`` if smaller. Then confirmation
    runs decide, compared by `Objective.between`, unless all finalists mostly missed the target. Incomplete neighbours
    of the optimum do not count if `begun_late`.

    The optimum is the smallest batch size shown to be within 5 % of the least median.
    """
    trials = _without_refused(trials)
    counted = [trial for trial in trials if trial.state.has_result]
    fresh = [trial for trial in counted if trial.phase is Phase.CONFIRM]
    common = objective.between(fresh, step_seconds, counted)
    if fewest_runs(trials, confirmation_runs, common) < min(confirmation_runs, FEWEST_RUNS):
        if (before := _before_the_neighbours(trials, confirmation_runs, objective, step_seconds)) is not None:
            return before
        fresh, common = [], objective.between([], step_seconds, counted)
    objective = common
    confirmed = repeats(fresh, objective)
    refuted = {one.configuration.key for one in confirmed if not math.isfinite(one.value)}
    searched = [
        Candidate(trial.configuration, (trial,), objective)
        for trial in counted
        if trial.phase is Phase.SEARCH and not (refuted and trial.configuration.key in refuted)
    ]
    by_size = {
        **grouped((one.configuration.batch_size, one) for one in searched),
        **grouped((one.configuration.batch_size, one) for one in confirmed),
    }
    by_batch = {
        size: min(here, key=lambda one: (one.value, one.mean, -one.watched_seconds))
        for size, here in sorted(by_size.items())
    }
    finished = [one for one in confirmed if math.isfinite(one.value)]
    pool = finished or [one for one in searched if math.isfinite(one.value)]
    if not pool:
        return None
    least = min(pool, key=lambda one: (one.value, one.mean))
    if finished:
        least = replace(least, selection=_selection_bias(finished))
    by_batch[least.configuration.batch_size] = least
    keys = {one.configuration.key for one in by_batch.values()}
    shown = [one for one in by_batch.values() if finished and one.is_confirmed and _is_shown_flat(one, least)]
    optimal = min([least, *shown], key=lambda one: one.configuration.batch_size)
    return Verdict(
        optimal=optimal,
        least=least,
        rule="least" if optimal is least else "smallest_shown_within_5_percent",
        by_batch=by_batch,
        confirmed=bool(finished),
        others=tuple(one for one in confirmed if one.configuration.key not in keys),
    )


def _without_refused(trials: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    confirmed = {one.configuration.key for one in trials if one.phase is Phase.CONFIRM and not one.is_refused}
    refused = [one.configuration for one in trials if one.is_refused and one.configuration.key not in confirmed]
    if not refused:
        return trials
    return [one for one in trials if not any(one.configuration.trains_like(other) for other in refused)]


def _before_the_neighbours(
    trials: Sequence[TrialRecord], confirmation_runs: int, objective: Objective, step_seconds: StepSeconds
) -> Verdict | None:
    late = begun_late(trials, confirmation_runs, compared(trials, objective, step_seconds))
    others = [trial for trial in trials if trial.phase is not Phase.CONFIRM or trial.configuration.key not in late]
    found = decide(others, confirmation_runs, objective, step_seconds) if late else None
    if found is None or not found.confirmed:
        return None
    sizes = sorted({*found.by_batch, *late.values()})
    place = sizes.index(found.optimal.configuration.batch_size)
    return found if all(abs(sizes.index(size) - place) == 1 for size in late.values()) else None


def _selection_bias(candidates: Sequence[Candidate]) -> float:
    known = [one.estimate for one in candidates]
    noise = _pooled_noise(known)
    if len(known) < 2 or noise is None:
        return 0.0
    means = np.array([one.log_mean for one in known])
    errors = np.array(
        [math.hypot(noise[0] / math.sqrt(one.reached), one.unresolved, one.step_time_error) for one in known]
    )
    draws = means + errors * np.random.default_rng(0).standard_normal((BOOTSTRAPS, len(means)))
    chosen = draws.argmin(axis=1)
    return max(0.0, float((means[chosen] - draws[np.arange(BOOTSTRAPS), chosen]).mean()))


def median_steps(candidate: Candidate) -> float | None:
    """Return the median steps to the target; None unless most runs reached the target."""
    return _median_of_all([one.steps_to_target for one in candidate.outcomes])


def median_samples(candidate: Candidate) -> float | None:
    return _median_of_all([samples_after(run, run.outcome.steps_to_target) for run in candidate.runs if run.outcome])


def _median_of_all(values: Sequence[float | None]) -> float | None:
    median = statistics.median([math.inf if value is None else value for value in values])
    return median if math.isfinite(median) else None


def runs_to_settle(log_deviation: float, ratio: float) -> int:
    """Return the runs per configuration, accurate to 2 %, that separate a ratio of two medians from 1.

    With the returned runs, a t-test on logarithms at 5 % has a power of 80 %.
    """
    from scipy.special import nctdtr, stdtrit  # scipy.stats takes half a second to import

    effect = abs(math.log(ratio)) / log_deviation if log_deviation > 0 else math.inf
    runs = 2
    while math.isfinite(effect) and runs < 100_000:
        freedom = 2 * (runs - 1)
        # NaN for a huge effect
        if not nctdtr(freedom, effect * math.sqrt(runs / 2), stdtrit(freedom, 0.975)) > 0.2:
            break
        runs += max(1, runs // 50)
    return runs


Regime = Literal["perfect", "diminishing", "maximal", "undecided"]

PERFECT, MAXIMAL = -0.75, -0.25  # midway between −1, −0.5 and 0


@dataclass(frozen=True)
class Slope:
    """The slope d log steps / d log batch size from ``since`` to the next batch size.

    Welch's 95 % interval allows for gaps between evaluations, and contains the slope of medians. ``low`` and ``high``
    are None if a side has fewer than three runs, a run missed the target, or runs are equal.
    """

    since: int
    value: float
    low: float | None
    high: float | None

    @property
    def regime(self) -> Regime:
        """The regime of the whole interval; "undecided" if the interval is unknown or spans two regimes."""
        if self.low is None or self.high is None:
            return "undecided"
        if self.high < PERFECT:
            return "perfect"
        if self.low > MAXIMAL:
            return "maximal"
        return "diminishing" if self.low >= PERFECT and self.high <= MAXIMAL else "undecided"

    @property
    def is_too_steep(self) -> bool:
        # then the smaller batch seems badly tuned
        return self.high is not None and self.high < -1


def slopes(candidates: Mapping[int, Candidate]) -> dict[int, Slope]:
    known = [(size, steps) for size, one in sorted(candidates.items()) if (steps := _steps(one)) is not None]
    return {here[0]: _slope(before, here) for before, here in itertools.pairwise(known)}


Steps = tuple[float, list[float], list[tuple[float, float]]]  # median, logs, and the errors of the logs' mean


def _steps(candidate: Candidate) -> Steps | None:
    if not (median := median_steps(candidate)):
        return None
    logs = [math.log(one.steps_to_target) for one in candidate.hits if one.steps_to_target]
    if len(logs) < len(candidate.runs) or len(logs) < FEWEST_RUNS:
        return median, [], []
    return median, logs, of_runs(*_deviation_of(logs, candidate.runs), len(logs))


def _slope(smaller: tuple[int, Steps], larger: tuple[int, Steps]) -> Slope:
    (size, (steps, logs, parts)), (larger_size, (larger_steps, larger_logs, larger_parts)) = smaller, larger
    span = math.log(larger_size / size)
    value = math.log(larger_steps / steps) / span
    half = half_width([*parts, *larger_parts])
    if not logs or not larger_logs or not half:
        return Slope(size, value, None, None)
    middle = statistics.fmean(larger_logs) - statistics.fmean(logs)
    return Slope(size, value, min(value, (middle - half) / span), max(value, (middle + half) / span))
