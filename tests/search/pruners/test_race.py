"""No pruning, capping, and the race against the incumbent's curve."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from bssearch.errors import UsageError
from bssearch.search.pruners.base import Action, Cap, Pruner, make_pruner, slack_for
from bssearch.search.pruners.pace import FROM, Pace, Race
from bssearch.spec.parts import PrunerSpec
from tests.search.pruners.field import Field


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
    race = make_pruner(PrunerSpec(name="race", options={"lag": 2.5}))
    assert isinstance(race, Race) and race.lag == 2.5
    for name, usual in {"safe": 4.0, "balanced": 2.7, "fast": 2.1}.items():
        pace = make_pruner(PrunerSpec(name=name))
        assert isinstance(pace, Pace) and pace.patience == usual
        other = make_pruner(PrunerSpec(name=name, options={"patience": 3}))
        assert isinstance(other, Pace) and other.patience == 3
    assert type(make_pruner(PrunerSpec(name="none"))) is Pruner
    with pytest.raises(UsageError):
        make_pruner(PrunerSpec.model_construct(name="nobody"))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("race", {"lag": 1}, "pruner.options.lag = 1: input should be greater than 1"),
        ("race", {"lag": "slow"}, "pruner.options.lag = 'slow': input should be a valid number"),
        ("race", {"lagg": 2}, "pruner.options.lagg: unknown key; did you mean 'lag'?"),
        ("race", {"x": 2}, "pruner.options.x: unknown key; it takes lag"),
        ("fast", {"patience": 1.0}, "pruner.options.patience = 1.0: input should be greater than 1"),
        ("none", {"lag": 2}, "pruner.options.lag: unknown key; it takes none"),
        ("asha", {"lag": 2}, "pruner.options.lag: unknown key; it takes none"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value_and_its_bound(name: str, options: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_pruner(PrunerSpec(name=name, options=options))
    assert raised.value.message.startswith(said)


def test_a_lag_beside_the_name_is_an_option_of_a_race_and_the_usual_one_is_none() -> None:
    assert PrunerSpec.model_validate({"name": "race", "lag": 2.5}) == PrunerSpec(name="race", options={"lag": 2.5})
    assert PrunerSpec.model_validate({"name": "safe", "lag": 3.0}) == PrunerSpec(name="safe")
    with pytest.raises(UsageError):
        make_pruner(PrunerSpec.model_validate({"name": "safe", "lag": 2.5}))
    with pytest.raises(ValidationError):
        PrunerSpec.model_validate({"name": "race", "lag": 2.5, "options": "lag"})


def test_the_slack_allows_two_deviations_between_seeds() -> None:
    assert slack_for(0.0) == 1.0
    assert slack_for(0.15) == pytest.approx(1.3)
