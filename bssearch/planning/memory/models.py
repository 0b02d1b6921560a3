"""Models for a traced memory plan, with random weights and no network access.

``package.module:attribute`` and ``path/file.py:attribute`` name an ``nn.Module``, or a function that returns an
``nn.Module``. A pair of a module and ``loss(module, size)`` can replace the module. ``transformers:Class`` uses the
default configuration, and ``transformers:PATH`` reads ``config.json``. ``timm:name`` is a model of timm.
"""

import importlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from bssearch.errors import BSSearchError, UsageError, require, required
from bssearch.planning.memory.request import MemoryPlanRequest
from bssearch.training.computation import checkpoint_modules
from bssearch.workloads.base import found_attribute

TOKENS = 512  # tokens per sample, if unknown from model and command

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | None]]


class NoBlocksError(UsageError):
    """The model's activations cannot be checkpointed."""


@dataclass(frozen=True, slots=True)
class ModelUnderPlan:
    """An ``nn.Module`` to trace.

    ``batch`` makes a batch of a given size. ``loss`` returns the loss and, if known, the output.
    """

    module: nn.Module
    batch: Callable[[int], Any]
    loss: Loss


def build_model(asked: MemoryPlanRequest, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> ModelUnderPlan:
    """Build the model in training mode with fake tensors, in ``dtype`` if given."""
    with _without_network(asked.name):
        try:
            with mode:
                made = _maker(asked)
        except BSSearchError:
            raise
        except (Exception, SystemExit):  # the model reads values, which only real tensors have
            made = real_model(asked)
    _take_into(mode, made.module, dtype)
    made.module.train()
    return made


# methods that enable checkpointing: of transformers from 5.23 on, of older transformers, and of timm
WAYS_TO_CHECKPOINT: Mapping[str, Mapping[str, Any]] = {
    "activation_checkpointing_enable": {"activation_checkpointing_kwargs": {"use_reentrant": False}},
    "gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "set_grad_checkpointing": {"enable": True},
}


def checkpoint_blocks(module: Any, name: str) -> None:
    """Checkpoint activations with the model's own method, else in each repeated block of a module list."""
    way = next((one for one in WAYS_TO_CHECKPOINT if hasattr(module, one)), None)
    if way is not None:
        try:
            getattr(module, way)(**WAYS_TO_CHECKPOINT[way])
        except Exception as error:  # some models have a method that only raises
            raise NoBlocksError(f"--checkpointing: {way}() of {name} failed: {error}; omit the option") from error
    elif blocks := list(_blocks(module)):
        checkpoint_modules(blocks)
    else:
        raise NoBlocksError(
            f"--checkpointing: {name} has no blocks to recompute; add gradient_checkpointing_enable(), or put modules "
            "of the same kind into an nn.ModuleList or nn.Sequential"
        )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_list, kinds = isinstance(child, nn.ModuleList | nn.Sequential), [type(one) for one in child.children()]
        repeated = [one for one in child.children() if kinds.count(type(one)) > 1 and list(one.children())]
        yield from repeated if is_list and repeated else _blocks(child)


def real_model(asked: MemoryPlanRequest) -> ModelUnderPlan:
    try:
        return _maker(asked)
    except BSSearchError:
        raise
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(
            f"--model {asked.name} failed to build: {type(error).__name__}: {lines[0]}",
            hint="correct the model or --model-setting, or plan with --parameters",
        ) from error


def _maker(asked: MemoryPlanRequest) -> ModelUnderPlan:
    kind, _, rest = asked.name.partition(":")
    return {"transformers": _of_transformers, "timm": _of_timm}.get(kind, _of_user)(asked, rest)


def _take_into(mode: FakeTensorMode, module: nn.Module, dtype: torch.dtype | None) -> None:
    fakes: dict[int, torch.Tensor] = {}
    with mode:
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = _fake(tensor, dtype)
                        tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _of_user(asked: MemoryPlanRequest, rest: str) -> ModelUnderPlan:
    require(rest, f"--model {asked.name!r} must be FILE.py:NAME, package.module:NAME, transformers:CLASS or timm:NAME")
    found = found_attribute(asked.name, asked.folder)
    made = found(**asked.settings) if callable(found) and not isinstance(found, nn.Module) else found
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        module, loss = made
        return ModelUnderPlan(module, lambda size: size, lambda model, size: (loss(model, size), None))
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"--model {asked.name} gave {type(made).__name__}; name or return a torch.nn.Module, or a pair of a module "
            "and a function loss(module, size)"
        )
    shape = required(
        asked.input_shape,
        f"--model {asked.name} needs --input; give a sample's shape, such as 3x224x224, or with --vocabulary a "
        "sample's number of tokens",
    )
    return ModelUnderPlan(made, _batches(shape, asked.vocabulary, made), _loss_of_output)


