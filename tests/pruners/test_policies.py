"""Pruning policies, evaluation by evaluation."""

from __future__ import annotations

import math

import pytest

from bssearch.pruners.base import Action, Cap, Policy, Progress, Race
from bssearch.pruners.halving import FIRST, PROMOTED
from bssearch.pruners.pace import FROM, Pace


def progress(*points: tuple[float, float]) -> Progress:
    found = Progress()
    for train_seconds, gain in points:
        found.add(train_seconds, gain)
    return found


def winner(policy: Policy, number: int = 0, seconds: float = 10.0) -> None:
    """Let a trial reach a gain of 1 at ``seconds``, on a straight line."""
    policy.started(number)
    for tenth in range(1, 10):
        policy.observe(number, seconds * tenth / 10, tenth / 10)
    policy.reached(number, seconds, 1.0)


def test_progress_is_the_best_so_far() -> None:
    curve = progress((1.0, 0.2), (2.0, 0.1), (3.0, math.nan), (4.0, 0.6))
    assert (curve.now, curve.gain) == (4.0, 0.6)
    assert [curve.at(moment) for moment in (0.5, 1.0, 3.5, 9.0)] == [None, 0.2, 0.2, 0.6]
    assert [curve.when(gain) for gain in (0.1, 0.2, 0.4, 0.6, 0.9)] == [1.0, 3.0, 3.5, 4.0, 4.0]
    assert (Progress().now, Progress().gain) == (0.0, -math.inf)


def test_nothing_is_pruned_by_no_policy_and_the_cap_is_the_fastest_hit() -> None:
    free, capped = Policy(100.0), Cap(100.0)
    for policy in (free, capped):
        winner(policy)
        winner(policy, 1, seconds=20.0)
        policy.started(2)
        assert policy.observe(2, 9.0, 0.0) is Action.GO_ON
    assert (free.cap, capped.cap) == (math.inf, 10.0)
    assert [seconds for _, seconds in capped.winners] == [10.0]
    winner(capped, 3, seconds=5.0)
    assert capped.cap == 5.0


def test_a_race_stops_what_lags_behind_the_incumbent() -> None:
    race = Race(100.0, lag=2.0)
    race.started(7)
    assert race.observe(7, 5.0, 0.0) is Action.GO_ON, "there is no incumbent yet"
    winner(race)
    race.started(1)
    assert race.observe(1, 0.9, -1.0) is Action.GO_ON, "before a tenth of the incumbent's time"
    assert race.observe(1, 4.0, 0.21) is Action.GO_ON
    assert race.observe(1, 6.0, 0.29) is Action.STOP, "the incumbent had 0.3 at half the time"


@pytest.mark.parametrize(
    ("seconds", "gain", "is_hopeless"),
    [
        (5.0, 0.5, False),
        (5.0, 0.2, True),  # 0.5 / 0.2 · √(0.8 / 0.5) = 3.16
        (5.0, 0.22, False),  # 2.84
        (9.5, 0.8, False),  # 0.95 / 0.8 · √(0.2 / 0.05) = 2.37
        (9.5, 0.7, True),  # 3.32
        (0.9, 0.0, False),
        (10.0, 0.9, True),
    ],
)
def test_pace_weighs_what_is_behind_and_what_is_left(seconds: float, gain: float, is_hopeless: bool) -> None:
    pace = Pace(100.0, patience=3.0)
    winner(pace)
    assert seconds >= FROM * pace.cap or not is_hopeless
    assert pace.is_hopeless(progress((seconds, gain))) is is_hopeless


def test_the_luckiest_winner_counts() -> None:
    pace = Pace(100.0, patience=3.0)
    pace.started(0)
    pace.observe(0, 18.0, 0.2)
    pace.reached(0, 20.0, 1.0)
    late = progress((5.0, 0.2))
    assert not pace.is_hopeless(late), "the slow starter had 0.2 at nine tenths of its way"
    winner(pace, 1)
    assert not pace.is_hopeless(late), "and still counts beside a faster one that started well"


