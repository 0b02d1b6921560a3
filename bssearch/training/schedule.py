"""The learning rate over a trial, as a factor on its peak: pure functions of the step.

Steps count from 0: ``factor(0)`` is what the first optimizer step uses. Warmup and horizon are given in samples or
epochs, so that they mean the same at every batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration
from bssearch.spec.space import DECAY_SHARE, ScheduleName
from bssearch.workloads.base import Workload

KINDS: tuple[ScheduleName, ...] = get_args(ScheduleName)

ONE_CYCLE_RISE = 0.3
"""The share of a one-cycle schedule in which the rate rises where no warmup is given, as `torch.optim.lr_scheduler`."""

ONE_CYCLE_START, ONE_CYCLE_END = 1 / 25, 1 / 25e4
"""The factors on the peak with which a one-cycle schedule begins and ends, as `torch.optim.lr_scheduler.OneCycleLR`."""


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

    ``warmup_stable_decay`` stays at the peak and decays in the last ``decay_share`` of the horizon, by 1 − √u with u
    from 0 to 1 over the decay (Hägele et al. 2024, arXiv 2405.18392; Hu et al. 2024, arXiv 2404.06395).
    ``one_cycle`` rises from a 25th of the peak within the warmup, or within 30 % of the horizon where there is none,
    and falls to a 250,000th, by half a cosine each way (Smith & Topin 2018, arXiv 1708.07120), as PyTorch's OneCycleLR
    step by step; the momentum stays.
    """

    kind: ScheduleName = "constant"
    warmup_steps: int = 0
    horizon_steps: int | None = None
    decay_share: float = DECAY_SHARE

    def factor(self, step: int) -> float:
        """Return the factor on the peak learning rate for a step, in 0 … 1."""
        if self.kind == "one_cycle" and self.horizon_steps is not None:
            return self._one_cycle(step, self.horizon_steps)
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant" or self.horizon_steps is None or step >= self.horizon_steps:
            return 1.0 if self.kind == "constant" else 0.0
        if self.kind == "warmup_stable_decay":
            decay = self.decay_share * self.horizon_steps
            return 1 - math.sqrt(max(0.0, 1 - (self.horizon_steps - step) / decay))
        progress = (step - self.warmup_steps) / (self.horizon_steps - self.warmup_steps)
        return 1 - progress if self.kind == "linear" else _half_cosine(progress, 1.0, 0.0)

    def _one_cycle(self, step: int, horizon: int) -> float:
        if step >= horizon:
            return 0.0
        top, last = (self.warmup_steps or ONE_CYCLE_RISE * horizon) - 1, horizon - 1
        if step < top:
            return _half_cosine(step / top, ONE_CYCLE_START, 1.0)
        return _half_cosine(min(1.0, (step - top) / max(1.0, last - top)), 1.0, ONE_CYCLE_END)

    def is_over(self, step: int) -> bool:
        """Return whether the horizon has come: this step is not run any more."""
        return self.horizon_steps is not None and step >= self.horizon_steps


def _half_cosine(progress: float, start: float, end: float) -> float:
    """Return where half a cosine from ``start`` to ``end`` is after a share of the way."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def schedule_of(configuration: Configuration, train_samples: int) -> Schedule:
    """Return the schedule of a configuration: ``schedule`` (constant), ``horizon_samples`` (none), ``decay_share``.

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
        decay_share=float(configuration.parameters.get("decay_share") or DECAY_SHARE),
    )


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """The workload's factors on the learning rate, until the horizon that the configuration has, if any.

    ``warmup_steps`` are those of the configuration, during which a trial is not judged to be stuck.
    """

    factor_at: Callable[[int], Any]
    configured: Schedule

    @property
    def warmup_steps(self) -> int:
        """Return the configuration's optimizer steps of warm-up."""
        return self.configured.warmup_steps

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate for a step; raise `WorkloadError` where it is no number >= 0."""
        factor = self.factor_at(step)
        try:
            value = float(factor)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise WorkloadError(f"build_schedule()'s function gave {factor!r} at step {step}; it must be a number >= 0")
        return value

    def is_over(self, step: int) -> bool:
        """Return whether the horizon has come: this step is not run any more."""
        return self.configured.is_over(step)


def schedule_for(workload: Workload, configuration: Configuration, train_samples: int) -> Schedule | OwnSchedule:
    """Return the schedule of a trial: the workload's, where it builds one.

    Raises `WorkloadError` where ``build_schedule`` returns no function, and what `schedule_of` raises.
    """
    configured = schedule_of(configuration, train_samples)
    build = getattr(workload, "build_schedule", None)
    if build is None:
        return configured
    factor_at = build(configuration, max(1, train_samples // configuration.batch_size))
    if not callable(factor_at):
        raise WorkloadError(
            f"build_schedule() returned a {type(factor_at).__name__}; it must be a function of the step, which "
            "returns the factor on the learning rate"
        )
    return OwnSchedule(factor_at, configured)


@dataclass(frozen=True, slots=True)
class BranchSchedule:
    """The run's schedule from the checkpoint on, for ``steps`` steps; ``offset`` are the steps before.

    Where the optimizer begins anew the rate may rise over the first ``rise`` steps: step s has (s + 1)/(rise + 1) of
    it. The run's own warmup is no warmup of the branch.
    """

    run: Schedule | OwnSchedule
    offset: int
    steps: int
    rise: int = 0
    warmup_steps: int = 0

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate for a step of the branch, counted from 0."""
        return self.run.factor(self.offset + step) * min(1.0, (step + 1) / (self.rise + 1))

    def is_over(self, step: int) -> bool:
        """Return whether the branch has seen its samples."""
        return step >= self.steps
