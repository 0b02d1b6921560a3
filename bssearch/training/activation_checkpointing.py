"""Activation checkpointing: less memory for one more forward pass of the modules that a workload names."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bssearch.errors import WorkloadError
from bssearch.workloads.base import Workload


def checkpoint_activations(workload: Workload, model: nn.Module) -> None:
    """Let the modules of ``workload.checkpointed_modules(model)`` forget their activations until the backward pass.

    In training they keep their inputs alone and run a second time when the gradients are due, with the same random
    numbers: the gradients are the same, and what the first run counted (running statistics) is not counted twice.
    Raises `WorkloadError` where the workload names no such modules.
    """
    checkpointed_modules = getattr(workload, "checkpointed_modules", None)
    if checkpointed_modules is None:
        raise WorkloadError(
            "activation_checkpointing = true needs a workload that has checkpointed_modules(model); "
            f"{type(workload).__name__} has none"
        )
    modules: list[Any] = list(checkpointed_modules(model))
    if not modules:
        raise WorkloadError("checkpointed_modules(model) returned no module; it must name at least one")
    checkpoint_modules(modules)


def checkpoint_modules(modules: Iterable[Any]) -> None:
    """Let each of these modules forget its activations until the backward pass, as `checkpoint_activations` says."""
    for module in modules:
        module.__class__ = _checkpointed_class(module.__class__)


@functools.cache
def _checkpointed_class(kind: Any) -> Any:
    """Return the one class for checkpointed modules of a kind: compiled graphs are found again by it."""

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            # A compiled graph changes buffers once, however often it computes; it takes no contexts of ours.
            contexts: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": lambda: _contexts(self)}
            return checkpoint(kind.forward, self, *arguments, use_reentrant=False, **contexts, **named)
        return kind.forward(self, *arguments, **named)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what to put around the first run of a module and around the second."""
    return nullcontext(), _buffers_kept(module)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
