"""A figure that is the seconds to the target times something: what time, cost and energy share."""

from __future__ import annotations

from abc import abstractmethod

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.seconds import seconds_to_target, split
from bssearch.records import TrialRecord, TrialState


class BySeconds(Objective):
    """A figure that follows from a trial's seconds to the target, measured or steps × step time."""

    @abstractmethod
    def of_seconds(self, trial: TrialRecord, seconds: float) -> float | None:
        """Return the figure of a trial that takes these seconds to the target."""

    def figure(self, trial: TrialRecord) -> float | None:
        """Return the figure of a trial that reached the target."""
        if trial.outcome is None or trial.state is not TrialState.REACHED:
            return None
        seconds = self._seconds(trial, trial.outcome.steps_to_target, seconds_to_target(trial))
        return None if seconds is None else self.of_seconds(trial, seconds)

    def bound(self, trial: TrialRecord) -> float | None:
        """Return the figure at the last miss; None where something else used the device and no step time is given."""
        outcome = trial.outcome
        if outcome is None or not trial.state.is_censored:
            return None
        measured = None if outcome.contended else outcome.last_miss_seconds
        seconds = self._seconds(trial, outcome.last_miss_step, measured)
        return None if seconds is None else self.of_seconds(trial, seconds)

    def _seconds(self, trial: TrialRecord, steps: int | None, own: float | None) -> float | None:
        """Return steps × ``step_seconds``; the trial's own seconds where its split is not among them."""
        known = None if self.step_seconds is None else self.step_seconds.get(split(trial.configuration))
        if known is None:
            return own
        return None if steps is None else steps * known
