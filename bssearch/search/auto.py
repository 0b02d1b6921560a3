"""The sampler that knows about batch size: a model of log time-to-target over the space, fed by every trial's curve.

What it believes at first are the laws of `bssearch.search.law_prior`, times the step time of each batch size; what it
sees are the paces of all trials, those that were pruned, wait or run among them (`bssearch.search.paces`); what it then
believes is `bssearch.search.posterior`. It asks for the configuration whose next run is expected to improve most on the
best tried one, for its price; running one again that was lucky is among the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from bssearch.search.candidates import Candidates, Points
from bssearch.search.law_prior import LawPrior
from bssearch.search.paces import ERROR, Paces, Run, paces
from bssearch.search.posterior import Belief, believe, prior_belief
from bssearch.search.step_times import StepTimes

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

MOST_TRIED = 128
"""Of more different points the best are looked at, and some of the others."""

PROMISING = 3
"""How many of the points with the least predicted times have their neighbours looked at."""

COST_POWER = 0.5
LEAST_COST = 0.35
"""Improvement counts per square root of the price, which is no less than this share of the incumbent's time."""

BEHIND = 0.1
"""A trial this much behind the incumbent, in nats, is expected to be stopped on the way."""

CLOSE = 1.05
"""What is within this factor of the incumbent's time is as good."""

NOT_AGAIN = 1e6
"""What is taken off the score of what has been tried while there is something else to try: more than any gain."""

NODES = np.linspace(-4.0, 4.0, 25)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.exp(-(NODES**2) / 2).sum()
"""A normal distribution as a sum: outcomes of a trial, in standard deviations."""


