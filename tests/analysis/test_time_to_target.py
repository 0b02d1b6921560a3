from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from bssearch.analysis.law.batch_model import WIDEST_GAP
from bssearch.analysis.objectives import seconds_to_target
from bssearch.analysis.optimum import estimate, ratio_interval
from bssearch.records import TrialRecord, TrialState
from bssearch.records.intervals import student_t
from tests.factories import make_trial, not_none, with_outcome


def test_only_reached_trials_have_a_time() -> None:
    assert seconds_to_target(make_trial(0, seconds=2.0)) == 2.0
    for state in TrialState:
        if state is not TrialState.REACHED:
            assert seconds_to_target(make_trial(0, state=state, seconds=2.0)) is None


def test_contended_runs_are_judged_by_steps_times_step_time() -> None:
    contended = make_trial(0, seconds=5.0, contended=True, product=2.0)
    assert seconds_to_target(contended) == 2.0
    alone = [make_trial(n, seconds=1.0 + n, product=0.1) for n in (1, 2)]
    mostly_alone = estimate([contended, *alone])
    assert (mostly_alone.median, mostly_alone.basis) == (2.0, "measured")
    assert mostly_alone.low is not None
    mostly_shared = estimate([contended, make_trial(8, seconds=9.0, contended=True, product=4.0), alone[0]])
    assert (mostly_shared.median, mostly_shared.basis) == (2.0, "steps_x_step_time")
    assert estimate([contended, alone[0]]).basis == "steps_x_step_time", "one half is enough"
    assert estimate(alone).basis == "measured"


def test_interval_is_students_t_on_logarithms() -> None:
    seconds = [2.0, 2.5, 3.2]
    found = estimate([make_trial(n, seconds=value) for n, value in enumerate(seconds)])
    logs = [math.log(value) for value in seconds]
    half = 4.302652729911275 * statistics.stdev(logs) / math.sqrt(3)  # t(0.975, 2), any table
    assert found.median == 2.5
    assert found.low == pytest.approx(math.exp(statistics.fmean(logs) - half))
    assert found.high == pytest.approx(math.exp(statistics.fmean(logs) + half))
    assert student_t(1e9) == pytest.approx(1.959964, abs=1e-5)


def between(last_miss: int, first_hit: int, seconds: float = 0.437) -> list[TrialRecord]:
    """Return three runs of equal seconds that hit between the same two evaluations."""
    trials = [make_trial(n, seconds=seconds, steps=(last_miss + first_hit) // 2) for n in range(3)]
    return [
        with_outcome(one, last_miss_step=last_miss, first_hit_step=first_hit)
        for one in trials
        if one.outcome is not None
    ]


def test_runs_that_hit_at_the_same_evaluation_have_the_width_of_its_gap() -> None:
    found = estimate(between(90, 110))
    assert found.low is not None and found.high is not None
    assert found.high / found.low > 110 / 90
    assert found.low < 0.437 < found.high
    # A uniform distribution of width w has the standard deviation w/√12.
    assert found.log_deviation == pytest.approx(math.log(110 / 90) / math.sqrt(12))
    many = estimate([replace(one, seed=n) for n, one in enumerate(between(90, 110) * 10)])
    assert math.log(not_none(many.high) / not_none(many.low)) / 2 == pytest.approx(1.96 * found.log_deviation, rel=0.01)
    low, high = ratio_interval(many, many) or (0.0, 0.0)
    assert math.log(high / low) / 2 == pytest.approx(1.96 * found.log_deviation * math.sqrt(2), rel=0.01)
    unknown = estimate([make_trial(n, seconds=0.437) for n in range(3)])
    assert (unknown.median, unknown.low, unknown.high) == (0.437, None, None)


def test_the_gap_counts_up_to_a_width_and_not_for_what_is_no_hit_at_the_target() -> None:
    found = estimate(between(1, 1000))
    assert found.log_deviation == pytest.approx(WIDEST_GAP / math.sqrt(12)) == estimate(between(0, 20)).log_deviation
    assert estimate(between(90, 110)[:1]).log_deviation == 0.0
    unseen = [with_outcome(one, first_hit_step=None) for one in between(90, 110) if one.outcome]
    assert estimate(unseen).log_deviation == 0.0


def test_seeds_that_differ_by_more_than_the_gap_count_by_themselves() -> None:
    runs = [
        with_outcome(one, time_to_target_s=seconds)
        for one, seconds in zip(between(99, 101), (1.0, 2.0, 4.0), strict=True)
        if one.outcome is not None
    ]
    assert estimate(runs).log_deviation == pytest.approx(math.log(2))


def test_missed_runs_count_as_longer_than_all() -> None:
    missed = make_trial(9, state=TrialState.EXHAUSTED, seconds=10.0)
    found = estimate([make_trial(0, seconds=1.0), make_trial(1, seconds=2.0), missed])
    assert (found.median, found.low, found.high, found.reached) == (2.0, None, None, 2)
    assert estimate([make_trial(0, seconds=1.0), missed]).median is None


def test_ratio_bound_needs_three_runs_on_both_sides() -> None:
    three = estimate([make_trial(n, seconds=1.0 + 0.01 * n) for n in range(3)])
    assert ratio_interval(three, estimate([make_trial(n, seconds=1.0) for n in range(2)])) is None
    assert 1.0 < not_none(ratio_interval(three, three))[1] < 1.05


def test_the_interval_of_a_ratio_is_welchs_and_turns_round_with_its_sides() -> None:
    slow = estimate([make_trial(n, seconds=value) for n, value in enumerate((2.0, 2.4, 1.8))])
    fast = estimate([make_trial(n, seconds=value) for n, value in enumerate((1.0, 1.01, 0.99, 1.02))])
    found, turned = ratio_interval(slow, fast), ratio_interval(fast, slow)
    # By scipy.stats.ttest_ind(…, equal_var=False).confidence_interval() of the logarithms.
    assert found == pytest.approx((1.42654, 2.92268), rel=1e-5)
    assert turned == pytest.approx((1 / 2.92268, 1 / 1.42654), rel=1e-5)
