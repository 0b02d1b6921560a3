"""What is known of the time to a target before any trial: laws of it over batch size and learning rate, as a sample.

    time to target = step time t(B) · steps,    steps ∝ (1 + B_crit / B) · valley(learning rate)

The number of steps over batch size is McCandlish et al. 2018's; Shallue et al. 2019 measured the same form after the
learning rate was tuned at each batch size. The best learning rate grows with the batch size as B^s up to a knee near
B_crit, s anywhere from 0 to 1 (1: Goyal et al. 2017; 1/2: Malladi et al. 2022 for Adam), and steps grow as a power of
the learning rate to either side of it. None of the constants is known; each law has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bssearch.noise import CRITICAL_BATCH_OCTAVES
from bssearch.samplers.time_model.candidates import Points, latin_hypercube

Numbers = NDArray[np.float64]

LAWS = 512
BEYOND_OCTAVES = 2.0
"""How far outside the batch sizes of the space B_crit may lie."""

UNINFORMED = 0.2
"""The share of the laws that does without a gradient noise scale, which tells B_crit roughly."""

KNEE_OCTAVES = 2.0
"""How far above B_crit the best learning rate may go on growing."""

LEFT = (0.4, 1.0)
RIGHT = (0.7, 4.0)
"""Steps are ∝ rate^−left far below the best learning rate, ∝ rate^right far above it."""

DEEPEST = 3.0
"""A learning rate costs at most so much, in nats: such trials do not get there, and are as bad as each other."""

LEVEL = 3.0
"""Standard deviation of the overall level of log time."""

SIDE = 0.2
SIDE_LENGTH = 0.7
"""Standard deviation and length of the main effect of each other parameter, over [0, 1]."""

OWN = 0.05
"""Standard deviation of what each configuration has for itself."""

OCTAVES = 2.0
NATS = 1.2
"""Lengths over which what the laws leave unexplained changes: in log2 of the batch size, in log of the rate."""


class LawPrior:
    """Laws drawn from the prior, for a space whose default configuration has a batch size and a learning rate."""

    def __init__(
        self,
        *,
        batch_sizes: Sequence[int],
        default_size: int,
        default_log_rate: float,
        log_rate_width: float,
        seed: int,
        noise_scale: float | None = None,
    ) -> None:
        """``log_rate_width`` is how wide the space of the learning rate is at the default batch size, in nats.

        ``noise_scale`` is the gradient noise scale near the target in samples, where it has been measured.
        """
        share = latin_hypercube(LAWS, 6, np.random.default_rng(seed)).clip(1e-6, 1 - 1e-6)
        low, high = min(batch_sizes), max(batch_sizes)
        normal = np.array([NormalDist().inv_cdf(one) for one in share[:, 1]])
        self._critical = np.exp2(
            _spread(share[:, 0], math.log2(low) - BEYOND_OCTAVES, math.log2(high) + BEYOND_OCTAVES, noise_scale)
        )
        self._best_log_rate = default_log_rate + normal * log_rate_width / 4
        self._slope = share[:, 2]
        self._knee = self._critical * np.exp2(KNEE_OCTAVES * share[:, 5])
        self._left = LEFT[0] + (LEFT[1] - LEFT[0]) * share[:, 3]
        self._right = RIGHT[0] * (RIGHT[1] / RIGHT[0]) ** share[:, 4]
        self._default_size = default_size

    def log_steps(self, points: Points) -> Numbers:
        """Return the log of the number of steps by each law, up to a constant of its own, shape (points, laws)."""
        sizes, where = np.unique(points.batch_sizes, return_inverse=True)
        size = sizes[:, None]
        shift = self._slope * (np.log1p(self._knee / size) - np.log1p(self._knee / self._default_size))
        off = points.log_rates[:, None] + (shift - self._best_log_rate)[where]
        left, right = self._left, self._right
        below, above = np.exp(np.minimum(-left * off, 8.0)), np.exp(np.minimum(right * off, 8.0))
        valley = np.log(right / (left + right) * below + left / (left + right) * above)
        steps: Numbers = np.log1p(self._critical / size)[where] + np.minimum(valley, DEEPEST)
        return steps


def _spread(share: Numbers, low: float, high: float, noise_scale: float | None) -> Numbers:
    """Return the log2 of B_crit at shares of its distribution: uniform, or mostly near the noise scale."""
    if noise_scale is None:
        return low + (high - low) * share
    wide = low + (high - low) * share / UNINFORMED
    at = [NormalDist().inv_cdf(max(1e-6, one)) for one in (share - UNINFORMED) / (1 - UNINFORMED)]
    return np.where(share < UNINFORMED, wide, math.log2(noise_scale) + CRITICAL_BATCH_OCTAVES * np.array(at))


def covariances(points: Points) -> tuple[Numbers, Numbers]:
    """Return the covariance of what adds to every law, and the correlation of what the laws leave unexplained.

    Both of shape (points, points), of log time.
    """
    apart = _squares(points.log2_batch_sizes, OCTAVES) + _squares(points.log_rates, NATS)
    adds = LEVEL**2 + OWN**2 * np.eye(len(points))
    for other in points.others.T:
        apart = apart + _squares(other, 1.0)
        adds = adds + SIDE**2 * np.exp(-0.5 * _squares(other, SIDE_LENGTH))
    return adds, np.exp(-0.5 * apart)


def _squares(values: Numbers, length: float) -> Numbers:
    """Return the squared distance of each pair, in lengths."""
    squares: Numbers = ((values[:, None] - values[None, :]) / length) ** 2
    return squares
