from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bssearch import registry
from bssearch.analysis.build_answer import at_target, easier_target, refuse_another_target
from bssearch.analysis.objectives import make_objective
from bssearch.errors import UsageError
from bssearch.records import Goal, Observation, Target, TrialState
from tests.factories import make_trial, not_none, with_outcome

ACCURACY = Target(metric="accuracy", value=0.9)


def curve(*metrics: float) -> list[Observation]:
    """One evaluation every 10 steps of 0.1 s, of batches of 4."""
    return [
        Observation(
            step=10 * index,
            samples=40 * index,
            train_seconds=1.0 * index,
            metric=metric,
            loss=None,
            learning_rate=0.1,
        )
        for index, metric in enumerate(metrics)
    ]


def test_a_trial_has_reached_an_easier_target_where_its_curve_first_meets_it() -> None:
    trial = make_trial(1, seconds=4.0, undelayed_train_seconds=3.0)
    trial = with_outcome(trial, steps=40, samples=160, tokens=1600, test_metric=0.88)
    moved = at_target(trial, curve(0.1, 0.5, 0.7, 0.6, 0.9), replace(ACCURACY, value=0.6), step_seconds=0.2)
    outcome = not_none(moved.outcome)
    assert moved.state is outcome.state is TrialState.REACHED
    assert (outcome.last_miss_step, outcome.first_hit_step, outcome.steps_to_target) == (10, 20, 15)
    assert outcome.time_to_target_s == pytest.approx(1.5)
    assert moved.steps_x_step_time_s == pytest.approx(15 * 0.2)
    assert (outcome.steps, outcome.samples, outcome.tokens, outcome.final_metric) == (20, 80, 800, 0.7)
    assert outcome.test_metric is None
    assert outcome.undelayed_train_seconds == pytest.approx(3.0 * 20 / 40)


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.PRUNED, TrialState.EXHAUSTED, TrialState.DIVERGED])
def test_however_it_ended_later_what_it_reached_it_reached(state: TrialState) -> None:
    trial = make_trial(1, state=state)
    assert at_target(trial, curve(0.1, 0.7), replace(ACCURACY, value=0.6), 0.1).state is TrialState.REACHED
    assert at_target(trial, curve(0.1, 0.5), replace(ACCURACY, value=0.6), 0.1) == trial


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.LOST, TrialState.CANCELLED])
def test_a_trial_that_says_nothing_says_nothing_of_another_target_either(state: TrialState) -> None:
    trial = make_trial(1, state=state)
    assert at_target(trial, curve(0.1, 0.7), replace(ACCURACY, value=0.6), 0.1) == trial


def test_an_objective_that_no_target_enters_has_no_answer_for_another_target() -> None:
    for name in registry.names("objectives"):
        if name != "metric_in_budget":
            refuse_another_target(make_objective(name, ACCURACY))
    with pytest.raises(UsageError, match="metric_in_budget has no answer for another target") as caught:
        refuse_another_target(make_objective("metric_in_budget", ACCURACY))
    assert caught.value.hint is not None


def test_a_target_met_before_the_first_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"target 0\.05 is met before the first step: trial 3 starts with .* 0\.1"):
        at_target(make_trial(3, seconds=1.0), curve(0.1, 0.9), replace(ACCURACY, value=0.05), 0.1)


@pytest.mark.parametrize(
    ("goal", "own", "harder", "easier"), [(Goal.MAXIMIZE, 0.9, 0.91, 0.5), (Goal.MINIMIZE, 2.0, 1.9, 3.0)]
)
def test_only_a_target_as_easy_as_the_studys_can_be_answered(
    goal: Goal, own: float, harder: float, easier: float
) -> None:
    target = Target(metric="m", value=own, goal=goal)
    assert easier_target(target, easier).value == easier
    assert easier_target(target, own) == target
    with pytest.raises(UsageError, match=f"target {harder:g} is harder than m {own:g}"):
        easier_target(target, harder)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UsageError, match=f"target {value:g} must be a finite number"):
            easier_target(target, value)
