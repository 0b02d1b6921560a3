"""Runs a workload's own training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration
from bssearch.training.computation import Computation
from bssearch.training.own.updates import Updates
from bssearch.workloads.base import WeightedLoss, Workload
from bssearch.workloads.data import Batch
from bssearch.workloads.training_step import TrainingStep

Take = Callable[[TrainingStep], Any]
T = TypeVar("T")


def own_training_step(workload: Workload, computation: Computation) -> Take | None:
    """Return the workload's ``training_step``, None without one.

    Raises `UsageError` where CUDA graphs are replayed: they know only bssearch's own step.
    """
    step: Take | None = getattr(workload, "training_step", None)
    if step is not None and computation.replays_graphs:
        raise UsageError(
            f"training.compile = {computation.settings.compile!r} must be 'default' or 'none' for a workload with a "
            "training_step of its own: CUDA graphs reuse the memory of what it may still hold"
        )
    return step


class OwnStep:
    """Takes steps by the workload's own ``training_step``, with the optimizers that it built."""

    def __init__(
        self,
        take: Take,
        model: torch.nn.Module,
        optimizers: Any,
        configuration: Configuration,
        computation: Computation,
        updates: Updates,
    ) -> None:
        self._take = take
        self._model = model
        self._optimizers = optimizers
        self._configuration = configuration
        self._computation = computation
        self._updates = updates

    def run(self, number: int, batches: Iterator[Batch], configuration: Configuration) -> torch.Tensor | WeightedLoss:
        """Take a step over the next micro-batches, as many as ``configuration`` has; return its loss.

        Raises `WorkloadError` where not all of them are taken, and where what it returns is no loss.
        """
        taken = _Taken(batches, configuration.accumulation_steps)
        step = TrainingStep(
            model=self._model,
            optimizers=self._optimizers,
            configuration=configuration,
            number=number,
            micro_batches=taken,
            _backward=self._outside_autocast(self._updates.backward),
            _update=self._outside_autocast(self._updates.apply_one),
        )
        with self._computation.whole_step():
            loss = self._take(step)
        if taken.left:
            total = configuration.accumulation_steps
            raise WorkloadError(f"training_step() took {total - taken.left} of {total} micro-batches; it must take all")
        return _checked(loss)

    def _outside_autocast(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """Return a function that does what bssearch's own step does outside of autocast, outside of it, too."""

        def called(argument: T) -> None:
            with torch.autocast(self._computation.device.type, enabled=False):
                function(argument)

        return called


class _Taken(Iterator[Batch]):
    """The next so many batches; ``left`` is how many of them were not taken yet."""

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        self._batches = batches
        self.left = count

    def __next__(self) -> Batch:
        if not self.left:
            raise StopIteration
        batch = next(self._batches)
        self.left -= 1
        return batch


def _checked(loss: Any) -> torch.Tensor | WeightedLoss:
    """Return what is logged of a step; raise `WorkloadError` where that is no scalar."""
    if isinstance(loss, int | float) and not isinstance(loss, bool):
        return torch.tensor(float(loss))
    scalar = loss.total if isinstance(loss, WeightedLoss) else loss
    if not isinstance(scalar, torch.Tensor) or scalar.ndim:
        shape = f" of shape {tuple(scalar.shape)}" if isinstance(scalar, torch.Tensor) else ""
        raise WorkloadError(
            f"training_step() returned a {type(scalar).__name__}{shape}; it must return the loss to log: "
            "a scalar tensor, a number or a WeightedLoss"
        )
    return loss  # type: ignore[no-any-return]
