"""Random numbers of the host, which a recording holds for good: who draws them in a step is found by looking."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from bssearch.training.trial_checkpoint import RandomState

DEPTH = 3
"""Attributes of attributes that are looked into: a choice; an augmentation holds its generator in one or two."""

MOST_ITEMS = 100
"""A list or a dictionary of more items is taken for data and is not looked into: a choice."""

OF_HOST = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


class HostGenerators:
    """The global generators of the host, and those of its own that each ``owner`` has; owners are named.

    They are looked for in attributes, those of the class too, and in what the methods read from their module and from
    the function around them. One that is made anew in each step, or that a library keeps to itself, is not found.
    """

    def __init__(self, owners: Mapping[str, object], device: torch.device) -> None:
        self._owners = owners
        self._device = device
        self._kept = dict(self._found())
        self._before = self._states()

    def drawn(self) -> str | None:
        """Return the name of a generator that was drawn from since the last look, None where none was."""
        now = self._states()
        changed = [name for name, state in now.items() if state != self._before[name]]
        for name, generator in self._found():
            self._kept.setdefault(name, generator)
        self._before = self._states()
        return changed[0] if changed else None

    def _states(self) -> dict[str, Any]:
        state = RandomState(self._device).state()
        of_torch = {} if self._device.type == "cpu" else {"torch": state["torch"].numpy().tobytes()}
        return {
            "random": state["python"],
            "numpy.random": state["numpy"],
            **of_torch,
            **{name: _state(generator) for name, generator in self._kept.items()},
        }

    def _found(self) -> Iterator[tuple[str, Any]]:
        """Yield generators with their names; on a CPU PyTorch's are those of the device."""
        seen: set[int] = set()
        for name, owner in self._owners.items():
            for found, generator in _generators(name, owner, DEPTH, seen):
                if not isinstance(generator, torch.Generator) or generator.device.type == "cpu" != self._device.type:
                    yield found, generator


def _generators(name: str, value: object, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, OF_HOST):
        yield name, value
    elif depth > 0 and not isinstance(value, type | ModuleType | torch.Tensor | np.ndarray):
        for inner, one in _parts(value):
            yield from _generators(f"{name}{inner}", one, depth - 1, seen)


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """Return what an object holds, with the ends of the names."""
    if isinstance(value, torch.nn.Module):
        modules = ((f".{name}", module) for name, module in value.named_modules() if name)
        return [*modules, *_attributes(value)]
    if isinstance(value, dict | list | tuple):
        if len(value) > MOST_ITEMS:
            return []
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"[{key!r}]", item) for key, item in items]
    if isinstance(value, FunctionType):
        try:
            used = inspect.getclosurevars(value)
        except ValueError:  # a name of the function around it that has no value
            return []
        return [(f" ({name})", one) for name, one in [*used.nonlocals.items(), *used.globals.items()]]
    return _attributes(value)


def _attributes(value: object) -> list[tuple[str, object]]:
    own = getattr(value, "__dict__", {})
    of_class = [pair for kind in type(value).__mro__ if not _is_a_librarys(kind) for pair in vars(kind).items()]
    return [(f".{name}", one) for name, one in [*own.items(), *of_class] if not name.startswith("__")]


def _is_a_librarys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in {"builtins", "torch", "numpy", "typing", "abc", "collections"}


def _state(generator: Any) -> object:
    """Return the state of a generator, to be compared; None of one that has none."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return _comparable(generator.get_state(legacy=False))
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return _comparable(bits.state)


def _comparable(state: Any) -> object:
    """Return a state of nested dictionaries without arrays, which do not compare as one."""
    if isinstance(state, Mapping):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
