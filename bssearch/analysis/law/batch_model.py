"""Fitted laws of steps and of step seconds by batch size, and the predicted optimum.

S(B) = S_min (1 + B_crit / B) steps and E(B) = B·S(B) = E_min (1 + B / B_crit) samples, with E_min = S_min·B_crit
(McCandlish et al. 2018, arXiv 1812.06162).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.posterior import DRAWS, OCTAVES_BEYOND, Numbers, Posterior, Runs, infer
from bssearch.analysis.shape import Predicted
from bssearch.records import FEWEST_RUNS, FEWEST_SIZES, FLAT_RATIO, MemoryUse, StepTime, TrialRecord, student_t

KNEE_SHARE = 0.9  # the knee's share of the highest measured throughput


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """The step time t(B) = α + β·B without accumulation; ``max_residual`` is the largest |fit / measured − 1|."""

    alpha_seconds: float
    beta_seconds: float
    max_residual: float
    measured: Mapping[int, float]

    def predict(self, batch_size: int, micro_batch_size: int, update_seconds: float) -> float:
        """Return the seconds of a step: t(B), or k·(t(micro-batch) − update) + update with k micro-batches."""
        accumulation = batch_size // micro_batch_size
        micro = self.alpha_seconds + self.beta_seconds * micro_batch_size
        if accumulation == 1:
            return micro
        return accumulation * (self.measured.get(micro_batch_size, micro) - update_seconds) + update_seconds


def fit_step_time(probes: Sequence[StepTime], fewest: int = FEWEST_SIZES) -> StepTimeFit | None:
    """Fit step times without accumulation by least squares of the relative error, with α ≥ 0.

    The result is None if fewer than ``fewest`` sizes are timed, or if β ≤ 0.
    """
    measured = {
        probe.batch_size: probe.step_seconds for probe in probes if probe.step_seconds is not None and probe.is_whole
    }
    if len(measured) < fewest:
        return None
    sizes, seconds = np.array(list(measured), dtype=float), np.array(list(measured.values()))
    terms = np.column_stack([1 / seconds, sizes / seconds])
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    if beta <= 0:
        return None
    return StepTimeFit(float(alpha), float(beta), float(np.abs(terms @ np.array([alpha, beta]) - 1).max()), measured)


def throughput_knee(probes: Sequence[StepTime]) -> int | None:
    """Return the smallest batch size with at least 90 % of the highest throughput, if known."""
    throughputs = {
        probe.batch_size: probe.batch_size / probe.step_seconds for probe in probes if probe.step_seconds is not None
    }
    enough = KNEE_SHARE * max(throughputs.values(), default=0.0)
    return min((size for size, throughput in throughputs.items() if throughput >= enough), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Peak memory as ``fixed_bytes`` + ``bytes_per_sample`` × micro-batch size."""

    fixed_bytes: float
    bytes_per_sample: float
    largest_residual: float


def fit_memory(uses: Sequence[MemoryUse]) -> MemoryFit | None:
    """Fit the peak memory of micro-batch sizes by least squares; None unless three sizes fit in memory."""
    peaks = {use.micro_batch_size: use.peak_memory_bytes for use in uses if use.fits and use.peak_memory_bytes}
    if len(peaks) < 3:
        return None
    slope, fixed = statistics.linear_regression(list(peaks), list(peaks.values()))
    residuals = [abs(fixed + slope * size - peak) / peak for size, peak in peaks.items()]
    return MemoryFit(fixed_bytes=fixed, bytes_per_sample=slope, largest_residual=max(residuals))


WIDEST_GAP = 1.0  # in log steps; also the gap if the last miss was before step 1


def log_gap(run: TrialRecord) -> float:
    """Return the log steps between the evaluations before and at the target, at most `WIDEST_GAP`; 0 if unknown."""
    outcome = run.outcome
    if outcome is None or not outcome.first_hit_step or outcome.last_miss_step is None:
        return 0.0
    if not outcome.last_miss_step:
        return WIDEST_GAP
    return min(WIDEST_GAP, math.log(outcome.first_hit_step / outcome.last_miss_step))


