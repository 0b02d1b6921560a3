"""Train seconds to the target."""

from __future__ import annotations

import math

from bssearch.analysis.objectives.by_seconds import BySeconds
from bssearch.analysis.objectives.seconds import seconds_to_target
from bssearch.records import ProbeRecord, TrialRecord


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
