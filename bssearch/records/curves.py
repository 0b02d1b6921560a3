"""Learning curves: the best so far, and where a target is crossed."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bssearch.records import Observation, Target, TrialOutcome


class Progress:
    """The best-so-far gains of one trial at its evaluations, as far as it ran."""

    __slots__ = ("gains", "train_seconds")

    def __init__(self) -> None:
        self.train_seconds: list[float] = []
        self.gains: list[float] = []

    @property
    def now(self) -> float:
        """Return the train seconds of the last evaluation, 0 before the first."""
        return self.train_seconds[-1] if self.train_seconds else 0.0

    @property
    def gain(self) -> float:
        """Return the best gain so far, −∞ before the first evaluation."""
        return self.gains[-1] if self.gains else -math.inf

    def add(self, train_seconds: float, gain: float) -> None:
        """Take in an evaluation; a gain that is not a number changes nothing."""
        self.train_seconds.append(train_seconds)
        self.gains.append(gain if gain > self.gain else self.gain)

    @property
    def when_best(self) -> float:
        """Return the train seconds of the first evaluation that had the best gain."""
        return self.train_seconds[bisect_left(self.gains, self.gain)]

    def index_from(self, train_seconds: float) -> int:
        """Return the place of the first evaluation at a moment or later."""
        return bisect_left(self.train_seconds, train_seconds)

    def at(self, train_seconds: float) -> float | None:
        """Return the best gain at a moment, that of the last evaluation until then; None before the first."""
        index = bisect_right(self.train_seconds, train_seconds) - 1
        return self.gains[index] if index >= 0 else None

    def when(self, gain: float) -> float:
        """Return the last train seconds at which the trial had no more than a gain, interpolated between evaluations.

        On a plateau that is its end. Of what the first evaluation exceeds, those of the first; of what none exceeds,
        those of the last.
        """
        index = bisect_right(self.gains, gain)
        if index == 0:
            return self.train_seconds[0]
        if index == len(self.gains):
            return self.train_seconds[-1]
        low, start = self.gains[index - 1], self.train_seconds[index - 1]
        if low == -math.inf:
            return self.train_seconds[index]
        share = (gain - low) / (self.gains[index] - low)
        return start + (self.train_seconds[index] - start) * share


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a target was first met: inside the interval from the last miss to the first hit.

    ``steps`` (rounded up) and ``train_seconds`` are interpolated inside it by the same fraction.
    """

    last_miss_step: int
    last_miss_seconds: float
    first_hit_step: int
    first_hit_seconds: float
    steps: int
    train_seconds: float


def crossing(previous: Observation | None, hit: Observation, target: Target) -> Crossing:
    """Return where the target was crossed between two successive evaluations, the second of which meets it.

    The fraction is that of the metric gap covered: (target − miss) / (hit − miss). Without a previous evaluation the
    target was met at once.
    """
    if previous is None:
        return Crossing(hit.step, hit.train_seconds, hit.step, hit.train_seconds, hit.step, hit.train_seconds)
    missed_by = target.shortfall(previous.metric)
    share = missed_by / (missed_by - target.shortfall(hit.metric))
    return Crossing(
        last_miss_step=previous.step,
        last_miss_seconds=previous.train_seconds,
        first_hit_step=hit.step,
        first_hit_seconds=hit.train_seconds,
        steps=math.ceil(previous.step + share * (hit.step - previous.step)),
        train_seconds=previous.train_seconds + share * (hit.train_seconds - previous.train_seconds),
    )


def with_crossing(outcome: TrialOutcome, found: Crossing) -> TrialOutcome:
    """Return the outcome of a trial that crossed its target there."""
    return replace(
        outcome,
        time_to_target_s=found.train_seconds,
        steps_to_target=found.steps,
        last_miss_step=found.last_miss_step,
        last_miss_seconds=found.last_miss_seconds,
        first_hit_step=found.first_hit_step,
        first_hit_seconds=found.first_hit_seconds,
    )


def first_crossing(observations: Sequence[Observation], target: Target) -> Crossing | None:
    """Return where a trial's observations, in time order, first meet a target; None where they never do."""
    previous = None
    for observation in observations:
        if target.is_met_by(observation.metric):
            return crossing(previous, observation, target)
        previous = observation
    return None


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a line of block characters, at most ``width`` long; empty for no values."""
    blocks = "▁▂▃▄▅▆▇█"
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(blocks[min(7, int(8 * (value - low) / span))] for value in values)