@dataclass(frozen=True, slots=True)
class LawPoint:
    """The runs of a batch size: samples to the target, and samples at the last evaluation of runs that missed."""

    batch_size: int
    samples: tuple[float, ...]
    missed_at: tuple[float, ...] = ()
    untuned: bool = False


def law_point(batch_size: int, runs: Sequence[TrialRecord]) -> LawPoint:
    outcomes = [run.outcome for run in runs if run.outcome is not None]
    return LawPoint(
        batch_size,
        tuple(float(one.steps_to_target * batch_size) for one in outcomes if one.steps_to_target),
        tuple(
            float(one.last_miss_step * batch_size) for one in outcomes if one.state.is_censored and one.last_miss_step
        ),
    )


def _posterior(points: Sequence[LawPoint], deviation: float) -> Posterior:
    runs = [
        (place, math.log(value), is_missed)
        for place, point in enumerate(points)
        for values, is_missed in ((point.samples, False), (point.missed_at, True))
        for value in values
    ]
    rows = ((place, -1 - number, log, 0.0, is_missed) for number, (place, log, is_missed) in enumerate(runs))
    log_sizes = np.log([float(point.batch_size) for point in points])
    return infer(Runs.of_rows(rows), log_sizes, log_sizes, np.zeros(len(points)), deviation)


BEYOND = 1e4  # B_crit may be up to this factor beyond the batch sizes

GRID = 0.25  # the grid step of log B_crit; the law bends over a range of about 1

ASSUMED_DEVIATION = 0.05  # for two single runs, which are too few for an estimate

SMALLEST_DEVIATION = 1e-6

NEWTON_STEPS = 50
SETTLING_STEPS = 100

CROSSING_ROUNDS = 12  # a round narrows a crossing to a sixteenth, so 12 rounds give double precision


class LawLikelihood:
    """The law's likelihood for each log B_crit, at the likeliest log E_min."""

    def __init__(self, points: Sequence[LawPoint], deviation: float) -> None:
        self.deviation = deviation
        self.reached, self.reached_sizes = _logs([(point.batch_size, point.samples) for point in points])
        self.missed, self.missed_sizes = _logs([(point.batch_size, point.missed_at) for point in points])
        sizes = [math.log(point.batch_size) for point in points]
        low, high = min(sizes) - math.log(BEYOND), max(sizes) + math.log(BEYOND)
        self.grid = np.linspace(low, high, math.ceil((high - low) / GRID) + 1)
        self.log_b_crit = self._likeliest()
        here = np.array([self.log_b_crit])
        self.log_e_min = float(_level(*self._bare(here), deviation)[0])
        self.least_deviance = float(self._deviances(here)[0])
        reached, missed = self._residuals(here)
        self.residuals = reached[0], missed[0]

    def log_samples(self, batch_size: int) -> float:
        return self.log_e_min + float(np.logaddexp(0, math.log(batch_size) - self.log_b_crit))

    def _deviances(self, log_b_crit: Numbers) -> Numbers:
        # −2 log likelihood of each log B_crit (n,), up to a constant
        return _deviance(*self._residuals(log_b_crit), self.deviation)

    def _likeliest(self) -> float:
        best = int(np.argmin(self._deviances(self.grid)))
        low, high = self.grid[max(0, best - 1)], self.grid[min(len(self.grid) - 1, best + 1)]
        slopes = self._slopes(np.array([low, high]))
        return _crossing(self._slopes, low, high) if slopes[0] < 0 < slopes[1] else float(self.grid[best])

    def _slopes(self, log_b_crit: Numbers) -> Numbers:
        reached, missed = self._residuals(log_b_crit)
        shares = [
            np.exp(-np.logaddexp(0, log_b_crit[:, None] - sizes)) for sizes in (self.reached_sizes, self.missed_sizes)
        ]
        unseen = self.deviation * (_hazard(-missed / self.deviation) * shares[1]).sum(axis=-1)
        return np.asarray((reached * shares[0]).sum(axis=-1) + unseen)

    def _residuals(self, log_b_crit: Numbers) -> tuple[Numbers, Numbers]:
        reached, missed = self._bare(log_b_crit)
        level = _level(reached, missed, self.deviation)[:, None]
        return reached - level, missed - level

    def _bare(self, log_b_crit: Numbers) -> tuple[Numbers, Numbers]:
        # Estimates of log E_min (n, runs)
        return (
            self.reached - np.logaddexp(0, self.reached_sizes - log_b_crit[:, None]),
            self.missed - np.logaddexp(0, self.missed_sizes - log_b_crit[:, None]),
        )


