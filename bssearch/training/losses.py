"""The loss of a workload as a configuration asks for it, and its sum on the device, for which no loop need wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.records import Configuration, parameters_of_group
from bssearch.workloads.base import WeightedLoss, Workload

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor | WeightedLoss]


def loss_of(workload: Workload, configuration: Configuration) -> Loss:
    """Return a workload's loss of (model, inputs, targets) with a configuration's own parameters.

    One with a training step of its own may have none: nothing calls it then.
    """
    own: dict[str, Any] = parameters_of_group(configuration.parameters, "loss")
    loss: Any = getattr(workload, "loss", _no_loss)
    return partial(loss, label_smoothing=configuration.label_smoothing, **own)


def _no_loss(*arguments: object, **settings: object) -> torch.Tensor:
    raise WorkloadError("the workload has a training step of its own, and no loss()")


class LossSum:
    """The losses of micro-batches and the weights behind them; a mean loss weighs one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._weight: torch.Tensor | float = 0.0
        self._losses = 0

    def clear(self) -> None:
        """Start again from nothing."""
        self._total.zero_()
        if isinstance(self._weight, torch.Tensor):
            self._weight.zero_()
        else:
            self._weight = 0.0
        self._losses = 0

    def add(self, loss: torch.Tensor | WeightedLoss) -> None:
        """Take in the loss of one micro-batch, without waiting for it."""
        self._losses += 1
        if isinstance(loss, WeightedLoss):
            self._total += loss.total.detach()
            if isinstance(loss.weight, torch.Tensor) and not isinstance(self._weight, torch.Tensor):
                self._weight = torch.full((), self._weight, dtype=torch.float64, device=loss.weight.device)
            self._weight += loss.weight.reshape(()) if isinstance(loss.weight, torch.Tensor) else loss.weight
        else:
            self._total += loss.detach()
            self._weight = self._weight + 1.0

    def state(self) -> dict[str, Any]:
        """Return the sums, to be saved."""
        weight = self._weight if isinstance(self._weight, torch.Tensor) else float(self._weight)
        return {"total": self._total, "weight": weight, "losses": self._losses}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
        weight = state["weight"]
        self._total.copy_(state["total"])
        if isinstance(self._weight, torch.Tensor):
            self._weight.copy_(torch.as_tensor(weight))
        else:
            self._weight = weight.to(self.device) if isinstance(weight, torch.Tensor) else weight
        self._losses = state["losses"]

    def mean(self) -> float | None:
        """Return the sum of the losses over that of their weights, None of no loss. Waits for the device."""
        return (self._total / self._weight).item() if self._losses else None
