"""A driver's turn to start trials, where several drivers of a study want to.

A driver that is alone in its way starts at once. One that was refused, because another was faster or others stand in
the queue, stands in the queue of the store (`bssearch.storage.turns`), and looks again after a random part of the time
that those before it are likely to take. Meanwhile its running trials are looked after. Once it is the first it chooses
for all of its free slots, and gives its place up.
"""

from __future__ import annotations

import random
import time

from bssearch.storage.repository import Store

PLACE_SECONDS = 4.0
"""How long a place in the queue is kept without its driver: what one that dies in its turn costs others. A choice."""

TURN_SECONDS = 0.05
"""How long a turn is taken to last before a driver has seen the queue move. A choice."""

LONGEST_TURN = 0.25
"""How long a turn is taken to last at most: where they last longer a driver looks more often than it must.

Without a bound those that look too late would make turns longer, and look later still.
"""

SLOWER = 0.2
"""With what weight a turn that took longer than others before counts; one that took less counts alone. A choice."""

EARLY = (0.4, 0.8)
"""A driver looks again after a random share, between these two, of the time that the turns before the last one ahead
take: nobody is to sleep through its turn. A choice."""

LAST_LOOKS = 0.3
"""While one turn is ahead, a driver looks again after this share of the time that it takes. A choice."""

MANY_TURNS = 16
"""After how many turns of others to read what they have done is worth two readings. A choice: with 8 drivers on two
cores one was 1.1 to 1.2 times as fast, with 64 two were 1.3 times as fast."""

SURE_SECONDS = 1.0
"""How long the first in the queue does not ask again whether it still is. A choice: well within its lease."""

SHORTEST_LOOK = 0.005
"""Seconds between two looks at the queue at least. A choice."""

LONGEST_LOOK = 0.4
"""Seconds between two looks at most, as a share of the time for which the place is kept: it is not to lapse."""


class Turns:
    """The turns of one driver of a study. `is_here` before each choice, `end` when no slot is left to choose for."""

    def __init__(self, store: Store, study: str, owner: str) -> None:
        self._store, self._study, self._owner = store, study, owner
        self._rng = random.Random(owner)
        self._is_contended = False
        self._is_queued = self._has_looked = False
        self._ahead = self._behind = self._ahead_at_first = 0
        self._next_look = 0.0
        self._seconds_each = TURN_SECONDS
        self._moved = 0.0

    @property
    def seconds_to_look(self) -> float:
        """Return after how many seconds to ask again for the turn, infinite where none is waited for."""
        return max(0.0, self._next_look - time.monotonic()) if self._is_queued and self._ahead else float("inf")

    @property
    def is_to_read(self) -> bool:
        """Return whether to read what the others have done, since `is_here` was asked.

        Before each choice where no turn is needed. Else as a turn begins, for all that is chosen in it: nobody else
        starts a trial meanwhile. And after many turns of others when the next is this driver's, so that little is left
        to be read in it.
        """
        soon = 1 if self._ahead_at_first > MANY_TURNS else 0
        return not self._is_contended or (self._has_looked and self._ahead <= soon)

    def is_here(self) -> bool:
        """Return whether this driver may choose now; where it may not, it stands in the queue."""
        if not self._is_contended:
            return True
        now, before = time.monotonic(), self._ahead
        self._has_looked = False
        if self._is_queued and now < self._next_look:
            return self._ahead == 0
        was_queued = self._is_queued
        lease = PLACE_SECONDS + self._ahead * self._seconds_each
        standing = self._store.queue_up(self._study, self._owner, lease)
        ahead, self._behind, self._is_queued = standing.ahead, standing.behind, True
        if not was_queued:
            self._ahead_at_first = ahead
        self._learn(now, ahead)
        self._next_look = time.monotonic() + min(self._wait(now, ahead), LONGEST_LOOK * lease)
        self._has_looked = ahead == 0 or ahead != before or not was_queued
        return ahead == 0

    def refused(self) -> None:
        """Take note that another driver was faster, or stands in the queue: this one queues up from now on."""
        self._is_contended = True
        self._next_look = 0.0

    @property
    def is_queued(self) -> bool:
        """Return whether this driver has a place in the queue."""
        return self._is_queued

    def end(self) -> None:
        """Give the place in the queue up; where others stand in it this driver queues up the next time, too."""
        if self._is_queued:
            self._left(self._store.leave_queue(self._study, self._owner))

    def ended(self) -> None:
        """Take note that the last trial that was to be started in this turn has given the place up."""
        self._left(self._behind)

    def _left(self, others: int) -> None:
        self._is_queued, self._ahead = False, 0
        self._is_contended = others > 0

    def _wait(self, now: float, ahead: int) -> float:
        """Return after how many seconds to look again."""
        if ahead == 0:
            return SURE_SECONDS
        if ahead > 1:
            return max(SHORTEST_LOOK, self._rng.uniform(*EARLY) * (ahead - 1) * self._seconds_each)
        return max(SHORTEST_LOOK, LAST_LOOKS * min(LONGEST_TURN, max(self._seconds_each, now - self._moved)))

    def _learn(self, now: float, ahead: int) -> None:
        """Take in how many stand ahead at a moment: how long each turn takes, at the least."""
        if ahead < self._ahead:
            seconds = (now - self._moved) / (self._ahead - ahead)
            slower = self._seconds_each + SLOWER * (min(LONGEST_TURN, seconds) - self._seconds_each)
            self._seconds_each = min(seconds, slower)
        if ahead != self._ahead:
            self._moved, self._ahead = now, ahead