def _batches(shape: Sequence[int], vocabulary: int | None, module: nn.Module) -> Callable[[int], Any]:
    def batch(size: int) -> torch.Tensor:
        if vocabulary is not None:
            return torch.zeros(size, *shape, dtype=torch.long)
        dtypes = [one.dtype for one in module.parameters() if one.is_floating_point()]
        return torch.zeros(size, *shape, dtype=dtypes[0] if dtypes else None)

    return batch


def _loss_of_output(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    output = model(batch)
    if hasattr(output, "values") and not isinstance(output, torch.Tensor):
        output = next(iter(output.values()))
    if isinstance(output, tuple | list):
        output = output[0]
    if output.ndim in (2, 3) and output.shape[-1] > 1:
        return functional.cross_entropy(
            output.flatten(0, -2), torch.zeros(output.shape[:-1], dtype=torch.long).flatten()
        ), output
    return functional.mse_loss(output, torch.zeros_like(output)), output


def _of_timm(asked: MemoryPlanRequest, rest: str) -> ModelUnderPlan:
    timm = _library("timm", asked.name)
    if not timm.is_model(rest):
        near = ", ".join(timm.list_models(f"*{rest.split('_')[0]}*")[:5]) or "timm.list_models()"
        raise UsageError(f"--model {asked.name}: timm has no model {rest!r}; choose from {near}")
    module = timm.create_model(rest, pretrained=False, **asked.settings)
    return ModelUnderPlan(
        module, _batches(asked.input_shape or module.default_cfg["input_size"], None, module), _loss_of_output
    )


def _of_transformers(asked: MemoryPlanRequest, rest: str) -> ModelUnderPlan:
    library = _library("transformers", asked.name)
    path = asked.folder / rest
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
        rest = (document.get("architectures") or [""])[0]
        configuration = library.AutoConfig.for_model(**{**document, **asked.settings})
    elif "/" in rest or not hasattr(library, rest) or not isinstance(getattr(library, rest), type):
        raise UsageError(
            f"--model {asked.name}: transformers has no class {rest!r}, and the file {path} does not exist",
            hint="plans do not download models; name a class, such as transformers:BertForMaskedLM, or a config.json",
        )
    else:
        configuration = getattr(library, rest).config_class(**asked.settings)
    module = getattr(library, rest)(configuration)
    return ModelUnderPlan(module, _batches_of(module, asked), _loss_of_transformers)


def _batches_of(module: Any, asked: MemoryPlanRequest) -> Callable[[int], dict[str, torch.Tensor]]:
    configuration, name = module.config, type(module).__name__
    images = module.main_input_name == "pixel_values"
    longest = getattr(configuration, "max_position_embeddings", None) or asked.sequence or TOKENS
    length = asked.sequence or min(longest, TOKENS)
    require(
        length <= longest, f"--sequence {length} must be at most {longest}, the number of positions of {asked.name}"
    )

    def batch(size: int) -> dict[str, torch.Tensor]:
        if images:
            side, channels = configuration.image_size, configuration.num_channels
            made = {"pixel_values": torch.zeros(size, channels, side, side, dtype=module.dtype)}
        else:
            made = {"input_ids": torch.zeros(size, length, dtype=torch.long)}
        if name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")):
            made["labels"] = made["input_ids"]
        elif name.endswith("Classification"):
            made["labels"] = torch.zeros(size, dtype=torch.long)
        return made

    return batch


def _loss_of_transformers(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    output = model(**batch)
    if getattr(output, "loss", None) is not None:
        return output.loss, getattr(output, "logits", None)
    return next(iter(output.values())).float().mean(), None


def _library(name: str, model: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"--model {model} needs the package {name}, but the import failed: {error}", hint=f"pip install {name}"
        ) from error


@contextmanager
def _without_network(name: str) -> Iterator[None]:
    wanted: list[str] = []

    def refuse(*arguments: Any, **named: Any) -> Any:
        wanted.append(str(arguments[0]))
        raise OSError(f"bssearch plan memory uses no network (blocked: {arguments[0]})")

    try:
        with (
            patch.object(socket, "getaddrinfo", refuse),
            patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}),
        ):
            yield
    except BSSearchError as error:
        if wanted or "connect" in f"{error} {error.__cause__}":
            raise UsageError(
                f"--model {name} needs the network ({wanted[0] if wanted else 'blocked'}), but plans use no network",
                hint="build the model with random weights, without pretrained=True",
            ) from error
        raise
