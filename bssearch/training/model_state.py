"""What a model keeps: parameters, buffers and the extra state of its modules, and how it gets them back in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bssearch.errors import WorkloadError


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and each buffer with its name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def extra_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return what modules keep beside tensors (``get_extra_state``)."""
    return {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}


@torch.no_grad()
def restore_model(model: torch.nn.Module, saved: Mapping[str, torch.Tensor], extra: dict[str, Any]) -> None:
    """Give a model the tensors, wherever they lie, and the extra state of another one.

    Raises `WorkloadError` where a parameter is missing or of another shape.
    """
    _check_parameters(model, saved)
    device = next(model.parameters()).device
    for name, tensor in saved.items():
        _put(model, name, tensor.to(device))
    model.load_state_dict(extra, strict=False)


def _check_parameters(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name not in saved or saved[name].shape != parameter.shape:
            was = f"of shape {tuple(saved[name].shape)}" if name in saved else "missing"
            raise WorkloadError(f"the parameter {name} of shape {tuple(parameter.shape)} was saved {was}")


def _put(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a parameter or buffer its value where it lies; a buffer that the first steps made or replaced is made."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    present = getattr(owner, leaf, None)
    if isinstance(present, torch.Tensor) and present.shape == value.shape and present.dtype == value.dtype:
        present.copy_(value)
    else:
        owner.register_buffer(leaf, value)
