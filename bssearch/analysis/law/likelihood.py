"""The likelihood of the law of samples: E(B) = E_min (1 + B / B_crit) with log-normal runs, some of them censored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bssearch.records import TrialRecord


@dataclass(frozen=True, slots=True)
class LawPoint:
    """The runs of the tuned configuration at one batch size.

    ``samples`` are those to the target of the runs that reached it, ``missed_at`` those at which the others were last
    seen to miss it: they need more. ``untuned``: known not to be retuned, for its steps rise or its learning rate lies
    at an edge.
    """

    batch_size: int
    samples: tuple[float, ...]
    missed_at: tuple[float, ...] = ()
    untuned: bool = False


def law_point(batch_size: int, runs: Iterable[TrialRecord]) -> LawPoint:
    """Return the samples to the target of runs at a batch size; one that was stopped needs more than it had seen."""
    outcomes = [run.outcome for run in runs if run.outcome is not None]
    reached = [one.steps_to_target * batch_size for one in outcomes if one.steps_to_target]
    missed = [one.last_miss_step * batch_size for one in outcomes if one.state.is_censored and one.last_miss_step]
    return LawPoint(batch_size, tuple(map(float, reached)), tuple(map(float, missed)))


BEYOND = 1e4
"""B_crit is sought between the smallest batch size over this and the largest times this, where E or S is constant."""

GRID = 0.25
"""Distance between the values of log B_crit looked at first: the law bends over about 1. A choice."""

ASSUMED_DEVIATION = 0.05
"""Standard deviation of log samples between runs, where two single runs leave nothing to measure it by: a choice."""

SMALLEST_DEVIATION = 1e-6
"""Runs without any spread are no more exact than this."""

NEWTON_STEPS = 50
SETTLING_STEPS = 100
"""The most steps of the two iterations, which end sooner where they have settled: choices."""

CROSSING_ROUNDS = 12
"""Rounds that narrow the crossing, each to a sixteenth: to double precision. A choice."""

Numbers = NDArray[np.float64]


class LawLikelihood:
    """The law at each log B_crit, with log E_min at its best for it; the deviation of log samples is given.

    ``log_b_crit`` and ``log_e_min`` are the likeliest, ``residuals`` those of the runs that reached the target and of
    where the others were seen to miss it.
    """

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
        self.least_deviance = float(self.deviances(here)[0])
        reached, missed = self._residuals(here)
        self.residuals = reached[0], missed[0]

    def log_samples(self, batch_size: int) -> float:
        """Return log E(B) by the likeliest law."""
        return self.log_e_min + float(np.logaddexp(0, math.log(batch_size) - self.log_b_crit))

    def deviances(self, log_b_crit: Numbers) -> Numbers:
        """Return −2 log likelihood (n,), up to a constant."""
        return deviance(*self._residuals(log_b_crit), self.deviation)

    def limits(self, allowed: float) -> tuple[float | None, float | None]:
        """Return the outermost log B_crit whose deviance is ``allowed`` above the least; None where none is."""
        grid = np.sort(np.append(self.grid, self.log_b_crit))
        inside = np.flatnonzero(self.deviances(grid) - self.least_deviance <= allowed)

        def excesses(log_b_crit: Numbers) -> Numbers:
            return self.deviances(log_b_crit) - self.least_deviance - allowed

        first, last = inside[0], inside[-1]
        low = None if first == 0 else _crossing(excesses, grid[first], grid[first - 1])
        high = None if last == len(grid) - 1 else _crossing(excesses, grid[last], grid[last + 1])
        return low, high

    def region(self, allowed: float) -> tuple[tuple[float, float, float], ...]:
        """Return log B_crit, log E_min and how far that may be off, over all laws up to ``allowed`` above the least."""
        low, high = self.limits(allowed)
        ends = self.grid[0] if low is None else low, self.grid[-1] if high is None else high
        over = np.append(np.linspace(*ends, 41), self.log_b_crit)
        left = np.maximum(0, allowed - (self.deviances(over) - self.least_deviance))
        halves = self.deviation * np.sqrt(left / len(self.reached))
        levels = _level(*self._bare(over), self.deviation)
        return tuple(zip(over.tolist(), levels.tolist(), halves.tolist(), strict=True))

    def _likeliest(self) -> float:
        best = int(np.argmin(self.deviances(self.grid)))
        low, high = self.grid[max(0, best - 1)], self.grid[min(len(self.grid) - 1, best + 1)]
        slopes = self._slopes(np.array([low, high]))
        return _crossing(self._slopes, low, high) if slopes[0] < 0 < slopes[1] else float(self.grid[best])

    def _slopes(self, log_b_crit: Numbers) -> Numbers:
        """Return values (n,) proportional to the derivatives of the deviance by log B_crit; E_min is at its best."""
        reached, missed = self._residuals(log_b_crit)
        shares = [
            np.exp(-np.logaddexp(0, log_b_crit[:, None] - sizes)) for sizes in (self.reached_sizes, self.missed_sizes)
        ]
        known = (reached * shares[0]).sum(axis=-1)
        slopes: Numbers = known + self.deviation * (_hazard(-missed / self.deviation) * shares[1]).sum(axis=-1)
        return slopes

    def _residuals(self, log_b_crit: Numbers) -> tuple[Numbers, Numbers]:
        reached, missed = self._bare(log_b_crit)
        level = _level(reached, missed, self.deviation)[:, None]
        return reached - level, missed - level

    def _bare(self, log_b_crit: Numbers) -> tuple[Numbers, Numbers]:
        """Return log E − log(1 + B / B_crit), (n, runs): all of them estimates of log E_min."""
        return (
            self.reached - np.logaddexp(0, self.reached_sizes - log_b_crit[:, None]),
            self.missed - np.logaddexp(0, self.missed_sizes - log_b_crit[:, None]),
        )


def _logs(runs: Sequence[tuple[int, tuple[float, ...]]]) -> tuple[Numbers, Numbers]:
    """Return log samples and log batch size, one each for every run."""
    samples = [math.log(value) for _, values in runs for value in values]
    return np.array(samples), np.array([math.log(size) for size, values in runs for _ in values])


def likeliest_mean(point: LawPoint, deviation: float) -> float:
    """Return the likeliest mean of the log samples of a point's runs."""
    return float(_level(np.log(point.samples), np.log(point.missed_at), deviation))


