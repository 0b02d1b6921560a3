"""A figure that is the seconds to the target times something: what time, cost and energy share."""

from __future__ import annotations

from abc import abstractmethod

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.seconds import Kind, seconds_to_target
from bssearch.records import TrialRecord, TrialState
from bssearch.step_times import PooledStepTime


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
