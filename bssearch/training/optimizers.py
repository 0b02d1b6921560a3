"""The optimizers a configuration can name, each built from its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.records import Configuration

ParameterGroups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, configuration: Configuration, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer over a model's trainable parameters, at the configuration's peak learning rate.

    ``fused`` asks for the update of all parameters in one kernel; otherwise PyTorch chooses.
    Raises `UsageError` for an optimizer that is not in `OPTIMIZERS` and for a model with nothing to train.
    """
    try:
        build = OPTIMIZERS[configuration.optimizer]
    except KeyError:
        raise UsageError(f"optimizer = {configuration.optimizer!r} must be one of {', '.join(OPTIMIZERS)}") from None
    groups = _parameter_groups(model.parameters(), configuration.weight_decay)
    if not groups:
        raise UsageError("the model has no parameter to train")
    return build(groups, configuration, True if fused else None)


def _parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> ParameterGroups:
    """Return the groups with and without weight decay.

    Weight decay is for matrices and filters. Biases and the scales of norms, which have fewer than two dimensions,
    are left alone, as in Goyal et al. 2017 (§ 5.1), He et al. 2019 ("Bag of tricks", § 3.1) and the MLPerf references.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _sgd(groups: ParameterGroups, configuration: Configuration, fused: bool | None) -> torch.optim.Optimizer:
    """SGD with ``momentum`` (0.9) and ``nesterov`` (true; it says nothing without momentum)."""
    momentum = _number(configuration, "momentum", 0.9)
    nesterov = bool(configuration.parameters.get("nesterov", True))
    return torch.optim.SGD(
        groups, lr=configuration.learning_rate, momentum=momentum, nesterov=nesterov and momentum > 0, fused=fused
    )


def _adamw(groups: ParameterGroups, configuration: Configuration, fused: bool | None) -> torch.optim.Optimizer:
    """AdamW with ``beta1`` (0.9), ``beta2`` (0.999) and ``epsilon`` (1e-8)."""
    return torch.optim.AdamW(
        groups,
        lr=configuration.learning_rate,
        betas=(_number(configuration, "beta1", 0.9), _number(configuration, "beta2", 0.999)),
        eps=_number(configuration, "epsilon", 1e-8),
        fused=fused,
    )


OPTIMIZERS: dict[str, Callable[[ParameterGroups, Configuration, bool | None], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}


def _number(configuration: Configuration, name: str, default: float) -> float:
    value = configuration.parameters.get(name)
    if value is None:
        return default
    if isinstance(value, bool | str):
        raise UsageError(f"{name} = {value!r} must be a number")
    return float(value)
