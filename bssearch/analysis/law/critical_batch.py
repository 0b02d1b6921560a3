"""The critical batch size from what a minute tells: the gradient noise scale, and the steps of a few runs.

A posterior over log B_crit on a grid. The prior is normal around the noise scale, or flat where that was not measured;
the likelihood is that of the runs under the law E(B) = E_min (1 + B / B_crit), with E_min at its best for each B_crit
(`bssearch.analysis.law.likelihood`). A run that missed the target says that it needs more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bssearch.analysis.law.batch_model import RunnableStep, around, fastest_by_size
from bssearch.analysis.law.likelihood import LawLikelihood, Numbers
from bssearch.analysis.law.points import LawPoint
from bssearch.intervals import FLAT_RATIO
from bssearch.noise import CRITICAL_BATCH_OCTAVES

BEYOND_OCTAVES = 4.0
"""How far outside the batch sizes that can be run B_crit may lie."""

RUN_DEVIATION = 0.2
"""Standard deviation of the log samples of single runs about the law, whose learning rates follow a rule: a choice."""

GRID = 400

CONFIDENCE = 0.90
"""Confidence of every interval here: a choice."""


@dataclass(frozen=True)
class CriticalBatchPosterior:
    """The probability ``weights`` of the values ``log_b_crit``, both (values,)."""

    log_b_crit: Numbers
    weights: Numbers

    @property
    def estimate(self) -> float:
        """Return the median of B_crit."""
        return self._quantile(0.5)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 90 % interval of B_crit."""
        return self._quantile((1 - CONFIDENCE) / 2), self._quantile((1 + CONFIDENCE) / 2)

    def _quantile(self, share: float) -> float:
        return math.exp(float(np.interp(share, np.cumsum(self.weights), self.log_b_crit)))


@dataclass(frozen=True)
class ExpectedOptimum:
    """The batch size with the least expected time, by the law and measured step times.

    ``step`` is that of it among the sizes to choose from; ``flat_range`` are the sizes around it whose expected time is
    within 5 %. ``interval`` holds the optimum with 90 % confidence, among all sizes, on the ladder or not.
    ``relative_times`` are the expected times over that of the optimum, by batch size.
    """

    step: RunnableStep
    interval: tuple[int, int]
    flat_range: tuple[int, int]
    relative_times: dict[int, float]


def critical_batch(
    sizes: Sequence[int], noise_scale: float | None, points: Sequence[LawPoint] = ()
) -> CriticalBatchPosterior:
    """Return what the noise scale (samples) and the runs tell of B_crit, for batch ``sizes`` that can be run."""
    reach = BEYOND_OCTAVES * math.log(2)
    low, high = math.log(min(sizes)) - reach, math.log(max(sizes)) + reach
    if noise_scale is not None:
        low, high = min(low, math.log(noise_scale) - reach), max(high, math.log(noise_scale) + reach)
    grid = np.linspace(low, high, GRID)
    logs = np.zeros(GRID)
    if noise_scale is not None:
        logs -= 0.5 * ((grid - math.log(noise_scale)) / (CRITICAL_BATCH_OCTAVES * math.log(2))) ** 2
    if any(point.samples for point in points):
        logs -= 0.5 * LawLikelihood(points, RUN_DEVIATION).deviances(grid)
    weights = np.exp(logs - logs.max())
    return CriticalBatchPosterior(grid, weights / weights.sum())


def expected_optimum(
    posterior: CriticalBatchPosterior, steps: Sequence[RunnableStep], ladder: Sequence[int]
) -> ExpectedOptimum:
    """Return the size of the ``ladder`` with the least expected log time; ``steps`` are all sizes that can be run.

    Raises ValueError where no size of the ladder has a step time.
    """
    by_size = fastest_by_size(steps)
    sizes = list(by_size)
    choices = [size for size in sizes if size in set(ladder)]
    if not choices:
        raise ValueError(f"none of the batch sizes {', '.join(map(str, ladder))} has a step time")
    logs = np.log([by_size[size].step_seconds for size in sizes])
    law = np.logaddexp(0, posterior.log_b_crit[:, None] - np.log(np.array(sizes, dtype=float)))
    times = law + logs  # (values, sizes), up to the level of the law
    expected = posterior.weights @ (times - times.min(axis=1, keepdims=True))
    at = dict(zip(sizes, expected.tolist(), strict=True))
    best = min(choices, key=at.__getitem__)
    flat = around(sizes.index(best), expected <= max(at[best], expected.min() + math.log(FLAT_RATIO)))
    assert flat is not None, "the best is within 5 % of itself"
    return ExpectedOptimum(
        step=by_size[best],
        interval=_interval(posterior, times, sizes),
        flat_range=(sizes[flat[0]], sizes[flat[1]]),
        relative_times={size: math.exp(at[size] - at[best]) for size in sizes},
    )


def _interval(posterior: CriticalBatchPosterior, times: Numbers, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the sizes between which the optimum of a law lies with 90 % probability."""
    shares = np.bincount(times.argmin(axis=1), weights=posterior.weights, minlength=len(sizes)).cumsum()
    low, high = np.searchsorted(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return sizes[int(low)], sizes[min(int(high), len(sizes) - 1)]
