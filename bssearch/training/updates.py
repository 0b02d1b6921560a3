"""Clipping, updates, weight averaging, and a workload's own training step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration
from bssearch.training.computation import Computation
from bssearch.training.optimizers import Optimizers, restore_states, states_of, take_over_states
from bssearch.workloads.base import TrainingStep, WeightedLoss, Workload
from bssearch.workloads.data import Batch


class AveragedWeights:
    """Average of a model's parameters and floating-point buffers.

    After each step: average ← decay · average + (1 − decay) · weights (Polyak & Juditsky 1992; Tarvainen & Valpola
    2017, eq. 2). Integer buffers and buffers with infinities (counters, masks) are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        buffers = (buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.isfinite().all())
        self._weights = [tensor.detach() for tensor in (*model.parameters(), *buffers)]
        self._averages = [tensor.clone() for tensor in self._weights]
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Add the current weights."""
        self._average(self._averages, self._weights, None)

    def begin_again(self) -> None:
        """Restart at the current weights."""
        _copy(self._weights, self._averages)

    def state(self) -> list[torch.Tensor]:
        """The averages, not copied."""
        return self._averages

    def restore(self, averages: list[torch.Tensor]) -> None:
        """Restore averages."""
        _copy(averages, self._averages)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averages into the model, at the same addresses."""
        kept = [tensor.clone() for tensor in self._weights]
        _copy(self._averages, self._weights)
        try:
            yield
        finally:
            _copy(kept, self._weights)


def ema_decay_of(configuration: Configuration) -> float | None:
    """Decay of averaged weights; `UsageError` outside (0, 1)."""
    value = configuration.parameters.get("ema_decay")
    if value is None:
        return None
    if isinstance(value, bool | str) or not 0 < value < 1:
        raise UsageError(f"ema_decay = {value!r} must be a number in (0, 1), or none for no average of the weights")
    return float(value)


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class Updates:
    """Optimizers with fp16 loss scaling, clipping and weight averaging.

    ``skipped`` counts, on the device, the updates that loss scaling skipped.
    """

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, configuration: Configuration, computation: Computation
    ) -> None:
        self.optimizers = optimizers
        self._model = model
        self._learning_rate = self._peak_learning_rate = configuration.learning_rate
        self._peak_rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
        self._clip_norm = clip_norm_of(configuration)
        decay = ema_decay_of(configuration)
        self.average = None if decay is None else AveragedWeights(model, decay)
        self.scaler = computation.new_scaler()
        self._step: Callable[[torch.optim.Optimizer], object]
        self._step = methodcaller("step") if self.scaler is None else self.scaler.step
        self.skipped = torch.zeros((), device=computation.device)
        self._left_out = torch.zeros_like(self.skipped)
        self._was_scaled = False

    def begin(self, factor: float) -> None:
        """Clear gradients; set rates to ``factor`` × the initial ones."""
        learning_rate = self._peak_learning_rate * factor
        if learning_rate != self._learning_rate:
            self._learning_rate = learning_rate
            for optimizer, rates in zip(self.optimizers, self._peak_rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradient, scaled in fp16."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def apply(self) -> None:
        """Clip the whole gradient; step all."""
        if self.scaler is not None:
            self._unscale(self.optimizers)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        for optimizer in self.optimizers:
            self._step(optimizer)
        self.end()

    def apply_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip and step one optimizer; call `end` later."""
        if self.scaler is not None:
            self._unscale([optimizer])
        if self._clip_norm is not None:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self._clip_norm)
        self._step(optimizer)

    def apply_each(self) -> None:
        """Step each optimizer that has gradients."""
        for optimizer in self.optimizers:
            if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
                self.apply_one(optimizer)
        self.end()

    def end(self) -> None:
        """Update loss scaling and the average."""
        if self.scaler is not None and self._was_scaled:
            self.scaler.update()
            self.skipped = self.skipped + self._left_out
            self._left_out = torch.zeros_like(self.skipped)
            self._was_scaled = False
        if self.average is not None:
            self.average.update()

    def _unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        assert self.scaler is not None, "there is a loss scaling in fp16 only"
        self._was_scaled = True
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
            for found in self.scaler._found_inf_per_device(optimizer).values():
                self._left_out = torch.maximum(self._left_out, found)

    def state(self) -> dict[str, Any]:
        """State to save; tensors are not copied."""
        return {
            "optimizer": states_of(self.optimizers),
            "learning_rate": self._learning_rate,
            "average": None if self.average is None else self.average.state(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "skipped": self.skipped,
        }

    def take_over(self, optimizer: Any, average: list[torch.Tensor] | None) -> None:
        """Take over another run's optimizer states and average, not its options; `ValueError` if parameters differ."""
        if optimizer is not None:
            take_over_states(self.optimizers, optimizer, self._model)
        if self.average is not None and average is not None:
            self.average.restore(average)
        elif self.average is not None:
            self.average.begin_again()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        restore_states(self.optimizers, state["optimizer"])
        self._learning_rate = state["learning_rate"]
        if self.average is not None:
            self.average.restore(state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"].to(self.skipped.device)


def clip_norm_of(configuration: Configuration) -> float | None:
    """Largest gradient norm; `UsageError` if not > 0."""
    value = configuration.parameters.get("clip_norm")
    if value is None:
        return None
    if isinstance(value, bool | str) or not value > 0 or not math.isfinite(value):
        raise UsageError(f"clip_norm = {value!r} must be a number > 0, or none for no clipping")
    return float(value)


Take = Callable[[TrainingStep], Any]
T = TypeVar("T")


def own_training_step(workload: Workload, computation: Computation) -> Take | None:
    """The workload's ``training_step``; `UsageError` with CUDA graphs."""
    step: Take | None = getattr(workload, "training_step", None)
    if step is not None and computation.replays_graphs:
        raise UsageError(
            f"training.compile = {computation.settings.compile!r} must be 'default' or 'none' for a workload with a "
            "training_step: CUDA graphs reuse memory that it may still use"
        )
    return step


class OwnStep:
    """Runs the workload's ``training_step``."""

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
        """Take a step; `WorkloadError` for skipped micro-batches or no loss."""
        total = configuration.accumulation_steps
        taken = itertools.islice(batches, total)
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
        if left := len(list(taken)):
            raise WorkloadError(f"training_step() took {total - left} of {total} micro-batches; it must take all")
        return _checked(loss)

    def _outside_autocast(self, function: Callable[[T], None]) -> Callable[[T], None]:

        def called(argument: T) -> None:
            with torch.autocast(self._computation.device.type, enabled=False):
                function(argument)

        return called


def _checked(loss: Any) -> torch.Tensor | WeightedLoss:
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