def test_a_first_evaluation_at_no_seconds_is_no_progress() -> None:
    pace = Pace(100.0, patience=3.0)
    pace.started(0)
    pace.observe(0, 0.0, 0.5)
    pace.reached(0, 10.0, 1.0)
    assert pace.is_hopeless(progress((5.0, 0.4)))


@pytest.mark.parametrize("speed", [1.0, 0.8, 0.5])
def test_the_winners_own_curve_is_never_hopeless_on_its_own_clock(speed: float) -> None:
    shape = [(0.0, 0.1), (2.0, 0.1), (4.0, 0.1), (5.0, 0.6), (8.0, 0.6), (9.0, 0.9)]
    pace = Pace(100.0, patience=2.0)
    pace.started(0)
    for moment, gain in shape:
        pace.observe(0, moment, gain)
    pace.reached(0, 10.0, 1.0)
    pace.started(1)
    actions = [pace.observe(1, speed * moment, gain) for moment, gain in shape]
    assert set(actions) == {Action.GO_ON}, "a plateau is passed at its end"


def test_what_waits_goes_on_when_a_better_winner_gives_it_hope() -> None:
    pace = Pace(16.0 / FIRST, patience=3.0)
    winner(pace, 0, seconds=10.0)
    for number, gain in ((1, 0.15), (2, 0.18)):
        pace.started(number)
        assert pace.observe(number, 5.0, gain) is Action.WAIT
    assert pace.next_waiting(fresh=True) is None
    pace.started(3)
    pace.observe(3, 8.0, 0.18)  # what they have now, this winner had when it was nearly there
    pace.reached(3, 9.0, 1.0)
    assert [pace.next_waiting(fresh=True) for _ in range(3)] == [2, 1, None], "the least predicted time first"
    assert not pace.waiting


def test_what_is_past_the_cap_waits_for_nothing() -> None:
    pace = Pace(1000.0, patience=3.0)
    winner(pace, 0, seconds=10.0)
    pace.started(1)
    assert pace.observe(1, 8.0, 0.0) is Action.WAIT
    winner(pace, 2, seconds=7.0)
    assert pace.next_waiting(fresh=False) is None
    assert pace.least_promising() == 1


def test_before_the_first_hit_the_best_of_each_rung_goes_on() -> None:
    limit = 160.0
    rung = FIRST * limit
    pace = Pace(limit, patience=3.0)
    for number, gain in enumerate((0.1, 0.3, 0.2)):
        pace.started(number)
        assert pace.observe(number, rung / 2, 0.0) is Action.GO_ON
        assert pace.observe(number, rung, gain) is Action.WAIT
        due = pace.next_waiting(fresh=True)
        assert due == (1 if number + 1 == PROMOTED else None)
    assert pace.observe(1, 1.5 * rung, 0.4) is Action.GO_ON, "it may run to twice the time"
    assert pace.observe(1, 2 * rung, 0.4) is Action.WAIT
    assert pace.next_waiting(fresh=True) is None
    assert [pace.next_waiting(fresh=False) for _ in range(4)] == [1, 2, 0, None], "nothing new: the highest rung first"


def test_an_evaluation_may_lie_beyond_several_rungs() -> None:
    pace = Pace(160.0, patience=3.0)
    pace.started(0)
    assert pace.observe(0, 45.0, 0.1) is Action.WAIT  # rungs at 10, 20, 40, 80
    assert pace.next_waiting(fresh=False) == 0
    assert pace.observe(0, 79.0, 0.1) is Action.GO_ON
    assert pace.observe(0, 80.0, 0.1) is Action.WAIT


def test_the_slack_moves_the_cap_and_what_is_hopeless() -> None:
    pace = Pace(100.0, patience=3.0)
    pace.allow(1.5)
    assert pace.cap == math.inf, "nothing has been reached"
    winner(pace)
    assert pace.cap == 15.0
    late = progress((10.5, 0.7))
    assert not pace.is_hopeless(late)
    pace.allow(1.0)
    assert pace.is_hopeless(late)


