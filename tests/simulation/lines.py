"""Trials that come to their target on a straight line."""

import math
from collections.abc import Mapping, Sequence

from bssearch.exchange.exporters.exports import RecordedTable, RecordedTrial
from bssearch.records import Goal, ParameterValue, Target
from tests.benchmarks.simulate.replay import Replay

TARGET = Target(metric="accuracy", value=1.0)


def line(seconds: float, limit: float = 100.0) -> Replay:
    """Return a trial that reaches a gain of 1 at ``seconds`` on a straight line, evaluated every second."""
    moments = [float(moment) for moment in range(1, int(min(seconds, limit)) + 1)]
    hit = seconds if seconds <= limit else math.inf
    return Replay(moments, [moment / seconds for moment in moments], hit, limit)


def table(*seconds: float, limit: float | None = 20.0) -> RecordedTable:
    trials = []
    for number, one in enumerate(seconds):
        replay = line(one, 20.0)
        steps = tuple(range(len(replay.train_seconds)))
        trials.append(RecordedTrial(number, {}, 0, steps, tuple(replay.train_seconds), tuple(replay.gains)))
    return RecordedTable("lines", TARGET, limit, tuple(trials))


Seconds = Mapping[tuple[ParameterValue, ...], Sequence[float]]


def grid(
    cells: Seconds,
    names: Sequence[str] = ("batch_size", "learning_rate"),
    *,
    limit: float = 20.0,
    step_seconds: float = 0.01,
    goal: Goal = Goal.MAXIMIZE,
) -> RecordedTable:
    """Return a table with a trial on a straight line for each of a cell's seconds to the target."""
    trials: list[RecordedTrial] = []
    for cell, seconds in cells.items():
        for seed, one in enumerate(seconds):
            replay = line(one, limit)
            steps = tuple(round(moment / step_seconds) for moment in replay.train_seconds)
            metrics = replay.gains if goal is Goal.MAXIMIZE else [1 - gain for gain in replay.gains]
            parameters = dict(zip(names, cell, strict=True))
            trials.append(
                RecordedTrial(len(trials), parameters, seed, steps, tuple(replay.train_seconds), tuple(metrics))
            )
    target = TARGET if goal is Goal.MAXIMIZE else Target(metric="loss", value=0.0, goal=goal)
    return RecordedTable("grid", target, limit, tuple(trials))
