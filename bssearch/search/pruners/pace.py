"""Pauses or stops a trial that is too slow compared with every winner (`Standings.winners`).

f is the trial's train seconds as a share of T, the incumbent's time to the target. u is the trial's progress: at share
u of a winner's time, the winner had the trial's best gain. The largest u of all winners counts. After a tenth of T, a
trial is hopeless if both conditions hold:

* (f / u) · ((1 − u) / (1 − f))ᵉ > ``patience``, or f ≥ 1: the trial takes f / u times as long as the winner. To end at
  T, the trial must become (1 − u) / (1 − f) times as fast as the winner. e is ``exponent``.
* f / u > ``slack``: at this pace, the trial ends after slack × T. The slack is 1 for `fast`.
"""

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from bssearch.records.curves import Progress
from bssearch.search.pruners.base import Action, Cap, Standings

# Before the first success, asynchronous successive halving (Li et al. 2020, ASHA) pauses trials instead of stopping.
#
# Each trial runs to `FIRST` of the limit and pauses. The best paused trial of a rung resumes to twice the rung's train
# seconds, whenever `PROMOTED` times as many trials reached the rung as left the rung. A trial better than all earlier
# trials at the rung does not pause. With many concurrent trials, leaders do not pause either, because a pause loses
# time. The best trial at a rung, from `LATE` on or if it is the first there, does not pause if its gains may reach the
# target: a success tells more than other trials' starts. Earlier gains are too steep for this forecast, except of the
# first trial, which is often the default.
#
# A trial reaches a rung with the first evaluation at the rung's train seconds or later. A trial has left the rung if
# the trial runs or has a later evaluation.

FIRST = 1 / 16  # share of the limit at the first rung; each rung doubles the share, which gives five rungs

LATE = 2  # rung at a quarter of the limit

# Trials per promotion; Li et al. recommend a reduction factor of 3 to 4
PROMOTED = 3

LEADERS = 2  # concurrent trials per leader; a leader does not pause above the first rung


def _waits_on_rung(number: int, standings: Standings) -> bool:
    # True if the newest evaluation reached a rung at which the trial pauses
    curve = standings.curves[number]
    rung = rung_of(curve, standings.limit)
    before = curve.train_seconds[-2] if len(curve.train_seconds) > 1 else -math.inf
    if rung < 0 or before >= seconds_of(rung, standings.limit):
        return False
    came = list(_that_came(rung, standings))
    best = max((at for one, at in came if one != number), default=-math.inf)
    shows_pace = rung >= LATE or len(came) == 1
    is_first = curve.gain > best and (len(came) >= PROMOTED or (shows_pace and _comes_in_time(curve, standings)))
    return not (is_first or (rung > 0 and _is_leader(number, standings)))


def _comes_in_time(curve: Progress, standings: Standings) -> bool:
    # True if further doublings of train seconds, with the gain of the last doubling, reach the target by the limit
    before = curve.at(curve.now / 2)
    if before is None:
        return False
    return curve.gain + math.log2(standings.limit / curve.now) * (curve.gain - before) >= standings.target_gain


def _promoted(standings: Standings, *, fresh: bool) -> int | None:
    # The best paused trial of the highest promotable rung; else, unless `fresh`, the best on any rung
    limit = standings.limit
    at = {number: rung_of(curve, limit) for number, curve in standings.waiting.items()}
    rungs = set(at.values())
    due = [rung for rung in rungs if _is_due(rung, standings)]
    if not rungs or (not due and fresh):
        return None
    rung = max(due or [rung for rung in rungs if seconds_of(rung, limit) < limit], default=min(rungs))
    return max((one for one in at if at[one] == rung), key=lambda one: (standings.waiting[one].gain, -one))


def rung_of(curve: Progress, limit: float) -> int:
    """Return a trial's highest rung, or −1 before the first rung."""
    if curve.now < FIRST * limit:
        return -1
    rung = int(math.log2(curve.now / (FIRST * limit)))
    return rung + (seconds_of(rung + 1, limit) <= curve.now) - (seconds_of(rung, limit) > curve.now)


def seconds_of(rung: int, limit: float) -> float:
    return FIRST * limit * 2.0**rung if rung >= 0 else 0.0


def _is_due(rung: int, standings: Standings) -> bool:
    came = [one for one, _ in _that_came(rung, standings)]
    return (sum(_has_left(one, rung, standings) for one in came) + 1) * PROMOTED <= len(came)


def _that_came(rung: int, standings: Standings) -> Iterator[tuple[int, float]]:
    seconds = seconds_of(rung, standings.limit)
    for number, curve in standings.curves.items():
        if curve.now >= seconds and number not in standings.uncapped:
            yield number, curve.gains[curve.index_from(seconds)]


