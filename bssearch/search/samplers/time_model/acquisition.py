"""The knowledge gradient per unit cost (Frazier et al. 2009) on the posterior of log time to the target.

The next run has the largest expected drop of the least posterior mean per cost^`COST_POWER`. The posterior is a
mixture over laws, departures from a law, and seed-to-seed spreads. Each component is a Gaussian process around a law
with a free level.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtri
from threadpoolctl import ThreadpoolController

from bssearch.records.intervals import FLAT_RATIO
from bssearch.records.noise_scale import CRITICAL_BATCH_OCTAVES
from bssearch.search.samplers.time_model.candidates import (
    ERROR,
    Extrapolation,
    Indices,
    Numbers,
    Points,
    Run,
    SpaceCandidates,
    extrapolate,
    latin_hypercube,
)

LAWS = 512
BEYOND_OCTAVES = 2.0  # B_crit may be this many octaves beyond the batch sizes

UNINFORMED = 0.2  # share of laws that ignore the gradient noise scale, because the scale is a rough estimate

KNEE_OCTAVES = 2.0  # the best learning rate may grow up to this many octaves above B_crit

# Steps are ∝ rate^−left far below the best learning rate, and ∝ rate^right far above
LEFT = (0.4, 1.0)
RIGHT = (0.7, 4.0)

# Prior deviation of the best log learning rate, as a share of the range. A run that has reached the target is near the
# best rate; before a success, the best rate may be anywhere.
NEAR_HIT = 1 / 4
BEFORE_HIT = 5 / 8

DEEPEST = 3.0  # largest cost of a learning rate, in nats; trials farther behind miss the target

LEVEL = 3.0  # prior deviation of the overall log time

# Deviation and length scale of other parameters' effects, on [0, 1]
SIDE = 0.2
SIDE_LENGTH = 0.7

OWN = 0.05  # prior deviation of a configuration's individual effect

# Length scales of departures in log2 batch size and log learning rate
OCTAVES = 2.0
NATS = 1.2


class LawPrior:
    """Random laws of training steps, around a batch size and a learning rate."""

    def __init__(
        self,
        *,
        batch_sizes: Sequence[int],
        size: int,
        log_rate: float,
        log_rate_deviation: float,
        seed: int,
        noise_scale: float | None = None,
    ) -> None:
        """``log_rate_deviation`` is the prior deviation of the best log learning rate, in nats.

        ``noise_scale`` is the gradient noise scale near the target, in samples.
        """
        share = latin_hypercube(LAWS, 6, np.random.default_rng(seed)).clip(1e-6, 1 - 1e-6)
        low, high = min(batch_sizes), max(batch_sizes)
        normal = np.array([NormalDist().inv_cdf(one) for one in share[:, 1]])
        self._critical = np.exp2(
            _spread(share[:, 0], math.log2(low) - BEYOND_OCTAVES, math.log2(high) + BEYOND_OCTAVES, noise_scale)
        )
        self._best_log_rate = log_rate + normal * log_rate_deviation
        self._slope = share[:, 2]
        self._knee = self._critical * np.exp2(KNEE_OCTAVES * share[:, 5])
        self._left = LEFT[0] + (LEFT[1] - LEFT[0]) * share[:, 3]
        self._right = RIGHT[0] * (RIGHT[1] / RIGHT[0]) ** share[:, 4]
        self._size = size

    def log_steps(self, points: Points) -> Numbers:
        """Return log steps of shape (points, laws), up to a constant per law."""
        sizes, where = np.unique(points.batch_sizes, return_inverse=True)
        size = sizes[:, None]
        shift = self._slope * (np.log1p(self._knee / size) - np.log1p(self._knee / self._size))
        off = points.log_rates[:, None] + (shift - self._best_log_rate)[where]
        left, right = self._left, self._right
        below, above = np.exp(np.minimum(-left * off, 8.0)), np.exp(np.minimum(right * off, 8.0))
        valley = np.log(right / (left + right) * below + left / (left + right) * above)
        steps: Numbers = np.log1p(self._critical / size)[where] + np.minimum(valley, DEEPEST)
        return steps


def _spread(share: Numbers, low: float, high: float, noise_scale: float | None) -> Numbers:
    if noise_scale is None:
        return low + (high - low) * share
    wide = low + (high - low) * share / UNINFORMED
    at = [NormalDist().inv_cdf(max(1e-6, one)) for one in (share - UNINFORMED) / (1 - UNINFORMED)]
    return np.where(share < UNINFORMED, wide, math.log2(noise_scale) + CRITICAL_BATCH_OCTAVES * np.array(at))


def covariances(points: Points) -> tuple[Numbers, Numbers]:
    """Return the covariance that all laws share and the correlation of departures, each of shape (points, points)."""
    apart = _squares(np.log2(points.batch_sizes), OCTAVES) + _squares(points.log_rates, NATS)
    adds = LEVEL**2 + OWN**2 * np.eye(len(points))
    for other in points.others.T:
        apart = apart + _squares(other, 1.0)
        adds = adds + SIDE**2 * np.exp(-0.5 * _squares(other, SIDE_LENGTH))
    return adds, np.exp(-0.5 * apart)


def _squares(values: Numbers, length: float) -> Numbers:
    return ((values[:, None] - values[None, :]) / length) ** 2


SEED_NOISES = ((0.10, 0.3), (0.16, 0.4), (0.28, 0.3))  # pairs of seed noise and prior weight

DEPARTURES = (0.15, 0.50)

# Seed noise and departure before the first trial
PRIOR_NOISE = 0.15
PRIOR_DEPARTURE = 0.25

UNCERTAIN = 0.02  # extra variance of a mean as the estimate of a law's level

LEAST_WEIGHT = 0.01
LEAST_LAW = 3e-4


@dataclass(frozen=True)
class TimesPosterior:
    """The log times of ``points`` (ascending indices), with a mean (points,) and a covariance (points, points)."""

    points: Indices
    mean: Numbers
    covariance: Numbers
    seed_noise: float

    @cached_property
    def _places(self) -> dict[int, int]:
        return {point: place for place, point in enumerate(self.points.tolist())}

    def place(self, point: int) -> int:
        return self._places[point]

    def places(self, points: Sequence[int]) -> Indices:
        return np.array([self._places[point] for point in points if point in self._places], int)

    def after(self, place: int) -> TimesPosterior:
        """The posterior after a run of a point, if the result equals the point's mean."""
        column = self.covariance[:, place]
        known = np.outer(column, column) / (column[place] + self.seed_noise**2)
        return replace(self, covariance=self.covariance - known)


