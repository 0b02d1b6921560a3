"""The optimizers that a workload builds itself, or else bssearch's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.records import Configuration
from bssearch.training.optimizers import build_optimizer
from bssearch.training.optimizers.timm_optimizers import check_timm
from bssearch.workloads.base import Workload

Optimizers = tuple[torch.optim.Optimizer, ...]


def built_optimizers(workload: Workload, model: nn.Module, configuration: Configuration, fused: bool) -> Any:
    """Return what the workload's ``build_optimizer`` returns, else bssearch's own optimizer.

    Raises `UsageError` for an optimizer that bssearch does not have, `LaunchError` where its library is missing.
    """
    build = getattr(workload, "build_optimizer", None)
    if build is None:
        return build_optimizer(model, configuration, fused=fused)
    return build(model, configuration)


def check_libraries(workload: Workload, names: Iterable[str]) -> None:
    """Import what the optimizers of these names need, unless the workload builds its own.

    Raises `LaunchError` where a library is missing or too old.
    """
    if getattr(workload, "build_optimizer", None) is None:
        check_timm(names)


def flat(built: Any, model: nn.Module) -> Optimizers:
    """Return the optimizers of a tuple, list or dict of them, or of one, in their order.

    Raises `WorkloadError` where there is something else among them, and where one trains no parameter of the model.
    """
    values = built.values() if isinstance(built, Mapping) else built if isinstance(built, tuple | list) else [built]
    optimizers = tuple(values)
    if not optimizers:
        raise WorkloadError(f"build_optimizer() returned an empty {type(built).__name__}; there must be an optimizer")
    parameters = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        _check(optimizer, parameters)
    return optimizers


def ignored_learning_rate(workload: Workload, model: nn.Module, configuration: Configuration) -> str | None:
    """Return a sentence where the workload's optimizers have the same rates at another learning rate, else None."""
    if getattr(workload, "build_optimizer", None) is None:
        return None
    doubled = replace(configuration, learning_rate=2 * configuration.learning_rate)
    rates = [
        [
            group["lr"]
            for optimizer in flat(built_optimizers(workload, model, each, False), model)
            for group in optimizer.param_groups
        ]
        for each in (configuration, doubled)
    ]
    if rates[0] != rates[1]:
        return None
    return (
        f"build_optimizer() does not use configuration.learning_rate: its rates are {rates[0]} whatever the trial's is"
    )


def _check(optimizer: object, parameters: set[int]) -> None:
    """Raise `WorkloadError` where this is no optimizer over any of the model's parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"build_optimizer() returned a {type(optimizer).__name__}; it must be a torch.optim.Optimizer, "
            "or a tuple, list or dict of them"
        )
    if not any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise WorkloadError(
            f"build_optimizer() returned a {type(optimizer).__name__} over none of the model's parameters",
            hint="build it over the parameters of the model that it is given",
        )
    for index, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise WorkloadError(
                f"build_optimizer() returned a {type(optimizer).__name__} whose parameter group {index} has no 'lr'"
            )


def states_of(optimizers: Optimizers) -> Any:
    """Return the state of one optimizer, or those of several, to be saved."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states[0] if len(states) == 1 else states


def restore_states(optimizers: Optimizers, saved: Any) -> None:
    """Put optimizers back into saved states."""
    states = [saved] if len(optimizers) == 1 else saved
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