def _logs(runs: Sequence[tuple[int, tuple[float, ...]]]) -> tuple[Numbers, Numbers]:
    samples = [math.log(value) for _, values in runs for value in values]
    return np.array(samples), np.array([math.log(size) for size, values in runs for _ in values])


def _likeliest_mean(point: LawPoint, deviation: float) -> float:
    return float(_level(np.log(point.samples), np.log(point.missed_at), deviation))


def _around_means(points: Sequence[LawPoint], deviation: float) -> tuple[Numbers, Numbers]:
    # Residuals of reached and of missed runs about the batch size's mean
    means = [_likeliest_mean(point, deviation) for point in points]
    reached = [np.log(point.samples) - mean for point, mean in zip(points, means, strict=True)]
    missed = [np.log(point.missed_at) - mean for point, mean in zip(points, means, strict=True)]
    return np.concatenate(reached), np.concatenate(missed)


def _level(reached: Numbers, missed: Numbers, deviation: float) -> Numbers:
    # The likeliest mean of normal values, if n equal `reached` and m exceed `missed`. Newton's method never overshoots
    # on the convex, falling score.
    mean: Numbers = reached.mean(axis=-1)
    level = mean
    for _ in range(NEWTON_STEPS if missed.shape[-1] else 0):
        distance = (level[..., None] - missed) / deviation
        hazard = _hazard(distance)
        score = reached.shape[-1] * (mean - level) + deviation * hazard.sum(axis=-1)
        change = score / (reached.shape[-1] + np.clip(hazard * (hazard + distance), 0, 1).sum(axis=-1))
        level = level + change
        if np.all(np.abs(change) <= 1e-9 * deviation):
            break
    return level


def _deviance(reached: Numbers, missed: Numbers, deviation: float) -> Numbers:
    # −2 log likelihood of residuals (..., n) and of exceeding `missed` (..., m), up to a constant
    from scipy.special import log_ndtr

    return np.asarray(((reached / deviation) ** 2).sum(axis=-1) - 2 * log_ndtr(-missed / deviation).sum(axis=-1))


def _hazard(distance: Numbers) -> Numbers:
    # φ/Φ of the standard normal, the derivative of log Φ.
    from scipy.special import erfcx

    return math.sqrt(2 / math.pi) / erfcx(-distance / math.sqrt(2))


def _settled_deviation(residuals: Callable[[float], tuple[Numbers, Numbers]], freedom: int) -> float:
    # The deviation of log samples: √(Σr² / freedom), or the EM algorithm's with missed runs
    deviation = ASSUMED_DEVIATION
    for _ in range(SETTLING_STEPS):
        reached, missed = residuals(deviation)
        distance = -missed / deviation
        unseen = deviation**2 * (1 - distance * _hazard(distance)).sum()
        before, deviation = deviation, math.sqrt(((reached**2).sum() + unseen) / (freedom + len(missed)))
        deviation = max(deviation, SMALLEST_DEVIATION)
        if not len(missed) or abs(deviation - before) <= 1e-3 * before:
            break
    return deviation


def _crossing(function: Callable[[Numbers], Numbers], below: float, above: float) -> float:
    for _ in range(CROSSING_ROUNDS):
        between = np.linspace(below, above, 17)
        rises = function(between) > 0
        rises[0], rises[-1] = False, True
        first = int(np.argmax(rises))
        below, above = between[first - 1], between[first]
    return float(below)


FitVerdict = Literal["fits", "poor", "too_few_points"]

CONFIDENCE = 0.90

STEPS_CONFIDENCE = 0.95


# A batch size is off the law if the residual exceeds both limits
LARGE_RESIDUAL = 0.10
STANDARD_ERRORS = 3

