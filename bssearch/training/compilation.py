"""Compiled models, without compiling again for each trial.

``torch.compile`` keeps its graphs by the code they were traced from and takes a module's parameters and buffers as
inputs, so that a freshly built model of a shape met before runs the graphs that there are. What would make a new graph
is a changed Python number: the probability of ``nn.Dropout``, which a search draws anew for each trial, becomes a
buffer here. A probability that a module hands to a function itself (``functional.dropout(x, self.p)``) still compiles
once per value, in the trial's warm-up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

BACKEND = "inductor"

GRAPHS_PER_FUNCTION = 4096
"""Past this many graphs of one function PyTorch would silently run it uncompiled; its own limit is 8, less than a
ladder of batch sizes has."""


def compile_in_place(model: nn.Module, mode: str) -> None:
    """Compile a model's forward pass in a ``mode`` of ``torch.compile``, one graph for each shape of the inputs.

    The model stays the same object, an instance of its class, with the names it has: a workload may look into it. If
    ``torch.compile`` raises, the model is unchanged.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = GRAPHS_PER_FUNCTION
    dynamo.accumulated_recompile_limit = GRAPHS_PER_FUNCTION
    kind: Any = type(model)
    compiled = _compiled_class(kind, BACKEND, mode)
    for module in model.modules():
        if type(module) is nn.Dropout and 0 < module.p < 1:
            module.__class__ = TracedDropout
            module.register_buffer("keep", torch.tensor(1 - module.p), persistent=False)
    model.__class__ = compiled


def share_storage(model: nn.Module, places: dict[str, torch.Tensor]) -> None:
    """Move a model's parameters and buffers to where those of the models before it lie, with the values they have.

    A CUDA graph reads its weights at the addresses that it was recorded with. ``places`` (by the tensors' names) is
    filled by the first model. The model before loses its values: only the last one that was built can be used.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = places.setdefault(name, tensor.detach())
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor.detach())
            tensor.data = place


class TracedDropout(nn.Dropout):
    """Dropout whose probability is data and not code: one graph serves all values. ``keep`` is 1 − p, shape ()."""

    keep: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Zero each element with the probability p and scale the others by 1 / (1 − p)."""
        if not self.training:
            return input
        kept = torch.rand_like(input, dtype=torch.float32) < self.keep
        return torch.where(kept, input / self.keep, 0.0)


@functools.cache
def _compiled_class(kind: Any, backend: str, mode: str) -> Any:
    """Return the one class for compiled models of a kind: graphs are found again by their module's class.

    The compiled function has a frame of its own: those of ``torch.nn``'s containers are not compiled by themselves.
    """

    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return kind.forward(self, *arguments, **named)

    compiled = torch.compile(forward, backend=backend, mode=mode, dynamic=False)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": compiled})
