"""The answer for another target, from the curves of trials that ran for a harder one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bssearch.analysis.objectives.base import Objective
from bssearch.curves import first_crossing, with_crossing
from bssearch.errors import UsageError
from bssearch.records import Goal, Observation, Target, TrialOutcome, TrialRecord, TrialState


def refuse_another_target(objective: Objective) -> None:
    """Raise `UsageError` where an objective has no answer for another target: no target enters its figure."""
    if not objective.stops_at_target:
        raise UsageError(
            f"a study of {objective.name} has no answer for another target: its batch sizes are compared by the best "
            "metric in the same train seconds, whether or not it meets a target",
            hint="leave the target out; when a metric was first reached takes a study of time_to_target",
        )


def easier_target(target: Target, value: float) -> Target:
    """Return the target with another value; raise `UsageError` where that is harder than the one trials ran for.

    A value that is no finite number is refused too.
    """
    if not math.isfinite(value):
        raise UsageError(f"target {value:g} must be a finite number")
    if target.gain(value) > target.gain(target.value):
        sign = "≤" if target.goal is Goal.MAXIMIZE else "≥"
        raise UsageError(
            f"target {value:g} is harder than the study's {target.metric} of {target.value:g}, where its trials "
            f"stopped; it must be {sign} {target.value:g}",
            hint="a harder target takes a study of its own, under a new name",
        )
    return replace(target, value=value)


def at_target(
    trial: TrialRecord, curve: Sequence[Observation], target: Target, step_seconds: float | None
) -> TrialRecord:
    """Return a trial as it would have ended at an easier target, by its curve.

    Where the curve meets the target the trial has reached it there, however it ended later. Its test metric is left
    out: that was measured at the end. Raises `UsageError` where the target is met before the first step.
    """
    if trial.outcome is None or trial.state.is_missing:
        return trial
    found = first_crossing(curve, target)
    if found is None:
        return trial
    if found.first_hit_step == 0:
        raise UsageError(
            f"target {target.value:g} is met before the first step: trial {trial.number} starts with "
            f"{target.metric} = {curve[0].metric:.4g}"
        )
    hit = next(one for one in curve if one.step == found.first_hit_step)
    tokens = trial.outcome.tokens
    outcome = replace(
        with_crossing(trial.outcome, found),
        state=TrialState.REACHED,
        reason=f"{target.metric} = {hit.metric:.6g} at step {hit.step}",
        steps=hit.step,
        samples=hit.samples,
        tokens=None if tokens is None else tokens * hit.samples // trial.outcome.samples,
        train_seconds=hit.train_seconds,
        undelayed_train_seconds=_until(hit.step, trial.outcome),
        final_metric=hit.metric,
        best_metric=hit.metric,
        test_metric=None,
        further_test_metrics=None,
    )
    product = None if step_seconds is None else found.steps * step_seconds
    return replace(trial, state=TrialState.REACHED, outcome=outcome, steps_x_step_time_s=product)


def _until(step: int, outcome: TrialOutcome) -> float | None:
    """Return the undelayed train seconds until a step: its share of the whole trial's, which no target changes."""
    whole = outcome.undelayed_train_seconds
    return None if whole is None or not outcome.steps else whole * step / outcome.steps