RISE = 1.1  # if runs are too few for an interval, this ratio of steps is a rise


LACK_OF_FIT = 0.05


@dataclass(frozen=True, slots=True)
class LawFit:
    """The law with the 90 % interval of B_crit, None on an unbounded side.

    Attributes:
        deviation: Residual standard deviation of log samples.
        residuals: Geometric mean of samples / the law's samples − 1, by batch size.
        verdict: "poor" if a residual exceeds 10 %. If runs are repeated, the residual must also exceed 3 standard
            errors, or an F-test (5 %) must reject the law.
    """

    s_min: float
    b_crit: float
    b_crit_low: float | None
    b_crit_high: float | None
    deviation: float
    residuals: Mapping[int, float]
    verdict: FitVerdict
    largest_batch: int
    including_untuned: LawFit | None = None
    _posterior: Posterior | None = field(default=None, repr=False, compare=False)

    @property
    def max_residual(self) -> float:
        return max(map(abs, self.residuals.values()))

    def steps(self, batch_size: int) -> float:
        """Return S(B), for batch sizes up to the largest size that ran."""
        return self.s_min * (1 + self.b_crit / batch_size)

    def steps_interval(self, batch_size: int) -> tuple[float, float] | None:
        """Return S(B)'s 95 % interval, including departures from the law; None if only two sizes reached the target."""
        own, known = self.steps(batch_size), self._posterior
        if known is None:
            return None
        # as large departures as at other sizes, because a tuning error moves all runs of a batch size
        off = known.departure * np.random.default_rng(0).standard_normal(DRAWS)
        logs = known.law_level + np.logaddexp(math.log(batch_size), known.log_b_crit) + off
        low, high = np.exp(np.quantile(logs, [0.025, 0.975])) / batch_size
        return min(own, float(low)), max(own, float(high))

    def steps_of_all(self, batch_sizes: Sequence[int]) -> Numbers | None:
        """Return S(B) / S_min of each draw of the law (`DRAWS`, sizes); None if the law has no draws."""
        if self._posterior is None:
            return None
        return np.asarray(1 + np.exp(self._posterior.log_b_crit[:, None] - np.log(np.array(batch_sizes, dtype=float))))


@dataclass(frozen=True, slots=True)
class RunnableStep:
    """A batch size with the seconds per step.

    Attributes:
        micro_batch_size: Micro-batch size summed over the devices.
        error: Standard error of the log seconds, if known.
    """

    batch_size: int
    micro_batch_size: int
    step_seconds: float
    error: float | None = None


def fit_law(points: Sequence[LawPoint]) -> LawFit | None:
    """Fit the law by maximum likelihood; None if fewer than two batch sizes reached the target.

    Log samples are normal about the law, and missed runs are right-censored. If three tuned sizes reached the target,
    the fit leaves out untuned sizes. If three sizes reached the target, the posterior (`infer`) gives
    B_crit's interval.
    """
    run = _that_ran(points)
    if sum(bool(point.samples) for point in run) < 2:
        return None
    tuned = [point for point in run if not point.untuned]
    enough = sum(bool(point.samples) for point in tuned) >= FEWEST_SIZES
    fit = _fit(tuned if enough else run, run, enough)
    if len(tuned) == len(run):
        return fit
    return replace(fit, including_untuned=_fit(run, run, sum(bool(point.samples) for point in run) >= FEWEST_SIZES))


def rising(points: Sequence[LawPoint]) -> Iterator[int]:
    """Yield badly tuned batch sizes, which need more steps than the next smaller size without missed runs.

    Welch's t-test on logarithms decides, or the factor `RISE` if a side has fewer than three runs. A missed run counts
    with the steps of the last evaluation.
    """
    smaller: LawPoint | None = None
    for point in _that_ran(points):
        if smaller is not None and _rises(_log_steps(smaller), _log_steps(point)):
            yield point.batch_size
        if not point.missed_at:
            smaller = point


