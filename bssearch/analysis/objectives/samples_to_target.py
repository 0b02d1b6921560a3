"""Training samples to the target."""

from __future__ import annotations

import math

from bssearch.analysis.objectives.base import Objective
from bssearch.records import ProbeRecord, TrialRecord, TrialState
from bssearch.records.batch_schedule import batch_schedule_of


class SamplesToTarget(Objective):
    """Training samples to the target, whatever the device."""

    name = "samples_to_target"
    own_unit = " samples"
    comparative = ("fewer samples", "more samples")
    axis_title = "training samples to the target"

    def figure(self, trial: TrialRecord) -> float | None:
        """Samples to the target."""
        if trial.outcome is None or trial.state is not TrialState.REACHED:
            return None
        return samples_after(trial, trial.outcome.steps_to_target)

    def bound(self, trial: TrialRecord) -> float | None:
        """Samples at the last miss."""
        if trial.outcome is None or not trial.state.is_censored:
            return None
        return samples_after(trial, trial.outcome.last_miss_step)

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float:
        """Steps × batch size."""
        return steps * batch_size

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Seconds of the best trial's samples at the probed batch size."""
        if best is None or probe.step_seconds is None:
            return super().seconds_as_good_as(best, probe, full)
        samples = self.figure(best)
        return math.inf if samples is None else samples / probe.batch_size * probe.step_seconds


def samples_after(trial: TrialRecord, steps: int | None) -> float | None:
    """Samples of a trial's first steps, by its mean samples per step: an epoch's last batch can be incomplete."""
    if steps is None or trial.outcome is None:
        return None
    planned = _planned(trial, steps)
    whole = _planned(trial, trial.outcome.steps)
    return planned * (trial.outcome.samples / whole) if whole and trial.outcome.samples else planned


def _planned(trial: TrialRecord, steps: int) -> float:
    schedule = batch_schedule_of(trial.configuration)
    if schedule is None or schedule.is_measured:
        return float(steps * trial.configuration.batch_size)
    return schedule.samples_after(steps)
