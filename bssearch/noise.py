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

from bssearch.intervals import student_t
from bssearch.records import GradientNoise

FEWEST_PASSES = 8
"""With fewer, an interval would rest on fewer than four blocks."""

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


def gradient_noise(passes: Sequence[Pass]) -> GradientNoise:
    """Return what passes say of the noise scale, plain and as Adam sees it; nothing of fewer than `FEWEST_PASSES`."""
    if len(passes) < FEWEST_PASSES:
        return GradientNoise()
    plain = estimate([moments(one, one.plain) for one in passes])
    preconditioned = [moments(one, one.adam) for one in passes if one.adam is not None]
    adam = estimate(preconditioned) if len(preconditioned) >= FEWEST_PASSES else Interval()
    return GradientNoise(
        scale=plain.scale,
        low=plain.low,
        high=plain.high,
        adam_scale=adam.scale,
        adam_low=adam.low,
        adam_high=adam.high,
        passes=len(passes),
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
    values = np.asarray(pairs, dtype=np.float64)
    block = max(1, round(len(values) ** (1 / 3)))
    trace, square = values.mean(axis=0)
    # A tiny ‖G‖² must not underflow when it is squared: the ratio of the scaled moments is scaled back at the end.
    unit = np.maximum(np.abs(values).max(axis=0), np.finfo(np.float64).tiny)
    covariance = _covariance_of_means(values / unit, block) * student_t(len(values) / block - 1) ** 2
    trace, square, ratio = trace / unit[0], max(square, 0.0) / unit[1], unit[0] / unit[1]
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