def predict_optimum(fit: LawFit, steps: Sequence[RunnableStep]) -> Predicted | None:
    """Return the batch size with the fewest predicted seconds; None if all sizes exceed the largest size that ran."""
    fastest = {size: step for size, step in fastest_by_size(steps).items() if size <= fit.largest_batch}
    if not fastest:
        return None
    seconds = {size: fit.steps(size) * step.step_seconds for size, step in fastest.items()}
    sizes = list(seconds)
    best = min(sizes, key=seconds.__getitem__)
    times = np.array(list(seconds.values()))
    flat = around(sizes.index(best), times <= FLAT_RATIO * times.min())
    assert flat is not None, "the optimum is in the flat range"
    optimum = Predicted(
        batch_size=best,
        micro_batch_size=fastest[best].micro_batch_size,
        time_to_target_s=seconds[best],
        flat_range=[sizes[flat[0]], sizes[flat[1]]],
    )
    if (steps_of_all := fit.steps_of_all(sizes)) is None:
        return optimum
    with np.errstate(over="ignore"):  # a time that overflows is infinite
        by_law = steps_of_all * _drawn_step_seconds(list(fastest.values()))
    low, high = np.quantile(by_law.argmin(axis=1), [0.025, 0.975], method="inverted_cdf")
    near = (by_law <= FLAT_RATIO * by_law.min(axis=1, keepdims=True)).mean(axis=0) >= STEPS_CONFIDENCE
    sure = around(sizes.index(best), near)
    interval = [min(best, sizes[low]), max(best, sizes[high])]
    surely_flat = None if sure is None else [sizes[sure[0]], sizes[sure[1]]]
    return optimum.model_copy(update={"interval": interval, "surely_flat": surely_flat})


def _drawn_step_seconds(steps: Sequence[RunnableStep]) -> Numbers:
    # Draws of step seconds (`DRAWS`, sizes): a line α + β·B, plus departures beyond the measurement errors
    rng = np.random.default_rng(0)
    sizes, seconds = (
        np.array([one.batch_size for one in steps], dtype=float),
        np.array([one.step_seconds for one in steps]),
    )
    nodes = np.array([one.error is not None and one.batch_size == one.micro_batch_size for one in steps])
    errors = np.array([one.error or 0.0 for one in steps])
    others = np.exp(errors * ~nodes * rng.standard_normal((DRAWS, len(steps))))
    if nodes.sum() < FEWEST_SIZES or not errors[nodes].all():
        return np.asarray(seconds * others)
    known = errors[nodes, None]
    terms = np.column_stack([1 / seconds[nodes], sizes[nodes] / seconds[nodes]]) / known
    covariance = np.linalg.inv(terms.T @ terms)
    mean = covariance @ (terms.T @ (1 / known[:, 0]))
    lines = np.maximum(rng.multivariate_normal(mean, covariance, DRAWS) @ np.stack([np.ones_like(sizes), sizes]), 0)
    line = np.maximum(mean @ np.stack([np.ones_like(sizes), sizes]), 1e-3 * seconds)
    lines = np.where(lines > 0, lines, line)
    off = np.log(seconds / line)[nodes]
    misfit = max(0.0, float((off**2).sum() / max(1, nodes.sum() - 2) - (errors[nodes] ** 2).mean()))
    share = misfit / (misfit + errors[nodes] ** 2)
    drawn = share * off + np.sqrt(share) * errors[nodes] * rng.standard_normal((DRAWS, int(nodes.sum())))
    logs = np.log(sizes)
    weights = np.stack([np.interp(logs, logs[nodes], one) for one in np.eye(int(nodes.sum()))])
    whole = np.array([one.batch_size == one.micro_batch_size for one in steps])
    return np.asarray(np.where(whole, lines * np.exp(drawn @ weights), seconds * others))


def fastest_by_size(steps: Sequence[RunnableStep]) -> dict[int, RunnableStep]:
    return {step.batch_size: step for step in sorted(steps, key=lambda step: (step.batch_size, -step.step_seconds))}


