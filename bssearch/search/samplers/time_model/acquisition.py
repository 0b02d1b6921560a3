"""Knowledge gradient per unit cost (Frazier et al. 2009) on the posterior of log time-to-target.

Chooses the configuration whose next run should lower the lowest mean of the tried ones most, for its price. May repeat
a lucky configuration.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from bssearch.records.intervals import FLAT_RATIO
from bssearch.search.samplers.time_model.candidates import Indices, Numbers, Points, SpaceCandidates
from bssearch.search.samplers.time_model.extrapolation import ERROR, Extrapolation, Run, extrapolate
from bssearch.search.samplers.time_model.posterior import LawPrior, Posterior, condition, prior

SLOWEST_FALL = 0.3
"""Extrapolated step time / a smaller batch size's, at least."""


def step_seconds_at(known: Mapping[int, float], batch_size: int) -> float:
    """Step time, linearly interpolated from the two nearest batch sizes if unknown."""
    if batch_size in known or len(known) == 1:
        return known.get(batch_size) or next(iter(known.values()))
    sizes = sorted(known)
    right = min(max(bisect_left(sizes, batch_size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    return max(known[low] + slope * (batch_size - low), SLOWEST_FALL * known[low])


MOST_TRIED = 128
"""The best, and a sample of the rest."""

PROMISING = 3
"""Best points with neighbours."""

COST_POWER = 0.5
LEAST_COST = 0.35
"""Score: gain / price^`COST_POWER`; minimum price as a share of the incumbent's time."""

BEHIND = 0.1
"""In nats; such a trial will probably be pruned."""

NOT_AGAIN = 1e6
"""Exceeds any gain."""

NODES = np.linspace(-4.0, 4.0, 25)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.exp(-(NODES**2) / 2).sum()
"""Normal quadrature."""


class KnowledgeGradient:
    """Chooses points of a space, deterministic for a ``seed``; ``default`` comes first."""

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
        first = candidates.take(np.array([default]))
        self._candidates = candidates
        self._default = default
        self._target_gain = target_gain
        self._step_seconds = step_seconds
        self._rng = np.random.default_rng(seed)
        self._laws = LawPrior(
            batch_sizes=candidates.batch_sizes,
            default_size=int(first.batch_sizes[0]),
            default_log_rate=float(first.log_rates[0]),
            log_rate_width=candidates.log_rate_width,
            seed=seed,
            noise_scale=noise_scale,
        )
        self._known: tuple[object, Posterior, float] | None = None
        self.expected_improvement = math.inf
        """Largest expected gain at the last ask, in nats; ∞ before a hit."""

    def ask(self, runs: Sequence[Run], batch_size: int | None = None) -> int:
        """Next point, by default at any batch size; the default if there are no runs.

        With a ``batch_size``, the price does not count.
        """
        if not runs and batch_size is None:
            return self._default
        posterior, error = self._posterior(runs)
        hits = posterior.places(sorted({run.point for run in runs if run.hit is not None}))
        running = [posterior.place(run.point) for run in runs if run.running]
        score = (
            self._gains_per_price(posterior, error, hits, running)
            if batch_size is None
            else self._gains_at(batch_size, posterior, hits, running)
        )
        if not hits.size:  # Repeat a miss only if no untried point is left.
            score[posterior.places(sorted({run.point for run in runs}))] -= NOT_AGAIN
        return int(posterior.points[np.argmax(score + 1e-12 * self._rng.random(len(score)))])

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        """Point with the lowest mean among those that reached the target."""
        hits = sorted({run.point for run in runs if run.hit is not None})
        if not hits:
            return None
        posterior, _ = self._posterior(runs)
        at = posterior.places(hits)
        return int(posterior.points[at[np.argmin(posterior.mean[at])]])

    def contenders(self, runs: Sequence[Run]) -> list[int]:
        """Batch sizes that may match the incumbent, ascending; all before a hit.

        Their mean less one standard deviation is within `FLAT_RATIO` of the incumbent's.
        """
        incumbent = self.incumbent(runs)
        if incumbent is None:
            return list(self._candidates.batch_sizes)
        posterior, _ = self._posterior(runs)
        lowest = posterior.mean - np.sqrt(np.maximum(np.diag(posterior.covariance), 0.0))
        may_win = lowest < posterior.mean[posterior.place(incumbent)] + math.log(FLAT_RATIO)
        return sorted({int(size) for size in self._candidates.take(posterior.points[may_win]).batch_sizes})

    def _gains_per_price(self, posterior: Posterior, error: float, hits: Indices, running: Sequence[int]) -> Numbers:
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

    def _gains_at(self, batch_size: int, posterior: Posterior, hits: Indices, running: Sequence[int]) -> Numbers:
        sizes = self._candidates.take(posterior.points).batch_sizes
        here = sizes == min(self._candidates.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        tried = np.array([place for place in sorted({*hits.tolist(), *running}) if here[place]], int)
        if not tried.size:
            tried = np.array([np.argmin(np.where(here, posterior.mean, np.inf))])
        gains = _improvements(_after(posterior, running), tried, np.zeros(len(sizes)))
        return np.where(here, gains, -2 * NOT_AGAIN)

    def _posterior(self, runs: Sequence[Run]) -> tuple[Posterior, float]:
        seen = [(len(run.progress.gains), run.running) for run in runs]
        if self._known is None or self._known[0] != seen:
            with _linear_algebra().limit(limits=1, user_api="blas"):
                self._known = (seen, *self._believed(runs))
        return self._known[1:]

    def _believed(self, runs: Sequence[Run]) -> tuple[Posterior, float]:
        found = extrapolate(runs, self._target_gain, MOST_TRIED)
        kept: set[int] = set() if found is None else set(found.points.tolist())
        tried = sorted(kept | {run.point for run in runs if run.running} | {self._default})
        looked_at = self._candidates.among(tried, _most_promising(found), self._rng)
        points = self._candidates.take(looked_at)
        laws = self._laws.log_steps(points) + self._log_step_times(points)[:, None]
        if found is None:
            return prior(looked_at, points, laws), ERROR
        return condition(looked_at, points, laws, found), found.error

    def _log_step_times(self, points: Points) -> Numbers:
        sizes, where = np.unique(points.batch_sizes, return_inverse=True)
        times: Numbers = np.log([step_seconds_at(self._step_seconds, int(size)) for size in sizes])[where]
        return times


@cache
def _linear_algebra() -> ThreadpoolController:
    """Beside trials that use every core, two BLAS threads wait for each other for seconds."""
    return ThreadpoolController()


def _most_promising(found: Extrapolation | None) -> list[int]:
    if found is None:
        return []
    ordered = found.points[np.argsort(found.log_seconds, kind="stable")]
    return list(dict.fromkeys(ordered.tolist()))[:PROMISING]


def _after(posterior: Posterior, running: Sequence[int]) -> Posterior:
    for place in running:
        posterior = posterior.after(place)
    return posterior


def _improvements(posterior: Posterior, tried: Indices, behind: Numbers) -> Numbers:
    """Expected drop, in nats, of the lowest mean among ``tried`` and each point.

    ``behind`` adds noise: a pruned run says less.
    """
    variance = np.diag(posterior.covariance)
    noise = np.sqrt(np.maximum(variance, 1e-9) + posterior.seed_noise**2 + behind**2)
    moves = posterior.covariance[tried] / noise
    best = (posterior.mean[tried][:, None, None] + moves[:, :, None] * NODES).min(axis=0)
    own = posterior.mean[:, None] + (variance / noise)[:, None] * NODES
    gains: Numbers = (posterior.mean[tried].min() - np.minimum(best, own)) @ WEIGHTS
    return np.maximum(gains, 0.0)
