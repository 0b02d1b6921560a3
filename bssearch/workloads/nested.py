"""Nestings of dicts, lists and tuples with tensors in them, as `torch.utils._pytree` sees them.

A plain tensor is a nesting, too: that of one leaf. It is handled first, without a walk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Nesting = Any
"""A tensor, or dicts, lists and tuples of nestings."""

CONTAINERS = (dict, list, tuple)


def mapped(function: Callable[[Any], Any], value: Nesting) -> Nesting:
    """Return a nesting like the one given with the function's result in the place of each leaf."""
    if not isinstance(value, CONTAINERS):
        return function(value)
    from torch.utils._pytree import tree_map

    return tree_map(function, value)


def leaves(value: Nesting) -> list[Any]:
    """Return the leaves in their order."""
    if not isinstance(value, CONTAINERS):
        return [value]
    from torch.utils._pytree import tree_leaves

    return tree_leaves(value)


def places(value: Nesting) -> list[tuple[str, Any]]:
    """Return each leaf with its place, such as ``['ids'][0]``; that of a lone leaf is empty."""
    if not isinstance(value, CONTAINERS):
        return [("", value)]
    from torch.utils._pytree import keystr, tree_flatten_with_path

    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]]


def tensors(value: Nesting) -> list[torch.Tensor]:
    """Return those of the leaves that are tensors."""
    import torch

    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def moved(value: Nesting, device: torch.device, *, non_blocking: bool = False) -> Nesting:
    """Return a nesting with its tensors on a device; other leaves stay as they are."""
    import torch

    def to_device(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf

    return mapped(to_device, value)