def test_what_was_told_to_wait_here_waits_once() -> None:
    """Its end tells again that it waits: it came to its rung once, and has hope once."""
    pace = Pace(160.0, patience=3.0)
    for number in range(2):
        pace.started(number)
        assert pace.observe(number, 10.0, 0.1 * (2 - number)) is Action.WAIT
        pace.waits(number)
    assert pace.next_waiting(fresh=True) is None, "two came, of three one goes on"
    winner(pace, 7, seconds=100.0)  # both are as fast now as it was
    pace.waits(0)
    assert {pace.next_waiting(fresh=True) for _ in range(2)} == {0, 1}
    assert pace.next_waiting(fresh=True) is None


def test_what_waited_before_this_policy_watched_it_has_hope_like_any_other() -> None:
    pace = Pace(160.0, patience=3.0)
    winner(pace)
    for number, (now, gain) in enumerate([(5.0, 0.1), (5.0, 0.4), (11.0, 0.9)], start=1):
        pace.started(number)
        pace.watch(number, now, gain)
        pace.waits(number)
    assert [pace.next_waiting(fresh=True) for _ in range(2)] == [2, None]


def test_where_trials_cannot_wait_the_hopeless_stop_and_before_the_first_hit_all_go_on() -> None:
    pace = Pace(160.0, patience=3.0)
    pace.can_wait = False
    for number in range(4):
        pace.started(number)
        assert pace.observe(number, 80.0, 0.1) is Action.GO_ON
    winner(pace, 9)
    pace.started(4)
    assert pace.observe(4, 5.0, 0.1) is Action.STOP
    assert not pace.waiting
    assert pace.least_promising() is None


def test_the_least_promising_goes_first_and_waits_no_more() -> None:
    pace = Pace(160.0, patience=3.0)
    for number, gain in enumerate((0.3, 0.1, 0.2)):
        pace.started(number)
        pace.observe(number, 10.0, gain)
    assert pace.least_promising() == 1
    winner(pace, 9)
    assert pace.next_waiting(fresh=False) is None, "they are past the cap"
    assert {pace.least_promising(), pace.least_promising()} == {0, 2}
    for number, gain in ((3, 0.15), (4, 0.05)):
        pace.started(number)
        pace.observe(number, 5.0, gain)
    assert [pace.least_promising() for _ in range(3)] == [4, 3, None]
    assert pace.next_waiting(fresh=False) is None


def test_what_beats_all_that_came_to_its_rung_does_not_wait_once_enough_came() -> None:
    pace = Pace(160.0, patience=3.0)
    actions = []
    for number, gain in enumerate((0.1, 0.2, 0.3, 0.25)):
        pace.started(number)
        actions.append(pace.observe(number, 10.0, gain))
    assert actions == [Action.WAIT, Action.WAIT, Action.GO_ON, Action.WAIT]
    assert pace.observe(2, 20.0, 0.4) is Action.WAIT, "at the next rung it is the first"


def test_an_ended_trial_waits_for_nothing_and_nan_is_no_progress() -> None:
    pace = Pace(160.0, patience=3.0)
    winner(pace)
    pace.started(1)
    assert pace.observe(1, 5.0, math.nan) is Action.WAIT
    pace.ended(1)
    winner(pace, 2, seconds=9.9)
    assert pace.next_waiting(fresh=True) is None
    pace.started(3)
    assert pace.observe(3, 0.0, math.nan) is Action.GO_ON
    assert pace.observe(3, 2.0, 0.5) is Action.GO_ON


def test_the_slack_decides_anew_what_has_hope() -> None:
    pace = Pace(160.0, patience=3.0)
    winner(pace, 0, seconds=10.0)
    pace.started(1)
    assert pace.observe(1, 10.0, 0.5) is Action.WAIT
    assert pace.next_waiting(fresh=False) is None
    pace.allow(3.0)
    pace.allow(1.0)
    assert pace.next_waiting(fresh=False) is None
    pace.allow(3.0)
    assert pace.next_waiting(fresh=False) == 1
