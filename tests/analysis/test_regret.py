"""What a rule's runs against the tuned ones come to: the ratio of their figures, and when it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bssearch.analysis.objectives import TIME, Objective, make_objective
from bssearch.analysis.optimum import Candidate
from bssearch.analysis.rules.regret import BROKE, HELD, Judgement, judge
from bssearch.records import Configuration, Phase, Target, TrialRecord, TrialState
from bssearch.records.intervals import student_t
from tests.factories import make_trial, not_none

LIMIT = 20.0
AT_64 = Configuration(batch_size=64, micro_batch_size=64, learning_rate=0.1)
MISSED, DIVERGED = TrialState.EXHAUSTED, TrialState.DIVERGED


def runs(*seconds: float, seeds: Sequence[int] = (), **changes: Any) -> tuple[TrialRecord, ...]:
    return tuple(
        make_trial(number, configuration=AT_64, seconds=one, seed=seed, phase=Phase.CONFIRM, **changes)
        for number, (one, seed) in enumerate(zip(seconds, seeds or range(len(seconds)), strict=True))
    )


def against(
    rule: tuple[TrialRecord, ...], tuned: tuple[TrialRecord, ...], *, wanted: int = 3, objective: Objective = TIME
) -> Judgement:
    mine, theirs = (Candidate(AT_64, one, objective) for one in (rule, tuned))
    return judge(mine, theirs, wanted=wanted, limit=LIMIT)


TUNED = runs(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("seconds", "finding"),
    [(HELD - 1e-6, "held"), (HELD, "undecided"), (BROKE, "undecided"), (BROKE + 1e-6, "broke"), (0.5, "held")],
)
def test_a_rule_holds_below_5_percent_and_breaks_above_10(seconds: float, finding: str) -> None:
    judgement = against(runs(seconds, seconds, seconds), TUNED)
    assert judgement.regret is not None
    assert (judgement.regret.low, judgement.regret.high) == pytest.approx((seconds, seconds))
    assert judgement.finding == finding


def test_paired_seeds_have_students_t_on_the_differences_of_their_logarithms() -> None:
    judgement = against(runs(2.0, 4.4, 8.0), runs(1.0, 2.0, 4.0))
    differences = [math.log(ratio) for ratio in (2.0, 2.2, 2.0)]
    mean = math.fsum(differences) / 3
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / 2)
    half = student_t(2) * deviation / math.sqrt(3)
    assert judgement.regret is not None
    expected = (math.exp(mean - half), math.exp(mean), math.exp(mean + half))
    assert (judgement.regret.low, judgement.regret.value, judgement.regret.high) == pytest.approx(expected)
    assert not judgement.regret.at_least


def test_seeds_in_one_side_alone_make_no_pair() -> None:
    wide, other = runs(1.0, 2.0, 4.0), runs(1.0, 2.0, 4.0, seeds=(0, 1, 7))
    paired, welch = (against(one, wide).regret for one in (wide, other))
    assert paired is not None and welch is not None
    assert paired.high is not None and welch.high is not None
    assert paired.high == pytest.approx(1.0) and welch.high > 2.0
    assert welch.value == pytest.approx(1.0) and welch.low == pytest.approx(1 / welch.high)


def test_none_reaching_breaks_a_rule_once_all_runs_are_made() -> None:
    for state in (MISSED, DIVERGED):
        rule = runs(5.0, 5.0, state=state)
        assert against(rule, TUNED, wanted=2).finding == "broke"
        assert against(rule, TUNED, wanted=3).finding == "undecided"


def test_a_rule_that_was_stopped_costs_at_least_what_it_ran_and_one_that_diverged_the_limit() -> None:
    for state, bound in ((MISSED, 5.0), (DIVERGED, LIMIT)):
        regret = not_none(against(runs(4.0, 5.0, 6.0, state=state), runs(2.0, 2.0, 2.0)).regret)
        assert regret.value == pytest.approx(bound / 2)
        assert regret.low is None and regret.high is None and regret.at_least


def test_what_some_runs_are_known_to_have_missed_bounds_the_regret_by_the_least_of_them() -> None:
    unknown = runs(6.0, state=DIVERGED)
    rule = (*runs(4.0, 5.0, state=MISSED), *(replace(one, seed=9, number=9) for one in unknown))
    regret = against(rule, TUNED).regret
    assert regret is not None and regret.at_least
    assert regret.value == pytest.approx(4.0)


def test_a_rule_seen_to_miss_at_no_time_at_all_has_no_bound() -> None:
    for seconds in (0.0, -0.0):
        assert against(runs(seconds, seconds, seconds, state=MISSED), TUNED).regret is None


def test_of_samples_a_run_that_diverged_bounds_nothing() -> None:
    samples = make_objective("samples_to_target", Target(metric="accuracy", value=0.9))
    judgement = against(runs(5.0, 5.0, 5.0, state=DIVERGED), TUNED, objective=samples)
    assert (judgement.finding, judgement.regret) == ("broke", None)


def test_some_that_missed_leave_a_ratio_of_medians_without_interval() -> None:
    missed = tuple(replace(one, seed=2, number=9) for one in runs(9.0, state=MISSED))
    of_rule = against((*runs(2.0, 3.0), *missed), TUNED)
    assert of_rule.finding == "undecided"
    assert of_rule.regret is not None
    assert of_rule.regret.value == pytest.approx(3.0)
    assert of_rule.regret.low is None and not of_rule.regret.at_least
    of_tuned = against(runs(6.0, 6.0, 6.0), (*runs(2.0, 3.0), *missed))
    assert of_tuned.finding == "undecided"
    assert of_tuned.regret is not None and of_tuned.regret.value == pytest.approx(2.0)


def test_where_the_tuned_runs_have_no_median_there_is_no_ratio() -> None:
    mostly = (*runs(1.0), *(replace(one, number=5 + one.seed, seed=5 + one.seed) for one in runs(9, 9, state=MISSED)))
    judgement = against(runs(2.0, 2.0, 2.0), mostly)
    assert (judgement.finding, judgement.regret) == ("undecided", None)


def test_a_shared_device_leaves_open_whether_none_would_have_reached_unless_the_runs_diverged() -> None:
    tuned = runs(1.0, 1.0, 1.0, contended=True, product=1.0)
    for state, finding in ((MISSED, "undecided"), (DIVERGED, "broke")):
        assert against(runs(5.0, 5.0, 5.0, state=state, contended=True), tuned).finding == finding


def test_a_rule_most_of_whose_runs_missed_costs_at_least_what_those_ran() -> None:
    mostly = (*runs(1.0), *(replace(one, number=5 + one.seed, seed=5 + one.seed) for one in runs(9, 9, state=MISSED)))
    judgement = against(mostly, TUNED)
    assert judgement.finding == "undecided" and judgement.regret is not None
    assert judgement.regret.at_least and judgement.regret.value == pytest.approx(9.0)
