"""Trials that train on to their limit after they have met the target."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from bssearch.records import TrialState
from tests.training.toys import Run, Toy, configuration, curve, metric_by_evaluation, request, ticking


def test_training_on_past_the_target_leaves_the_steps_and_the_crossing_as_they_were() -> None:
    dropping = configuration(dropout=0.1)
    stopping, going_on = (
        ticking(request(dropping, train_seconds_limit=20.04, **changes), step_seconds=0.1)
        for changes in ({"target": 0.9}, {"stop_at_target": False})
    )
    stopped, whole = stopping.outcome, going_on.outcome
    assert stopped.steps < 100 and whole.steps == 201
    assert curve(stopping) == curve(going_on)[: len(stopping.observations)]
    assert [seen.step for seen in going_on.observations] == list(range(0, 201, 5))
    crossings = [
        (
            outcome.state,
            outcome.time_to_target_s,
            outcome.steps_to_target,
            (outcome.last_miss_step, outcome.last_miss_seconds),
            (outcome.first_hit_step, outcome.first_hit_seconds),
        )
        for outcome in (stopped, whole)
    ]
    assert crossings[0] == crossings[1]
    metrics = [seen.metric for seen in going_on.observations]
    assert (whole.final_metric, whole.best_metric) == (metrics[-1], max(metrics))
    assert (whole.best_metric or 0) > (stopped.best_metric or 0)
    assert whole.reason == f"{stopped.reason}, then trained on: the limit of 20.04 train seconds passed"


@pytest.mark.parametrize(
    ("metrics", "changes", "steps", "hit", "best"),
    [
        ([0.5, 0.95, 0.7, 0.99, 0.8], {"train_seconds_limit": 22.5}, 23, 5, 0.99),
        ([0.5], {"train_seconds_limit": 7.5, "target": 0.0}, 8, 0, 0.5),
        ([0.2, 0.31], {"train_seconds_limit": 30.0, "target": 0.3}, 31, 5, 0.31),
    ],
    ids=["the first crossing counts", "before the first step", "worse than chance"],
)
def test_a_trial_that_has_met_its_target_trains_on_to_its_limit(
    metrics: list[float], changes: dict[str, Any], steps: int, hit: int, best: float
) -> None:
    outcome = ticking(request(stop_at_target=False, **changes), metrics).outcome
    assert (outcome.state, outcome.steps, outcome.first_hit_step) == (TrialState.REACHED, steps, hit)
    assert (outcome.first_hit_seconds, outcome.best_metric, outcome.final_metric) == (float(hit), best, metrics[-1])


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.EXHAUSTED])
def test_a_trial_that_would_train_on_but_never_meets_its_target_ends_as_any_other(state: TrialState) -> None:
    outcome = ticking(
        request(stop_at_target=False, train_seconds_limit=8.5, limit_state=state, tested=True), [0.5, 0.7]
    ).outcome
    assert (outcome.state, outcome.steps, outcome.time_to_target_s) == (state, 9, None)
    assert (outcome.last_miss_step, outcome.first_hit_step) == (5, None)
    assert outcome.test_metric == 0.7


def test_the_horizon_ends_a_trial_that_trains_on_and_its_test_part_is_seen() -> None:
    decaying = configuration(20, parameters={"schedule": "linear", "horizon_samples": 260})
    toy = Toy(on_evaluate=metric_by_evaluation([0.5, 0.95, 0.96, 0.97, 0.98]))
    outcome = Run(request(decaying, stop_at_target=False, tested=True), toy).outcome
    assert (outcome.state, outcome.steps, outcome.first_hit_step) == (TrialState.REACHED, 13, 5)
    assert outcome.reason.endswith("then trained on: the schedule's horizon ended at step 13")
    assert (outcome.final_metric, outcome.test_metric) == (0.97, 0.98)


@pytest.mark.parametrize(("hit", "state"), [(0.95, TrialState.REACHED), (0.8, TrialState.DIVERGED)])
def test_what_diverges_after_its_target_has_reached_it_all_the_same(hit: float, state: TrialState) -> None:
    outcome = Run(request(stop_at_target=False), Toy(on_evaluate=metric_by_evaluation([0.5, hit, math.nan]))).outcome
    assert (outcome.state, outcome.steps, outcome.final_metric) == (state, 10, hit)
    assert "accuracy is not finite" in outcome.reason


def test_what_runs_out_of_memory_after_its_target_has_reached_it_all_the_same() -> None:
    calls = itertools.count(1)

    def fail() -> None:
        if next(calls) == 9:
            raise MemoryError

    outcome = Run(
        request(stop_at_target=False), Toy(on_loss=fail, on_evaluate=metric_by_evaluation([0.5, 0.95]))
    ).outcome
    assert (outcome.state, outcome.steps_to_target) == (TrialState.REACHED, 5)
    assert "out of memory" in outcome.reason


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        (TrialState.PRUNED, TrialState.PRUNED),
        (TrialState.PAUSED, TrialState.PRUNED),  # its request names no checkpoint
        (TrialState.CANCELLED, TrialState.CANCELLED),
    ],
)
def test_a_trial_that_is_stopped_after_its_target_has_not_finished(asked: TrialState, state: TrialState) -> None:
    toy = Toy(on_evaluate=metric_by_evaluation([0.5, 0.95, 0.96]))
    seen: list[None] = []
    outcome = Run(
        request(stop_at_target=False),
        toy,
        on_observation=lambda: seen.append(None),
        stop=lambda: (asked, "enough") if len(seen) == 3 else None,
    ).outcome
    assert (outcome.state, outcome.steps, outcome.reason) == (state, 10, "enough")
    assert (outcome.time_to_target_s, outcome.first_hit_step, outcome.last_miss_step) == (None, None, None)
    assert (outcome.final_metric, outcome.best_metric) == (0.96, 0.96)
