"""The shape of a quick answer: what ``bssearch run --quick --format json`` prints, before any search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from bssearch.analysis.shape import Model, Notice

if TYPE_CHECKING:
    from bssearch.analysis.answer import Answer


class QuickOptimum(Model):
    """The batch size that is expected to reach the target soonest, in micro-batches, with the learning rate by rule."""

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
    """A run of the quick answer, with its steps to the target, null where that was not reached.

    ``train_seconds`` are those to the target, else those that it ran.
    """

    trial: int
    batch_size: int
    learning_rate: float
    steps: int | None
    train_seconds: float


class QuickAnswer(Model):
    """A batch size from a minute of measurements, which no search has verified.

    ``interval`` holds the optimum with 90 % confidence, ``flat_range`` the batch sizes expected to be within 5 % of it.
    ``gain`` is the default's expected time over that of ``optimal`` with learning rates by the rule; the learning rate
    of ``optimal`` is another one where that was seen to be there sooner, ``learning_rate_gain`` times (else 1), and a
    retuned one is to be looked for in ``learning_rate_range``. ``largest_micro_batch_size`` is the largest that ran.
    The time of a step is ``alpha_s`` + ``beta_s`` × samples, null below three batch sizes. ``target`` is what the
    ``runs`` were compared at: easier than the study's where the default did not get there. ``noise_scale`` is null
    where it is not known, or its interval reaches 0 or infinity.
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
    """A quick answer as a search uses it, in samples.

    ``batch_size`` is the one that it recommends, ``interval`` holds the optimum with 90 %; ``b_crit`` is the critical
    batch size with its 90 % interval, ``noise_scale`` the gradient noise scale near the target, None where it was not
    measured.
    """

    batch_size: int
    interval: tuple[int, int]
    b_crit: tuple[float, float, float]
    noise_scale: float | None

    @classmethod
    def of(cls, found: QuickAnswer) -> Self:
        """Return the prior of a quick answer."""
        low, high = found.interval
        b_crit = found.b_crit.low, found.b_crit.estimate, found.b_crit.high
        return cls(found.optimal.batch_size, (low, high), b_crit, found.noise_scale)

    def holds(self, batch_size: int) -> bool:
        """Return whether a batch size lies within the interval of the optimum."""
        return self.interval[0] <= batch_size <= self.interval[1]


class Promise(Model):
    """A quick answer's batch size and the search's.

    ``interval`` is that which held the optimum with 90 % confidence; it ``holds`` where it meets the flat range that
    the search found. ``time_ratio`` is the time at the promised batch size, tuned by the search, over that of the
    optimum, null where the search has no time of it.
    """

    batch_size: int
    interval: list[int]
    gain: float
    found_batch_size: int
    found_flat_range: list[int]
    holds: bool
    time_ratio: float | None

    @property
    def in_words(self) -> str:
        """Return the two side by side, for people."""
        low, high = self.interval
        kept = "which holds" if self.holds else "which misses it"
        ratio = "" if self.time_ratio is None else f", where the target takes {self.time_ratio:.2g}× as long"
        return f"the quick answer had said batch {self.batch_size}{ratio}, and {low} to {high} with 90 %, {kept}"


def promise_of(quick: QuickAnswer, answer: Answer) -> Promise | None:
    """Return a stored quick answer beside an answer; None before fresh seeds have confirmed that."""
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
