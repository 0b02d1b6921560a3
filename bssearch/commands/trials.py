"""``trials``: the trials of a study as flat rows and as a data frame."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bssearch.records import TrialRecord, outcome_fields
from bssearch.storage.repository import open_store

if TYPE_CHECKING:
    import pandas as pd

ZERO_WHERE_UNKNOWN = frozenset({"steps", "samples", "train_seconds"})
"""The outcome's fields that an imported run has as 0 where its table does not say them."""

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
"""The fields that are null of a run that was made elsewhere: no table has them."""

ALWAYS_THERE = ("train_seconds", "time_to_target_s", "steps_to_target", "final_metric", "reason")
"""The outcome's fields that a row has before its trial has ended, as null: a contract of ``trials --format json``."""


def trials_frame(study: str, *, db: str | None = None) -> pd.DataFrame:
    """Return a study's trials as a data frame, one row a trial: `trial_row`, and the traceback of its end."""
    import pandas as pd

    with open_store(db, write=False) as store:
        return pd.DataFrame([{**trial_row(trial), "traceback": traceback(trial)} for trial in store.trials(study)])


def trial_row(trial: TrialRecord) -> dict[str, Any]:
    """Return a trial as a flat row of configuration and outcome: the contract of ``trials --format json``."""
    outcome = outcome_fields(trial.outcome) if trial.outcome else {}
    outcome.pop("traceback", None)
    outcome.pop("state", None)
    configuration = asdict(trial.configuration)
    if trial.is_imported:
        outcome = {name: value for name, value in outcome.items() if value or name not in ZERO_WHERE_UNKNOWN}
    return {
        "number": trial.number,
        "state": trial.state.value,
        "phase": trial.phase.value,
        **{name: value for name, value in configuration.items() if name != "parameters"},
        **configuration["parameters"],
        "seed": trial.seed,
        "uncapped": trial.uncapped,
        "retry_of": trial.retry_of,
        "sampled": None if trial.sampled is None else dict(trial.sampled),
        "train_seconds_limit": trial.train_seconds_limit,
        "eval_every_steps": trial.eval_every_steps,
        "threads": trial.threads,
        **dict.fromkeys(ALWAYS_THERE),
        **outcome,
        "steps_x_step_time_s": trial.steps_x_step_time_s,
        **(dict.fromkeys(UNKNOWN_OF_IMPORTED) if trial.is_imported else {}),
    }


def traceback(trial: TrialRecord) -> str | None:
    """Return the traceback of the exception that ended a trial, None without one."""
    return None if trial.outcome is None else trial.outcome.traceback
