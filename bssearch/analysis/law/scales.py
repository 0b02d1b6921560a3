"""The law of steps across scales: models of N parameters, trained on D samples."""

# log S(B; D, N) = s + q·log D + r·log N + log(1 + B_crit / B), with log B_crit = b + p·log D, and r = 0 if N follows D.
# B_crit grows with the data, hardly with the model (Zhang et al. 2024, arXiv 2410.21676; Bergsma et al. 2025, arXiv
# 2505.13738). Batch sizes need not be optimal (Schaipp 2026, arXiv 2607.01487).

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bssearch.analysis.law.beyond import BEYOND_SIZES
from bssearch.analysis.posterior import Numbers
from bssearch.analysis.shape import Interval
from bssearch.records.intervals import student_t

FEWEST_SCALES = 3  # the power p needs two scales, and the error of a left-out scale one more
FEWEST_BATCHES = 3  # of each scale: two for S_min and B_crit, and one for their errors
NEAR_LINE = 0.1  # N varies apart from D if log N departs by more than this from a line in log D
B_CRITS = 121
POWERS = np.linspace(-0.5, 2.0, 101)
NEWTON_STEPS = 5
RIDGE = 1e-9
DRAWS = 500
TAILS = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class ScaledSteps:
    """A batch size's steps to the target at a scale."""

    parameters: float
    samples: float
    batch_size: int
    steps: float


class ScalingLaw:
    """The joint law of ``points``, with refits to a bootstrap of the points."""

    # Each draw adds resampled residuals to the fitted steps: divided by √(1 − leverage), and by the random root of χ² /
    # freedom, because few points determine the noise badly.

    def __init__(self, points: Sequence[ScaledSteps]) -> None:
        self.points = points
        table = np.log([[one.samples, one.parameters, one.batch_size, one.steps] for one in points])
        self.middle: Numbers = table[:, :2].mean(axis=0)
        self.data, models = (table[:, :2] - self.middle).T
        self.sizes, logs = table[:, 2], table[:, 3]
        line = self.data * (self.data @ models) / (self.data @ self.data)
        self.columns = 3 if np.abs(models - line).max() > NEAR_LINE else 2
        terms = self._terms(self.data, models)
        self.inverse = np.linalg.pinv(terms)
        self.rest = np.eye(len(points)) - terms @ self.inverse
        self.freedom = len(points) - self.columns - 2
        own = self._nearest(logs[None], POWERS)
        residuals, slopes = self._residuals(logs[None], own), self._slopes(own)[0]
        spare = np.diag(self.rest) - (slopes * np.linalg.lstsq(slopes @ slopes.T, slopes, rcond=None)[0]).sum(axis=0)
        noise = residuals[0] / np.sqrt(np.maximum(spare, RIDGE))
        constant = self._residuals(logs[None], self._nearest(logs[None], np.zeros(1)))
        self.is_shown = bool(
            (constant**2).sum() / (residuals**2).sum() - 1 > student_t(self.freedom) ** 2 / self.freedom
        )
        rng = np.random.default_rng(0)
        wide = np.sqrt(self.freedom / rng.chisquare(self.freedom, (DRAWS, 1)))
        drawn = logs - residuals + wide * rng.choice(noise - noise.mean(), (DRAWS, len(points)))
        self.logs = np.concatenate([logs[None], drawn])
        self.found = np.concatenate([own, self._nearest(drawn, POWERS)])
        self.linear = (self.logs - self._shape(self.found, self.data, self.sizes)) @ self.inverse.T
        self.deviation = float(np.sqrt((residuals**2).sum() / self.freedom))

    @property
    def power(self) -> Interval:
        """B_crit grows with this power of D."""
        return interval(self.found[:, 1])

    @property
    def follows_data(self) -> bool:
        """True if N follows D, so that the law cannot tell them apart."""
        return self.columns == 2

    def b_crit(self, samples: float) -> Interval:
        """B_crit at D samples."""
        return interval(np.exp(self.found[:, 0] + self.found[:, 1] * (math.log(samples) - self.middle[0])))

    def steps(self, parameters: float, samples: float, batch_sizes: Sequence[float]) -> Numbers:
        """Steps (1 + `DRAWS`, batch sizes) at N and D; the first row is the estimate."""
        data, model = np.log([samples, parameters]) - self.middle
        level = self.linear @ self._terms(np.array([data]), np.array([model]))[0]
        sizes = np.log(batch_sizes)
        return np.asarray(np.exp(level[:, None] + self._shape(self.found, np.full(len(sizes), data), sizes)))

    def _terms(self, data: Numbers, models: Numbers) -> Numbers:
        return np.column_stack([np.ones(len(data)), data, models][: self.columns])

    @staticmethod
    def _shape(found: Numbers, data: Numbers, sizes: Numbers) -> Numbers:
        return np.asarray(np.logaddexp(0, found[:, :1] + found[:, 1:] * data - sizes))

    def _residuals(self, logs: Numbers, found: Numbers) -> Numbers:
        return np.asarray((logs - self._shape(found, self.data, self.sizes)) @ self.rest)

    def _slopes(self, found: Numbers) -> Numbers:
        # Of the residuals by log B_crit and p: (n, 2, points)
        share = 1 - np.exp(-self._shape(found, self.data, self.sizes))
        return np.asarray(np.stack([share, share * self.data], axis=1) @ self.rest)

    def _nearest(self, logs: Numbers, powers: Numbers) -> Numbers:
        # Least-squares (log B_crit at the middle D, p) of each row of log steps; a grid, then Gauss-Newton steps
        b_crits = np.linspace(self.sizes.min() - BEYOND_SIZES, self.sizes.max() + BEYOND_SIZES, B_CRITS)
        grid = np.stack(np.meshgrid(b_crits, powers), axis=-1).reshape(-1, 2)
        free = self._shape(grid, self.data, self.sizes) @ self.rest
        found: Numbers = grid[((free**2).sum(axis=1) - 2 * logs @ free.T).argmin(axis=1)]
        count = min(2, len(powers))  # a single power stays
        most = np.array([b_crits[1] - b_crits[0], POWERS[1] - POWERS[0]])[:count]
        for _ in range(NEWTON_STEPS):
            slopes = self._slopes(found)[:, :count]
            squares = slopes @ slopes.transpose(0, 2, 1) + RIDGE * np.eye(count)
            change = np.linalg.solve(squares, slopes @ self._residuals(logs, found)[..., None])[..., 0]
            found[:, :count] += np.clip(change, -most, most)
        return found


def interval(drawn: Numbers) -> Interval:
    """The 90 % interval of draws whose first is the estimate."""
    low, high = np.quantile(drawn[1:], TAILS)
    return Interval(value=float(drawn[0]), low=float(low), high=float(high))
