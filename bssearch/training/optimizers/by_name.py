"""Every optimizer by its name, built from its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.records import Configuration
from bssearch.space import OPTIMIZERS
from bssearch.training.optimizers.groups import ParameterGroups, parameter_groups
from bssearch.training.optimizers.muon import muon_with_adamw
from bssearch.training.optimizers.timm_optimizers import timm_optimizers

Options = Mapping[str, Any]


def build_optimizer(model: nn.Module, configuration: Configuration, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer over a model's trainable parameters, at the configuration's peak learning rate.

    ``fused`` asks for the update of all parameters in one kernel, where the optimizer has that on every device;
    otherwise PyTorch chooses. Raises `UsageError` for an optimizer that is not in `OPTIMIZERS` and for a model with
    nothing to train, `LaunchError` where its library is missing.
    """
    options = _options(configuration)
    groups = parameter_groups(model.parameters(), configuration.weight_decay)
    if not groups:
        raise UsageError("the model has no parameter to train")
    one_kernel = True if fused else None
    if configuration.optimizer == "muon":
        return muon_with_adamw(model, configuration, options, one_kernel)
    return _BUILD[configuration.optimizer](groups, configuration.learning_rate, options, one_kernel)


def _options(configuration: Configuration) -> Options:
    """Return all options of a configuration's optimizer; one that is not given has its default."""
    try:
        defaults = OPTIMIZERS[configuration.optimizer].option_defaults()
    except KeyError:
        raise UsageError(f"optimizer = {configuration.optimizer!r} must be one of {', '.join(OPTIMIZERS)}") from None
    return {name: _option(name, configuration.parameters.get(name), default) for name, default in defaults.items()}


def _option(name: str, value: Any, default: Any) -> Any:
    """Return an option as its default is: a switch, a text or a number. Raises `UsageError` for what is no number."""
    if value is None:
        return default
    if isinstance(default, bool | str):
        return type(default)(value)
    if isinstance(value, bool | str):
        raise UsageError(f"{name} = {value!r} must be a number")
    return type(default)(value)


def _betas(options: Options) -> tuple[float, float]:
    return options["beta1"], options["beta2"]


def _sgd(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    """SGD; Nesterov says nothing without momentum."""
    nesterov = options["nesterov"] and options["momentum"] > 0
    return torch.optim.SGD(groups, lr=rate, momentum=options["momentum"], nesterov=nesterov, fused=fused)


def _adam(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=rate, betas=_betas(options), eps=options["epsilon"], fused=fused)


def _adamw(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=rate, betas=_betas(options), eps=options["epsilon"], fused=fused)


def _adamax(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.Adamax(groups, lr=rate, betas=_betas(options), eps=options["epsilon"])


def _nadam(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        groups,
        lr=rate,
        betas=_betas(options),
        eps=options["epsilon"],
        momentum_decay=options["momentum_decay"],
        decoupled_weight_decay=options["decoupled_weight_decay"],
    )


def _radam(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.RAdam(
        groups,
        lr=rate,
        betas=_betas(options),
        eps=options["epsilon"],
        decoupled_weight_decay=options["decoupled_weight_decay"],
    )


def _rmsprop(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(
        groups,
        lr=rate,
        alpha=options["alpha"],
        eps=options["epsilon"],
        momentum=options["momentum"],
        centered=options["centered"],
    )


def _adagrad(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    """Adagrad, never fused: the PyTorch 2.11 that bssearch still takes has that on the CPU only."""
    return torch.optim.Adagrad(
        groups, lr=rate, eps=options["epsilon"], initial_accumulator_value=options["initial_accumulator_value"]
    )


def _adafactor(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    """Adafactor; its first ε is the precision of the parameters, as PyTorch has it."""
    return torch.optim.Adafactor(
        groups,
        lr=rate,
        beta2_decay=options["beta2_decay"],
        eps=(None, options["epsilon2"]),
        d=options["clipping_threshold"],
    )


def _lamb(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    lamb: torch.optim.Optimizer = timm_optimizers("lamb").Lamb(
        _adapted(groups),
        lr=rate,
        betas=_betas(options),
        eps=options["epsilon"],
        max_grad_norm=options["max_gradient_norm"],
        trust_clip=options["trust_clip"],
    )
    return lamb


def _lars(groups: ParameterGroups, rate: float, options: Options, fused: bool | None) -> torch.optim.Optimizer:
    """LARS; Nesterov says nothing without momentum."""
    lars: torch.optim.Optimizer = timm_optimizers("lars").Lars(
        _adapted(groups),
        lr=rate,
        momentum=options["momentum"],
        nesterov=options["nesterov"] and options["momentum"] > 0,
        trust_coeff=options["trust_coefficient"],
        eps=options["epsilon"],
        trust_clip=options["trust_clip"],
    )
    return lars


def _adapted(groups: ParameterGroups) -> ParameterGroups:
    """Return groups with the trust ratio on matrices and filters, and off biases and norms.

    timm itself leaves it off wherever there is no weight decay, so that without any LARS would be SGD.
    """
    return [{**group, "always_adapt": group["params"][0].ndim >= 2} for group in groups]


_BUILD: dict[str, Callable[[ParameterGroups, float, Options, bool | None], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adamax": _adamax,
    "nadam": _nadam,
    "radam": _radam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "adafactor": _adafactor,
    "lamb": _lamb,
    "lars": _lars,
}
