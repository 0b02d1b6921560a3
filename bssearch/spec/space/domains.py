"""Domains of parameters (fixed, range or choices), the batch ladder, the learning rate and the schedule."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bssearch.records import LearningRateRule, ParameterValue
from bssearch.records.text import nearest

UNKNOWN_KEY: Final = "unknown_key"  # Pydantic's error type for an unknown key


class StrictModel(BaseModel):
    """A frozen part of a spec that rejects unknown keys, infinities and NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                raise cls._unknown(str(key))
        return data

    @classmethod
    def _unknown(cls, key: str) -> PydanticCustomError:
        known = ", ".join(cls.model_fields)
        advice = nearest(key, cls.model_fields, f"choose from {known}" if known else "remove the key", cutoff=0.4)
        return PydanticCustomError(UNKNOWN_KEY, "unknown key; {advice}", {"key": key, "advice": advice})


class Range(StrictModel):
    """A continuous range, searched on a log scale if ``log`` (default: if low > 0)."""

    low: float
    high: float
    log: bool | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be < high = {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"low = {self.low:g} must be > 0 on a log scale")
        return self

    @property
    def is_log(self) -> bool:
        return self.low > 0 if self.log is None else self.log


Scalar = bool | int | float


def domain_kind(value: Any) -> str:
    return (
        "range" if isinstance(value, Mapping | BaseModel) else "choices" if isinstance(value, list | tuple) else "fixed"
    )


Domain = Annotated[
    Annotated[Scalar, Tag("fixed")]
    | Annotated[Range, Tag("range")]
    | Annotated[tuple[Scalar, ...], Field(min_length=1), Tag("choices")],
    Discriminator(domain_kind),
]
LIMITS: dict[str, tuple[float, float, str]] = {
    "warmup_epochs": (0.0, math.inf, "must be >= 0"),
    "weight_decay": (0.0, math.inf, "must be >= 0"),
    "dropout": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "label_smoothing": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "clip_norm": (math.nextafter(0.0, 1.0), math.inf, "must be > 0"),
    "ema_decay": (math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0), "must be in (0, 1)"),
    "momentum": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "beta1": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "beta2": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "epsilon": (math.nextafter(0.0, 1.0), math.inf, "must be > 0"),
    "horizon_samples": (1.0, math.inf, "must be >= 1"),
    "decay_share": (math.nextafter(0.0, 1.0), 1.0, "must be in (0, 1]"),
}
TRAINING_PARAMETERS = ("warmup_epochs", "weight_decay", "dropout", "label_smoothing")
# Parameters that only the workload's ``build_model`` or ``loss`` uses.
WORKLOAD_PARAMETERS = ("dropout", "label_smoothing")

# Parameters that disable their step if missing: clipping, weight averaging.
OPTIONAL = ("clip_norm", "ema_decay")


def bounds(domain: Domain) -> tuple[float, float]:
    if isinstance(domain, Range):
        return domain.low, domain.high
    return (min(domain), max(domain)) if isinstance(domain, tuple) else (domain, domain)


def holds(domain: Any, value: Any) -> bool:
    """True if a domain contains a value, up to rounding."""
    if isinstance(domain, Range):
        return domain.low <= value <= domain.high or any(
            math.isclose(value, end, rel_tol=1e-9) for end in (domain.low, domain.high)
        )
    choices = domain if isinstance(domain, tuple) else (domain,)
    return any(
        value == choice or (is_number(choice) and is_number(value) and math.isclose(value, choice, rel_tol=1e-9))
        for choice in choices
    )


def describe(domain: Any, factor: float = 1.0) -> str:
    def shown(value: Any) -> str:
        return f"{value * factor:g}" if is_number(value) else str(value)

    if isinstance(domain, Range):
        whole = "a whole number " if getattr(domain, "is_integer", False) else ""
        return f"{whole}in [{shown(domain.low)}, {shown(domain.high)}]"
    return f"one of {', '.join(map(shown, domain))}" if isinstance(domain, tuple) else f"the fixed {shown(domain)}"


