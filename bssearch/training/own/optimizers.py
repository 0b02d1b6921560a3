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


KIND_OPTIONS = ("betas", "momentum", "alpha", "beta2_decay", "ns_steps")
"""Options by which one kind of optimizer is told from another: those without which its state means something else."""


def take_over_states(optimizers: Optimizers, saved: Any, model: nn.Module | None = None) -> None:
    """Give optimizers the states of another run, each group the options that it was built with.

    A state in one group over the trained parameters of the ``model``, in their order, fits an optimizer of several.
    Raises `ValueError` where the states are those of another number or kind of optimizers, or of other parameters.
    """
    states = saved if isinstance(saved, list | tuple) else [saved]
    if len(states) != len(optimizers):
        raise ValueError(f"{len(states)} states for {len(optimizers)} optimizers")
    for optimizer, state in zip(optimizers, states, strict=True):
        built = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        _check_kind(optimizer, state["param_groups"])
        optimizer.load_state_dict(state if model is None else _regrouped(optimizer, state, model))
        for group, options in zip(optimizer.param_groups, built, strict=True):
            group.update(options)


def _regrouped(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state in the groups of an optimizer, where it has one group over the same parameters of the model."""
    saved, groups = state["param_groups"], [group["params"] for group in optimizer.param_groups]
    own = {id(parameter) for group in groups for parameter in group}
    order = [id(parameter) for parameter in model.parameters() if id(parameter) in own]
    if len(saved) != 1 or len(groups) == 1 or not len(saved[0]["params"]) == len(order) == len(own):
        return dict(state)
    places = dict(zip(order, saved[0]["params"], strict=True))
    regrouped = [{**saved[0], "params": [places[id(parameter)] for parameter in group]} for group in groups]
    return {**state, "param_groups": regrouped}


def _check_kind(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for own, other in zip(optimizer.param_groups, saved, strict=False):
        for name in KIND_OPTIONS:
            if (name in own) != (name in other):
                where = "the study's has" if name in own else "the checkpoint's has"
                raise ValueError(f"{where} {name}, the other has not")
