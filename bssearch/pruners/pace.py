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

from bssearch.curves import Progress
from bssearch.pruners import halving
from bssearch.pruners.base import Action, Standings
from bssearch.pruners.cap import Cap

FROM = 0.1
"""Before this share of the incumbent's time no trial is hopeless: the first evaluations say little. A choice."""


class Pace(Cap):
    """Cap, and let wait what is hopeless; go on with what a better winner gives hope again.

    Before the first hit `bssearch.pruners.halving` says which wait. Afterwards those that wait and are not hopeless go
    on first, the one with the least predicted time (t / u) before the others. Where trials cannot be saved, what is
    hopeless is stopped for good, and before the first hit all go on.
    """

    heeds_seed_noise = True
    """Whether a trial that at its pace ends within the seeds' noise of the incumbent has a chance."""

    def __init__(self, patience: float) -> None:
        self.patience = patience

    def judge(self, number: int, standings: Standings) -> Action:
        """Let a trial wait that is hopeless, or, before the first hit, that has come to its rung."""
        if standings.winners:
            waits = self.is_hopeless(standings.curves[number], standings)
        else:
            waits = standings.can_wait and halving.waits(number, standings)
        if not waits:
            return Action.GO_ON
        return Action.WAIT if standings.can_wait else Action.STOP

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        """Return the trial that goes on next: what has hope again, or before the first hit what is promoted."""
        if not standings.waiting:
            return None
        if not standings.winners:
            return halving.promoted(standings, fresh=fresh)
        hopeful = [one for one, curve in standings.waiting.items() if not self.is_hopeless(curve, standings)]
        return min(hopeful, key=lambda one: (_predicted(standings.waiting[one], standings), one), default=None)

    def least_promising(self, standings: Standings) -> int | None:
        """Return the waiting trial with the greatest predicted time; before the first hit that of the lowest rung."""
        if not standings.waiting:
            return None
        if not standings.winners:
            return halving.least_promising(standings)
        return max(standings.waiting, key=lambda one: (_predicted(standings.waiting[one], standings), one))

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

    def __init__(self) -> None:
        super().__init__(PATIENCE["safe"])


class Balanced(Pace):
    """Pace that misses the winner in at most 5 % of the draws of ``tests/benchmarks/pruning.py``."""

    def __init__(self) -> None:
        super().__init__(PATIENCE["balanced"])


class Fast(Pace):
    """Pace that misses the winner in at most 12 % of the draws of ``tests/benchmarks/pruning.py``."""

    heeds_seed_noise = False

    def __init__(self) -> None:
        super().__init__(PATIENCE["fast"])


PATIENCE = {"safe": 4.0, "balanced": 2.7, "fast": 2.1}
"""The operating points, by name: chosen on six recorded tables, ``tests/benchmarks/pruning.py``."""


def _share(curve: Progress, standings: Standings) -> float:
    """Return what part of the way to the target a trial has gone, by the luckiest of the winners' clocks."""
    return max(winner.when(curve.gain) / seconds for winner, seconds in standings.winners)


def _predicted(curve: Progress, standings: Standings) -> float:
    """Return the train seconds to the target of a trial that keeps its pace."""
    share = _share(curve, standings)
    return curve.now / share if share > 0 else math.inf
