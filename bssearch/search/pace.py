"""Pruning by pace: a trial waits while, on the clocks of all winners so far, it would have to be too fast to win.

With f the share of the incumbent's time-to-target that a trial has trained, and u the largest share, over the winners,
of a winner's own time until which it had no more than the trial's best gain (what part of the way the trial has gone,
by the luckiest comparison), a trial is hopeless where

    (f / u) · √((1 − u) / (1 − f)) > ``patience``:

so far it was f / u times slower than a winner, and for what is left it would have to be (1 − u) / (1 − f) times faster.
"""

from __future__ import annotations

import math
from collections import Counter

from bssearch.search.policy import Action, Cap, Progress

FROM = 0.1
"""Before this share of the incumbent's time no trial is hopeless."""

FIRST_RUNG = 1 / 16
"""Of the limit: how long each trial runs while none has reached the target."""

PROMOTED = 3
"""Whenever so many times as many trials came to a rung as went on from it, the best that waits there goes on."""

PATIENCE = {"safe": 4.0, "balanced": 2.7, "fast": 2.1}
"""The operating points, by name."""


class Pace(Cap):
    """Cap, and let wait what is hopeless; go on with what a better winner gives hope again.

    Before the first hit: every trial runs to `FIRST_RUNG` of the limit and waits; the best of a rung goes on to twice
    its time, by `PROMOTED`, asynchronously (Li et al. 2020, ASHA), and nothing is ever thrown away. What is better than
    all the others that came to its rung does not wait. Afterwards those
    that wait and are not hopeless go on first, the one with the least predicted time (t / u) before the others.
    """

    def __init__(self, limit: float, patience: float, slack: float = 1.0) -> None:
        super().__init__(limit, slack)
        self.patience = patience
        self.can_wait = True
        """Where trials cannot be saved, what is hopeless is stopped for good, and before the first hit all go on."""
        self.waiting: dict[int, Progress] = {}
        self._hopeful: list[int] = []
        self._rung: dict[int, int] = {}
        self._best: dict[int, float] = {}
        self._came: Counter[int] = Counter()
        self._left: Counter[int] = Counter()

    def started(self, number: int) -> None:
        """Take note that a trial has begun: it may run to the first rung."""
        super().started(number)
        self._rung[number] = 0

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Let a trial wait that is hopeless, or, before the first hit, that has come to its rung."""
        super().observe(number, train_seconds, gain)
        curve = self.curves[number]
        if self.winners:
            waits = self.is_hopeless(curve)
        else:
            waits = self.can_wait and self._is_at_its_rung(number, train_seconds)
        if not waits:
            return Action.GO_ON
        if not self.can_wait:
            return Action.STOP
        self.waiting[number] = curve
        return Action.WAIT

    def reached(self, number: int, train_seconds: float, gain: float) -> None:
        """Take note of a hit, and of what waits which could still be faster."""
        super().reached(number, train_seconds, gain)
        self.waiting.pop(number, None)
        self.waiting = {one: curve for one, curve in self.waiting.items() if curve.now < self.cap}
        chances = {one: curve for one, curve in self.waiting.items() if not self.is_hopeless(curve)}
        self._hopeful = sorted(chances, key=lambda one: self._predicted(chances[one]), reverse=True)

    def ended(self, number: int) -> None:
        """Take note that a trial came to its end."""
        self.waiting.pop(number, None)
        self._hopeful = [one for one in self._hopeful if one != number]

    def waits(self, number: int) -> None:
        """Take note that a trial waits: at the rung that it has come to, where none has reached the target."""
        curve = self.curves[number]
        self.waiting[number] = curve
        if self.winners:
            if curve.now >= self.cap:
                del self.waiting[number]
            elif not self.is_hopeless(curve):
                self._hopeful.insert(0, number)
        else:
            self._is_at_its_rung(number, curve.now)

    def least_promising(self) -> int | None:
        """Return the waiting trial that would be missed least: by its predicted time, or by its gain at equal rungs."""
        if not self.waiting:
            return None
        if self.winners:
            number = max(self.waiting, key=lambda one: self._predicted(self.waiting[one]))
        else:
            number = min(self.waiting, key=lambda one: (self._rung[one], self.waiting[one].gain))
        self.ended(number)
        return number

    def next_waiting(self, *, fresh: bool) -> int | None:
        """Return the trial that goes on next: what has hope again, or before the first hit what is promoted."""
        number = (self._hopeful.pop() if self._hopeful else None) if self.winners else self._promoted(fresh)
        if number is not None:
            del self.waiting[number]
        return number

    def is_hopeless(self, curve: Progress) -> bool:
        """Return whether, by every winner's clock, the pace of a trial so far leaves it no chance."""
        elapsed = curve.now / self.cap
        if elapsed < FROM:
            return False
        if elapsed >= 1:
            return True
        share = self._share(curve)
        return share < 1 and elapsed * math.sqrt(1 - share) > self.patience * share * math.sqrt(1 - elapsed)

    def _share(self, curve: Progress) -> float:
        """Return what part of the way to the target a trial has gone, by the luckiest of the winners' clocks."""
        return max(winner.when(curve.gain) / seconds for winner, seconds in self.winners)

    def _predicted(self, curve: Progress) -> float:
        """Return the train seconds to the target of a trial that keeps its pace."""
        share = self._share(curve)
        return curve.now / share if share > 0 else math.inf

    def _is_at_its_rung(self, number: int, train_seconds: float) -> bool:
        """Return whether a trial has come to its rung and waits there; an evaluation may lie beyond several at once."""
        if train_seconds < self._seconds(self._rung[number]):
            return False
        self._came[self._rung[number]] += 1
        while train_seconds >= self._seconds(self._rung[number] + 1):
            self._climb(number)
            self._came[self._rung[number]] += 1
        rung, gain = self._rung[number], self.curves[number].gain
        best, self._best[rung] = self._best.get(rung, -math.inf), max(gain, self._best.get(rung, -math.inf))
        if gain <= best or self._came[rung] < PROMOTED:
            return True
        self._climb(number)
        return False

    def _climb(self, number: int) -> None:
        self._left[self._rung[number]] += 1
        self._rung[number] += 1

    def _promoted(self, fresh: bool) -> int | None:
        """Return the best trial of a rung from which one may go on, with nothing to begin of any, the highest first."""
        rungs = {self._rung[number] for number in self.waiting}
        due = [rung for rung in rungs if (self._left[rung] + 1) * PROMOTED <= self._came[rung]]
        if not rungs or (not due and fresh):
            return None
        below = [rung for rung in rungs if self._seconds(rung) < self.limit]
        rung = max(due or below, default=min(rungs))
        number = max((one for one in self.waiting if self._rung[one] == rung), key=lambda one: self.waiting[one].gain)
        self._climb(number)
        return number

    def _seconds(self, rung: int) -> float:
        return FIRST_RUNG * self.limit * 2.0**rung
