"""Which trials go on while none has reached the target: successive halving that throws nothing away.

Every trial runs to `FIRST` of its limit and waits; the best of a rung goes on to twice its time, whenever `PROMOTED`
times as many came to it as went on (asynchronously: Li et al. 2020, ASHA). What is better than all that came to its
rung before does not wait, nor, where many run at once, do the leaders: waiting would idle nobody but lose time.

A trial has come to a rung with its first evaluation at the rung's train seconds or later. It has left the rung where
it runs, or was evaluated again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from bssearch.curves import Progress
from bssearch.pruners.base import Standings

FIRST = 1 / 16
"""The first rung, as a share of the limit. A choice: with a factor of 2 there are five rungs."""

PROMOTED = 3
"""So many trials come to a rung for one that goes on: the reduction factor that Li et al. recommend is 3 to 4."""

LEADERS = 2
"""For so many trials that run at once, one leader does not wait above the first rung. A choice."""


def waits(number: int, standings: Standings) -> bool:
    """Return whether a running trial has come to a rung with its newest evaluation and waits there."""
    curve = standings.curves[number]
    rung = rung_of(curve, standings.limit)
    before = curve.train_seconds[-2] if len(curve.train_seconds) > 1 else -math.inf
    if rung < 0 or before >= seconds_of(rung, standings.limit):
        return False
    came = list(_that_came(rung, standings))
    best = max((at for one, at in came if one != number), default=-math.inf)
    is_first = curve.gain > best and len(came) >= PROMOTED
    return not (is_first or (rung > 0 and _is_leader(number, standings)))


def promoted(standings: Standings, *, fresh: bool) -> int | None:
    """Return the best waiting trial of the highest rung from which one may go on; nothing ``fresh``: of any rung."""
    limit = standings.limit
    at = {number: rung_of(curve, limit) for number, curve in standings.waiting.items()}
    rungs = set(at.values())
    due = [rung for rung in rungs if _is_due(rung, standings)]
    if not rungs or (not due and fresh):
        return None
    below = [rung for rung in rungs if seconds_of(rung, limit) < limit]
    rung = max(due or below, default=min(rungs))
    return max((one for one in at if at[one] == rung), key=lambda one: (standings.waiting[one].gain, -one))


def least_promising(standings: Standings) -> int:
    """Return the waiting trial that would be missed least: on the lowest rung, the one with the least gain."""
    waiting = standings.waiting
    return min(waiting, key=lambda one: (rung_of(waiting[one], standings.limit), waiting[one].gain))


def rung_of(curve: Progress, limit: float) -> int:
    """Return the highest rung that a trial has come to, −1 before the first."""
    if curve.now < FIRST * limit:
        return -1
    rung = int(math.log2(curve.now / (FIRST * limit)))
    return rung + (seconds_of(rung + 1, limit) <= curve.now) - (seconds_of(rung, limit) > curve.now)


def seconds_of(rung: int, limit: float) -> float:
    """Return the train seconds of a rung; before the first one there are none."""
    return FIRST * limit * 2.0**rung if rung >= 0 else 0.0


def _is_due(rung: int, standings: Standings) -> bool:
    """Return whether so many trials came to a rung that a further one goes on."""
    came = sum(1 for _ in _that_came(rung, standings))
    left = sum(_has_left(one, rung, standings) for one, _ in _that_came(rung, standings))
    return (left + 1) * PROMOTED <= came


def _that_came(rung: int, standings: Standings) -> Iterator[tuple[int, float]]:
    """Yield each trial that came to a rung, with its best gain when it did; not those that no pruner judges."""
    seconds = seconds_of(rung, standings.limit)
    for number, curve in standings.curves.items():
        if curve.now >= seconds and number not in standings.uncapped:
            yield number, curve.gains[curve.index_from(seconds)]


def _has_left(number: int, rung: int, standings: Standings) -> bool:
    curve = standings.curves[number]
    came = curve.index_from(seconds_of(rung, standings.limit))
    return number in standings.running or came < len(curve.gains) - 1


def _is_leader(number: int, standings: Standings) -> bool:
    """Return whether a trial is one of the best of all, of which some do not wait where many run at once."""
    gain = standings.curves[number].gain
    ahead = sum(curve.gain >= gain for one, curve in standings.curves.items() if one != number)
    return ahead < len(standings.running) // LEADERS
