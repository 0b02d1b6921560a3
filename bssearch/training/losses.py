"""Training losses summed on the device, so that the loop need not wait for them."""

from __future__ import annotations

from typing import Any

import torch

from bssearch.workloads.base import WeightedLoss


class LossSum:
    """The losses of micro-batches and the weights behind them; a mean loss weighs one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Start again from nothing."""
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._weight: torch.Tensor | float = 0.0
        self._losses = 0

    def add(self, loss: torch.Tensor | WeightedLoss) -> None:
        """Take in the loss of one micro-batch, without waiting for it."""
        total, weight = (loss.total, loss.weight) if isinstance(loss, WeightedLoss) else (loss, 1.0)
        self._total = self._total + total.detach()
        self._weight = self._weight + weight
        self._losses += 1

    def state(self) -> dict[str, Any]:
        """Return the sums, to be saved."""
        weight = self._weight if isinstance(self._weight, torch.Tensor) else float(self._weight)
        return {"total": self._total, "weight": weight, "losses": self._losses}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from saved sums."""
        weight = state["weight"]
        self._total = state["total"].to(self._device)
        self._weight = weight.to(self._device) if isinstance(weight, torch.Tensor) else weight
        self._losses = state["losses"]

    def mean(self) -> float | None:
        """Return the sum of the losses over that of their weights, None of no loss. Waits for the device."""
        return (self._total / self._weight).item() if self._losses else None
