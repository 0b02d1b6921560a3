"""Time-to-target of one configuration from its runs over seeds, and of one configuration against another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.records import TrialRecord, TrialState

Basis = Literal["measured", "steps_x_step_time"]
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds to the target over seeds: the median, its 95 % interval, and how many of the runs reached it.

    ``median`` is None where half of the runs or more missed the target; the interval is None below three runs, and
    where any run missed.
    """

    median: float | None
    low: float | None
    high: float | None
    runs: int
    reached: int
    basis: Basis
    log_mean: float
    log_deviation: float

    @property
    def variation(self) -> float | None:
        """Return the coefficient of variation over seeds, for a log-normal spread; None below two runs."""
        return math.sqrt(math.expm1(self.log_deviation**2)) if self.reached > 1 else None


def seconds_to_target(trial: TrialRecord, basis: Basis | None = None) -> float | None:
    """Return a trial's seconds to the target, or None where it did not reach it.

    Without a basis, the measured seconds where the device was the trial's alone, else steps × step time.
    """
    if trial.outcome is None or trial.state is not TrialState.REACHED:
        return None
    if (basis or trial_basis(trial)) == "measured":
        return trial.outcome.time_to_target_s
    return trial.steps_x_step_time_s


def trial_basis(trial: TrialRecord) -> Basis:
    """Return which of the two products counts for a trial."""
    contended = trial.outcome is not None and trial.outcome.contended
    return "steps_x_step_time" if contended and trial.steps_x_step_time_s is not None else "measured"


def estimate(runs: Sequence[TrialRecord]) -> Estimate:
    """Return the time-to-target of one configuration from repeats of it.

    Each repeat counts with the seconds it would take alone: the measured ones, or steps × step time where it was
    contended; ``basis`` names what most have. A run that missed the target counts as longer than all others.

    The interval is Student's t on the logarithms of the seconds: seed noise is multiplicative, and the exponential of
    the mean logarithm is the median of a log-normal.
    """
    products = sum(trial_basis(run) == "steps_x_step_time" for run in runs)
    basis: Basis = "steps_x_step_time" if products and 2 * products >= len(runs) else "measured"
    seconds = [value for run in runs if (value := seconds_to_target(run)) is not None and value > 0]
    logs = [math.log(value) for value in seconds]
    mean = statistics.fmean(logs) if logs else math.nan
    deviation = statistics.stdev(logs) if len(logs) > 1 else 0.0
    ordered = sorted(seconds) + [math.inf] * (len(runs) - len(seconds))
    median = statistics.median(ordered) if ordered else math.inf
    low = high = None
    if len(seconds) == len(runs) >= 3:
        half = student_t(len(runs) - 1) * deviation / math.sqrt(len(runs))
        low, high = math.exp(mean - half), math.exp(mean + half)
    return Estimate(
        median=median if math.isfinite(median) else None,
        low=low,
        high=high,
        runs=len(runs),
        reached=len(seconds),
        basis=basis,
        log_mean=mean,
        log_deviation=deviation,
    )


def ratio_upper_bound(slower: Estimate, faster: Estimate) -> float | None:
    """Return the upper end of the 95 % interval of slower / faster (Welch's t on logarithms).

    None where either has fewer than three runs or a run that missed: then nothing is shown.
    """
    if slower.low is None or faster.low is None:
        return None
    variances = [one.log_deviation**2 / one.runs for one in (slower, faster)]
    total = sum(variances)
    difference = slower.log_mean - faster.log_mean
    if total == 0:
        return math.exp(difference)
    parts = zip(variances, (slower, faster), strict=True)
    freedom = total**2 / sum(variance**2 / (one.runs - 1) for variance, one in parts)
    return math.exp(difference + student_t(freedom) * math.sqrt(total))


def student_t(degrees_of_freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
