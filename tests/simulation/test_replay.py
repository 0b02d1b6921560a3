"""Recorded trials on a virtual clock: what they cost, as counted by hand."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.pruners.base import Action, Cap, Policy, Progress
from bssearch.recorded import RecordedTable, RecordedTrial
from bssearch.records import Goal, Target
from bssearch.simulation.replay import Order, Replay, State, VirtualClock, ended_before, replays, with_target
from tests.search.lines import line, table


class Followed:
    """A clock run to its end: what it cost, and (train seconds spent by then, time-to-target) of each hit."""

    def __init__(self, trials: Sequence[Replay], policy: Policy, workers: int = 1, **options: Any) -> None:
        clock = VirtualClock(Order(trials), policy, workers, **options)
        self.changes: list[tuple[int, State]] = []
        self.hits: list[tuple[float, float]] = []
        for number, state in clock.run():
            self.changes.append((number, state))
            if state is State.REACHED:
                self.hits.append((clock.cost, policy.curves[number].now))
        self.now, self.cost = clock.now, clock.cost


def followed(policy: Policy, *seconds: float, workers: int = 1) -> Followed:
    return Followed([line(one) for one in seconds], policy, workers)


def test_without_pruning_every_trial_runs_to_its_target_or_its_end() -> None:
    found = followed(Policy(100.0), 10, 4, 300)
    assert found.cost == 10 + 4 + 100
    assert found.hits == [(10.0, 10.0), (14.0, 4.0)]
    assert found.now == found.cost


def test_no_trial_runs_past_the_incumbent() -> None:
    assert followed(Cap(100.0), 10, 4, 300, 7).cost == 10 + 4 + 4 + 4


def test_workers_run_at_once_and_a_new_incumbent_caps_those_that_run() -> None:
    found = followed(Cap(100.0), 10, 4, 300, workers=2)
    # 10 and 4 begin together; at 4 s the first has come to the cap, and 300 runs from there for 4 s.
    assert found.now == 8.0
    assert found.cost == 4 + 4 + 4


def test_a_fall_of_the_cap_ends_what_is_under_way() -> None:
    long = Replay([1000.0], [0.1], math.inf, 1000.0)
    found = Followed([line(10), long], Cap(1000.0), 2)
    assert (found.now, found.cost) == (10.0, 20.0)


def test_what_was_spent_by_an_incumbent_counts_what_the_others_are_at() -> None:
    alike = [Replay([5.0], [1.0], 5.0, 100.0)] * 3
    assert Followed(alike, Policy(100.0), 3).hits == [(15.0, 5.0)] * 3


def test_rounding_loses_no_hit() -> None:
    found = Followed([Replay([0.72, 2.98], [0.1, 0.95], 2.98, 10.0)], Policy(10.0))
    ((_, seconds),) = found.hits
    assert seconds == 2.98


class OnceInTheMiddle(Policy):
    """Lets every trial wait at its fifth second, and go on when nothing is left to begin."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.waiting: list[int] = []

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        super().observe(number, train_seconds, gain)
        if train_seconds != 5.0:
            return Action.GO_ON
        self.waiting.append(number)
        return Action.WAIT

    def next_waiting(self, *, fresh: bool, among: Collection[int] | None = None) -> int | None:
        return None if fresh or not self.waiting else self.waiting.pop()


def test_what_waited_goes_on_from_where_it_was() -> None:
    found = followed(OnceInTheMiddle(), 10, 8)
    assert found.cost == 18.0
    assert found.hits == [(13.0, 8.0), (18.0, 10.0)], "the second goes on first, and no second is paid twice"
    assert found.changes == [
        (0, State.RUNNING),
        (0, State.WAITING),
        (1, State.RUNNING),
        (1, State.WAITING),
        (1, State.RUNNING),
        (1, State.REACHED),
        (0, State.RUNNING),
        (0, State.REACHED),
    ]


class Endless:
    """As many trials of 3 seconds as are asked for; each asking is charged half a second."""

    has_more = True

    def __init__(self) -> None:
        self.charged = 0.0
        self.seen: list[Progress] = []

    def begin(self, progress: Progress) -> Replay:
        self.charged += 0.5
        self.seen.append(progress)
        return line(3)


@pytest.mark.parametrize(("budget", "hits"), [(3.49, 0), (3.5, 1), (10.0, 2), (10.5, 3)])
def test_what_comes_after_the_budget_does_not_happen(budget: float, hits: int) -> None:
    source = Endless()
    clock = VirtualClock(source, Policy(100.0), 1, budget=budget)
    spent = [clock.cost for _, state in clock.run() if state is State.REACHED]
    assert spent == [3.5 * (one + 1) for one in range(hits)]
    assert source.seen[0].train_seconds[:2] == [1.0, 2.0], "a source sees how far its trials are"


def test_the_budget_is_of_all_workers() -> None:
    clock = VirtualClock(Endless(), Policy(100.0), 2, budget=7.0)
    hits = [(clock.now, clock.cost) for _, state in clock.run() if state is State.REACHED]
    assert hits == [(3.0, 7.0)], "3 s on each of 2 workers, two charges; the second hit comes after a third charge"


class Never(Policy):
    """Stops every trial at its first evaluation."""

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        super().observe(number, train_seconds, gain)
        return Action.STOP


def test_a_policy_has_no_say_over_what_is_exempt_but_its_cap_holds() -> None:
    trials = [line(5), line(4)]
    assert Followed(trials, Never(100.0)).hits == []
    assert Followed(trials, Never(100.0), exempt={0}).hits == [(5.0, 5.0)]
    capped = Followed([line(5), line(9)], Cap(100.0), exempt={0, 1})
    assert (capped.hits, capped.cost) == ([(5.0, 5.0)], 10.0)


def test_a_table_is_read_with_its_goal_and_limit() -> None:
    losses = RecordedTable(
        "loss",
        Target(metric="loss", value=0.5, goal=Goal.MINIMIZE),
        None,
        (RecordedTrial(0, {}, 0, (1, 2, 3), (1.0, 2.0, 3.0), (0.9, 0.4, math.nan)),),
    )
    (one,) = replays(losses)
    assert (one.target_seconds, one.end, one.limit) == (2.0, 2.0, 3.0)
    assert list(one.gains[:2]) == [-0.9, -0.4]


def test_another_target_changes_when_trials_reach() -> None:
    lines = table(10, 20)
    assert [one.target_seconds for one in replays(with_target(lines, 0.5))] == [5.0, 10.0]
    with pytest.raises(UsageError, match="target = nan must be a finite number"):
        with_target(lines, math.nan)
    with pytest.raises(UsageError, match="no trial of table 'lines' reaches accuracy ≥ 2") as raised:
        replays(with_target(lines, 2.0))
    assert raised.value.hint == "the best accuracy in it is 1"


def test_trials_that_ended_at_the_target_cannot_say_when_they_meet_a_harder_one() -> None:
    lines = table(10, 20, 30)
    assert ended_before(lines, with_target(lines, 2.0).target) == 2
    assert ended_before(lines, with_target(lines, 0.5).target) == 0
    easy = with_target(lines, 0.5)
    assert ended_before(easy, lines.target) == 0, "they went on after it"
