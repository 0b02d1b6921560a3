"""The optimizers of bssearch and of workloads."""

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from bssearch.errors import LaunchError, WorkloadError, require
from bssearch.records import Configuration
from bssearch.spec.space import OPTIMIZERS
from bssearch.training.environment import numbers_of
from bssearch.workloads.base import Workload
from bssearch.workloads.data import in_words


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Group the trainable parameters. Tensors of fewer than two dimensions have no weight decay."""
    # as in Goyal et al. 2017 (§ 5.1), He et al. 2019 ("Bag of tricks", § 3.1) and the MLPerf references
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


OF_TIMM = ("lamb", "lars")  # optimizers that need timm

OLDEST = (1, 0, 13)  # the oldest supported timm


def timm_optimizers(name: str) -> ModuleType:
    oldest = ".".join(map(str, OLDEST))
    hint = "pip install 'bssearch[optimizers]'"
    try:
        version = importlib.metadata.version("timm")
        optimizers = importlib.import_module("timm.optim")
    except (ImportError, RuntimeError, OSError) as error:  # timm's torchvision may not match this PyTorch
        raise LaunchError(
            f"optimizer = {name!r} needs timm >= {oldest}, which cannot be imported: {error}", hint=hint
        ) from error
    require(
        numbers_of(version) >= OLDEST,
        f"optimizer = {name!r} needs timm >= {oldest}; {version} is installed",
        hint=hint,
        error=LaunchError,
    )
    return optimizers


class OptimizersAsOne(torch.optim.Optimizer):
    """Several optimizers as one, so that loss scaling skips a step of all optimizers or none."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]


def muon_with_adamw(
    model: nn.Module, configuration: Configuration, options: Mapping[str, Any], fused: bool | None
) -> torch.optim.Optimizer:
    """Build Muon for weight matrices outside embeddings, and AdamW with a scaled rate for other parameters.

    An output layer counts as a matrix unless the layer shares an embedding's weights.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(parameter) for layer in layers for parameter in layer.parameters()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and id(parameter) not in embeddings]
    require(
        matrices,
        "optimizer = 'muon' trains weight matrices outside embeddings, but the model has no such matrix",
        hint="set optimizer: {name: adamw}",
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


# optimizers from PyTorch
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

# optimizers that may be fused; Adagrad is absent, because PyTorch 2.11 fuses Adagrad on the CPU only
IN_ONE_KERNEL = frozenset({"sgd", "adam", "adamw"})

# options whose names in PyTorch and timm differ from bssearch's names
KEYWORDS = {
    "epsilon": "eps",
    "clipping_threshold": "d",
    "max_gradient_norm": "max_grad_norm",
    "trust_coefficient": "trust_coeff",
}


def build_optimizer(model: nn.Module, configuration: Configuration, fused: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer of a model's trainable parameters, at the peak learning rate.

    ``fused`` selects the fused kernel if PyTorch fuses the optimizer on CPUs and GPUs.
    """
    given = configuration.parameters
    options: dict[str, Any] = {
        name: default if given.get(name) is None else type(default)(given[name])
        for name, default in OPTIMIZERS[configuration.optimizer].option_defaults().items()
    }
    groups = parameter_groups(model.parameters(), configuration.weight_decay)
    require(groups, "the model has no parameter to train; leave requires_grad on in build_model()")
    one_kernel = True if fused else None
    if configuration.optimizer == "muon":
        return muon_with_adamw(model, configuration, options, one_kernel)
    keywords = {KEYWORDS.get(name, name): value for name, value in options.items() if name not in {"beta1", "beta2"}}
    if "beta1" in options:
        keywords["betas"] = options["beta1"], options["beta2"]
    if options.get("nesterov") and not options["momentum"] > 0:
        keywords["nesterov"] = False  # meaningless without momentum
    if configuration.optimizer in OF_TIMM:
        kind: Any = getattr(timm_optimizers(configuration.optimizer), configuration.optimizer.capitalize())
        # Apply the trust ratio to matrices and filters only. Without weight decay, timm skips the ratio, and LARS
        # becomes SGD.
        groups = [{**group, "always_adapt": group["params"][0].ndim >= 2} for group in groups]
    else:
        kind = KINDS[configuration.optimizer]
    if configuration.optimizer in IN_ONE_KERNEL:
        keywords["fused"] = one_kernel
        if not fused and all(one.device.type == "cpu" for one in model.parameters()):
            keywords["foreach"] = False  # the default on a CPU, which PyTorch would determine in each step
    if configuration.optimizer == "adafactor":
        keywords["eps"] = None, keywords.pop("epsilon2")  # None: ε1 follows the precision of the parameters
    return cast(torch.optim.Optimizer, kind(groups, lr=configuration.learning_rate, **keywords))


