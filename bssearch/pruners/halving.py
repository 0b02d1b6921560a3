"""Who goes on while no trial has reached the target: successive halving that throws nothing away.

Every trial runs to `FIRST` of its limit and waits; the best of a rung goes on to twice its time, whenever `PROMOTED`
times as many came to it as went on (asynchronously: Li et al. 2020, ASHA). What is better than all that came to its
rung before does not wait, nor, where many run at once, do the leaders: waiting would idle nobody but lose time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from bssearch.pruners.base import Progress

FIRST = 1 / 16
"""Of the limit: how long each trial runs at first."""

PROMOTED = 3

LEADERS = 2
"""For so many trials that run at once, one leader does not wait above the first rung."""


class Rungs:
    """Where each trial stands on its way to ``limit`` train seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._at: dict[int, int] = {}
        self._best: dict[int, float] = {}
        self._came: Counter[int] = Counter()
        self._left: Counter[int] = Counter()

    def started(self, number: int) -> None:
        """Take note that a trial has begun: it may run to the first rung."""
        self._at[number] = 0

    def waits(self, number: int, curves: Mapping[int, Progress], running: int) -> bool:
        """Return whether a trial has come to its rung and waits there; an evaluation may lie beyond several at once.

        ``curves`` are those of all trials so far, ``running`` is how many run now.
        """
        curve = curves[number]
        if curve.now < self._seconds(self._at[number]):
            return False
        self._came[self._at[number]] += 1
        while curve.now >= self._seconds(self._at[number] + 1):
            self._climb(number)
            self._came[self._at[number]] += 1
        rung, gain = self._at[number], curve.gain
        best, self._best[rung] = self._best.get(rung, -math.inf), max(gain, self._best.get(rung, -math.inf))
        is_first = gain > best and self._came[rung] >= PROMOTED
        if not is_first and not (rung > 0 and self._is_leader(number, curves, running)):
            return True
        self._climb(number)
        return False

    def promoted(self, waiting: Mapping[int, Progress], *, fresh: bool) -> int | None:
        """Return the best trial of a rung from which one may go on, the highest first; nothing ``fresh``: of any."""
        rungs = {self._at[number] for number in waiting}
        due = [rung for rung in rungs if (self._left[rung] + 1) * PROMOTED <= self._came[rung]]
        if not rungs or (not due and fresh):
            return None
        below = [rung for rung in rungs if self._seconds(rung) < self._limit]
        rung = max(due or below, default=min(rungs))
        number = max((one for one in waiting if self._at[one] == rung), key=lambda one: waiting[one].gain)
        self._climb(number)
        return number

    def least_promising(self, waiting: Collection[int], curves: Mapping[int, Progress]) -> int:
        """Return the waiting trial that would be missed least: on the lowest rung, the one with the least gain."""
        return min(waiting, key=lambda one: (self._at[one], curves[one].gain))

    def _is_leader(self, number: int, curves: Mapping[int, Progress], running: int) -> bool:
        """Return whether a trial is one of the best of all, of which some do not wait where many run at once."""
        gain = curves[number].gain
        ahead = sum(curve.gain >= gain for one, curve in curves.items() if one != number)
        return ahead < running // LEADERS

    def _climb(self, number: int) -> None:
        self._left[self._at[number]] += 1
        self._at[number] += 1

    def _seconds(self, rung: int) -> float:
        return FIRST * self._limit * 2.0**rung
