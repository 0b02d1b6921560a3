"""The learning rate over a trial, as a factor on its peak: pure functions of the step.

Steps count from 0: ``factor(0)`` is what the first optimizer step uses. Warmup and horizon are given in samples or
epochs, so that they mean the same at every batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from bssearch.errors import UsageError
from bssearch.records import Configuration

Kind = Literal["constant", "cosine", "linear"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def warmup_steps(warmup_epochs: float, train_samples: int, batch_size: int) -> int:
    """Return the optimizer steps that see ``warmup_epochs`` × ``train_samples`` samples, rounded."""
    return round(warmup_epochs * train_samples / batch_size)


def horizon_steps(horizon_samples: float, batch_size: int) -> int:
    """Return the optimizer steps that see at least ``horizon_samples`` samples; at least one."""
    return max(1, math.ceil(horizon_samples / batch_size))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warmup, then a constant rate or a decay to zero at the horizon, where the trial ends.

    Warmup (Goyal et al. 2017) starts near 0 and not at it: step s of w uses (s + 1)/(w + 1), so that no step is
    wasted and step w is the first at the peak. The decay runs from step w to the horizon h, with u = (s − w)/(h − w):
    1 − u for ``linear``, (1 + cos πu)/2 for ``cosine`` (Loshchilov & Hutter 2017, one cycle). The last step, h − 1,
    is still above zero. A horizon within the warmup cuts the warmup off.
    """

    kind: Kind = "constant"
    warmup_steps: int = 0
    horizon_steps: int | None = None

    def factor(self, step: int) -> float:
        """Return the factor on the peak learning rate for a step, in 0 … 1."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant" or self.horizon_steps is None or step >= self.horizon_steps:
            return 1.0 if self.kind == "constant" else 0.0
        progress = (step - self.warmup_steps) / (self.horizon_steps - self.warmup_steps)
        return 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2

    def is_over(self, step: int) -> bool:
        """Return whether the horizon has come: this step is not run any more."""
        return self.horizon_steps is not None and step >= self.horizon_steps


def schedule_of(configuration: Configuration, train_samples: int) -> Schedule:
    """Return the schedule of a configuration: its ``schedule`` (constant) and ``horizon_samples`` (none).

    Raises `UsageError` for an unknown schedule and for a decay without a horizon.
    """
    kind = configuration.parameters.get("schedule", "constant")
    if kind not in KINDS:
        raise UsageError(f"schedule = {kind!r} must be one of {', '.join(KINDS)}")
    horizon = configuration.parameters.get("horizon_samples")
    if horizon is None and kind != "constant":
        raise UsageError(f"schedule = {kind!r} needs horizon_samples, the samples after which it ends")
    return Schedule(
        kind=kind,
        warmup_steps=warmup_steps(configuration.warmup_epochs, train_samples, configuration.batch_size),
        horizon_steps=None if horizon is None else horizon_steps(float(horizon), configuration.batch_size),
    )
