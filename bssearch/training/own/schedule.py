"""A learning-rate schedule of the workload's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bssearch.errors import WorkloadError
from bssearch.records import Configuration
from bssearch.training.schedule import Schedule, schedule_of
from bssearch.workloads.base import Workload


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