@dataclass(frozen=True)
class _Data:
    places: Indices
    mean: Numbers
    weight: Numbers
    only_bounds: NDArray[np.bool_]
    log_likelihood: float


@dataclass(frozen=True)
class _Part:
    # Part of the mixture with equal noise and departure. `across`: covariance of all points with the data. `root`:
    # inverse Cholesky factor of the noisy data covariance. `solved`: inverse covariance × residuals of each law.

    log_weights: Numbers
    solved: Numbers
    across: Numbers
    root: Numbers
    covariance: Numbers
    seed_noise: float


def prior(indices: Indices, points: Points, laws: Numbers) -> TimesPosterior:
    """The prior, given the points' log times under each law, of shape (points, laws)."""
    adds, departs = covariances(points)
    return TimesPosterior(indices, laws.mean(axis=1), np.cov(laws) + adds + PRIOR_DEPARTURE**2 * departs, PRIOR_NOISE)


def condition(indices: Indices, points: Points, laws: Numbers, found: Extrapolation) -> TimesPosterior:
    adds, departs = covariances(points)
    kept = np.searchsorted(indices, found.points)
    parts = []
    for noise, share in SEED_NOISES:
        data = _by_point(kept, found, noise)
        for departure in DEPARTURES:
            parts.append(_part(laws, adds + departure**2 * departs, data, noise, math.log(share)))
    return _matched(indices, laws, parts)