def _has_left(number: int, rung: int, standings: Standings) -> bool:
    curve = standings.curves[number]
    return number in standings.running or curve.index_from(seconds_of(rung, standings.limit)) < len(curve.gains) - 1


def _is_leader(number: int, standings: Standings) -> bool:
    gain = standings.curves[number].gain
    ahead = sum(curve.gain >= gain for one, curve in standings.curves.items() if one != number)
    return ahead < len(standings.running) // LEADERS


FROM = 0.1  # no trial is hopeless before this share of the incumbent's time, because early evaluations say little


class Pace(Cap):
    """Caps trials and pauses hopeless trials, which resume if a later winner makes them hopeful again.

    If trials cannot save checkpoints, hopeless trials stop, and no trial pauses before the first success.
    """

    heeds_seed_noise = True

    # tuned by ``tests/benchmarks/pruning.py``: `safe` on eight tables, `balanced` and `fast` on six
    usual_patience = 2.7

    exponent = 0.5

    def __init__(self, patience: Annotated[float, Field(gt=1)] | None = None) -> None:
        self.patience = self.usual_patience if patience is None else patience

    def judge(self, number: int, standings: Standings) -> Action:
        if standings.winners:
            waits = self.is_hopeless(standings.curves[number], standings)
        else:
            waits = standings.can_wait and _waits_on_rung(number, standings)
        return Action.GO_ON if not waits else Action.WAIT if standings.can_wait else Action.STOP

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        """Return the paused trial with the least predicted time to the target; before a success, the promoted trial.

        Returns None if all paused trials are hopeless. If ``fresh``, also returns None if all predictions exceed the
        cap or no promotion is due.
        """
        if not standings.winners:
            return _promoted(standings, fresh=fresh)
        hopeful = {one: curve for one, curve in standings.waiting.items() if not self.is_hopeless(curve, standings)}
        seconds, number = min(
            ((_predicted(curve, standings), one) for one, curve in hopeful.items()), default=(math.inf, None)
        )
        return None if fresh and seconds > standings.cap else number

    def least_promising(self, standings: Standings) -> int | None:
        """Return the trial of the longest predicted time; before a success, of the least gain on the lowest rung."""
        waiting, limit = standings.waiting, standings.limit
        if not standings.winners:
            return min(waiting, key=lambda one: (rung_of(waiting[one], limit), waiting[one].gain), default=None)
        return max(waiting, key=lambda one: (_predicted(waiting[one], standings), one), default=None)

    def paces_itself(self, standings: Standings) -> bool:
        return standings.can_wait

    def is_hopeless(self, curve: Progress, standings: Standings) -> bool:
        elapsed = curve.now / standings.winners[0][1]
        if elapsed < FROM:
            return False
        share = _share(curve, standings)
        if elapsed <= (standings.slack if self.heeds_seed_noise else 1.0) * share:
            return False
        speed_up = (1 - share) / (1 - elapsed) if elapsed < 1 else math.inf
        return elapsed * math.pow(speed_up, self.exponent) > self.patience * share


class Safe(Pace):
    """Misses the fastest trial in at most 1 % of draws on each table of ``tests/benchmarks/pruning.py``."""

    usual_patience = 8.3

    exponent = 1.6  # a larger exponent spares late surges, as of a decaying learning rate, and costs little


class Balanced(Pace):
    """Misses the fastest trial in at most 5 % of draws on six tables of ``tests/benchmarks/pruning.py``."""


class Fast(Pace):
    """Misses the fastest trial in at most 12 % of draws on six tables of ``tests/benchmarks/pruning.py``."""

    usual_patience = 2.1
    heeds_seed_noise = False


def _share(curve: Progress, standings: Standings) -> float:
    return max(winner.when(curve.gain) / seconds for winner, seconds in standings.winners)


def _predicted(curve: Progress, standings: Standings) -> float:
    share = _share(curve, standings)
    return curve.now / share if share > 0 else math.inf


class Race(Cap):
    """Caps trials and stops lagging trials.

    After a tenth of the cap, a trial lags if the incumbent had a higher gain in 1 / ``lag`` of the train seconds.
    """

    def __init__(self, lag: Annotated[float, Field(gt=1)] = 3.0) -> None:
        self.lag = lag

    def judge(self, number: int, standings: Standings) -> Action:
        curve = standings.curves[number]
        if not standings.winners or curve.now < FROM * standings.cap:
            return Action.GO_ON
        expected = standings.winners[0][0].at(curve.now / self.lag)
        return Action.STOP if expected is not None and curve.gain < expected else Action.GO_ON
