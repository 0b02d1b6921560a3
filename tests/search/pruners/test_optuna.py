"""Optuna's pruners on a common grid of train seconds: what they are told, and that nothing else matters to them."""

from __future__ import annotations

import math
import random

import pytest

from bssearch.records import TrialState
from bssearch.search.pruners.base import Action
from bssearch.search.pruners.optuna import GRID, Asha, Hyperband, Median
from tests.search.pruners.field import Field

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
