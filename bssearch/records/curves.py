"""Learning curves and the target's crossing."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bssearch.records.measured import Observation, TrialOutcome
from bssearch.records.question import Target


@dataclass(slots=True, eq=False)
class Progress:
    """The best `Target.gain` of a trial up to each evaluation."""

    train_seconds: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.train_seconds[-1] if self.train_seconds else 0.0

    @property
    def gain(self) -> float:
        return self.gains[-1] if self.gains else -math.inf

    def add(self, train_seconds: float, gain: float) -> None:
        """Add an evaluation. NaN does not change the best gain."""
        self.train_seconds.append(train_seconds)
        self.gains.append(gain if gain > self.gain else self.gain)

    @property
    def when_best(self) -> float:
        return self.train_seconds[bisect_left(self.gains, self.gain)]

    def index_from(self, train_seconds: float) -> int:
        return bisect_left(self.train_seconds, train_seconds)

    def at(self, train_seconds: float) -> float | None:
        index = bisect_right(self.train_seconds, train_seconds) - 1
        return self.gains[index] if index >= 0 else None

    def when(self, gain: float) -> float:
        """The train seconds at which the best gain last equalled ``gain``, interpolated and clamped to the curve."""
        index = bisect_right(self.gains, gain)
        if index == 0:
            return self.train_seconds[0]
        if index == len(self.gains):
            return self.train_seconds[-1]
        low, start = self.gains[index - 1], self.train_seconds[index - 1]
        if low == -math.inf:
            return self.train_seconds[index]
        return start + (self.train_seconds[index] - start) * ((gain - low) / (self.gains[index] - low))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The interval from the last evaluation before the target (miss) to the first evaluation at the target (hit).

    ``steps`` (rounded up) and ``train_seconds`` are at the same fraction of the interval.
    """

    last_miss_step: int
    last_miss_seconds: float
    first_hit_step: int
    first_hit_seconds: float
    steps: int
    train_seconds: float


def crossing(previous: Observation | None, hit: Observation, target: Target) -> Crossing:
    """Return the target's crossing between two consecutive evaluations, or at ``hit`` if ``previous`` is None.

    The fraction of the interval is (target − miss) / (hit − miss).
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
    """Return the outcome with the fields of a crossing. Seconds are None if an imported curve has no seconds."""
    is_timed = found.first_hit_seconds > 0 or found.first_hit_step == 0
    return replace(
        outcome,
        time_to_target_s=found.train_seconds if is_timed else None,
        steps_to_target=found.steps,
        last_miss_step=found.last_miss_step,
        last_miss_seconds=found.last_miss_seconds if is_timed else None,
        first_hit_step=found.first_hit_step,
        first_hit_seconds=found.first_hit_seconds if is_timed else None,
    )


def first_crossing(observations: Sequence[Observation], target: Target) -> Crossing | None:
    previous = None
    for observation in observations:
        if target.is_met_by(observation.metric):
            return crossing(previous, observation, target)
        previous = observation
    return None


def sparkline(values: Sequence[float], width: int = 40) -> str:
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / span))] for value in values)