def around_means(points: Sequence[LawPoint], deviation: float) -> tuple[Numbers, Numbers]:
    """Return the residuals of reached and of missed runs around the mean of their own batch size."""
    means = [likeliest_mean(point, deviation) for point in points]
    reached = [np.log(point.samples) - mean for point, mean in zip(points, means, strict=True)]
    missed = [np.log(point.missed_at) - mean for point, mean in zip(points, means, strict=True)]
    return np.concatenate(reached), np.concatenate(missed)


def _level(reached: Numbers, missed: Numbers, deviation: float) -> Numbers:
    """Return the likeliest mean of normal values (..., n), of which others are known to exceed ``missed`` (..., m).

    Newton's method on the score, which is convex and falls: from the mean of the known values it never overshoots.
    """
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


def deviance(reached: Numbers, missed: Numbers, deviation: float) -> Numbers:
    """Return −2 log likelihood of residuals (..., n) and of exceeding ``missed`` (..., m), up to a constant."""
    from scipy.special import log_ndtr

    total: Numbers = ((reached / deviation) ** 2).sum(axis=-1) - 2 * log_ndtr(-missed / deviation).sum(axis=-1)
    return total


def _hazard(distance: Numbers) -> Numbers:
    """Return φ/Φ of the standard normal, the derivative of log Φ."""
    from scipy.special import erfcx

    hazard: Numbers = math.sqrt(2 / math.pi) / erfcx(-distance / math.sqrt(2))
    return hazard


def settled_deviation(residuals: Callable[[float], tuple[Numbers, Numbers]], freedom: int) -> float:
    """Return the deviation of log samples, given the residuals of reached and missed runs at a deviation.

    Without missed runs √(Σr² / freedom); with them, the expectation of their squares takes part (the EM algorithm).
    """
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
    """Return where a function (n,) → (n,) rises above 0, between two arguments on either side of that."""
    for _ in range(CROSSING_ROUNDS):
        between = np.linspace(below, above, 17)
        rises = function(between) > 0
        rises[0], rises[-1] = False, True
        first = int(np.argmax(rises))
        below, above = between[first - 1], between[first]
    return float(below)
