"""Optuna's pruners on a common grid of train seconds."""

import math
import random

import pytest

from bssearch.records import TrialState
from bssearch.search.pruners.base import Action
from bssearch.search.pruners.optuna import GRID, Asha, Hyperband, Median
from bssearch.search.pruners.pace import FIRST, LEADERS, PROMOTED, Pace, rung_of, seconds_of
from tests.search.pruners.field import Field, progress

Kind = type[Median] | type[Asha] | type[Hyperband]
KINDS: list[Kind] = [Median, Asha, Hyperband]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_made_anew_from_the_standings_it_decides_as_the_one_that_saw_every_evaluation(kind: Kind, seed: int) -> None:
    rng, field, stopped = random.Random(seed), Field(kind(), float(GRID)), 0
    for number in range(1, 13):
        slope = rng.uniform(0.2, 1.0)
        for moment in range(3, GRID, 9):
            gain = math.nan if rng.random() < 0.05 else slope * moment / GRID + rng.gauss(0, 0.03)
            field.told(number, (float(moment), gain))
            action = field.pruner.judge(number, field.standings)
            assert kind().judge(number, field.standings) is action
            if action is Action.STOP:
                field.ended(number, TrialState.PRUNED)
                stopped += 1
                break
        else:
            field.ended(number, rng.choice([TrialState.EXHAUSTED, TrialState.CAPPED, TrialState.FAILED]))
    assert 0 < stopped < 12


def test_an_evaluation_at_a_place_of_the_grid_that_has_one_is_not_told() -> None:
    field = Field(Median(), float(GRID))
    for number in range(6):
        field.told(number, (40.0, 1.0))
        field.ended(number, TrialState.EXHAUSTED)
    assert field.observe(9, 40.2, 2.0) is Action.GO_ON
    assert field.observe(9, 40.9, 0.0) is Action.GO_ON, "the place of 40.2 s, and the best so far counts"
    assert field.observe(10, 40.2, 0.5) is Action.STOP


def test_what_others_ran_counts_for_optunas_median_too() -> None:
    seen, alone = Field(Median(), float(GRID)), Field(Median(), float(GRID))
    for number in range(10):
        seen.told(number, (40.0, 1.0))
        seen.ended(number, TrialState.EXHAUSTED)
    assert (seen.observe(99, 40.0, 0.5), alone.observe(99, 40.0, 0.5)) == (Action.STOP, Action.GO_ON)


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.PAUSED])
def test_what_was_pruned_elsewhere_is_no_complete_trial_to_optuna(state: TrialState) -> None:
    field = Field(Median(), float(GRID))
    for number in range(10):
        field.told(number, (40.0, 1.0))
        field.ended(number, state)
    assert field.observe(99, 40.0, 0.5) is Action.GO_ON, "it has no complete trial to compare with"


LIMIT = 160.0
RUNG = FIRST * LIMIT


def rungs() -> Field:
    return Field(Pace(patience=3.0), LIMIT)


@pytest.mark.parametrize(
    ("seconds", "rung"),
    [(0.0, -1), (9.99, -1), (10.0, 0), (math.nextafter(20.0, 0), 0), (20.0, 1), (39.0, 1), (80.0, 3), (160.0, 4)],
)
def test_a_rung_is_twice_as_far_as_the_one_before(seconds: float, rung: int) -> None:
    assert rung_of(progress((seconds, 0.5)), LIMIT) == rung
    assert seconds_of(rung, LIMIT) <= seconds
    assert rung == -1 or seconds_of(rung + 1, LIMIT) == 2 * seconds_of(rung, LIMIT) > seconds


@pytest.mark.parametrize("limit", [0.1, 0.3, 7.0, 1e-9, 1e9])
def test_a_rung_is_come_to_at_its_very_seconds_whatever_the_limit(limit: float) -> None:
    for rung in range(5):
        assert rung_of(progress((seconds_of(rung, limit), 0.5)), limit) == rung


@pytest.fixture
def field() -> Field:
    return rungs()


def test_before_the_first_hit_the_best_of_each_rung_goes_on(field: Field) -> None:
    for number, gain in enumerate((0.1, 0.3, 0.2)):
        assert field.observe(number, RUNG / 2, 0.0) is Action.GO_ON
        assert field.observe(number, RUNG, gain) is Action.WAIT
        assert field.goes_on(fresh=True) == (1 if number + 1 == PROMOTED else None)
    assert field.observe(1, 1.5 * RUNG, 0.4) is Action.GO_ON, "it may run to twice the time"
    assert field.observe(1, 2 * RUNG, 0.4) is Action.WAIT
    assert field.goes_on(fresh=True) is None
    assert [field.goes_on(fresh=False) for _ in range(4)] == [1, 2, 0, None], "nothing new: the highest rung first"


def test_what_beats_all_that_came_to_its_rung_does_not_wait_once_enough_came(field: Field) -> None:
    actions = [field.observe(number, RUNG, gain) for number, gain in enumerate((0.1, 0.2, 0.3, 0.25))]
    assert actions == [Action.WAIT, Action.WAIT, Action.GO_ON, Action.WAIT]
    assert field.observe(2, 2 * RUNG, 0.4) is Action.WAIT, "at the next rung it is the first"


def test_a_trial_goes_on_from_a_rung_once_for_every_three_that_came_to_it(field: Field) -> None:
    due = []
    for number in range(2 * PROMOTED):
        field.observe(number, RUNG, 0.5 - 0.05 * number)
        due.append(field.goes_on(fresh=True))
    assert due == [None, None, 0, None, None, 1]


def test_where_many_run_at_once_a_leader_does_not_wait_above_the_first_rung(field: Field) -> None:
    for number in range(LEADERS - 1):
        field.told(number, (RUNG / 2, 0.01))
    assert field.observe(8, RUNG, 0.2) is Action.WAIT, "at the first rung all wait"
    assert field.goes_on(fresh=False) == 8
    assert field.observe(8, 2 * RUNG, 0.3) is Action.GO_ON, "one leader for every two that run"
    assert field.observe(9, 2 * RUNG, 0.2) is Action.WAIT, "the second best of three that run"


def test_what_a_winner_ends_the_rungs_for_goes_on_by_its_pace(field: Field) -> None:
    for number in range(2):
        assert field.observe(number, RUNG, 0.1 * (2 - number)) is Action.WAIT
    assert field.goes_on(fresh=True) is None, "two came, of three one goes on"
    field.winner(7, seconds=100.0)  # both are as fast now as it was
    assert {field.goes_on(fresh=True) for _ in range(2)} == {0, 1}
    assert field.goes_on(fresh=True) is None


def test_of_those_that_wait_the_least_gain_on_the_lowest_rung_is_given_up_first(field: Field) -> None:
    field.observe(0, 2 * RUNG, 0.05)
    field.observe(1, RUNG, 0.4)
    field.observe(2, RUNG, 0.3)
    assert [field.given_up() for _ in range(4)] == [2, 1, 0, None]
