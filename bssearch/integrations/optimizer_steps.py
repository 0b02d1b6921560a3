"""The steps that a loop's optimizers take, counted at the optimizers themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


class OptimizerSteps:
    """Counts the steps of optimizers by their name; of several the one with the most steps counts.

    A step that a gradient scaler skips is none: the scaler does not call the optimizer, or tells a fused one that the
    gradients are not finite. Of a wrapped optimizer, as Accelerate and Fabric make it, the inner one is watched: the
    wrapper takes no step within an accumulation.
    """

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def watch(self, objects: Mapping[str, Any]) -> None:
        """Count the steps of the optimizers among some objects from now on."""
        for name, owner in objects.items():
            optimizer = _inner(owner)
            if isinstance(optimizer, Optimizer):
                self._taken[name] = 0
                optimizer.register_step_post_hook(self._counter(name))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the optimizers that are counted."""
        return tuple(self._taken)

    @property
    def taken(self) -> int:
        """Return the most steps that one of the optimizers has taken."""
        return max(self._taken.values(), default=0)

    def _counter(self, name: str) -> Any:
        def count(optimizer: Optimizer, *given: object) -> None:
            not_finite = getattr(optimizer, "found_inf", None)  # a tensor while a scaler steps a fused optimizer
            if not_finite is None or not bool(not_finite):
                self._taken[name] += 1

        return count


def _inner(owner: Any) -> Any:
    while isinstance(getattr(owner, "optimizer", None), Optimizer):
        owner = owner.optimizer
    return owner
