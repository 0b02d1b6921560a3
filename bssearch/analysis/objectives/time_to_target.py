"""Train seconds, samples, cost and energy to the target."""

from __future__ import annotations

import math
from abc import abstractmethod

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.seconds import Kind, seconds_to_target
from bssearch.errors import LaunchError
from bssearch.records import ProbeRecord, TrialRecord, TrialState
from bssearch.records.batch_schedule import batch_schedule_of
from bssearch.records.step_times import PooledStepTime


class BySeconds(Objective):
    """A figure that follows from a trial's seconds to the target, measured or steps × step time."""

    @abstractmethod
    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Return the figure of a trial that takes these seconds to the target."""

    def figure(self, trial: TrialRecord) -> float | None:
        """Return the figure of a trial that reached the target."""
        outcome = trial.outcome
        if outcome is None or trial.state is not TrialState.REACHED:
            return None
        seconds = self._product(trial, outcome.steps_to_target)
        seconds = seconds_to_target(trial) if seconds is None else seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def bound(self, trial: TrialRecord) -> float | None:
        """Return the figure at the last miss; None if the trial was contended and its step time is unknown."""
        outcome = trial.outcome
        if outcome is None or not trial.state.is_censored:
            return None
        seconds = self._product(trial, outcome.last_miss_step)
        if seconds is None and not outcome.contended:
            seconds = outcome.last_miss_seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Return the step time by which a trial is compared with others."""
        return None if self.common is None else self.common.step_time(trial)

    def _product(self, trial: TrialRecord, steps: int | None) -> float | None:
        return None if self.common is None or steps is None else self.common.seconds(trial, steps)


class TimeToTarget(BySeconds):
    """Train seconds to the target, as if the trial had its device to itself."""

    name = "time_to_target"
    own_unit = " s"
    comparative = ("faster", "slower")
    equal = "as fast as"
    phrase = "in {}"
    axis_title = "train seconds to the target"
    exceeds = "longer"
    trials_race = True

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        """Return the seconds."""
        return seconds

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """Return steps × step time."""
        return None if step_seconds is None else steps * step_seconds

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Return the best trial's measured seconds, contended or not, because curves use the same clock."""
        seconds = None if best is None else seconds_to_target(best, "measured")
        return math.inf if seconds is None else seconds


TIME = TimeToTarget()
"""Time to target by each trial's own seconds, which every answer states whatever its objective."""


class CostToTarget(TimeToTarget):
    """Hours × devices × the price of a device-hour, in the currency of the price; device-hours without a price."""

    name = "cost_to_target"
    comparative = ("cheaper", "dearer")
    equal = "the same as"
    phrase = "at a cost of {}"
    axis_title = "cost to the target"
    exceeds = "more"

    @property
    def unit(self) -> str:
        """Return device-hours; empty if a price is given, because the spec does not name its currency."""
        return " device-hours" if self.price_per_device_hour is None else ""

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        """Return seconds × devices × price / 3600."""
        return seconds * trial.configuration.world_size * self._price / 3600

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """Return steps × step time × price / 3600."""
        return None if step_seconds is None else steps * step_seconds * self._price / 3600

    @property
    def _price(self) -> float:
        return self.price_per_device_hour or 1.0


class EnergyToTarget(BySeconds):
    """Joules of the device to the target: its mean reported power × the seconds."""

    name = "energy_to_target"
    own_unit = " J"
    comparative = ("less energy", "more energy")
    axis_title = "joules to the target"

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Return mean power × seconds; None if the power is unknown."""
        power = None if trial.outcome is None else trial.outcome.device_use.mean_power_watts
        return None if power is None else power * seconds

    def check_measured(self, trial: TrialRecord, device_name: str) -> None:
        """Raise `LaunchError` if a trial reached the target but the device reported no power."""
        if trial.outcome is None or trial.state is not TrialState.REACHED or self.figure(trial) is not None:
            return
        raise LaunchError(
            f"objective = energy_to_target: {device_name} does not report its power, so the energy of trial "
            f"{trial.number} is unknown",
            hint="use a CUDA device with the extra gpu, or time_to_target or cost_to_target, which need only seconds",
        )


class SamplesToTarget(Objective):
    """Training samples to the target, independent of the device."""

    name = "samples_to_target"
    own_unit = " samples"
    comparative = ("fewer samples", "more samples")
    axis_title = "training samples to the target"

    def figure(self, trial: TrialRecord) -> float | None:
        """Return the samples of a trial that reached the target."""
        if trial.outcome is None or trial.state is not TrialState.REACHED:
            return None
        return samples_after(trial, trial.outcome.steps_to_target)

    def bound(self, trial: TrialRecord) -> float | None:
        """Return the samples at the last miss, contended or not."""
        if trial.outcome is None or not trial.state.is_censored:
            return None
        return samples_after(trial, trial.outcome.last_miss_step)

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float:
        """Return steps × batch size."""
        return steps * batch_size

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Return the seconds that the best trial's samples take at the probed batch size."""
        if best is None or probe.step_seconds is None:
            return super().seconds_as_good_as(best, probe, full)
        samples = self.figure(best)
        return math.inf if samples is None else samples / probe.batch_size * probe.step_seconds


def samples_after(trial: TrialRecord, steps: int | None) -> float | None:
    """Return the samples of a trial's first steps; None without ``steps`` or an outcome.

    Scaled by the trial's mean samples per step, because batches can be incomplete, such as the last of an epoch.
    """
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
