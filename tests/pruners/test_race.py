"""No pruning, capping, and the race against the incumbent's curve; the standings that they see."""

from __future__ import annotations

import math

import pytest

from bssearch.errors import UsageError
from bssearch.pruners.base import Action, Pruner, make_pruner, slack_for
from bssearch.pruners.cap import Cap
from bssearch.pruners.pace import PATIENCE, Pace
from bssearch.pruners.race import FROM, Race
from bssearch.spec.parts import PrunerSpec
from tests.pruners.field import Field


def test_the_cap_is_the_slack_times_the_fastest_hit_and_infinite_before_there_is_one() -> None:
    field = Field(Cap(), slack=1.5)
    assert field.standings.cap == math.inf
    field.winner(0)
    assert field.standings.cap == 15.0
    field.winner(1, seconds=20.0)
    assert [seconds for _, seconds in field.standings.winners] == [10.0]
    field.winner(2, seconds=5.0)
    assert field.standings.cap == 7.5
    field.standings.slack = 1.0
    assert field.standings.cap == 5.0


@pytest.mark.parametrize("pruner", [Pruner(), Cap()])
def test_nothing_is_stopped_before_the_cap_without_a_pruner_of_ones_own(pruner: Pruner) -> None:
    field = Field(pruner)
    field.winner()
    assert field.observe(1, 9.0, 0.0) is Action.GO_ON
    assert (pruner.caps, field.goes_on(fresh=False), field.given_up()) == (isinstance(pruner, Cap), None, None)


def test_a_race_stops_what_lags_behind_the_incumbent() -> None:
    field = Field(Race(lag=2.0))
    assert field.observe(7, 5.0, 0.0) is Action.GO_ON, "there is no incumbent yet"
    field.winner()
    assert field.observe(1, FROM * 10 - 0.1, -1.0) is Action.GO_ON, "before a tenth of the incumbent's time"
    assert field.observe(1, 4.0, 0.21) is Action.GO_ON
    assert field.observe(1, 6.0, 0.29) is Action.STOP, "the incumbent had 0.3 at half the time"


def test_a_spec_has_its_pruner_with_its_settings() -> None:
    race = make_pruner(PrunerSpec(name="race", lag=2.5))
    assert isinstance(race, Race) and race.lag == 2.5
    for name in ("safe", "balanced", "fast"):
        pace = make_pruner(PrunerSpec.model_validate({"name": name}))
        assert isinstance(pace, Pace) and pace.patience == PATIENCE[name]
    assert type(make_pruner(PrunerSpec(name="none"))) is Pruner
    with pytest.raises(UsageError):
        make_pruner(PrunerSpec.model_construct(name="nobody"))


def test_the_slack_allows_two_deviations_between_seeds() -> None:
    assert slack_for(0.0) == 1.0
    assert slack_for(0.15) == pytest.approx(1.3)