def _by_point(places: Indices, found: Extrapolation, noise: float) -> _Data:
    # the average of a point's runs has all information, because repeats differ by noise alone
    where, group = np.unique(places, return_inverse=True)

    def summed(values: NDArray[Any]) -> Numbers:
        return np.bincount(group, values, len(where)).astype(np.float64)

    weights = 1 / (noise**2 + found.variance)
    weight = summed(weights)
    mean = summed(weights * found.log_seconds) / weight
    spread = weights @ (found.log_seconds - mean[group]) ** 2
    likelihood = -0.5 * spread + 0.5 * np.log(weights).sum() - 0.5 * np.log(weight).sum()
    return _Data(where, mean, weight, summed(1.0 - found.is_bound) == 0, float(likelihood))


def _part(laws: Numbers, covariance: Numbers, data: _Data, noise: float, log_prior: float) -> _Part:
    at = data.places
    factor = np.linalg.cholesky(covariance[np.ix_(at, at)] + np.diag(1 / data.weight))
    root, _ = dtrtri(factor, lower=1)
    residuals, solved = _residuals(data.mean[:, None] - laws[at], root.T @ root, data)
    fit = -0.5 * np.einsum("pl,pl->l", residuals, solved) - np.log(np.diag(factor)).sum()
    return _Part(
        log_weights=log_prior + data.log_likelihood + fit,
        solved=solved,
        across=covariance[:, at],
        root=root,
        covariance=covariance,
        seed_noise=noise,
    )


def _residuals(off: Numbers, inverse: Numbers, data: _Data) -> tuple[Numbers, Numbers]:
    # a bound counts only if the law is below the bound
    bounds = data.only_bounds
    if not bounds.any():
        return off, inverse @ off
    trust = np.where(bounds, 0.0, 1 / (UNCERTAIN + 1 / data.weight))
    level = trust @ off / trust.sum() if trust.any() else off.mean(axis=0)
    residuals = off.copy()
    residuals[bounds] = np.maximum(off[bounds], level)
    solved = inverse @ residuals
    moved = residuals[bounds] - solved[bounds] / data.weight[bounds, None]  # covariance × solved
    met = np.maximum(off[bounds], moved)
    solved += inverse[:, bounds] @ (met - residuals[bounds])
    residuals[bounds] = met
    return residuals, solved


def _matched(indices: Indices, laws: Numbers, parts: Sequence[_Part]) -> TimesPosterior:
    top = max(part.log_weights.max() for part in parts)
    weights = [np.exp(part.log_weights - top) for part in parts]
    total = sum(one.sum() for one in weights)
    means, shares = [], []
    within: Numbers = np.zeros((len(indices), len(indices)))
    variance = 0.0
    for part, one in zip(parts, weights, strict=True):
        weight = one.sum() / total
        variance += weight * part.seed_noise**2
        if weight < LEAST_WEIGHT:
            continue
        kept = one > LEAST_LAW * one.max()
        means.append(laws[:, kept] + part.across @ part.solved[:, kept])
        shares.append(one[kept])
        explained = part.across @ part.root.T
        within += weight * (part.covariance - explained @ explained.T)
    mixed, share = np.concatenate(means, axis=1), np.concatenate(shares)
    share /= share.sum()
    mean = mixed @ share
    apart = (mixed - mean[:, None]) * np.sqrt(share)
    return TimesPosterior(indices, mean, within + apart @ apart.T, math.sqrt(variance))


SLOWEST_FALL = 0.3  # least ratio of an extrapolated step time to a smaller batch size's step time


