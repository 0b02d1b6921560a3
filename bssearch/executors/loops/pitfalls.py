"""Warnings of normalisation, data order and averages of weights that distort a comparison of batch sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from bssearch.records import Configuration
from bssearch.spec.space.micro_batches import batch_norm_caveats
from bssearch.training.loop import batch_norm_layers

WATCHED_STEPS = 3  # first steps to check; an average that follows micro-batches does so in each step


def modules_of(objects: Collection[Any]) -> list[nn.Module]:
    """The modules among these objects, without parts of other modules."""
    modules = [one for one in objects if isinstance(one, nn.Module)]
    inner = {id(part) for one in modules for part in one.modules() if part is not one}
    return [one for one in modules if id(one) not in inner]


def about_batch_norm(modules: Sequence[nn.Module], now: Configuration) -> list[str]:
    """Warnings of batch normalisation in these modules that distorts a trial's steps."""
    layers = sum(map(batch_norm_layers, modules))
    is_split = now.accumulation_steps > 1
    caveats = batch_norm_caveats(layers, now.micro_batch_size, accumulates=is_split, ghost_batch_size=None)
    return [sentence for _, sentence in caveats]


def about_ranks(modules: Sequence[nn.Module]) -> list[str]:
    """Warning if batch normalisation is not synchronised between the ranks that share a batch."""
    parts = [part for one in modules for part in one.modules()]
    if not sum(map(batch_norm_layers, modules)) or any(isinstance(one, nn.SyncBatchNorm) for one in parts):
        return []
    remedy = "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    return [f"batch normalisation sees each rank's share of a batch alone: {remedy}"]


def about_order(loader: object) -> str | None:
    """Warning if a `DataLoader` yields the data in order, because the noise scale assumes random batches."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(loader.batch_sampler.sampler) is not SequentialSampler or len(loader) < 2:
        return None
    return "the loader of the training data does not shuffle: use DataLoader(..., shuffle=True) or trial.sampler(data)"


class Averages:
    """Averages of weights among a loop's objects, which must change with the optimizer's step alone."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        optimizers = [one for one in objects.values() if isinstance(one, Optimizer)]
        self._trained = {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}
        self._objects = {name: one for name, one in objects.items() if optimizers and self._may_average(one)}
        self._versions: dict[str, Any] = {}
        self._steps = 0

    def step_begins(self) -> None:
        """Note the averages before a step's first micro-batch."""
        self._steps += 1
        self._versions = self._now() if self._steps <= WATCHED_STEPS else {}

    def changed(self) -> str | None:
        """Warning if an average has changed since the step began."""
        now = self._now() if self._versions else {}
        name = next((name for name, before in self._versions.items() if before != now[name]), None)
        if name is None:
            return None
        self._objects = self._versions = {}
        return (
            f"{name} of trial.state changes between the micro-batches of a step: an average of weights must be updated "
            "after the optimizer's step, or its horizon shrinks with accumulation"
        )

    def _now(self) -> dict[str, Any]:
        return {name: _versions(one) for name, one in self._objects.items()}

    def _may_average(self, one: Any) -> bool:
        """True for objects with tensors that no optimizer trains."""
        if isinstance(one, Optimizer) or not callable(getattr(one, "state_dict", None)):
            return False
        if isinstance(one, nn.Module):
            return not any(id(parameter) in self._trained for parameter in one.parameters())
        return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(one.state_dict()))


def _versions(one: Any) -> list[tuple[int, int]]:
    # address and version: both replacements and in-place changes show
    leaves = tree_leaves(one.state_dict())
    return [(leaf.data_ptr(), leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]