def is_number(value: Any) -> TypeGuard[int | float]:
    """True for a number other than a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def within_limits(domain: Domain | None, info: ValidationInfo) -> Domain | None:
    if domain is not None and info.field_name is not None:
        check_bounds(domain, LIMITS[info.field_name])
    return domain


def check_bounds(domain: Domain, limits: tuple[float, float, str]) -> None:
    low, high, rule = limits
    for value in bounds(domain):
        if not low <= value <= high:
            raise ValueError(f"{value:g} {rule}")


@dataclass(frozen=True, slots=True)
class Dimension:
    """A searched coordinate: a range (low, high, log, ``integer``) or choices."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[ParameterValue, ...] = ()
    integer: bool = False

    def holds(self, value: object) -> bool:
        """True if a value is valid. Booleans never equal numbers."""
        if self.choices:
            return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in self.choices)
        return is_number(value) and self.low <= value <= self.high and (not self.integer or float(value).is_integer())

    @property
    def any_value(self) -> ParameterValue:
        return self.choices[0] if self.choices else self.low

    def other_than(self, value: ParameterValue) -> ParameterValue:
        """The range's end or the number farthest from ``value``, or the first other choice."""
        if not self.choices:
            ends = (self.nearest(self.low), self.nearest(self.high))
            return max(ends, key=lambda end: abs(float(end or 0.0) - float(value or 0.0)))
        others = [choice for choice in self.choices if choice != value]
        if not (is_number(value) and all(map(is_number, others))):
            return others[0]
        return max(others, key=lambda choice: abs(float(choice or 0.0) - float(value or 0.0)))

    def nearest(self, value: ParameterValue) -> ParameterValue:
        """The value if valid, else the nearest number or the first choice."""
        if self.choices:
            return value if value in self.choices else self._nearest_choice(value)
        number = min(max(float(value or 0.0), self.low), self.high)
        return round(number) if self.integer else number

    def at_share(self, share: float) -> ParameterValue:
        """The number at a share in [0, 1] of the range, on a log scale if ``log``."""
        low, high = self.low, self.high
        return self.nearest(low * (high / low) ** share if self.log else low + (high - low) * share)

    def _nearest_choice(self, value: ParameterValue) -> ParameterValue:
        numbers = [float(choice) for choice in self.choices if is_number(choice)]
        if not is_number(value) or len(numbers) < len(self.choices):
            return self.choices[0]
        number = float(value)
        are_ratios = min(number, *numbers) > 0

        def distance(place: int) -> float:
            return abs(math.log(numbers[place] / number) if are_ratios else numbers[place] - number)

        return self.choices[min(range(len(numbers)), key=distance)]


def are_coordinates(sampled: Mapping[str, ParameterValue] | None, dimensions: Sequence[Dimension]) -> bool:
    """True if ``sampled`` holds exactly one valid value for each dimension."""
    if not isinstance(sampled, Mapping) or {*sampled} != {one.name for one in dimensions}:
        return False
    return all(one.holds(sampled[one.name]) for one in dimensions)


class BatchLadder(StrictModel):
    """The powers of two from ``low`` to ``high``."""

    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must be <= high = {self.high}")
        if not self.rungs:
            raise ValueError(f"no power of two from low = {self.low} to high = {self.high}; lower low or raise high")
        return self

    @property
    def rungs(self) -> tuple[int, ...]:
        powers = (2**exponent for exponent in range(self.high.bit_length()))
        return tuple(power for power in powers if self.low <= power <= self.high)


BatchSize = Annotated[int, Field(ge=1)]


class RelativeLearningRate(StrictModel):
    """The learning rate's range at ``reference_batch``, on a log scale, and the scaling rule."""

    low: float = Field(gt=0)
    high: float = Field(gt=0)
    reference_batch: int = Field(default=64, ge=1)
    rule: LearningRateRule = LearningRateRule.SQRT

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must be < high = {self.high:g}")
        return self


Positive = Annotated[float, Field(gt=0)]

ScheduleName = Literal["constant", "cosine", "linear", "one_cycle", "warmup_stable_decay"]
FOLLOWED = ("cosine", "linear", "warmup_stable_decay")  # decays that a growing batch can follow
# Default decay share of ``warmup_stable_decay`` (Hägele et al. 2024).
DECAY_SHARE = 0.2


class Schedule(StrictModel):
    """The learning rate after warmup; see `bssearch.training.schedule.RateSchedule` for formulas.

    Except under ``constant``, the rate decays to about zero at ``horizon_samples``, where a trial ends at the latest.
    ``warmup_stable_decay`` decays in the last ``decay_share`` of these samples (default 0.2).
    """

    name: (
        Annotated[ScheduleName, Tag("fixed")] | Annotated[tuple[ScheduleName, ...], Field(min_length=1), Tag("choices")]
    ) = Field(default="constant", discriminator=Discriminator(domain_kind))
    horizon_samples: Domain | None = None
    decay_share: Domain | None = None

    _limits = field_validator("horizon_samples", "decay_share")(within_limits)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if isinstance(self.name, str) else self.name

    @model_validator(mode="after")
    def _horizon_goes_with_decay(self) -> Self:
        decays = [name for name in self.names if name != "constant"]
        if decays and self.horizon_samples is None:
            raise ValueError(f"a {decays[0]} schedule needs horizon_samples; add horizon_samples")
        if not decays and self.horizon_samples is not None:
            raise ValueError("a constant schedule takes no horizon_samples; remove horizon_samples")
        if self.decay_share is not None and "warmup_stable_decay" not in decays:
            raise ValueError(
                f"decay_share needs warmup_stable_decay as name, not {', '.join(self.names)}; remove decay_share"
            )
        return self
