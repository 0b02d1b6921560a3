"""What an executor knows of a trial that runs, should that end without a word."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from bssearch.records import Observation, TrialOutcome, TrialRequest


@dataclass(slots=True)
class RunningTrial:
    """A trial in a slot: its last observation, its best metric, and where the slot's log stood when it began.

    ``device`` and ``device_uuid`` are those of the slot.
    """

    request: TrialRequest
    log_start: int = 0
    device: str | None = None
    device_uuid: str | None = None
    started: float = field(default_factory=time.monotonic)
    contended: bool = False
    last: Observation | None = None
    best_metric: float | None = None

    def observe(self, observation: Observation) -> None:
        """Take in an evaluation."""
        gain = self.request.target.gain
        if self.best_metric is None or gain(observation.metric) > gain(self.best_metric):
            self.best_metric = observation.metric
        self.last = observation

    def finished(self, outcome: TrialOutcome) -> TrialOutcome:
        """Return the outcome with what is known here: contention, the device, and how far a failed trial had come."""
        outcome = replace(
            outcome,
            contended=outcome.contended or self.contended,
            device=outcome.device or self.device,
            device_uuid=outcome.device_uuid or self.device_uuid,
        )
        if self.last is not None and outcome.final_metric is None:
            outcome = replace(
                outcome,
                steps=self.last.step,
                samples=self.last.samples,
                train_seconds=self.last.train_seconds,
                final_metric=self.last.metric,
                best_metric=self.best_metric,
            )
            if self.best_metric is not None and not self.request.target.is_met_by(self.best_metric):
                outcome = replace(outcome, last_miss_step=self.last.step, last_miss_seconds=self.last.train_seconds)
        if outcome.wall_seconds == 0.0:
            outcome = replace(outcome, wall_seconds=time.monotonic() - self.started)
        return outcome