def step_seconds_at(known: Mapping[int, float], batch_size: int) -> float:
    """The step seconds, linearly interpolated or extrapolated if unknown."""
    if batch_size in known or len(known) == 1:
        return known.get(batch_size) or next(iter(known.values()))
    sizes = sorted(known)
    right = min(max(bisect_left(sizes, batch_size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    return max(known[low] + slope * (batch_size - low), SLOWEST_FALL * known[low])


MOST_TRIED = 128  # limit of counted points: the best, and a sample of the other tried points

PROMISING = 3  # the neighbours of this many best points are candidates

# The score is gain / price^`COST_POWER`, with a minimum price as a share of the incumbent's time
COST_POWER = 0.5
LEAST_COST = 0.35

BEHIND = 0.1  # in nats; pruners probably stop trials farther behind the incumbent

EVEN = 1e-3  # in nats; at a given batch size, gains that differ less are even, and the least mean time decides

NOT_AGAIN = 1e6  # a penalty larger than any gain

# Normal quadrature
NODES = np.linspace(-4.0, 4.0, 25)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.exp(-(NODES**2) / 2).sum()


class KnowledgeGradient:
    """Chooses points of a space, starting with ``default``. The same ``seed`` and runs give the same points."""

    def __init__(
        self,
        candidates: SpaceCandidates,
        *,
        default: int,
        target_gain: float,
        step_seconds: Mapping[int, float],
        seed: int,
        noise_scale: float | None = None,
    ) -> None:
        self._candidates = candidates
        self._default = default
        self._target_gain = target_gain
        self._step_seconds = step_seconds
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._noise_scale = noise_scale
        self._known: tuple[object, TimesPosterior, float] | None = None
        self.expected_improvement = math.inf
        """The largest expected gain at the last `ask` without a batch size, in nats; infinite before a success."""

    def ask(self, runs: Sequence[Run], batch_size: int | None = None) -> int:
        """Return the point to run next; with ``batch_size``, the point of the largest gain there, at any cost."""
        if not runs and batch_size is None:
            return self._default
        posterior, error = self._posterior(runs)
        reached = {run.point for run in runs if run.hit is not None}
        hits = posterior.places(sorted(reached))
        running = [posterior.place(run.point) for run in runs if run.running]
        score = (
            self._gains_per_price(posterior, error, hits, running)
            if batch_size is None
            else self._gains_at(batch_size, posterior, hits, running)
        )
        if batch_size is not None or not reached:  # repeats a miss only if no untried point is left
            score[posterior.places(sorted({run.point for run in runs} - reached))] -= NOT_AGAIN
        return int(posterior.points[np.argmax(score + 1e-12 * self._rng.random(len(score)))])

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        """The point with the least mean log time among points that reached the target, if any."""
        hits = sorted({run.point for run in runs if run.hit is not None})
        if not hits:
            return None
        posterior, _ = self._posterior(runs)
        at = posterior.places(hits)
        return int(posterior.points[at[np.argmin(posterior.mean[at])]])

    def contenders(self, runs: Sequence[Run]) -> list[int]:
        """Return the ascending batch sizes of points that may match the incumbent; before a success, all sizes.

        A point may match if the point's mean minus a standard deviation is within `FLAT_RATIO` of the incumbent's mean.
        """
        incumbent = self.incumbent(runs)
        if incumbent is None:
            return list(self._candidates.batch_sizes)
        posterior, _ = self._posterior(runs)
        lowest = posterior.mean - np.sqrt(np.maximum(np.diag(posterior.covariance), 0.0))
        may_win = lowest < posterior.mean[posterior.place(incumbent)] + math.log(FLAT_RATIO)
        return sorted({int(size) for size in self._candidates.take(posterior.points[may_win]).batch_sizes})

    def _gains_per_price(
        self, posterior: TimesPosterior, error: float, hits: Indices, running: Sequence[int]
    ) -> Numbers:
        default = posterior.place(self._default)
        star = posterior.mean[hits].min() if hits.size else posterior.mean[default]
        behind = np.maximum(0.0, posterior.mean - star - BEHIND)
        price = np.maximum(np.exp(posterior.mean - star - behind / error), LEAST_COST) ** COST_POWER
        gains = _improvements(posterior, hits, behind) if hits.size else None
        self.expected_improvement = math.inf if gains is None else float(gains.max())
        if gains is None or running:
            tried = np.array(sorted({*hits.tolist(), *running}) or [default])
            gains = _improvements(_after(posterior, running), tried, behind)
        score: Numbers = gains / price
        return score

    def _gains_at(self, batch_size: int, posterior: TimesPosterior, hits: Indices, running: Sequence[int]) -> Numbers:
        sizes = self._candidates.take(posterior.points).batch_sizes
        here = sizes == min(self._candidates.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        tried = np.array([place for place in sorted({*hits.tolist(), *running}) if here[place]], int)
        if not tried.size:
            tried = np.array([np.argmin(np.where(here, posterior.mean, np.inf))])
        gains = _improvements(_after(posterior, running), tried, np.zeros(len(sizes)))
        return np.where(here, gains - EVEN * posterior.mean, -2 * NOT_AGAIN)

    def _posterior(self, runs: Sequence[Run]) -> tuple[TimesPosterior, float]:
        seen = [(len(run.progress.gains), run.running) for run in runs]
        if self._known is None or self._known[0] != seen:
            with _linear_algebra().limit(limits=1, user_api="blas"):
                self._known = (seen, *self._believed(runs))
        return self._known[1:]

    def _believed(self, runs: Sequence[Run]) -> tuple[TimesPosterior, float]:
        found = extrapolate(runs, self._target_gain, MOST_TRIED)
        kept: set[int] = set() if found is None else set(found.points.tolist())
        tried = sorted(kept | {run.point for run in runs if run.running} | {self._default})
        likely = [] if found is None else found.points[np.argsort(found.log_seconds, kind="stable")].tolist()
        looked_at = self._candidates.among(tried, list(dict.fromkeys(likely))[:PROMISING], self._rng)
        points = self._candidates.take(looked_at)
        sizes, where = np.unique(points.batch_sizes, return_inverse=True)
        log_step_times = np.log([step_seconds_at(self._step_seconds, int(size)) for size in sizes])
        laws = self._laws(runs, likely).log_steps(points) + log_step_times[where][:, None]
        if found is None:
            return prior(looked_at, points, laws), ERROR
        return condition(looked_at, points, laws, found), found.error

    def _laws(self, runs: Sequence[Run], likely: Sequence[int]) -> LawPrior:
        # A default that has not reached the target may be far off: then around the fastest trial or, before a
        # success, the most promising.
        hits = [run for run in runs if run.hit is not None]
        centre = self._default
        if hits and all(run.point != self._default for run in hits):
            centre = min(hits, key=lambda run: run.hit or 0.0).point
        elif likely and not hits:
            centre = likely[0]
        point = self._candidates.take(np.array([centre]))
        return LawPrior(
            batch_sizes=self._candidates.batch_sizes,
            size=int(point.batch_sizes[0]),
            log_rate=float(point.log_rates[0]),
            log_rate_deviation=self._candidates.log_rate_width * (NEAR_HIT if hits else BEFORE_HIT),
            seed=self._seed,
            noise_scale=self._noise_scale,
        )


@cache
def _linear_algebra() -> ThreadpoolController:
    # limits BLAS, because two BLAS threads block each other for seconds if trials use all cores
    return ThreadpoolController()


def _after(posterior: TimesPosterior, running: Sequence[int]) -> TimesPosterior:
    for place in running:
        posterior = posterior.after(place)
    return posterior


def _improvements(posterior: TimesPosterior, tried: Indices, behind: Numbers) -> Numbers:
    # The expected drop, in nats, of the least mean among `tried` and each point. `behind` adds noise, because a pruned
    # run has less information.
    variance = np.diag(posterior.covariance)
    noise = np.sqrt(np.maximum(variance, 1e-9) + posterior.seed_noise**2 + behind**2)
    moves = posterior.covariance[tried] / noise
    best = (posterior.mean[tried][:, None, None] + moves[:, :, None] * NODES).min(axis=0)
    own = posterior.mean[:, None] + (variance / noise)[:, None] * NODES
    gains: Numbers = (posterior.mean[tried].min() - np.minimum(best, own)) @ WEIGHTS
    return np.maximum(gains, 0.0)
