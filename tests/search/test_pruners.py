from __future__ import annotations

import math

import pytest

from bssearch.curves import envelope
from bssearch.records import Target, TrialState
from bssearch.search.pruners import Incumbent, lags, train_seconds_limit, verdict
from bssearch.spec.model import PrunerSpec
from tests.factories import make_curve

TARGET = Target(metric="accuracy", value=0.9)
INCUMBENT = Incumbent(7, 4.0, envelope(make_curve((0.0, 0.1), (1.0, 0.5), (4.0, 0.9)), TARGET))
RACE = PrunerSpec(name="race", slack=1.5, lag=2.0)


def test_cap_is_slack_times_the_incumbent_and_never_beyond_the_full_limit() -> None:
    assert train_seconds_limit(RACE, 10.0, 4.0, sweeps=0) == 6.0
    assert train_seconds_limit(RACE, 5.0, 4.0, sweeps=0) == 5.0
    assert train_seconds_limit(PrunerSpec(name="none"), 10.0, 1.0, sweeps=0) == 10.0


def test_limits_grow_until_the_first_hit() -> None:
    limits = [train_seconds_limit(RACE, 8.0, math.inf, sweeps) for sweeps in range(5)]
    assert limits == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_trial_past_the_cap_is_capped() -> None:
    late = make_curve((0.0, 0.1), (6.1, 0.89))
    found = verdict(RACE, late, TARGET, INCUMBENT)
    assert found is not None
    assert found[0] is TrialState.CAPPED
    assert "trial 7" in found[1]
    assert verdict(RACE, make_curve((0.0, 0.1), (5.9, 0.89)), TARGET, INCUMBENT) is None


def test_racing_compares_at_equal_seconds_not_at_equal_steps() -> None:
    # At 2 s the incumbent's curve at 2 s / lag = 1 s stood at 0.5.
    assert verdict(RACE, make_curve((0.0, 0.1), (2.0, 0.49)), TARGET, INCUMBENT) is not None
    assert verdict(RACE, make_curve((0.0, 0.1), (2.0, 0.51)), TARGET, INCUMBENT) is None
    many_steps = make_curve(*((2.0 * i / 50, 0.51 * i / 50) for i in range(51)))
    assert verdict(RACE, many_steps, TARGET, INCUMBENT) is None


def test_no_race_before_a_tenth_of_the_incumbents_time() -> None:
    bad = envelope(make_curve((0.0, 0.0), (0.39, 0.0), (0.5, 0.0)), TARGET)
    assert not lags(bad, 0.39, INCUMBENT, lag=2.0)
    assert lags(bad, 0.5, INCUMBENT, lag=2.0)


@pytest.mark.parametrize("name", ["cap", "none"])
def test_only_the_race_stops_a_slow_trial_before_the_cap(name: str) -> None:
    slow = make_curve((0.0, 0.1), (3.0, 0.2))
    assert verdict(PrunerSpec.model_validate({"name": name}), slow, TARGET, INCUMBENT) is None
