"""Learning rates and weight decay of a script's own optimizers and schedules, scaled to those of its trial.

The script says in `current_trial` to which learning rate its own belong: all of them follow in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bssearch.errors import UsageError
from bssearch.integrations.own_loop import LoopTrial

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""What a parameter group has in the unit of a learning rate, of PyTorch's optimizers and schedules."""

SCHEDULE_RATES = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
"""What a schedule of PyTorch has in that unit; what else it derives it takes from these and from the groups."""

Scale = Callable[[Any], Any]


def adopt_learning_rate(trial: LoopTrial, optimizers: Iterable[Any], schedules: Iterable[Any]) -> None:
    """Scale every learning rate by the trial's over that given to `current_trial`.

    ``schedules`` are Lightning's configurations of them. Nothing changes where the script has read
    ``trial.learning_rate``, or where it gave none: a function that is given its trial sets its rates itself.
    Raises `UsageError` where the learning rate that was given is not above 0.
    """
    given = trial.given.get("learning_rate")
    if given is None or trial.has_asked("learning_rate"):
        return
    if not given > 0:
        raise UsageError(f"current_trial(learning_rate={given}): must be > 0, for the others are scaled by it")
    scale = scaling(float(given), trial.learning_rate)
    for optimizer in optimizers:
        _scale_groups(optimizer, GROUP_RATES, scale)
    for one in schedules:
        _scale_schedule(one.scheduler, scale)


def adopt_weight_decay(trial: LoopTrial, optimizers: Iterable[Any]) -> None:
    """Scale the weight decay of all groups that have one, where the study sets it and the script has not read it.

    It is relative to the one given to `current_trial`, without one to the largest of a group.
    """
    name = "weight_decay"
    found = list(optimizers)
    largest = max((float(group.get(name) or 0.0) for one in found for group in one.param_groups), default=0.0)
    if name not in trial.parameters or trial.has_asked(name) or not largest:
        return
    wanted: Any = trial.parameters[name]
    scale = scaling(float(trial.given.get(name) or largest), float(wanted))
    for optimizer in found:
        _scale_groups(optimizer, (name,), scale)


def scaling(given: float, wanted: float) -> Scale:
    """Return what scales a value by wanted over given; the one that was given becomes exactly what is wanted."""

    def scale(value: Any) -> Any:
        return wanted if value == given else value * (wanted / given)

    return scale


def _scale_groups(optimizer: Any, names: Iterable[str], scale: Scale) -> None:
    for group in optimizer.param_groups:
        for name in names:
            if group.get(name):
                group[name] = scale(group[name])


def _scale_schedule(schedule: Any, scale: Scale) -> None:
    for name in SCHEDULE_RATES:
        value = getattr(schedule, name, None)
        if isinstance(value, list):
            setattr(schedule, name, [scale(one) for one in value])
        elif value:
            setattr(schedule, name, scale(value))
    for part in getattr(schedule, "_schedulers", ()):
        _scale_schedule(part, scale)
