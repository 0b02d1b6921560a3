"""Answers for an easier target, and for another device by its step times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from bssearch.analysis.answer import NO_NEXT_STEP, Answer, Device
from bssearch.analysis.objectives.base import Objective, objective_of
from bssearch.analysis.objectives.time_to_target import TimeToTarget
from bssearch.analysis.report import build_answer
from bssearch.analysis.shape import Notice
from bssearch.errors import TargetNotReachedError, UsageError
from bssearch.records import (
    Goal,
    Observation,
    ProbeRecord,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
    model_parameters,
)
from bssearch.records.curves import first_crossing, with_crossing
from bssearch.spec import StudySpec


def refuse_another_target(objective: Objective) -> None:
    """Raise `UsageError` if figures do not depend on a target."""
    if not objective.stops_at_target:
        raise UsageError(
            f"a study of {objective.name} has no answer for another target: it compares the best metric in equal train "
            "seconds",
            hint="omit the target, or run a study with objective time_to_target",
        )


def easier_target(target: Target, value: float) -> Target:
    """Target with another value; raises `UsageError` if not finite or harder."""
    if not math.isfinite(value):
        raise UsageError(f"target {value:g} must be a finite number")
    if target.gain(value) > target.gain(target.value):
        sign = "≤" if target.goal is Goal.MAXIMIZE else "≥"
        raise UsageError(
            f"target {value:g} is harder than {target.metric} {target.value:g}, at which the study's trials stopped; "
            f"it must be {sign} {target.value:g}",
            hint="run a new study, under a new name, for a harder target",
        )
    return replace(target, value=value)


def at_target(
    trial: TrialRecord, curve: Sequence[Observation], target: Target, step_seconds: float | None
) -> TrialRecord:
    """Trial as it would have ended at an easier target, by its curve; without its test metric.

    Raises `UsageError` if the target is met before the first step.
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
    whole = outcome.undelayed_train_seconds
    return None if whole is None or not outcome.steps else whole * step / outcome.steps


OF_THE_STUDYS_DEVICE = frozenset({"contended", "step_times_contended", "measurement", "device_slower"})
"""Notices that do not apply to another device."""


def predict_for_device(
    study: StudyRecord,
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    step_times: Mapping[int, ProbeRecord],
    device_name: str,
) -> Answer:
    """Answer predicted from a study's steps and another device's step times.

    Left out, with a notice: batch sizes without a step time, other models than the default's, and growing batches.
    Raises `UsageError` without a step time of a batch size that ran, `TargetNotReachedError` if no such batch size
    reached the target.
    """
    constant = [trial for trial in trials if not trial.configuration.grows]
    grown = len(trials) - len(constant)
    trials, others = _of_timed_model(spec, constant)
    sizes = {trial.configuration.batch_size for trial in trials}
    left_out = sorted(sizes - step_times.keys())
    if not sizes & step_times.keys():
        ran, timed = (_listed(sorted(some)) for some in (sizes, step_times))
        raise UsageError(
            f"no step time is of a batch size that study {study.name!r} ran: it ran {ran or 'no trials'}; step times "
            f"are of {timed}"
        )
    _check_reached(study, trials, step_times, " with the default's model" if others else "")
    moved = [
        at_step_time(trial, seconds)
        for trial in trials
        if (probe := step_times.get(trial.configuration.batch_size)) and (seconds := probe.step_seconds) is not None
    ]
    objective = spec.objective if objective_of(spec).trials_race else TimeToTarget.name
    found = build_answer(
        replace(study, objective=objective),
        spec.model_copy(update={"objective": objective}),
        moved,
        step_times,
    )
    measured_on = "elsewhere" if study.environment is None else study.environment.device_name
    told = [
        (
            "predicted",
            True,
            f"predicted for {device_name} from steps measured on {measured_on}; no trial ran on {device_name}",
        ),
        ("no_step_time", left_out, f"batch {_listed(left_out)} left out: no step time"),
        (
            "other_models_left_out",
            others,
            f"{others} trials left out: step times are of the default's model only",
        ),
        ("growing_batches_left_out", grown, f"{grown} trials left out: their batch grows"),
    ]
    notices = [Notice(code=code, message=message) for code, holds, message in told if holds]
    kept = [notice for notice in found.warnings if notice.code not in OF_THE_STUDYS_DEVICE]
    device = Device(name=device_name, type="unknown", memory_bytes=None, precision=None, torch_version=None)
    return found.model_copy(update={"device": device, "warnings": [*notices, *kept], **NO_NEXT_STEP})


def _of_timed_model(spec: StudySpec, trials: Sequence[TrialRecord]) -> tuple[Sequence[TrialRecord], int]:
    if not spec.has_several_models:
        return trials, 0
    timed = [trial for trial in trials if model_parameters(trial.configuration) == spec.timed_model]
    return timed, len(trials) - len(timed)


def at_step_time(trial: TrialRecord, step_seconds: float) -> TrialRecord:
    """Trial with times of steps × step time, without device counters and peak memory."""
    outcome = trial.outcome
    if outcome is None:
        return trial
    reached = outcome.steps_to_target
    miss = outcome.last_miss_step
    changed = replace(
        outcome,
        train_seconds=outcome.steps * step_seconds,
        undelayed_train_seconds=None,
        reference_seconds=None,
        host_bound_share=None,
        time_to_target_s=None if reached is None else reached * step_seconds,
        last_miss_seconds=None if miss is None else miss * step_seconds,
        first_hit_seconds=None if outcome.first_hit_step is None else outcome.first_hit_step * step_seconds,
        peak_memory_bytes=None,
        peak_memory_basis=None,
        contended=reached is not None,  # makes steps × step time count
        device_use=type(outcome.device_use)(),
        warnings=(),
    )
    return replace(trial, outcome=changed, steps_x_step_time_s=None if reached is None else reached * step_seconds)


def _check_reached(study: StudyRecord, trials: Sequence[TrialRecord], timed: Collection[int], of_model: str) -> None:
    reached = {
        trial.configuration.batch_size
        for trial in trials
        if trial.state is TrialState.REACHED and trial.outcome is not None and trial.outcome.steps_to_target is not None
    }
    if not reached:
        raise TargetNotReachedError(
            f"no trial of study {study.name!r}{of_model} has a known number of steps to the target",
            hint=f"`bssearch trial list {study.name}` shows how they ended",
        )
    if reached.isdisjoint(timed):
        ran = sorted({trial.configuration.batch_size for trial in trials} & set(timed))
        raise TargetNotReachedError(
            f"the step times are of batch sizes of study {study.name!r} that did not reach the target: {_listed(ran)}",
            hint=f"give step times of batch sizes that reached it: {_listed(sorted(reached))}",
        )


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))
