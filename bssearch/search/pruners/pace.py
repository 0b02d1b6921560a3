"""Pruning by pace: a trial waits while, on the clocks of all winners so far, it would have to be too fast to win.

With f the train seconds of a trial as a share of the incumbent's time-to-target T, and u the largest share, over the
winners, of a winner's own time until which it had no more than the trial's best gain (what part of the way the trial
has gone, by the luckiest comparison), a trial is hopeless where both

    (f / u) · √((1 − u) / (1 − f)) > ``patience``, or f ≥ 1,
    f / u > ``slack``.

By the first, it was f / u times slower than a winner so far, and for what is left it would have to be (1 − u) / (1 − f)
times faster to end at T. By the second, at its pace it ends past slack × T: what would end before that may be as good
as the incumbent, which one seed does not tell. `fast` takes the incumbent's one seed at its word: its ``slack`` is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from bssearch.records.curves import Progress
from bssearch.search.pruners.base import Action, Cap, Standings

# Which trials go on while none has reached the target: successive halving that throws nothing away.
#
# Every trial runs to `FIRST` of its limit and waits; the best of a rung goes on to twice its time, whenever `PROMOTED`
# times as many came to it as went on (asynchronously: Li et al. 2020, ASHA). What is better than all that came to its
# rung before does not wait, nor, where many run at once, do the leaders: waiting would idle nobody but lose time.
#
# A trial has come to a rung with its first evaluation at the rung's train seconds or later. It has left the rung where
# it runs, or was evaluated again.

FIRST = 1 / 16
"""The first rung, as a share of the limit. A choice: with a factor of 2 there are five rungs."""

PROMOTED = 3
"""So many trials come to a rung for one that goes on: the reduction factor that Li et al. recommend is 3 to 4."""

LEADERS = 2
"""For so many trials that run at once, one leader does not wait above the first rung. A choice."""


def waits_on_rung(number: int, standings: Standings) -> bool:
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


FROM = 0.1
"""Before this share of the incumbent's time no trial is hopeless: the first evaluations say little. A choice."""


class Pace(Cap):
    """Cap, and let wait what is hopeless; go on with what a better winner gives hope again.

    Before the first hit `bssearch.search.pruners.pace` says which wait. Afterwards those that wait and are not hopeless
    go on first, the one with the least predicted time (t / u) before the others. Where trials cannot be saved, what is
    hopeless is stopped for good, and before the first hit all go on.
    """

    heeds_seed_noise = True
    """Whether a trial that at its pace ends within the seeds' noise of the incumbent has a chance."""

    usual_patience = 4.0
    """Chosen, as those of the subclasses, on six recorded tables with ``tests/benchmarks/pruning.py``."""

    def __init__(self, patience: Annotated[float, Field(gt=1)] | None = None) -> None:
        self.patience = self.usual_patience if patience is None else patience

    def judge(self, number: int, standings: Standings) -> Action:
        """Let a trial wait that is hopeless, or, before the first hit, that has come to its rung."""
        if standings.winners:
            waits = self.is_hopeless(standings.curves[number], standings)
        else:
            waits = standings.can_wait and waits_on_rung(number, standings)
        if not waits:
            return Action.GO_ON
        return Action.WAIT if standings.can_wait else Action.STOP

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        """Return the trial that goes on next: what has hope again, or before the first hit what is promoted."""
        if not standings.winners:
            return promoted(standings, fresh=fresh)
        hopeful = [one for one, curve in standings.waiting.items() if not self.is_hopeless(curve, standings)]
        return min(hopeful, key=lambda one: (_predicted(standings.waiting[one], standings), one), default=None)

    def least_promising(self, standings: Standings) -> int | None:
        """Return the waiting trial with the greatest predicted time; before a hit, the worst on the lowest rung."""
        waiting, limit = standings.waiting, standings.limit
        if not standings.winners:
            return min(waiting, key=lambda one: (rung_of(waiting[one], limit), waiting[one].gain), default=None)
        return max(waiting, key=lambda one: (_predicted(waiting[one], standings), one), default=None)

    def paces_itself(self, standings: Standings) -> bool:
        """Return whether trials wait for each other before any has reached the target."""
        return standings.can_wait

    def is_hopeless(self, curve: Progress, standings: Standings) -> bool:
        """Return whether, by every winner's clock, the pace of a trial so far leaves it no chance."""
        elapsed = curve.now / standings.winners[0][1]
        if elapsed < FROM:
            return False
        share = _share(curve, standings)
        if elapsed <= (standings.slack if self.heeds_seed_noise else 1.0) * share:
            return False
        return elapsed >= 1 or elapsed * math.sqrt(1 - share) > self.patience * share * math.sqrt(1 - elapsed)


class Safe(Pace):
    """Pace that misses the winner in at most 1 % of the draws of ``tests/benchmarks/pruning.py``."""


class Balanced(Pace):
    """Pace that misses the winner in at most 5 % of the draws of ``tests/benchmarks/pruning.py``."""

    usual_patience = 2.7


class Fast(Pace):
    """Pace that misses the winner in at most 12 % of the draws of ``tests/benchmarks/pruning.py``."""

    usual_patience = 2.1
    heeds_seed_noise = False


def _share(curve: Progress, standings: Standings) -> float:
    """Return what part of the way to the target a trial has gone, by the luckiest of the winners' clocks."""
    return max(winner.when(curve.gain) / seconds for winner, seconds in standings.winners)


def _predicted(curve: Progress, standings: Standings) -> float:
    """Return the train seconds to the target of a trial that keeps its pace."""
    share = _share(curve, standings)
    return curve.now / share if share > 0 else math.inf