class Auto:
    """Asks for points of a space; ``default`` is the first, ``target_gain`` the gain that meets the target.

    ``noise_scale`` is the gradient noise scale in samples, where it has been measured.

    The same ``seed`` and the same runs make the same choices.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        default: int,
        target_gain: float,
        step_times: StepTimes,
        seed: int,
        noise_scale: float | None = None,
    ) -> None:
        first = candidates.take(np.array([default]))
        self._candidates = candidates
        self._default = default
        self._target_gain = target_gain
        self._step_times = step_times
        self._dice = np.random.default_rng(seed)
        self._laws = LawPrior(
            batch_sizes=candidates.batch_sizes,
            default_size=int(first.batch_sizes[0]),
            default_log_rate=float(first.log_rates[0]),
            log_rates=candidates.log_rates,
            seed=seed,
            noise_scale=noise_scale,
        )
        self._known: tuple[object, Belief, float] | None = None
        self.expected_improvement = math.inf
        """By how much, in nats, the best next trial is expected to better the incumbent's time, as of the last ask.

        Whatever runs at the moment is not counted on. Infinite before a trial has reached the target."""

    def ask(self, runs: Sequence[Run], batch_size: int | None = None) -> int:
        """Return the point to run next, the first time the default.

        With a ``batch_size`` it is the point there, or at the nearest one, that promises most for it, at any price.
        """
        if not runs and batch_size is None:
            return self._default
        belief, error = self._belief(runs)
        hits = belief.places(sorted({run.point for run in runs if run.hit is not None}))
        running = [belief.place(run.point) for run in runs if run.running]
        score = (
            self._gains_per_price(belief, error, hits, running)
            if batch_size is None
            else self._gains_at(batch_size, belief, hits, running)
        )
        if not hits.size:  # Nothing has reached the target: what did not is run again only where there is nothing else.
            score[belief.places(sorted({run.point for run in runs}))] -= NOT_AGAIN
        return int(belief.points[np.argmax(score + 1e-12 * self._dice.random(len(score)))])

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        """Return the point with the least expected log time of those with a run that reached the target."""
        hits = sorted({run.point for run in runs if run.hit is not None})
        if not hits:
            return None
        belief, _ = self._belief(runs)
        at = belief.places(hits)
        return int(belief.points[at[np.argmin(belief.mean[at])]])

    def contenders(self, runs: Sequence[Run]) -> list[int]:
        """Return the batch sizes, ascending, of which some configuration may well be as good as the incumbent.

        Its expected log time less one standard deviation is within `CLOSE` of the incumbent's. All before a hit.
        """
        incumbent = self.incumbent(runs)
        if incumbent is None:
            return list(self._candidates.batch_sizes)
        belief, _ = self._belief(runs)
        lowest = belief.mean - np.sqrt(np.maximum(np.diag(belief.covariance), 0.0))
        may_win = lowest < belief.mean[belief.place(incumbent)] + math.log(CLOSE)
        return sorted({int(size) for size in self._candidates.take(belief.points[may_win]).batch_sizes})

    def _gains_per_price(self, belief: Belief, error: float, hits: Indices, running: Sequence[int]) -> Numbers:
        default = belief.place(self._default)
        star = belief.mean[hits].min() if hits.size else belief.mean[default]
        behind = np.maximum(0.0, belief.mean - star - BEHIND)
        price = np.maximum(np.exp(belief.mean - star - behind / error), LEAST_COST) ** COST_POWER
        gains = _improvements(belief, hits, behind) if hits.size else None
        self.expected_improvement = math.inf if gains is None else float(gains.max())
        if gains is None or running:
            tried = np.array(sorted({*hits.tolist(), *running}) or [default])
            gains = _improvements(_after(belief, running), tried, behind)
        score: Numbers = gains / price
        return score

    def _gains_at(self, batch_size: int, belief: Belief, hits: Indices, running: Sequence[int]) -> Numbers:
        sizes = self._candidates.take(belief.points).batch_sizes
        nearest = min(self._candidates.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        here = sizes == nearest
        tried = np.array([place for place in sorted({*hits.tolist(), *running}) if here[place]], int)
        if not tried.size:
            tried = np.array([np.argmin(np.where(here, belief.mean, np.inf))])
        gains = _improvements(_after(belief, running), tried, np.zeros(len(sizes)))
        return np.where(here, gains, -2 * NOT_AGAIN)

    def _belief(self, runs: Sequence[Run]) -> tuple[Belief, float]:
        """Return what is believed of the log times after runs, and the error of a pace; kept until more is seen."""
        seen = [(len(run.progress.gains), run.running) for run in runs]
        if self._known is None or self._known[0] != seen:
            with _linear_algebra().limit(limits=1, user_api="blas"):
                self._known = (seen, *self._believed(runs))
        return self._known[1:]

    def _believed(self, runs: Sequence[Run]) -> tuple[Belief, float]:
        found = paces(runs, self._target_gain, MOST_TRIED)
        kept: set[int] = set() if found is None else set(found.points.tolist())
        tried = sorted(kept | {run.point for run in runs if run.running} | {self._default})
        looked_at = self._candidates.among(tried, _most_promising(found), self._dice)
        points = self._candidates.take(looked_at)
        laws = self._laws.log_steps(points) + self._log_step_times(points)[:, None]
        if found is None:
            return prior_belief(looked_at, points, laws), ERROR
        return believe(looked_at, points, laws, found), found.error

    def _log_step_times(self, points: Points) -> Numbers:
        sizes, where = np.unique(points.batch_sizes, return_inverse=True)
        times: Numbers = np.log([self._step_times.at(int(size)) for size in sizes])[where]
        return times


@cache
def _linear_algebra() -> ThreadpoolController:
    """Return what sets its threads: beside trials that use every core, two of them wait for each other for seconds."""
    return ThreadpoolController()


def _most_promising(found: Paces | None) -> list[int]:
    """Return the points whose runs had the least predicted times."""
    if found is None:
        return []
    ordered = found.points[np.argsort(found.log_seconds, kind="stable")]
    return list(dict.fromkeys(ordered.tolist()))[:PROMISING]


def _after(belief: Belief, running: Sequence[int]) -> Belief:
    """Return what is believed once the runs at some places have ended as expected."""
    for place in running:
        belief = belief.after(place)
    return belief


def _improvements(belief: Belief, tried: Indices, behind: Numbers) -> Numbers:
    """Return by how much a run of each point is expected to lower the least mean of those tried, itself among them.

    In nats. ``tried`` are places; a run ``behind`` the incumbent is stopped early and tells as much less.
    """
    variance = np.diag(belief.covariance)
    noise = np.sqrt(np.maximum(variance, 1e-9) + belief.seed_noise**2 + behind**2)
    moves = belief.covariance[tried] / noise
    best = (belief.mean[tried][:, None, None] + moves[:, :, None] * NODES).min(axis=0)
    own = belief.mean[:, None] + (variance / noise)[:, None] * NODES
    gains: Numbers = (belief.mean[tried].min() - np.minimum(best, own)) @ WEIGHTS
    return np.maximum(gains, 0.0)
