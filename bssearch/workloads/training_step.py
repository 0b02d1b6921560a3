"""What a workload with a training step of its own is given for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bssearch.records import Configuration

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One optimizer step, for ``training_step(step)``: forward, backward and update are the workload's.

    ``micro_batches`` gives the step's ``accumulation_steps`` pairs (inputs, targets) on the device, augmented, once;
    all of them must be taken. ``optimizers`` is what ``build_optimizer`` returned, else bssearch's own optimizer; their
    learning rates are those of the step, and all gradients are None. ``number`` counts steps from 0. The whole step
    runs under autocast where the precision asks for it.
    """

    model: torch.nn.Module
    optimizers: Any
    configuration: Configuration
    number: int
    micro_batches: Iterator[tuple[Any, Any]]
    _backward: Callable[[torch.Tensor], None]
    _update: Callable[[torch.optim.Optimizer], None]

    @property
    def accumulation_steps(self) -> int:
        """Return the number of micro-batches."""
        return self.configuration.accumulation_steps

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar loss, scaled where fp16 needs it. Divide by the micro-batches beforehand."""
        self._backward(loss)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step: after undoing fp16's scaling, and clipping its gradients to ``clip_norm``, if any.

        An ``optimizer.step()`` of one's own does neither.
        """
        self._update(optimizer)
