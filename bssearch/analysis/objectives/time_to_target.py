"""Train seconds to the target."""

from __future__ import annotations

import math
from abc import abstractmethod

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.seconds import Kind, seconds_to_target
from bssearch.errors import LaunchError
from bssearch.records import ProbeRecord, TrialRecord, TrialState
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
        """Return the figure at the last miss; None where something else used the device and no step time is known."""
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
        """Return steps × step time, None where the trial counts by its own seconds."""
        return None if self.common is None or steps is None else self.common.seconds(trial, steps)


class TimeToTarget(BySeconds):
    """Train seconds to the target, those the trial would take alone on its device."""

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
        """Return the best trial's seconds on the clock of its curve, contended or not."""
        seconds = None if best is None else seconds_to_target(best, "measured")
        return math.inf if seconds is None else seconds


TIME = TimeToTarget()
"""Seconds to a target, each trial's own: the figure that every answer states, whatever its objective."""


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
        """Return the device-hour, or nothing where a price gives a currency that the spec does not name."""
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
    """Joules of the device to the target: its mean power × the seconds. The device must report its power."""

    name = "energy_to_target"
    own_unit = " J"
    comparative = ("less energy", "more energy")
    axis_title = "joules to the target"

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Return mean power × seconds; None where the power is not known."""
        power = None if trial.outcome is None else trial.outcome.device_use.mean_power_watts
        return None if power is None else power * seconds

    def check_measured(self, trial: TrialRecord, device_name: str) -> None:
        """Raise `LaunchError` where a trial reached the target and the device did not report its power."""
        if trial.outcome is None or trial.state is not TrialState.REACHED or self.figure(trial) is not None:
            return
        raise LaunchError(
            f"objective = energy_to_target: {device_name} does not report its power, so that "
            f"nothing is known of what trial {trial.number} took",
            hint="a CUDA device and the extra gpu report it; time_to_target and cost_to_target take seconds alone",
        )
