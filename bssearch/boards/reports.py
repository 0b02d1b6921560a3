"""What is reported of records: the events of boards, made of a study, its trials and its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import yaml

from bssearch.analysis.answer import Answer, Ratio, parameters_of
from bssearch.analysis.headline import headline
from bssearch.boards.events import Answered, StudyOpened, TrialEnded, TrialObserved, TrialStarted
from bssearch.records import Configuration, Observation, ParameterValue, StudyRecord, TrialRecord
from bssearch.spec import StudySpec

FIGURES = (
    "time_to_target_s",
    "steps_to_target",
    "final_metric",
    "best_metric",
    "test_metric",
    "train_seconds",
    "evaluation_seconds",
    "wall_seconds",
    "steps",
    "samples",
    "peak_memory_bytes",
)
"""The figures of a trial's outcome that are reported, where they were measured."""

_SECRET = re.compile(r"passw|passphrase|secret|credential|api[_-]?key|token$", re.IGNORECASE)
"""What the name of a secret has in it; a text of such a name is not reported."""


def study_opened(study: StudyRecord, spec: StudySpec) -> StudyOpened:
    """Return what is told of a study: its spec without passwords."""
    target = study.target
    return StudyOpened(
        name=study.name,
        mark=study.mark,
        metric=target.metric,
        target=f"{target.metric} {target.goal.sign} {target.value:g}",
        objective=study.objective,
        device="unknown" if study.environment is None else study.environment.device_name,
        spec=yaml.safe_dump(without_secrets(spec.model_dump(mode="json")), sort_keys=False),
    )


def trial_started(trial: TrialRecord) -> TrialStarted:
    """Return what is told of a trial that begins, or goes on."""
    return TrialStarted(
        number=trial.number,
        phase=trial.phase,
        seed=trial.seed,
        started_at=trial.created_at.timestamp(),
        parameters=all_parameters(trial.configuration),
        retry_of=trial.retry_of,
    )


def trial_observed(number: int, one: Observation, train_samples: int | None) -> TrialObserved:
    """Return what is told of an evaluation; epochs where it is known how many samples one has."""
    figures = {"samples": float(one.samples), "learning_rate": one.learning_rate}
    if one.loss is not None:
        figures["loss"] = one.loss
    if train_samples:
        figures["epoch"] = one.samples / train_samples
    return TrialObserved(
        number=number, step=one.step, train_seconds=one.train_seconds, value=one.metric, figures=figures
    )


def trial_ended(trial: TrialRecord, *, is_elsewhere: bool = False) -> TrialEnded:
    """Return what is told of a trial that has ended, or is paused."""
    outcome = trial.outcome
    measured = {name: getattr(outcome, name, None) for name in FIGURES}
    measured["steps_x_step_time_s"] = trial.steps_x_step_time_s
    warnings = [] if outcome is None else outcome.warnings
    reason = "" if outcome is None else "; ".join([outcome.reason, *warnings])
    return TrialEnded(
        number=trial.number,
        state=trial.state,
        reason=reason,
        ended_at=time.time() if trial.ended_at is None else trial.ended_at.timestamp(),
        figures={name: float(value) for name, value in measured.items() if value is not None},
        is_elsewhere=is_elsewhere,
    )


def answered(answer: Answer, trials: int) -> Answered:
    """Return what is told of an answer, made after so many trials."""
    best = answer.optimal
    parameters = {
        "batch_size": best.batch_size,
        "micro_batch_size": best.micro_batch_size,
        "accumulation_steps": best.accumulation_steps,
        **best.parameters,
    }
    return Answered(
        headline=headline(answer),
        verdict="provisional" if answer.provisional else "settled",
        trials=trials,
        parameters=parameters,
        figures=_answer_figures(answer),
        document=answer.model_dump_json(indent=2),
    )


def _answer_figures(answer: Answer) -> dict[str, float]:
    best, speedup = answer.optimal, answer.speedup
    named: dict[str, float | None] = {
        "optimal_batch_size": best.batch_size,
        "flat_range_low": answer.flat_range[0],
        "flat_range_high": answer.flat_range[1],
        "within_5_percent": answer.within_5_percent,
        "steps_to_target": best.steps_to_target,
        "test_metric": best.test_metric,
    }
    for name, figure in (("time_to_target_s", best.time_to_target_s), ("objective_value", best.objective_value)):
        if figure is not None:
            named |= {name: figure.median, f"{name}_low": figure.low, f"{name}_high": figure.high}
            named[f"{name}_runs"] = figure.runs
    for name, ratio in (("over_default", speedup.over_default), ("over_largest", speedup.over_largest)):
        named |= _ratio(f"speedup_{name}", ratio)
    return {name: float(value) for name, value in named.items() if value is not None}


def _ratio(name: str, ratio: Ratio | None) -> dict[str, float | None]:
    return {} if ratio is None else {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}


def all_parameters(configuration: Configuration) -> dict[str, ParameterValue]:
    """Return everything of a configuration by name, with its batch sizes."""
    sizes = {name: getattr(configuration, name) for name in ("batch_size", "micro_batch_size", "accumulation_steps")}
    return {**sizes, **parameters_of(configuration)}


def without_secrets(value: Any, name: str = "") -> Any:
    """Return JSON values with ``***`` for each text whose name says that it is a secret.

    In a list of arguments the name is in the argument, ``--password=…``, or is the argument before it.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        names = ["", *(one if isinstance(one, str) and one.startswith("-") else "" for one in value)]
        return [without_secrets(one, before or name) for one, before in zip(value, names, strict=False)]
    if not isinstance(value, str):
        return value
    key, equals, _ = value.partition("=")
    if equals and _SECRET.search(key):
        return f"{key}=***"
    return "***" if _SECRET.search(name) and not value.startswith("-") else value
