"""The pruners `safe`, `balanced` and `fast` once a trial has won."""

import pytest

from bssearch.search.pruners.base import Action
from bssearch.search.pruners.pace import FIRST, FROM, Balanced, Fast, Pace, Safe
from tests.search.pruners.field import Field, progress


def pace(*, patience: float = 3.0, limit: float = 160.0, slack: float = 1.0, can_wait: bool = True) -> Field:
    return Field(Pace(patience), limit, slack=slack, can_wait=can_wait)


def is_hopeless(field: Field, seconds: float, gain: float) -> bool:
    assert isinstance(field.pruner, Pace)
    return field.pruner.is_hopeless(progress((seconds, gain)), field.standings)


@pytest.fixture
def field() -> Field:
    return pace()


@pytest.mark.parametrize(
    ("seconds", "gain", "expected"),
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
def test_pace_weighs_what_is_behind_and_what_is_left(seconds: float, gain: float, expected: bool, field: Field) -> None:
    field.winner()
    assert seconds >= FROM * field.standings.cap or not expected
    assert is_hopeless(field, seconds, gain) is expected
    assert field.observe(1, seconds, gain) is (Action.WAIT if expected else Action.GO_ON)


@pytest.mark.parametrize(("pruner", "expected"), [(Safe(), False), (Balanced(), False), (Fast(), True)])
def test_fast_alone_lets_wait_what_would_end_within_the_seeds_noise(pruner: Pace, expected: bool) -> None:
    field = Field(pruner, 160.0, slack=1.3)
    field.winner()
    assert is_hopeless(field, 9.9, 0.85) is expected  # at its pace it ends at 1.16 of the winner's time


def test_the_luckiest_winner_counts(field: Field) -> None:
    field.told(0, (18.0, 0.2))
    field.reached(0, 20.0)
    assert not is_hopeless(field, 5.0, 0.2), "the slow starter had 0.2 at nine tenths of its way"
    field.winner(1)
    assert not is_hopeless(field, 5.0, 0.2), "and still counts beside a faster one that started well"


def test_a_first_evaluation_at_no_seconds_is_no_progress(field: Field) -> None:
    field.told(0, (0.0, 0.5))
    field.reached(0, 10.0)
    assert is_hopeless(field, 5.0, 0.4)


@pytest.mark.parametrize("speed", [1.0, 0.8, 0.5])
def test_the_winners_own_curve_is_never_hopeless_on_its_own_clock(speed: float) -> None:
    shape = [(0.0, 0.1), (2.0, 0.1), (4.0, 0.1), (5.0, 0.6), (8.0, 0.6), (9.0, 0.9)]
    field = pace(patience=2.0)
    field.told(0, *shape)
    field.reached(0, 10.0)
    actions = [field.observe(1, speed * moment, gain) for moment, gain in shape]
    assert set(actions) == {Action.GO_ON}, "a plateau is passed at its end"


def test_what_waits_goes_on_when_a_better_winner_gives_it_hope() -> None:
    field = pace(limit=16.0 / FIRST)
    field.winner(0, seconds=10.0)
    for number, gain in ((1, 0.15), (2, 0.18)):
        assert field.observe(number, 5.0, gain) is Action.WAIT
    assert field.goes_on(fresh=True) is None
    field.told(3, (8.0, 0.17), (8.5, 0.18))  # what they have now, this winner had when it was nearly there
    field.reached(3, 9.0)
    assert [field.goes_on(fresh=True) for _ in range(3)] == [2, 1, None], "the least predicted time first"


def test_what_is_past_the_cap_waits_for_nothing() -> None:
    field = pace(limit=1000.0)
    field.winner(0, seconds=10.0)
    assert field.observe(1, 8.0, 0.0) is Action.WAIT
    field.winner(2, seconds=7.0)
    assert field.goes_on(fresh=False) is None
    assert field.given_up() == 1


def test_where_trials_cannot_wait_the_hopeless_stop_and_before_the_first_hit_all_go_on() -> None:
    field = pace(can_wait=False)
    assert not field.pruner.paces_itself(field.standings), "so the planner must"
    for number in range(4):
        assert field.observe(number, 80.0, 0.1) is Action.GO_ON
    field.winner(9)
    assert field.observe(4, 5.0, 0.1) is Action.STOP
    assert field.given_up() is None


def test_where_trials_can_wait_it_says_itself_how_long_they_run_before_the_first_hit(field: Field) -> None:
    assert field.pruner.paces_itself(field.standings)


def test_the_least_promising_goes_first_and_waits_no_more(field: Field) -> None:
    for number, gain in enumerate((0.3, 0.1, 0.2)):
        field.observe(number, 10.0, gain)
    assert field.given_up() == 1, "before the first hit, the one with the least gain"
    field.winner(9)
    assert field.goes_on(fresh=False) is None, "they are past the cap"
    assert {field.given_up(), field.given_up()} == {0, 2}
    for number, gain in ((3, 0.15), (4, 0.05)):
        assert field.observe(number, 5.0, gain) is Action.WAIT
    assert [field.given_up() for _ in range(3)] == [4, 3, None], "the greatest predicted time"
    assert field.goes_on(fresh=False) is None