def around(index: int, holds: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the first and last index of the True values around ``index``; None if ``holds[index]`` is False."""
    if not holds[index]:
        return None
    gaps = np.flatnonzero(~holds)
    below, above = gaps[gaps < index], gaps[gaps > index]
    return int(below[-1]) + 1 if len(below) else 0, int(above[0]) - 1 if len(above) else len(holds) - 1


def _that_ran(points: Sequence[LawPoint]) -> list[LawPoint]:
    return sorted((point for point in points if point.samples or point.missed_at), key=lambda point: point.batch_size)


def _log_steps(point: LawPoint) -> Numbers:
    return np.log([*point.samples, *point.missed_at]) - math.log(point.batch_size)


def _rises(smaller: Numbers, larger: Numbers) -> bool:
    difference = larger.mean() - smaller.mean()
    counts = np.array([len(smaller), len(larger)])
    if counts.min() < FEWEST_RUNS or smaller.var() + larger.var() == 0:  # equal runs do not show the noise
        return bool(difference > math.log(RISE))
    variances = np.maximum([smaller.var(ddof=1), larger.var(ddof=1)], SMALLEST_DEVIATION**2) / counts
    freedom = variances.sum() ** 2 / (variances**2 / (counts - 1)).sum()
    return bool(difference > student_t(freedom, STEPS_CONFIDENCE) * math.sqrt(variances.sum()))


def _fit(fitted: Sequence[LawPoint], shown: Sequence[LawPoint], enough: bool) -> LawFit:
    reached = [point for point in fitted if point.samples]
    runs = sum(len(point.samples) for point in reached)
    lack_freedom, freedom = len(reached) - 2, runs - len(reached)
    repeated = freedom > 0
    if repeated:
        deviation = _settled_deviation(lambda deviation: _around_means(reached, deviation), freedom)
    elif lack_freedom:
        freedom = lack_freedom
        deviation = _settled_deviation(lambda deviation: LawLikelihood(fitted, deviation).residuals, freedom)
    else:
        deviation = ASSUMED_DEVIATION
    law = LawLikelihood(fitted, deviation)
    lacks = False
    if repeated and lack_freedom:
        lack = law.least_deviance - float(_deviance(*_around_means(reached, deviation), deviation))
        from scipy.special import fdtrc

        lacks = bool(fdtrc(lack_freedom, freedom, max(0.0, lack / lack_freedom)) < LACK_OF_FIT)
    posterior = _posterior(fitted, deviation) if lack_freedom else None
    sizes = [point.batch_size for point in fitted]
    low, high = (None, None) if posterior is None else _ends(posterior.log_b_crit, law.log_b_crit, sizes)

    means = {point.batch_size: _likeliest_mean(point, deviation) for point in shown if point.samples}
    excesses = {size: mean - law.log_samples(size) for size, mean in means.items()}
    noise = {point.batch_size: deviation * repeated / math.sqrt(max(1, len(point.samples))) for point in shown}
    residuals = {size: math.expm1(excess) for size, excess in excesses.items()}
    tested = {point.batch_size for point in reached} if lacks else set()
    is_off = any(
        abs(residuals[size]) > LARGE_RESIDUAL and (size in tested or abs(excess) > STANDARD_ERRORS * noise[size])
        for size, excess in excesses.items()
    )
    verdict: FitVerdict = "too_few_points" if not enough else "poor" if is_off else "fits"
    return LawFit(
        s_min=math.exp(law.log_e_min - law.log_b_crit),
        b_crit=math.exp(law.log_b_crit),
        b_crit_low=None if low is None else math.exp(low),
        b_crit_high=None if high is None else math.exp(high),
        deviation=_settled_deviation(lambda _: law.residuals, runs - 2) if runs > 2 else 0.0,
        residuals=residuals,
        verdict=verdict,
        largest_batch=shown[-1].batch_size,
        _posterior=posterior,
    )


def _ends(draws: Numbers, likeliest: float, sizes: Sequence[int]) -> tuple[float | None, float | None]:
    # The 90 % interval of log B_crit, None on a side that only the prior bounds
    logs = np.log(np.array(sizes, dtype=float))
    beyond = (OCTAVES_BEYOND - 1) * math.log(2)
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return (
        None if low < logs.min() - beyond else min(float(low), likeliest),
        None if high > logs.max() + beyond else max(float(high), likeliest),
    )
