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
    """A figure that follows from the seconds to the target."""

    @abstractmethod
    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Figure of a trial that takes these seconds to the target."""

    def figure(self, trial: TrialRecord) -> float | None:
        """Figure of a trial that reached the target."""
        outcome = trial.outcome
        if outcome is None or trial.state is not TrialState.REACHED:
            return None
        seconds = self._product(trial, outcome.steps_to_target)
        seconds = seconds_to_target(trial) if seconds is None else seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def bound(self, trial: TrialRecord) -> float | None:
        """Figure at the last miss; None if the trial was contended and its step time is unknown."""
        outcome = trial.outcome
        if outcome is None or not trial.state.is_censored:
            return None
        seconds = self._product(trial, outcome.last_miss_step)
        if seconds is None and not outcome.contended:
            seconds = outcome.last_miss_seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def step_time(self, trial: TrialRecord) -> PooledStepTime[Kind] | None:
        """Step time by which a trial is compared."""
        return None if self.common is None else self.common.step_time(trial)

    def _product(self, trial: TrialRecord, steps: int | None) -> float | None:
        return None if self.common is None or steps is None else self.common.seconds(trial, steps)


class TimeToTarget(BySeconds):
    """Train seconds to the target, as if alone on the device."""

    name = "time_to_target"
    own_unit = " s"
    comparative = ("faster", "slower")
    equal = "as fast as"
    phrase = "in {}"
    axis_title = "train seconds to the target"
    exceeds = "longer"
    trials_race = True

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        """Seconds."""
        return seconds

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """Steps × step time."""
        return None if step_seconds is None else steps * step_seconds

    def seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord, full: float) -> float:
        """Best trial's measured seconds, contended or not: curves use the same clock."""
        seconds = None if best is None else seconds_to_target(best, "measured")
        return math.inf if seconds is None else seconds


TIME = TimeToTarget()


class CostToTarget(TimeToTarget):
    """Hours × devices × the price of a device-hour; device-hours without a price."""

    name = "cost_to_target"
    comparative = ("cheaper", "dearer")
    equal = "the same as"
    phrase = "at a cost of {}"
    axis_title = "cost to the target"
    exceeds = "more"

    @property
    def unit(self) -> str:
        """ "device-hours", or empty if a price is set: its currency is unknown."""
        return " device-hours" if self.price_per_device_hour is None else ""

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float:
        """Seconds × devices × price / 3600."""
        return seconds * trial.configuration.world_size * self._price / 3600

    def predicted(self, steps: float, batch_size: float, step_seconds: float | None) -> float | None:
        """Steps × step time × price / 3600."""
        return None if step_seconds is None else steps * step_seconds * self._price / 3600

    @property
    def _price(self) -> float:
        return self.price_per_device_hour or 1.0


class EnergyToTarget(BySeconds):
    """The device's mean reported power × seconds, in joules."""

    name = "energy_to_target"
    own_unit = " J"
    comparative = ("less energy", "more energy")
    axis_title = "joules to the target"

    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Mean power × seconds."""
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
