"""What happens once per optimizer step: the learning rate is set, gradients are clipped, weights updated, averaged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.records import Configuration
from bssearch.training.averaging import AveragedWeights, ema_decay_of
from bssearch.training.computation import Computation
from bssearch.training.own.optimizers import Optimizers, restore_states, states_of, take_over_states


class Updates:
    """The optimizers of a model, with fp16's loss scaling, clipping and the average of the weights around them.

    ``skipped`` counts the steps of which the loss scaling left out an update, on the device.
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
        self.skipped = torch.zeros((), device=computation.device)
        self._left_out = torch.zeros_like(self.skipped)
        self._was_scaled = False

    def begin(self, factor: float) -> None:
        """Begin a step: without gradients, each parameter group at ``factor`` times the rate that it was built with."""
        learning_rate = self._peak_learning_rate * factor
        if learning_rate != self._learning_rate:
            self._learning_rate = learning_rate
            for optimizer, rates in zip(self.optimizers, self._peak_rates, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss, scaled in fp16."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def apply(self) -> None:
        """Apply the gradient that lies there with all optimizers, clipped as one."""
        if self.scaler is not None:
            self._unscale(self.optimizers)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        for optimizer in self.optimizers:
            self._step(optimizer)
        self.end()

    def apply_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients of one optimizer's parameters, clipped by themselves; `end` must follow in the step."""
        if self.scaler is not None:
            self._unscale([optimizer])
        if self._clip_norm is not None:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self._clip_norm)
        self._step(optimizer)

    def apply_each(self) -> None:
        """Apply, one by one, the optimizers for which gradients lie there."""
        for optimizer in self.optimizers:
            if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
                self.apply_one(optimizer)
        self.end()

    def end(self) -> None:
        """End a step: the loss scaling and the average take note of its updates."""
        if self.scaler is not None and self._was_scaled:
            self.scaler.update()
            self.skipped = self.skipped + self._left_out
            self._left_out = torch.zeros_like(self.skipped)
            self._was_scaled = False
        if self.average is not None:
            self.average.update()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def _unscale(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        assert self.scaler is not None, "there is a loss scaling in fp16 only"
        self._was_scaled = True
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
            for found in self.scaler._found_inf_per_device(optimizer).values():
                self._left_out = torch.maximum(self._left_out, found)

    def state(self) -> dict[str, Any]:
        """Return what the next steps hang on, to be saved; the tensors are those in use."""
        return {
            "optimizer": states_of(self.optimizers),
            "learning_rate": self._learning_rate,
            "average": None if self.average is None else self.average.state(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "skipped": self.skipped,
        }

    def take_over(self, optimizer: Any, average: list[torch.Tensor] | None) -> None:
        """Begin with another run's state of the optimizers, None for none, and options of this one's own.

        The average of the weights is that of the run, or else begins at its weights. Raises what an optimizer raises
        whose state it is not.
        """
        if optimizer is not None:
            take_over_states(self.optimizers, optimizer, self._model)
        if self.average is not None and average is not None:
            self.average.restore(average)
        elif self.average is not None:
            self.average.begin_again()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        restore_states(self.optimizers, state["optimizer"])
        self._learning_rate = state["learning_rate"]
        if self.average is not None:
            self.average.restore(state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"].to(self.skipped.device)


def clip_norm_of(configuration: Configuration) -> float | None:
    """Return the largest norm of a gradient, None for no clipping. Raises `UsageError` where it is no number > 0."""
    value = configuration.parameters.get("clip_norm")
    if value is None:
        return None
    if isinstance(value, bool | str) or not value > 0 or not math.isfinite(value):
        raise UsageError(f"clip_norm = {value!r} must be a number > 0, or none for no clipping")
    return float(value)
