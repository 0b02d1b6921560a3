"""Warnings about normalisation, data order and averages of weights that distort a comparison of batch sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from bssearch.records import Configuration
from bssearch.records.text import plural
from bssearch.spec import GROUP_NORM, batch_norm_caveats
from bssearch.training.loop import batch_norm_layers
from bssearch.training.optimizers import trained_by

WATCHED_STEPS = 3  # first steps to check, because an average that follows micro-batches changes in each step


def trained_modules(objects: Mapping[str, Any]) -> list[nn.Module]:
    """Return the outermost modules. If the objects have optimizers, return only modules that the optimizers train."""
    modules = [one for one in objects.values() if isinstance(one, nn.Module)]
    if trained := _trained_by(objects):
        modules = [one for one in modules if any(id(part) in trained for part in one.parameters())]
    inner = {id(part) for one in modules for part in one.modules() if part is not one}
    return [one for one in modules if id(one) not in inner]


def _trained_by(objects: Mapping[str, Any]) -> set[int]:
    return {id(one) for each in objects.values() if isinstance(each, Optimizer) for one in trained_by(each)}


def about_batch_norm(modules: Sequence[nn.Module], now: Configuration) -> list[str]:
    layers, ranks = sum(map(batch_norm_layers, modules)), 1 if _unsynchronised(modules) else now.world_size
    caveats = batch_norm_caveats(
        layers,
        now.micro_batch_size * ranks,
        accumulates=now.accumulation_steps > 1,
        ghost_batch_size=None,
        remedy=GROUP_NORM,
    )
    return [sentence for _, sentence in caveats]


def about_ranks(modules: Sequence[nn.Module]) -> list[str]:
    """Return a warning if ranks that share a batch do not synchronise batch normalisation."""
    layers = _unsynchronised(modules)
    sentence = (
        f"{plural(layers, 'batch normalisation layer')} must synchronise the ranks' statistics: on GPUs use "
        f"model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), else {GROUP_NORM}"
    )
    return [sentence] if layers else []


def _unsynchronised(modules: Sequence[nn.Module]) -> int:
    return sum(map(batch_norm_layers, modules)) - sum(
        batch_norm_layers(part) for one in modules for part in one.modules() if isinstance(part, nn.SyncBatchNorm)
    )


def about_order(loader: object) -> str | None:
    # The noise scale assumes random batches.
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    words = (
        "the loader of the training data does not shuffle; unless the dataset draws at random, use "
        "DataLoader(..., shuffle=True) or trial.sampler(data)"
    )
    return words if type(loader.batch_sampler.sampler) is SequentialSampler and len(loader) > 1 else None


Versions = list[tuple[int, int]]


class Averages:
    """Watches the weight averages (EMA, SWA) among a loop's objects.

    An average must change only after the optimizer's step.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        trained = _trained_by(objects)
        self._objects = {name: one for name, one in objects.items() if trained and _may_average(one, trained)}
        self._versions: dict[str, Versions] = {}
        self._steps = 0

    def step_begins(self) -> None:
        self._steps += 1
        self._versions = {}
        for name, one in self._objects.items() if self._steps <= WATCHED_STEPS else ():
            versions = _versions(one)
            if versions and versions == _versions(one):  # a state_dict() of copies always differs
                self._versions[name] = versions

    def changed(self) -> str | None:
        """Return a warning if an average has changed since the step began."""
        changed = [name for name, before in self._versions.items() if _versions(self._objects[name]) != before]
        if not changed:
            return None
        self._objects = self._versions = {}
        return (
            f"{changed[0]} of trial.state changes between the micro-batches of a step: update an average of weights "
            "only after optimizer.step()"
        )


def _may_average(one: Any, trained: set[int]) -> bool:
    if isinstance(one, nn.Module):
        return not any(id(parameter) in trained for parameter in one.parameters())
    return not isinstance(one, Optimizer) and callable(getattr(one, "state_dict", None))


def _versions(one: Any) -> Versions:
    # Any change alters a tensor's address or version. Buffers do not count, because a forward pass may change buffers.
    leaves = list(one.parameters()) if isinstance(one, nn.Module) else tree_leaves(one.state_dict())
    try:
        return [(leaf.data_ptr(), leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    except RuntimeError:  # inference tensors have no version, sparse tensors no address
        return []
