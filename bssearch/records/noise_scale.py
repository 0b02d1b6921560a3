"""The gradient noise scale tr Σ / ‖G‖², estimated from the norms of gradients over few and over more samples.

G is the gradient over the whole training part, Σ the covariance of the gradients of its single samples (divisor N − 1).
McCandlish et al. 2018 (arXiv 1812.06162, appendix A) take both from two squared norms: with b and B samples drawn
independently, E‖G_b‖² = ‖G‖² + tr Σ / b, and the same for B. Samples drawn without replacement from N vary less, by the
finite population correction: E‖G_b‖² = ‖G‖² + tr Σ · (1/b − 1/N). Both moments are unbiased for a single pass; they are
averaged over the passes apart, and only the averages are divided, since the mean of ratios is biased without bound.

The interval is Fieller's for a ratio of means (1954), with the covariance of the means from the circular block
bootstrap (Politis & Romano 1992) in its closed form, so that nothing is drawn, and Student's t for as many degrees of
freedom as there are blocks less one. Where ‖G‖² cannot be told from zero it has no upper end, and "low or more" is
what remains. Measured: share of 1,000 runs (Gaussian gradients in 64 dimensions, eight small batches of eight a pass)
whose nominal 95 % interval holds the exact value, in brackets the share of "low or more", by the ratio of the noise
scale to the samples of a pass; and, for comparison, what percentiles of block-bootstrapped ratios hold.

======  ==========  ==========  ===========  ==================
passes  0.25        1           8            percentiles
======  ==========  ==========  ===========  ==================
8       98 % (0 %)  98 % (0 %)  98 % (84 %)  83 %, 81 %, 85 %
16      97 % (0 %)  97 % (0 %)  96 % (58 %)  89 %, 87 %, 89 %
32      96 % (0 %)  96 % (0 %)  96 % (11 %)  92 %, 91 %, 93 %
64      95 % (0 %)  95 % (0 %)  97 % (0 %)   94 %, 92 %, 92 %
256     95 % (0 %)  96 % (0 %)  96 % (0 %)   not measured
======  ==========  ==========  ===========  ==================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bssearch.records import GradientNoise
from bssearch.records.intervals import student_t

CRITICAL_BATCH_OCTAVES = 1.5
"""A gradient noise scale tells the critical batch size within so many octaves, one standard deviation: the two are 1.5
to 8 times apart in McCandlish et al. 2018 (arXiv 1812.06162, table 1)."""

FEWEST_PASSES = 8
"""With fewer, an interval would rest on fewer than four blocks."""

FEWEST_TRIALS = 3
"""Trials that an interval over trials takes, as many as any interval over seeds: a choice."""

CONFIDENCE = 0.95
"""The share of intervals that hold the scale; the convention, here as in every answer."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared gradient norms of one pass: ``small`` is the mean over its small batches, ``big`` that of their mean."""

    small: float
    big: float

    @property
    def are_finite(self) -> bool:
        """Whether they can be used at all."""
        return math.isfinite(self.small) and math.isfinite(self.big)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One measurement: ``small_batches`` (two or more) of ``small_batch`` samples, all different, out of ``samples``.

    ``adam`` are the norms after each element was divided as Adam does it; None under other optimizers.
    """

    small_batch: int
    small_batches: int
    samples: int
    plain: Norms
    adam: Norms | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A noise scale in samples and its 95 % interval; without ``high`` it is ``low`` or more, without both unknown."""

    scale: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def relative_half_width(self) -> float:
        """Half the width over the scale; infinite where the interval has no upper end."""
        if self.scale is None or self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / (2 * self.scale) if self.scale > 0 else 0.0


def gradient_noise(passes: Sequence[Pass], seconds: float | None = None) -> GradientNoise:
    """Return what passes, which took ``seconds``, say of the noise scale, plain and as Adam sees it.

    Of fewer than `FEWEST_PASSES` the mean moments are all there is, of none nothing.
    """
    if not passes:
        return GradientNoise(seconds=seconds)
    plain = [moments(one, one.plain) for one in passes]
    adam = [moments(one, one.adam) for one in passes if one.adam is not None]
    found, preconditioned = (estimate(pairs) if len(pairs) >= FEWEST_PASSES else Interval() for pairs in (plain, adam))
    return _noise(found, preconditioned, _means(plain), _means(adam), passes=len(passes), seconds=seconds)


def pooled(trials: Sequence[GradientNoise]) -> GradientNoise:
    """Return the noise scale from the passes of several trials together, most of which have too few of their own.

    The moments are averaged over all passes and only the averages are divided. The interval rests on the differences
    between trials, each of which counts as one: so what differs between their weights, seeds and configurations is in
    it as well. Fewer than `FEWEST_TRIALS` trials give the moments and no interval. Measured: of 1,000 sets of trials
    (Gaussian gradients in 64 dimensions, one to four passes a trial of two small batches of 32) the share with an
    interval, in brackets "low or more" among them, and the share of these nominal 95 % intervals that hold the exact
    value, by the ratio of the noise scale to the samples of a pass.

    ======  ==================  ==================  ==================
    trials  0.25                1                   8
    ======  ==================  ==================  ==================
    3       100 % (0 %), 96 %   99 % (16 %), 96 %   99 % (91 %), 97 %
    4       100 % (0 %), 96 %   100 % (1 %), 96 %   100 % (84 %), 95 %
    8       100 % (0 %), 95 %   100 % (0 %), 96 %   100 % (58 %), 96 %
    16      100 % (0 %), 96 %   100 % (0 %), 95 %   100 % (21 %), 94 %
    32      100 % (0 %), 94 %   100 % (0 %), 96 %   100 % (1 %), 96 %
    ======  ==================  ==================  ==================
    """
    known = [one for one in trials if one.passes and one.trace is not None and one.square is not None]
    if not known:
        return GradientNoise()
    plain, means = _pooled([(one.passes, one.trace, one.square) for one in known])
    adam, adam_means = _pooled([(one.passes, one.adam_trace, one.adam_square) for one in known])
    return _noise(
        plain,
        adam,
        means,
        adam_means,
        passes=sum(one.passes or 0 for one in known),
        seconds=math.fsum(one.seconds or 0.0 for one in known),
    )


