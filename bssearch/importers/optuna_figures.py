"""Seconds and steps in an Optuna study: which of them are those to a target, and whether they are numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bssearch.curves import Crossing
from bssearch.errors import UsageError
from bssearch.importers.runs import LONGEST_S
from bssearch.records import Target

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from bssearch.importers.optuna_database import OptunaTrials

VALUE, USER_ATTRIBUTE = "value", "user_attr:"
OWN_TIME, OWN_STEPS, OWN_SECONDS = "time_to_target_s", "steps_to_target", "train_seconds"
"""User attributes of a trial that `export --to optuna` wrote: to the study's own target, and of the whole trial."""


def check_own_place(found: OptunaTrials, option: str, place: str | None, own: Target, wanted: Target) -> None:
    """Raise `UsageError` where figures of a study that bssearch exported are not those to the wanted target.

    Its values are the objective's figure, seconds under time_to_target alone; they and two attributes of a trial are
    to the study's ``own`` target.
    """
    if place == VALUE and list(found.metric_names) != [OWN_TIME]:
        named = ", ".join(found.metric_names) or "not named"
        raise UsageError(f"{option} {VALUE}: the values of {found.name!r}, which bssearch exported, are {named}")
    if place in (VALUE, USER_ATTRIBUTE + OWN_TIME, USER_ATTRIBUTE + OWN_STEPS) and wanted != own:
        raise UsageError(
            f"{option} {place}: in {found.name!r}, which bssearch exported, it is to {_in_words(own)}, "
            f"not to {_in_words(wanted)}"
        )


def _in_words(target: Target) -> str:
    return f"{target.metric} {target.goal.sign} {target.value:g}"


def ended_at_target(hit: Crossing | None, trial: FrozenTrial) -> bool:
    """Return whether a trial is known to have ended where it reached the target: at its last report, after a miss."""
    return hit is not None and hit.last_miss_step < hit.first_hit_step == max(trial.intermediate_values)


def hit_before_end(hit: Crossing, trial: FrozenTrial, *, is_value_a_metric: bool) -> bool:
    """Return whether the reports show that a trial met the target before its last report, and cover its training.

    If its value is none of its reports, it was measured after the last one, and the training may have been longer.
    """
    reports = trial.intermediate_values
    if hit.first_hit_step == max(reports):
        return False
    value = trial.value if is_value_a_metric else None
    return value is None or any(math.isclose(value, report) for report in reports.values())


def says_target(name: str) -> bool:
    """Return whether the name of a figure says that it is the figure at the target, as ``steps_to_target``."""
    return "target" in name.lower()


def are_seconds_of_whole(trial: FrozenTrial, seconds: float, share: float) -> bool | None:
    """Return whether a trial's duration shows that seconds are those of the whole trial; None if it tells nothing.

    ``share`` is the part of the trial until the target. Seconds to the target are at most that share of the duration;
    20 % more allows for a slow first epoch.
    """
    lasted = 0.0 if trial.duration is None else trial.duration.total_seconds()
    if lasted <= 0 or seconds > lasted * 1.02:
        return None
    return seconds > 1.2 * share * lasted or (seconds > 0.98 * lasted and share < 0.95)


def is_feasible(trial: FrozenTrial) -> bool:
    """Return whether a trial satisfies its constraints: all are <= 0, as for Optuna's `Study.best_trial`."""
    return all(value <= 0.0 for value in trial.constraints.values())


def checked_seconds(value: Any, name: str, reached: bool, origin: str) -> float | None:
    """Return seconds; raise `UsageError` for what is no number of them."""
    if value is None:
        return None
    seconds = number(value)
    if seconds is None or not (0 < seconds <= LONGEST_S or (seconds == 0 and not reached)):
        bound = f"> 0 where the target was reached, and <= {LONGEST_S:g}" if reached else f"in [0, {LONGEST_S:g}]"
        raise UsageError(f"{name} = {value!r} must be seconds {bound} ({origin})")
    return seconds


def number(value: Any) -> float | None:
    """Return a number as a float, None for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
