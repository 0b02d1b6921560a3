"""Figures over seeds, and ratios of two."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bssearch.analysis.law.batch_model import log_gap
from bssearch.analysis.objectives import LARGEST_LOG_RATIO, TIME, Basis, Kind, Objective
from bssearch.records import TrialRecord
from bssearch.records.intervals import student_t
from bssearch.records.step_times import PooledStepTime

KNOWN = 1e9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over seeds: median, 95 % interval, and the number of runs that reached.

    The median is None if half of the runs or more missed the target, the interval below three runs or with any miss.
    ``log_deviation``: over seeds, at least a uniform hit's between two evaluations. ``unresolved`` and the error of
    ``step_time`` do not shrink with more runs.
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
        """Standard error of the log step time, if used."""
        return 0.0 if self.step_time is None else self.step_time.error

    @property
    def excess(self) -> float:
        """Possible excess of the log step time, if used."""
        return 0.0 if self.step_time is None else self.step_time.excess

    @property
    def variation(self) -> float | None:
        """Log-normal coefficient of variation over seeds."""
        return coefficient_of_variation(self.log_deviation) if self.reached > 1 else None


def estimate(runs: Sequence[TrialRecord], objective: Objective = TIME) -> Estimate:
    """Figure of one configuration over its repeats.

    The interval is Student's t on logarithms, because seed noise is multiplicative. The interval includes the error of
    the shared step time, holds the median, and extends downwards by `PooledStepTime.excess`. If hits are not
    interpolated (imported runs), it holds the last miss.
    """
    basis, step_time = _basis(runs, objective), objective.step_time(runs[0]) if runs else None
    known = [value for run in runs if (value := objective.figure(run)) is not None]
    logs = [log for value in known if (log := objective.log(value)) is not None]
    values = [value for value in known if objective.log(value) is not None]
    mean = statistics.fmean(logs) if logs else math.nan
    deviation, unresolved = deviation_of(logs, runs, is_crossing=objective.stops_at_target)
    earlier = _gaps(runs)[1] if len(logs) > 1 and objective.stops_at_target else 0.0
    ordered = sorted(values) + [math.inf] * (len(runs) - len(values))
    median = statistics.median(ordered) if ordered else math.inf
    low = high = None
    excess = 0.0 if step_time is None else step_time.excess
    is_spread = deviation > 0 or step_time is not None or not objective.stops_at_target
    if len(values) == len(runs) >= 3 and is_spread:
        parts = [*of_runs(deviation, unresolved, len(runs)), *_of_step_time(step_time)]
        if step_time is not None and step_time.common:
            parts.append((step_time.common**2, step_time.freedom))
        half = half_width(parts)
        least = mean - half - excess
        low, high = (
            min(median * math.exp(-earlier), objective.from_log(least)),
            max(median, objective.from_log(mean + half)),
        )
    return Estimate(
        median=median if math.isfinite(median) else None,
        low=low,
        high=high,
        runs=len(runs),
        reached=len(values),
        basis=basis,
        log_mean=mean,
        log_deviation=deviation,
        unresolved=unresolved,
        step_time=step_time,
    )


def pooled_deviation(estimates: Iterable[Estimate]) -> float | None:
    """Pooled standard deviation of log figures over seeds; None without repeats."""
    known = [one for one in estimates if one.reached > 1]
    freedom = sum(one.reached - 1 for one in known)
    if not freedom:
        return None
    return math.sqrt(sum((one.reached - 1) * one.log_deviation**2 for one in known) / freedom)


def _basis(runs: Sequence[TrialRecord], objective: Objective) -> Basis:
    bases = Counter(objective.basis(run) for run in runs)
    others = sorted((count, basis) for basis, count in bases.items() if basis != "measured")
    return others[-1][1] if others and 2 * others[-1][0] >= len(runs) else "measured"


def deviation_of(
    logs: Sequence[float], runs: Sequence[TrialRecord], *, is_crossing: bool = True
) -> tuple[float, float]:
    """Deviation over seeds, at least of a uniform hit between two evaluations, and what more runs leave of it."""
    if len(logs) < 2:
        return 0.0, 0.0
    spread, gap = statistics.stdev(logs), _gaps(runs)[0] if is_crossing else 0.0
    return max(spread, gap), math.sqrt(max(0.0, gap**2 - spread**2) * (1 - 1 / len(logs)))


def _gaps(runs: Sequence[TrialRecord]) -> tuple[float, float]:
    """Standard deviation by the gaps between last misses and hits, and the gap of hits not interpolated."""
    gaps = [(gap, run.outcome) for run in runs if (gap := log_gap(run)) and run.outcome is not None]
    whole = [gap for gap, one in gaps if one.steps_to_target == one.first_hit_step and one.last_miss_seconds is None]
    deviation = statistics.median(gap for gap, _ in gaps) / math.sqrt(12) if gaps else 0.0
    return deviation, statistics.median(whole) if whole else 0.0


def ratio_interval(slower: Estimate, faster: Estimate) -> tuple[float, float] | None:
    """95 % interval of slower / faster (Welch's t on logarithms); None if either has no interval.

    Includes step-time errors, widened by the difference of `PooledStepTime.excess`.
    """
    if slower.low is None or faster.low is None:
        return None
    sides = [of_runs(one.log_deviation, one.unresolved, one.runs) for one in (slower, faster)]
    parts = [part for side in sides for part in side]
    if slower.step_time is None or slower.step_time != faster.step_time:
        parts += [*_of_step_time(slower.step_time), *_of_step_time(faster.step_time)]
    half = half_width(parts)
    difference = slower.log_mean - faster.log_mean
    left = slower.excess - faster.excess
    return _ratio(difference - half - max(0.0, left)), _ratio(difference + half + max(0.0, -left))


def half_width(parts: Sequence[tuple[float, float]]) -> float:
    """Half the 95 % interval of a sum of errors, each (variance, degrees of freedom) (Welch 1947)."""
    total = math.fsum(variance for variance, _ in parts)
    if total == 0:
        return 0.0
    return student_t(total**2 / math.fsum(variance**2 / freedom for variance, freedom in parts)) * math.sqrt(total)


def of_runs(deviation: float, unresolved: float, runs: int) -> list[tuple[float, float]]:
    """Errors of a mean, for `half_width`."""
    parts = [(deviation**2 / runs, float(runs - 1))]
    return [*parts, (unresolved**2, KNOWN)] if unresolved else parts


def _of_step_time(known: PooledStepTime[Kind] | None) -> list[tuple[float, float]]:
    return [] if known is None or known.error == 0 else [(known.error**2, known.freedom)]


def coefficient_of_variation(log_deviation: float) -> float:
    """Of a log-normal quantity."""
    return math.sqrt(math.expm1(min(log_deviation**2, LARGEST_LOG_RATIO)))


def _ratio(log_ratio: float) -> float:
    return math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, log_ratio)))
