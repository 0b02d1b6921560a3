"""Trials as rows of tables and as JSON documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bssearch.records import (
    Environment,
    Observation,
    Phase,
    TrialRecord,
    TrialState,
    field_values,
    outcome_fields,
    run_stages,
)

if TYPE_CHECKING:
    from bssearch.storage.repository import Store

# Outcome fields that are 0 if an imported table lacks them.
ZERO_IF_UNKNOWN = frozenset({"steps", "samples", "train_seconds"})


# Fields that no imported table has.
UNKNOWN_OF_IMPORTED = (
    "uncapped",
    "train_seconds_limit",
    "eval_every_steps",
    "threads",
    "evaluation_seconds",
    "warmup_seconds",
    "other_seconds",
    "wall_seconds",
    "contended",
)


# Keys that are null for unfinished trials: a contract of ``trial list --format json``.
ALWAYS_THERE = ("train_seconds", "time_to_target_s", "steps_to_target", "final_metric", "reason")


TRIALS_AT_ONCE = 200


def trial_table(trials: Sequence[TrialRecord]) -> tuple[list[str], list[dict[str, Any]]]:
    return flat_table([trial_row(trial) for trial in trials])


def flat_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return columns and flat rows, with dotted names such as ``environment.device_name``."""
    flat = [flat_row(row) for row in rows]
    names = dict.fromkeys(key for row in flat for key in row)
    columns = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    return columns, [{name: row[name] for name in columns if name in row} for row in flat]


def with_first(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    return [*(one for one in names if one in columns), *(one for one in columns if one not in names)]


def flat_row(row: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{path}{key}"
        found |= flat_row(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def trial_rows(
    store: Store, name: str, trials: Sequence[TrialRecord], kept: Sequence[TrialRecord]
) -> list[dict[str, Any]]:
    """Return the rows that ``trial list --format json`` prints for the ``kept`` trials.

    A row's ``answer`` has the seconds that `bssearch best` compares, their basis, and whether the batch size's median
    includes the trial. ``answer`` is null if `best` has no result.
    """
    from bssearch.search.finding import counted_seconds

    counted = counted_seconds(store, name, trials)
    return [{**trial_row(one), "answer": asdict(counted[one.number]) if counted else None} for one in kept]


def matching_trials(
    trials: Sequence[TrialRecord],
    *,
    phase: Phase | None = None,
    state: TrialState | None = None,
    batch_size: int | None = None,
) -> list[TrialRecord]:
    return [
        trial
        for trial in trials
        if (phase is None or trial.phase is phase)
        and (state is None or trial.state is state)
        and (batch_size is None or trial.configuration.batch_size == batch_size)
    ]


def trial_row(trial: TrialRecord) -> dict[str, Any]:
    known = outcome_fields(trial.outcome) if trial.outcome else {}
    left_out = {"state", "traceback", *(name for name in ZERO_IF_UNKNOWN if trial.is_imported and not known.get(name))}
    configuration = field_values(trial.configuration)
    return {
        "number": trial.number,
        "state": trial.state.value,
        "phase": trial.phase.value,
        **{name: value for name, value in configuration.items() if name != "parameters"},
        **configuration["parameters"],
        "seed": trial.seed,
        "uncapped": trial.uncapped,
        "retry_of": trial.retry_of,
        "started_by": trial.started_by,
        "sampled": None if trial.sampled is None else dict(trial.sampled),
        "train_seconds_limit": trial.train_seconds_limit,
        "eval_every_steps": trial.eval_every_steps,
        "threads": trial.threads,
        **dict.fromkeys(ALWAYS_THERE),
        **{name: value for name, value in known.items() if name not in left_out},
        "steps_x_step_time_s": trial.steps_x_step_time_s,
        **(dict.fromkeys(UNKNOWN_OF_IMPORTED) if trial.is_imported else {}),
    }


def trial_document(
    trial: TrialRecord,
    curve: Sequence[Observation],
    environment: Environment | None,
    spec: Mapping[str, object] | None,
) -> dict[str, Any]:
    """Return the document that ``trial show --format json`` prints.

    ``stages`` is null unless the batch size grows.
    """
    return {
        **trial_row(trial),
        "stages": [asdict(one) for one in run_stages(trial, curve)] if trial.configuration.grows else None,
        "traceback": traceback(trial),
        "environment": None
        if environment is None
        else {**asdict(environment), "libraries": environment.library_versions},
        "spec": spec,
        "observations": [
            {"step": one.step, "train_seconds": one.train_seconds, "metric": one.metric, "loss": one.loss}
            for one in curve
        ],
    }


def traceback(trial: TrialRecord) -> str | None:
    return None if trial.outcome is None else trial.outcome.traceback


def observations_of(store: Store, name: str, trials: Sequence[TrialRecord]) -> Iterator[tuple[int, Observation]]:
    numbers = [trial.number for trial in trials]
    for start in range(0, len(numbers), TRIALS_AT_ONCE):
        for trial, curve in store.trials.curves(name, numbers[start : start + TRIALS_AT_ONCE]).items():
            for observation in curve:
                yield trial, observation
