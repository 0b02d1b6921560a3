"""What a trial ran in each stage of its batch schedule: steps, samples and train seconds, from its stored curve."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.batch_schedule import BatchSchedule, Stage, batch_schedule_of
from bssearch.records import Observation, TrialRecord

Point = tuple[int, int, float]
"""Steps, samples and train seconds of a trial until some moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """What a trial ran of one stage, which began after ``start_samples``; ``learning_rate`` is the peak there."""

    start_samples: int
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    steps: int
    samples: int
    train_seconds: float


def run_stages(trial: TrialRecord, curve: Sequence[Observation]) -> list[RunStage]:
    """Return the stages that a trial ran, in order; none of one whose batch size stays, or that took no step.

    Where the trial decided by what it measured, the sizes are the samples over the steps between its evaluations, at
    which alone it grows. Else they follow from its schedule, and the train seconds of a change between two evaluations
    lie on a line over the samples. Raises what `batch_schedule_of` does.
    """
    schedule = batch_schedule_of(trial.configuration)
    points = _points(trial, curve)
    if schedule is None or len(points) < 2:
        return []
    parts = _as_measured(schedule, points) if schedule.is_measured else _as_planned(schedule, points)
    return [
        RunStage(
            start_samples=start[1],
            batch_size=stage.batch_size,
            micro_batch_size=stage.micro_batch_size,
            learning_rate=trial.configuration.learning_rate * schedule.rate_factor(stage.batch_size),
            steps=end[0] - start[0],
            samples=end[1] - start[1],
            train_seconds=end[2] - start[2],
        )
        for stage, start, end in parts
    ]


def _points(trial: TrialRecord, curve: Sequence[Observation]) -> list[Point]:
    """Return where the trial was at its beginning, at its evaluations and at its end."""
    found: list[Point] = [(0, 0, 0.0)]
    ran = [(one.step, one.samples, one.train_seconds) for one in curve]
    if trial.outcome is not None:
        end = trial.outcome
        undelayed = end.undelayed_train_seconds  # which evaluations count by, too
        ran.append((end.steps, end.samples, end.train_seconds if undelayed is None else undelayed))
    for point in ran:
        if point[0] > found[-1][0]:
            found.append(point)
    return found


def _as_planned(schedule: BatchSchedule, points: Sequence[Point]) -> list[tuple[Stage, Point, Point]]:
    found, start = [], points[0]
    for stage, steps in schedule.steps_by_stage(points[-1][0]):
        samples = start[1] + round(steps) * stage.batch_size
        end = (start[0] + round(steps), samples, _seconds_at(samples, points))
        found.append((stage, start, end))
        start = end
    return found


def _as_measured(schedule: BatchSchedule, points: Sequence[Point]) -> list[tuple[Stage, Point, Point]]:
    found: list[tuple[Stage, Point, Point]] = []
    for start, end in itertools.pairwise(points):
        size = (end[1] - start[1]) / (end[0] - start[0])
        stage = min(schedule.stages, key=lambda one: abs(one.batch_size - size))
        if found and found[-1][0] == stage:
            start = found.pop()[1]
        found.append((stage, start, end))
    return found


def _seconds_at(samples: int, points: Sequence[Point]) -> float:
    """Return the train seconds until so many samples, between two points by a line."""
    for start, end in itertools.pairwise(points):
        if samples <= end[1]:
            return start[2] + (end[2] - start[2]) * (samples - start[1]) / (end[1] - start[1])
    return points[-1][2]
