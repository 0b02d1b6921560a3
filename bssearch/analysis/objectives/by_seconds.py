"""A figure that is the seconds to the target times something: what time, cost and energy share."""

from __future__ import annotations

from abc import abstractmethod

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.seconds import seconds_to_target
from bssearch.records import TrialRecord, TrialState


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
        seconds = self._common(trial, outcome.steps_to_target, outcome.time_to_target_s)
        seconds = seconds_to_target(trial) if seconds is None else seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def bound(self, trial: TrialRecord) -> float | None:
        """Return the figure at the last miss; None where something else used the device and nothing corrects that."""
        outcome = trial.outcome
        if outcome is None or not trial.state.is_censored:
            return None
        seconds = self._common(trial, outcome.last_miss_step, outcome.last_miss_seconds)
        if seconds is None and not outcome.contended:
            seconds = outcome.last_miss_seconds
        return None if seconds is None else self.of_seconds(trial, seconds)

    def excess(self, trial: TrialRecord) -> float:
        """Return what a correction for other work on the device may have left; see `CommonSeconds.excess`."""
        return self.common.excess(trial) if self.common is not None and self.common.holds_for(trial) else 0.0

    def _common(self, trial: TrialRecord, steps: int | None, measured: float | None) -> float | None:
        """Return the seconds until a step of the kind that all trials count by, None where there are none."""
        if self.common is None or steps is None or measured is None or not self.common.holds_for(trial):
            return None
        return self.common.until(trial, steps, measured)