Means = tuple[float | None, float | None]
"""Means of (tr Σ, ‖G‖²), None where they are not known."""


def _pooled(rows: Sequence[tuple[int | None, float | None, float | None]]) -> tuple[Interval, Means]:
    """Return the noise scale and the mean moments of trials, given by their passes and their own mean moments."""
    known = [
        (passes, trace, square) for passes, trace, square in rows if passes and trace is not None and square is not None
    ]
    if not known:
        return Interval(), (None, None)
    weights, values = np.array([row[0] for row in known], dtype=np.float64), np.array([row[1:] for row in known])
    trace, square = np.average(values, axis=0, weights=weights).tolist()
    found = _of_trials(values, weights) if len(known) >= FEWEST_TRIALS else Interval()
    return found, (trace, square)


def _means(pairs: Sequence[tuple[float, float]]) -> Means:
    if not pairs:
        return None, None
    trace, square = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return trace, square


def _noise(
    plain: Interval,
    adam: Interval,
    means: Means,
    adam_means: Means,
    *,
    passes: int,
    seconds: float | None,
) -> GradientNoise:
    return GradientNoise(
        scale=plain.scale,
        low=plain.low,
        high=plain.high,
        adam_scale=adam.scale,
        adam_low=adam.low,
        adam_high=adam.high,
        passes=passes,
        trace=means[0],
        square=means[1],
        adam_trace=adam_means[0],
        adam_square=adam_means[1],
        seconds=seconds,
    )


def moments(one: Pass, norms: Norms) -> tuple[float, float]:
    """Return unbiased estimates of tr Σ and ‖G‖² from one pass; the second may be negative."""
    small, big = 1 / one.small_batch, 1 / (one.small_batch * one.small_batches)
    trace = (norms.small - norms.big) / (small - big)
    return trace, norms.big - trace * (big - 1 / one.samples)


def estimate(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Return the ratio of the means of (tr Σ, ‖G‖²) over consecutive passes, at least two, with its 95 % interval.

    The interval is the set of ratios θ for which the mean of tr Σ − θ‖G‖² is no further from zero than t standard
    errors: the solutions of a quadratic. A negative mean of ‖G‖² is taken for zero, which only widens it. Where tr Σ
    cannot be told from zero either, nothing is known.
    """
    values, unit = _scaled(np.asarray(pairs, dtype=np.float64))
    block = max(1, round(len(values) ** (1 / 3)))
    return _fieller(values.mean(axis=0), _covariance_of_means(values, block), len(values) / block - 1, unit)


def _of_trials(moments: Numbers, weights: Numbers) -> Interval:
    """Return the ratio of the weighted means of moments (trials, 2), which are independent, as `estimate` does.

    A weighted mean is a ratio of sums, and its covariance that of the linearised ratio (Cochran 1977, chapter 6), which
    takes no equal variances; Student's t is for the effective number of trials, (Σw)²/Σw² (Kish 1965), less one.
    """
    values, unit = _scaled(moments)
    shares = weights / weights.sum()
    means = shares @ values
    deviations = shares[:, None] * (values - means)
    covariance = deviations.T @ deviations * len(values) / (len(values) - 1)
    return _fieller(means, covariance, 1 / (shares**2).sum() - 1, unit)


def _scaled(values: Numbers) -> tuple[Numbers, Numbers]:
    """Return moments in units of their largest: a tiny ‖G‖² must not underflow when it is squared."""
    unit = np.maximum(np.abs(values).max(axis=0), np.finfo(np.float64).tiny)
    return values / unit, unit


def _fieller(means: Numbers, covariance: Numbers, freedom: float, unit: Numbers) -> Interval:
    """Return the ratio of two means (in these units) with Fieller's interval, for Student's t with that freedom."""
    covariance = covariance * student_t(freedom) ** 2
    trace, square, ratio = means[0], max(means[1], 0.0), unit[0] / unit[1]
    # a·θ² − 2b·θ + c ≤ 0
    a = square**2 - covariance[1, 1]
    b = trace * square - covariance[0, 1]
    c = trace**2 - covariance[0, 0]
    upper_root = b + math.sqrt(max(0.0, b**2 - a * c))
    if a > 0:
        low = max(0.0, c / upper_root) if upper_root > 0 else 0.0
        return Interval(float(trace / square * ratio), float(low * ratio), float(upper_root / a * ratio))
    return Interval(low=float(c / upper_root * ratio)) if c > 0 and upper_root > 0 else Interval()


def _covariance_of_means(values: Numbers, block: int) -> Numbers:
    """Return the covariance (2, 2) of the means of values (passes, 2) by the circular block bootstrap.

    That of infinitely many resamples, from the deviations of all blocks of neighbours; divided by its own expectation
    for independent values, 1 − block/passes.
    """
    count = len(values)
    deviations = values - values.mean(axis=0)
    of_blocks = sum(np.roll(deviations, -shift, axis=0) for shift in range(block)) / block
    covariance: Numbers = of_blocks.T @ of_blocks / count * (block / count)
    return covariance / (1 - block / count)
