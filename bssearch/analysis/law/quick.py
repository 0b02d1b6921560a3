"""The quick answer as ``bssearch run --quick --format json`` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from bssearch.analysis.shape import Model, Notice

if TYPE_CHECKING:
    from bssearch.analysis.answer import Answer


class QuickOptimum(Model):
    """The batch size expected to reach the target soonest."""

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    learning_rate: float


class QuickCriticalBatch(Model):
    """The critical batch size in samples, with its 90 % interval."""

    estimate: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class QuickRun(Model):
    """A run; ``steps`` are null if it missed the target."""

    trial: int
    batch_size: int
    learning_rate: float
    steps: int | None
    train_seconds: float


class QuickAnswer(Model):
    """A batch size from a minute of measurements, not verified by a search.

    ``interval`` holds the optimum with 90 %. ``gain``: the default's expected time over the optimum's.
    ``learning_rate_gain``: time with the rule's rate over time with the recommended one. ``alpha_s`` + ``beta_s`` ×
    samples: step seconds. ``target`` is easier than the study's if the default missed it.
    """

    schema_version: Literal[1] = 1
    verified: Literal[False] = False
    study: str
    metric: str
    target: float
    default_batch_size: int
    optimal: QuickOptimum
    interval: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    flat_range: list[int]
    gain: float
    learning_rate_gain: float
    learning_rate_range: list[float]
    largest_micro_batch_size: int
    b_crit: QuickCriticalBatch
    noise_scale: PositiveFloat | None
    alpha_s: float | None
    beta_s: float | None
    runs: list[QuickRun]
    seconds: float
    warnings: list[Notice]


@dataclass(frozen=True, slots=True)
class QuickPrior:
    """A quick answer as prior of a search; intervals are 90 %."""

    batch_size: int
    interval: tuple[int, int]
    b_crit: tuple[float, float, float]
    noise_scale: float | None

    @classmethod
    def of(cls, found: QuickAnswer) -> Self:
        """Prior of a quick answer."""
        low, high = found.interval
        b_crit = found.b_crit.low, found.b_crit.estimate, found.b_crit.high
        return cls(found.optimal.batch_size, (low, high), b_crit, found.noise_scale)

    def holds(self, batch_size: int) -> bool:
        """True within the optimum's interval."""
        return self.interval[0] <= batch_size <= self.interval[1]


class Promise(Model):
    """The quick answer's batch size and the search's; ``holds`` if its interval meets the flat range found."""

    batch_size: int
    interval: list[int]
    gain: float
    found_batch_size: int
    found_flat_range: list[int]
    holds: bool
    time_ratio: float | None

    @property
    def in_words(self) -> str:
        """Both side by side."""
        low, high = self.interval
        kept = "which holds" if self.holds else "which misses it"
        ratio = "" if self.time_ratio is None else f", where the target takes {self.time_ratio:.2g}× as long"
        return f"the quick answer had said batch {self.batch_size}{ratio}, and {low} to {high} with 90 %, {kept}"


def promise_of(quick: QuickAnswer, answer: Answer) -> Promise | None:
    """Quick answer beside a confirmed answer; None before confirmation."""
    best = answer.optimal.batch_size
    if not any(row.confirmed and row.batch_size == best for row in answer.batches):
        return None
    (low, high), flat, size = quick.interval, answer.flat_range, quick.optimal.batch_size
    times = {row.batch_size: row.time_to_target_s.median for row in answer.batches if row.time_to_target_s is not None}
    return Promise(
        batch_size=size,
        interval=quick.interval,
        gain=quick.gain,
        found_batch_size=best,
        found_flat_range=flat,
        holds=low <= flat[1] and flat[0] <= high,
        time_ratio=times[size] / times[best] if times.get(best) and size in times else None,
    )
