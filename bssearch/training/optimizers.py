"""The optimizers that a configuration can name, and those that a workload builds itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from bssearch.errors import LaunchError, UsageError, WorkloadError
from bssearch.records import Configuration
from bssearch.spec.space import OPTIMIZERS
from bssearch.workloads.base import Workload

ParameterGroups = list[dict[str, Any]]


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> ParameterGroups:
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


OF_TIMM = ("lamb", "lars")
"""The optimizers that need timm."""

OLDEST = (1, 0, 13)
"""The oldest version of timm that bssearch is tried with."""


def timm_optimizers(name: str) -> ModuleType:
    """Return ``timm.optim``, for the optimizer of that name. Raises `LaunchError` where it is missing or too old."""
    oldest = ".".join(map(str, OLDEST))
    hint = "pip install 'bssearch[optimizers]'"
    try:
        version = importlib.metadata.version("timm")
        optimizers = importlib.import_module("timm.optim")
    except (ImportError, RuntimeError, OSError) as error:  # its torchvision may be of another PyTorch
        message = f"optimizer = {name!r} needs timm >= {oldest}, which cannot be imported: {error}"
        raise LaunchError(message, hint=hint) from error
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        raise LaunchError(f"optimizer = {name!r} needs timm >= {oldest}, and {version} is installed", hint=hint)
    return optimizers


class OptimizersAsOne(torch.optim.Optimizer):
    """Optimizers over different parameters that step together, with their groups and states in one.

    To schedules, clipping, loss scaling and pauses it is one optimizer. An update that the loss scaling leaves out is
    left out by all of them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each; return what the closure does, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Have the parts work on the groups and states that are seen from outside."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]


def muon_with_adamw(
    model: nn.Module, configuration: Configuration, options: Mapping[str, Any], fused: bool | None
) -> torch.optim.Optimizer:
    """Return Muon over a model's weight matrices and AdamW over all else, at the learning rate times its scale.

    Muon takes parameters of two dimensions: PyTorch's has no others, so that convolution filters go to AdamW, with
    embeddings, biases and norms. Embeddings are known by their module. The last layer of a classifier or a language
    model is a matrix like any other, unless it shares its weights with an embedding. Raises `UsageError` where the
    model has no such matrix.
    """
    embeddings = _embeddings(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and id(parameter) not in embeddings]
    if not matrices:
        raise UsageError(
            "optimizer = 'muon' trains weight matrices outside of embeddings, and the model has none",
            hint="optimizer: {name: adamw}",
        )
    chosen = {id(parameter) for parameter in matrices}
    rest = parameter_groups((one for one in trainable if id(one) not in chosen), configuration.weight_decay)
    muon = torch.optim.Muon(
        matrices,
        lr=configuration.learning_rate,
        weight_decay=configuration.weight_decay,
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        ns_steps=options["newton_schulz_steps"],
        adjust_lr_fn=options["adjustment"],
    )
    if not rest:
        return muon
    adamw = torch.optim.AdamW(
        rest,
        lr=configuration.learning_rate * options["adamw_learning_rate_scale"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["epsilon"],
        fused=fused,
    )
    return OptimizersAsOne([muon, adamw])


def _embeddings(model: nn.Module) -> set[int]:
    """Return which parameters are those of embeddings, by their id."""
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(parameter) for layer in layers for parameter in layer.parameters()}


Options = Mapping[str, Any]

KINDS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
}
"""PyTorch's own optimizers."""

IN_ONE_KERNEL = frozenset({"sgd", "adam", "adamw"})
"""Those that may be fused; Adagrad is on the CPU only, with the PyTorch 2.11 that bssearch still takes."""

KEYWORDS = {
    "epsilon": "eps",
    "clipping_threshold": "d",
    "max_gradient_norm": "max_grad_norm",
    "trust_coefficient": "trust_coeff",
}
"""What PyTorch and timm call an option, if otherwise than bssearch."""


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
    keywords = {KEYWORDS.get(name, name): value for name, value in options.items() if name not in {"beta1", "beta2"}}
    if "beta1" in options:
        keywords["betas"] = options["beta1"], options["beta2"]
    if options.get("nesterov") and not options["momentum"] > 0:
        keywords["nesterov"] = False  # it says nothing without momentum
    if configuration.optimizer in OF_TIMM:
        kind: Any = getattr(timm_optimizers(configuration.optimizer), configuration.optimizer.capitalize())
        groups = _adapted(groups)
    else:
        kind = KINDS[configuration.optimizer]
    if configuration.optimizer in IN_ONE_KERNEL:
        keywords["fused"] = one_kernel
    if configuration.optimizer == "adafactor":
        keywords["eps"] = None, keywords.pop("epsilon2")  # its first ε is the precision of the parameters
    optimizer: torch.optim.Optimizer = kind(groups, lr=configuration.learning_rate, **keywords)
    return optimizer


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


def _adapted(groups: ParameterGroups) -> ParameterGroups:
    """Return groups with the trust ratio on matrices and filters, and off biases and norms.

    timm itself leaves it off wherever there is no weight decay, so that without any LARS would be SGD.
    """
    return [{**group, "always_adapt": group["params"][0].ndim >= 2} for group in groups]


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
        for name in OF_TIMM:
            if name in names:
                timm_optimizers(name)


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
