"""Predicts each trial's time to the target from its learning curve.

If the winners reached a trial's best metric after a share F of their times, and the trial after t seconds, its log time
is log t − log F: exact for finished trials, less certain for smaller F. For trials far behind, at chance, or overdue,
it is only a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bssearch.records.curves import Progress
from bssearch.search.samplers.time_model.candidates import Numbers

WINNERS = 12

LATE = 0.7
"""Predictions are averaged after this share of a trial's time."""

FIRST_SHARE = 1e-3
"""Smallest resolved share of a winner's time."""

WORST = 6.0
"""Slower than the fastest winner by this factor, a trial gives only a bound."""

BOUND_DEVIATION = 0.3

ERROR = 0.35
ERROR_TRIALS = 4
"""Prior of `Extrapolation.error`, and its weight in winners."""

EARLY = 0.1
"""Running trials count from this share of the fastest winner's time."""

AT_CHANCE = 0.05
"""Share of the way from the worst metric to the target."""


@dataclass(slots=True)
class Run:
    """A trial's point and learning curve; ``hit``: train seconds at the target."""

    point: int
    progress: Progress
    hit: float | None = None
    running: bool = True
    diverged: bool = False


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Log predicted seconds to the target; arrays have shape (runs,).

    ``variance`` excludes seed noise. ``error``: standard deviation in log seconds of a prediction from share F, per log
    1/F.
    """

    points: NDArray[np.int64]
    log_seconds: Numbers
    variance: Numbers
    is_bound: NDArray[np.bool_]
    error: float


@dataclass(frozen=True, slots=True)
class _Winner:
    gains: Numbers
    train_seconds: Numbers
    seconds: float
    goal: float

    def log_share(self, gains: Numbers) -> Numbers:
        moments = np.interp(np.minimum(gains, self.goal), self.gains, self.train_seconds)
        return np.log(np.clip(moments / self.seconds, FIRST_SHARE, 1.0))


def extrapolate(runs: Sequence[Run], target_gain: float, most_points: int) -> Extrapolation | None:
    """Predictions of all informative runs; None without a reference run.

    Above ``most_points``, keeps the best and samples the rest.
    """
    shown = _that_have_shown(runs)
    gain = np.array([run.progress.gain for run in shown])
    hit = np.array([run.hit is not None for run in shown], bool)
    at_chance = ~hit & (gain < _at_chance(shown, target_gain))
    winners = _winners([run for run, is_lost in zip(shown, at_chance, strict=True) if not is_lost], target_gain)
    if not winners:
        return None
    log_share = _mean_log_share(winners, gain)
    log_now = np.log([run.progress.now for run in shown])
    fastest = hit & (log_now == log_now.min(where=hit, initial=math.inf))
    rough = np.where(fastest, -math.inf, log_now - log_share)
    kept = _thinned([run.point for run in shown], rough, most_points)
    shown, hit, at_chance = [shown[index] for index in kept], hit[kept], at_chance[kept]
    log_share, log_now, missed = log_share[kept], log_now[kept], gain[kept] < winners[0].goal
    log_seconds = _late_predictions(shown, winners)
    bound = math.log(WORST * min(winner.seconds for winner in winners))
    is_far = at_chance | (log_seconds > bound)
    is_bound = ~hit & (is_far | (missed & (log_seconds < log_now)))
    log_seconds = np.where(is_bound, np.where(is_far, bound, log_now), log_seconds)
    error = _error(winners)
    lost = [run.point for run in runs if run.diverged]
    lost = lost[:: 1 + len(lost) // (most_points // 8)]
    return Extrapolation(
        points=np.array([run.point for run in shown] + lost),
        log_seconds=np.append(log_seconds, np.full(len(lost), bound)),
        variance=np.append(
            np.where(hit, 0.0, (error * log_share) ** 2 + BOUND_DEVIATION**2 * is_bound),
            np.full(len(lost), BOUND_DEVIATION**2),
        ),
        is_bound=np.append(is_bound, np.full(len(lost), True)),
        error=error,
    )


def _that_have_shown(runs: Sequence[Run]) -> list[Run]:
    early = EARLY * min((run.hit for run in runs if run.hit is not None), default=0.0)
    return [
        run
        for run in runs
        if not run.diverged and run.progress.now > (early if run.running else 0.0) and run.progress.gain > -math.inf
    ]


def _at_chance(runs: Sequence[Run], target_gain: float) -> float:
    starts = [start for run in runs if (start := run.progress.gains[0]) > -math.inf]
    worst = min(starts, default=-math.inf)
    return worst + AT_CHANCE * (target_gain - worst) if starts else -math.inf


def _winners(runs: Sequence[Run], target_gain: float) -> list[_Winner]:
    hits = sorted((run for run in runs if run.hit is not None), key=lambda run: run.hit or 0.0)[:WINNERS]
    if hits:
        return [_winner(run, run.hit or 0.0, target_gain) for run in hits]
    first = max(runs, key=lambda run: (run.progress.gain, -run.progress.when_best), default=None)
    return [] if first is None else [_winner(first, first.progress.now, first.progress.gain)]


def _winner(run: Run, seconds: float, goal: float) -> _Winner:
    return _Winner(np.array(run.progress.gains), np.array(run.progress.train_seconds), seconds, goal)


def _mean_log_share(winners: Sequence[_Winner], gains: Numbers) -> Numbers:
    shares: Numbers = np.mean([winner.log_share(gains) for winner in winners], axis=0)
    return shares


def _error(winners: Sequence[_Winner]) -> float:
    squares, count = ERROR_TRIALS * ERROR**2, ERROR_TRIALS
    for index, winner in enumerate(winners):
        others = [*winners[:index], *winners[index + 1 :]]
        before = (winner.train_seconds > 0) & (winner.train_seconds < winner.seconds)
        if not others or not before.any():
            continue
        share = np.minimum(_mean_log_share(others, winner.gains[before]), -0.05)
        off = np.log(winner.train_seconds[before] / winner.seconds) - share
        squares += float(np.mean(off**2 / (share**2 + 0.05)))
        count += 1
    return math.sqrt(squares / count)


def _late_predictions(runs: Sequence[Run], winners: Sequence[_Winner]) -> Numbers:
    starts: list[int] = []
    seconds: list[float] = []
    gains: list[float] = []
    for run in runs:
        starts.append(len(seconds))
        first = run.progress.index_from(LATE * run.progress.now)
        seconds += run.progress.train_seconds[first:]
        gains += run.progress.gains[first:]
    each = np.log(seconds) - _mean_log_share(winners, np.array(gains))
    counts = np.diff([*starts, len(seconds)])
    averages: Numbers = np.add.reduceat(each, starts) / counts
    return averages


def _thinned(points: Sequence[int], rough: Numbers, most: int) -> list[int]:
    ordered = list(dict.fromkeys(np.array(points)[np.argsort(rough, kind="stable")].tolist()))
    if len(ordered) <= most:
        return list(range(len(points)))
    head = 3 * most // 4
    rest = ordered[head:]
    step = max(1, len(rest) // (most - head))
    kept = {*ordered[:head], *rest[::step][: most - head]}
    return [index for index, point in enumerate(points) if point in kept]
