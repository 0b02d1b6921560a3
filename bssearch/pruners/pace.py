"""Pruning by pace: a trial waits while, on the clocks of all winners so far, it would have to be too fast to win.

With f the share of the incumbent's time-to-target that a trial has trained, and u the largest share, over the winners,
of a winner's own time until which it had no more than the trial's best gain (what part of the way the trial has gone,
by the luckiest comparison), a trial is hopeless where

    (f / u) · √((1 − u) / (1 − f)) > ``patience``:

so far it was f / u times slower than a winner, and for what is left it would have to be (1 − u) / (1 − f) times faster.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from bssearch.pruners.base import Action, Cap, Progress
from bssearch.pruners.halving import Rungs

FROM = 0.1
"""Before this share of the incumbent's time no trial is hopeless."""

PATIENCE = {"safe": 4.0, "balanced": 2.7, "fast": 2.1}
"""The operating points, by name."""


class Pace(Cap):
    """Cap, and let wait what is hopeless; go on with what a better winner gives hope again.

    Before the first hit `Rungs` say who waits. Afterwards those that wait and are not hopeless go on first, the one
    with the least predicted time (t / u) before the others.
    """

    def __init__(self, limit: float, patience: float, slack: float = 1.0) -> None:
        super().__init__(limit, slack)
        self.patience = patience
        self.can_wait = True
        """Where trials cannot be saved, what is hopeless is stopped for good, and before the first hit all go on."""
        self.waiting: dict[int, Progress] = {}
        self._hopeful: list[int] = []
        self._running: set[int] = set()
        self._rungs = Rungs(limit)

    @property
    def paces_itself(self) -> bool:
        """Whether trials wait for each other before any has reached the target."""
        return self.can_wait

    def started(self, number: int) -> None:
        """Take note that a trial has begun: it may run to the first rung."""
        super().started(number)
        self._running.add(number)
        self._rungs.started(number)

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Let a trial wait that is hopeless, or, before the first hit, that has come to its rung."""
        super().observe(number, train_seconds, gain)
        curve = self.curves[number]
        if self.winners:
            waits = self.is_hopeless(curve)
        else:
            waits = self.can_wait and self._rungs.waits(number, self.curves, len(self._running))
        if not waits:
            return Action.GO_ON
        if not self.can_wait:
            return Action.STOP
        self.waiting[number] = curve
        self._running.discard(number)
        return Action.WAIT

    def reached(self, number: int, train_seconds: float, gain: float) -> None:
        """Take note of a hit, and of what waits which could still be faster."""
        super().reached(number, train_seconds, gain)
        self._running.discard(number)
        self.waiting.pop(number, None)
        self._hope_again()

    def allow(self, slack: float) -> None:
        """Set the slack from now on; what waits may have another chance for it, or none."""
        super().allow(slack)
        if self.winners:
            self._hope_again()

    def _hope_again(self) -> None:
        """Find what waits and could still be faster, the least promising first."""
        chances = {one: curve for one, curve in self.waiting.items() if not self.is_hopeless(curve)}
        self._hopeful = sorted(chances, key=lambda one: self._predicted(chances[one]), reverse=True)

    def ended(self, number: int) -> None:
        """Take note that a trial came to its end."""
        self._running.discard(number)
        self.waiting.pop(number, None)
        self._hopeful = [one for one in self._hopeful if one != number]

    def waits(self, number: int) -> None:
        """Take note that a trial waits: at the rung that it has come to, where none has reached the target."""
        if number in self.waiting:
            return  # It was told to, here.
        curve = self.curves[number]
        self.waiting[number] = curve
        self._running.discard(number)
        if self.winners:
            if not self.is_hopeless(curve):
                self._hopeful.insert(0, number)
        else:
            self._rungs.waits(number, self.curves, running=0)

    def least_promising(self) -> int | None:
        """Return the waiting trial that would be missed least: by its predicted time, or by its gain at equal rungs."""
        if not self.waiting:
            return None
        if self.winners:
            number = max(self.waiting, key=lambda one: self._predicted(self.waiting[one]))
        else:
            number = self._rungs.least_promising(self.waiting, self.curves)
        self.ended(number)
        return number

    def next_waiting(self, *, fresh: bool, among: Collection[int] | None = None) -> int | None:
        """Return the trial that goes on next: what has hope again, or before the first hit what is promoted."""
        waiting = self.waiting if among is None else {one: self.waiting[one] for one in self.waiting if one in among}
        if self.winners:
            number = next((one for one in reversed(self._hopeful) if one in waiting), None)
        else:
            number = self._rungs.promoted(waiting, fresh=fresh)
        if number is not None:
            self._hopeful = [one for one in self._hopeful if one != number]
            del self.waiting[number]
            self._running.add(number)
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
