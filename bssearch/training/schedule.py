"""Learning rate schedules: functions from the step, counted from 0, to a factor on the peak rate.

A configuration gives the warmup in epochs and the horizon in samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from bssearch.errors import WorkloadError, require
from bssearch.records import Configuration
from bssearch.spec.space import DECAY_SHARE, ScheduleName
from bssearch.workloads.base import Workload

ONE_CYCLE_RISE = 0.3  # share of a one-cycle schedule that rises without warmup, as in OneCycleLR

ONE_CYCLE_START, ONE_CYCLE_END = 1 / 25, 1 / 25e4  # first and last factor, as in OneCycleLR


def warmup_steps(warmup_epochs: float, train_samples: int, batch_size: int) -> int:
    return round(warmup_epochs * train_samples / batch_size)


def horizon_steps(horizon_samples: float, batch_size: int) -> int:
    return max(1, math.ceil(horizon_samples / batch_size))


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """Linear warmup, then a constant rate or a decay until the trial ends at the horizon.

    Warmup (Goyal et al. 2017): step s of w uses (s + 1)/(w + 1) of the peak rate. From step w to the horizon h, let u
    = (s − w)/(h − w). Then ``linear`` uses 1 − u, and ``cosine`` (1 + cos πu)/2 (Loshchilov & Hutter 2017).
    ``warmup_stable_decay`` uses 1 − √u (Hägele et al. 2024, arXiv 2405.18392), in which u rises from 0 to 1 over the
    last ``decay_share`` of the horizon. ``one_cycle`` is PyTorch's OneCycleLR with constant momentum (Smith & Topin
    2018, arXiv 1708.07120). Without warmup, ``one_cycle`` rises for 30 % of the horizon.
    """

    kind: ScheduleName = "constant"
    warmup_steps: int = 0
    horizon_steps: int | None = None
    decay_share: float = DECAY_SHARE

    def factor(self, step: int) -> float:
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
        return self.horizon_steps is not None and step >= self.horizon_steps


def _half_cosine(progress: float, start: float, end: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def schedule_of(configuration: Configuration, train_samples: int) -> RateSchedule:
    kind = cast(ScheduleName, configuration.parameters.get("schedule", "constant"))
    horizon = configuration.parameters.get("horizon_samples")
    require(
        horizon is not None or kind == "constant",
        f"schedule = {kind!r} needs horizon_samples, the samples after which the schedule ends",
        hint="give schedule: {horizon_samples: N}, or name the constant schedule",
    )
    return RateSchedule(
        kind=kind,
        warmup_steps=warmup_steps(configuration.warmup_epochs, train_samples, configuration.batch_size),
        horizon_steps=None if horizon is None else horizon_steps(float(horizon), configuration.batch_size),
        decay_share=float(configuration.parameters.get("decay_share") or DECAY_SHARE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSchedule(RateSchedule):
    """The workload's own schedule, until the configured horizon."""

    factor_at: Callable[[int], Any]

    def factor(self, step: int) -> float:
        factor = self.factor_at(step)
        try:
            value = float(factor)
        except (TypeError, ValueError, RuntimeError):  # ValueError: several elements; RuntimeError: complex tensor
            value = math.nan
        if not 0 <= value < math.inf:
            raise WorkloadError(
                f"build_schedule()'s function returned {factor!r} at step {step}; return a finite number >= 0"
            )
        return value


def schedule_for(workload: Workload, configuration: Configuration, train_samples: int) -> RateSchedule:
    configured = schedule_of(configuration, train_samples)
    build = getattr(workload, "build_schedule", None)
    if build is None:
        return configured
    factor_at = build(configuration, max(1, train_samples // configuration.batch_size))
    require(
        callable(factor_at),
        f"build_schedule() returned {type(factor_at).__name__}; return a function from the step to the factor on "
        "the learning rate",
        error=WorkloadError,
    )
    # The configured warmup only keeps `Course.stuck_at_chance` from ending a trial during the warmup.
    return OwnSchedule(
        warmup_steps=configured.warmup_steps, horizon_steps=configured.horizon_steps, factor_at=factor_at
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSchedule(RateSchedule):
    """A run's schedule for ``horizon_steps`` steps after a checkpoint at step ``offset``.

    With a new optimizer state the rate may rise over ``rise`` steps: step s uses (s + 1)/(rise + 1) of the run's rate.
    """

    run: RateSchedule
    offset: int
    rise: int = 0

    def factor(self, step: int) -> float:
        return self.run.factor(self.offset + step) * min(1.0, (step + 1) / (self.rise + 1))