def defer_compiler() -> None:
    """Keep PyTorch's optimizers from importing ``torch._dynamo`` (1.2 s) until other code imports the module."""
    # until then PyTorch compiles no code, so the methods need no guard against compilation
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        _defer(torch.optim.Optimizer, name, nullcontext)
    for kind in KINDS.keys() - {"adamw", "adafactor"}:  # AdamW steps as Adam does; Adafactor imports no compiler
        _defer(KINDS[kind], "step", lambda self: torch.set_grad_enabled(self.defaults["differentiable"]))


def _defer(kind: type, name: str, context: Callable[[Any], AbstractContextManager[object]]) -> None:
    guarded: Any = vars(kind).get(name)
    if not hasattr(guarded, "__wrapped__"):  # another version of PyTorch, without the guard
        return

    @functools.wraps(guarded)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return guarded(self, *arguments, **named)
        with context(self):
            return guarded.__wrapped__(self, *arguments, **named)

    setattr(kind, name, method)


Optimizers = tuple[torch.optim.Optimizer, ...]


def built_optimizers(workload: Workload, model: nn.Module, configuration: Configuration, fused: bool) -> Any:
    build = getattr(workload, "build_optimizer", None)
    return build_optimizer(model, configuration, fused=fused) if build is None else build(model, configuration)


def check_libraries(workload: Workload, names: Iterable[str]) -> None:
    if getattr(workload, "build_optimizer", None) is None:
        for name in {*OF_TIMM} & {*names}:
            timm_optimizers(name)


def flat(built: Any, model: nn.Module) -> Optimizers:
    values = built.values() if isinstance(built, Mapping) else built if isinstance(built, tuple | list) else [built]
    optimizers = tuple(values)
    require(
        optimizers and all(isinstance(one, torch.optim.Optimizer) for one in optimizers),
        f"build_optimizer() returned {in_words(built)}; return a torch.optim.Optimizer, or a tuple, list or dict of "
        "at least one optimizer",
        error=WorkloadError,
    )
    parameters = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        require(
            any(id(parameter) in parameters for parameter in trained_by(optimizer)),
            f"build_optimizer() returned {type(optimizer).__name__} over parameters outside the model",
            hint="build the optimizer over the parameters of the given model",
            error=WorkloadError,
        )
        require(
            all("lr" in group for group in optimizer.param_groups),
            f"build_optimizer() returned {type(optimizer).__name__} with a parameter group without 'lr'; set lr",
            error=WorkloadError,
        )
    return optimizers


def ignored_learning_rate(workload: Workload, model: nn.Module, configuration: Configuration) -> str | None:
    """Return a warning if the workload's optimizers ignore the learning rate."""
    if getattr(workload, "build_optimizer", None) is None:
        return None
    rates = [
        [
            group["lr"]
            for optimizer in flat(built_optimizers(workload, model, each, False), model)
            for group in optimizer.param_groups
        ]
        for each in (configuration, replace(configuration, learning_rate=2 * configuration.learning_rate))
    ]
    if rates[0] != rates[1]:
        return None
    return (
        f"build_optimizer() ignores configuration.learning_rate: a doubled rate does not change the rates {rates[0]}; "
        "pass configuration.learning_rate as lr"
    )


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Options that distinguish kinds of optimizers; with and without such an option, states have different meanings.
KIND_OPTIONS = ("betas", "momentum", "alpha", "beta2_decay", "ns_steps")


def take_over_states(optimizers: Optimizers, saved: Any, model: nn.Module | None = None) -> None:
    """Load another run's optimizer states, but keep each group's options.

    Raises `ValueError` if the number or kinds of optimizers, or the parameters, differ.
    """
    states = saved if isinstance(saved, list | tuple) else [saved]
    if len(states) != len(optimizers):
        raise ValueError(f"the number of optimizer states is {len(states)}; expected {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=True):
        built = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        _check_kind(optimizer, state["param_groups"])
        optimizer.load_state_dict(state if model is None else _regrouped(optimizer, state, model))
        for group, options in zip(optimizer.param_groups, built, strict=True):
            group.update(options)


def _regrouped(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
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
                with_it, without = ("study", "checkpoint") if name in own else ("checkpoint", "study")
                raise ValueError(
                    f"the {with_it}'s optimizer has the option {name}, which the {without}'s optimizer lacks"
                )
