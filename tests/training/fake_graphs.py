"""A CUDA graph's stand-in on a CPU: the operations of some work, done again on the same tensors, without its Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what has the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation")
        return func(*args, **(kwargs or {}))


class Recorded(NoWaits):  # type: ignore[no-untyped-call]
    """Keeps each operation with the tensors that it read and made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self._operations.append((func, args, kwargs or {}, _tensors(made)))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        """Do the operations again; what they made then is written to where it was made first."""
        for func, args, kwargs, places in self._operations:
            for place, made in zip(places, _tensors(func(*args, **kwargs)), strict=True):
                if made.untyped_storage().data_ptr() != place.untyped_storage().data_ptr():
                    place.copy_(made)


class FakeGraphs:
    """Records on a CPU. ``replays`` counts the replays of each recording; a recording is also done once."""

    def __init__(self, peak_bytes: int | None = None, idle_bytes: int = 0) -> None:
        self.peak_bytes = peak_bytes
        self.idle_bytes = idle_bytes
        self.replays: list[int] = []
        self.is_closed = False

    def apart(self, work: Callable[[], None]) -> None:
        work()

    def refusing_waits(self) -> AbstractContextManager[Any]:
        return NoWaits()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.is_closed = True

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        recorded, number = Recorded(), len(self.replays)
        self.replays.append(0)
        with recorded:
            work()

        def replay() -> None:
            self.replays[number] += 1
            recorded.replay()

        return replay
