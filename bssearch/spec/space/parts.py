"""Composite parts of a space."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from bssearch.records.scaling import LearningRateRule
from bssearch.spec.space.domains import Domain, StrictModel, domain_kind, within_limits


class BatchLadder(StrictModel):
    """Powers of two from low to high."""

    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must be <= high = {self.high}")
        if not self.rungs:
            raise ValueError(f"no power of two between low = {self.low} and high = {self.high}: the ladder is empty")
        return self

    @property
    def rungs(self) -> tuple[int, ...]:
        """Batch sizes, ascending."""
        powers = (2**exponent for exponent in range(self.high.bit_length()))
        return tuple(power for power in powers if self.low <= power <= self.high)


BatchSize = Annotated[int, Field(ge=1)]


class RelativeLearningRate(StrictModel):
    """The learning rate at ``reference_batch``, in log scale, and its scaling rule."""

    low: float = Field(gt=0)
    high: float = Field(gt=0)
    reference_batch: int = Field(default=64, ge=1)
    rule: LearningRateRule = LearningRateRule.SQRT

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be < high = {self.high:g}")
        return self


PositiveRate = Annotated[float, Field(gt=0)]


ScheduleName = Literal["constant", "cosine", "linear", "one_cycle", "warmup_stable_decay"]
# Default decay share of ``warmup_stable_decay`` (Hägele et al. 2024).
DECAY_SHARE = 0.2


class Schedule(StrictModel):
    """The learning rate after warmup; see `bssearch.training.schedule.Schedule` for formulas.

    Except under ``constant`` it decays to about zero at ``horizon_samples``, where the trial ends; samples, so that all
    batch sizes see equal data. ``warmup_stable_decay`` decays in the last ``decay_share`` (default 0.2).
    """

    name: (
        Annotated[ScheduleName, Tag("fixed")] | Annotated[tuple[ScheduleName, ...], Field(min_length=1), Tag("choices")]
    ) = Field(default="constant", discriminator=Discriminator(domain_kind))
    horizon_samples: Domain | None = None
    decay_share: Domain | None = None

    _limits = field_validator("horizon_samples", "decay_share")(within_limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Schedules to choose from."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @model_validator(mode="after")
    def _horizon_goes_with_decay(self) -> Self:
        decays = [name for name in self.names if name != "constant"]
        if decays and self.horizon_samples is None:
            raise ValueError(f"a {decays[0]} schedule needs horizon_samples")
        if not decays and self.horizon_samples is not None:
            raise ValueError("a constant schedule takes no horizon_samples")
        if self.decay_share is not None and "warmup_stable_decay" not in decays:
            raise ValueError(f"decay_share is of warmup_stable_decay; name is {', '.join(self.names)}")
        return self
