from dataclasses import replace

import pytest

from bssearch.analysis.batches import survival
from bssearch.analysis.objectives import TIME, Products
from bssearch.records import TrialRecord, TrialState
from tests.factories import make_trial, not_none


def runs(reached: list[float], missed: list[float], state: TrialState = TrialState.EXHAUSTED) -> list[TrialRecord]:
    times = [make_trial(n, seconds=value) for n, value in enumerate(reached)]
    return times + [make_trial(100 + n, seconds=value, state=state) for n, value in enumerate(missed)]


def test_the_mean_is_restricted_to_the_horizon_of_those_that_missed() -> None:
    found = not_none(survival(runs([2.0, 4.0, 6.0], [10.0])))
    assert found.mean_s == pytest.approx((2 + 4 + 6 + 10) / 4)
    assert (found.horizon_s, found.median_s) == (10.0, 6.0)
    assert found.reached_share == pytest.approx(0.75)


def test_a_run_that_ended_early_counts_as_long_as_it_was_seen() -> None:
    """By hand: S = 2/3 after 2; the run that left at 3 is no longer at risk; S = 0 after 6."""
    found = not_none(survival(runs([2.0, 6.0], [3.0])))
    assert found.mean_s == pytest.approx(2 + 4 * 2 / 3)
    assert found.median_s == 6.0


def test_the_median_is_unknown_where_half_have_missed() -> None:
    found = not_none(survival(runs([2.0], [10.0, 10.0])))
    assert found.median_s is None
    assert found.mean_s == pytest.approx((2 + 10 + 10) / 3)
    half = not_none(survival(runs([2.0, 3.0], [10.0, 10.0])))
    assert half.median_s is None
    assert half.reached_share == pytest.approx(0.5)


def test_seconds_are_of_the_kind_that_the_measure_counts() -> None:
    reached = [make_trial(n, seconds=9.0, steps=steps, contended=True) for n, steps in enumerate((20, 40, 60))]
    missed = make_trial(9, seconds=30.0, state=TrialState.EXHAUSTED, last_miss_step=100, contended=True)
    found = not_none(survival([*reached, missed], replace(TIME, common=Products({(32, 32, 1): 0.1}))))
    assert found.mean_s == pytest.approx((2 + 4 + 6 + 10) / 4)
    assert (found.horizon_s, found.median_s) == (10.0, 6.0)
    assert survival([*reached, missed]) is None  # when the last was last seen alone to miss is not known


def test_nothing_is_said_where_censoring_depends_on_the_run_or_nothing_is_censored() -> None:
    assert survival(runs([2.0, 3.0], [])) is None
    assert survival(runs([], [10.0, 10.0])) is None
    assert survival(runs([2.0], [10.0], TrialState.PRUNED)) is None
    assert survival(runs([2.0], [10.0], TrialState.DIVERGED)) is None
    one, other = runs([2.0], [10.0])
    assert survival([one, replace(other, train_seconds_limit=20.0)]) is None
