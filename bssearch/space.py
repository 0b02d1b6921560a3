"""The search space: what may vary between trials, in the coordinates in which it is searched.

The batch size is a ladder. The learning rate is searched relative to its rule: what is sampled is the learning rate
at the reference batch, and the rule gives the one at the trial's batch, so that what is learned at one batch size
helps at the next. Every other parameter is fixed (a scalar), a range (``{low, high}``) or a list of choices.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bssearch.records import Configuration, ParameterValue
from bssearch.scaling import LearningRateRule, learning_rate_factor

REFERENCE_LEARNING_RATE = "reference_learning_rate"


class StrictModel(BaseModel):
    """A part of a spec: unknown keys are errors, values do not change, infinities are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, Mapping) else []
        if unknown:
            key = str(unknown[0])
            near = difflib.get_close_matches(key, cls.model_fields, n=1, cutoff=0.4)
            advice = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(cls.model_fields)}"
            raise PydanticCustomError("unknown_key", "unknown key; {advice}", {"key": key, "advice": advice})
        return data


class Range(StrictModel):
    """A continuous range, searched on a log scale where ``log`` is true (default: where low > 0)."""

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
        """Return whether the range is searched on a log scale."""
        return self.low > 0 if self.log is None else self.log


Scalar = bool | int | float


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | BaseModel):
        return "range"
    return "choices" if isinstance(value, list | tuple) else "fixed"


Domain = Annotated[
    Annotated[Scalar, Tag("fixed")]
    | Annotated[Range, Tag("range")]
    | Annotated[tuple[Scalar, ...], Field(min_length=1), Tag("choices")],
    Discriminator(_kind),
]
DOMAIN_TAGS = frozenset({"fixed", "range", "choices"})

LIMITS: dict[str, tuple[float, float, str]] = {
    "warmup_epochs": (0.0, math.inf, "must be >= 0"),
    "weight_decay": (0.0, math.inf, "must be >= 0"),
    "dropout": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "label_smoothing": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "clip_norm": (math.nextafter(0.0, 1.0), math.inf, "must be > 0"),
    "momentum": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "beta1": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "beta2": (0.0, math.nextafter(1.0, 0.0), "must be in [0, 1)"),
    "epsilon": (math.nextafter(0.0, 1.0), math.inf, "must be > 0"),
    "horizon_samples": (1.0, math.inf, "must be >= 1"),
}
REGULAR = ("warmup_epochs", "weight_decay", "dropout", "label_smoothing")


def bounds(domain: Domain) -> tuple[float, float]:
    """Return the least and the greatest value of a domain."""
    if isinstance(domain, Range):
        return domain.low, domain.high
    if isinstance(domain, tuple):
        return min(domain), max(domain)
    return domain, domain


def within_limits(domain: Domain | None, info: ValidationInfo) -> Domain | None:
    """Return the domain of a parameter; raise ValueError where it leaves what the parameter can be."""
    if domain is not None and info.field_name is not None:
        low, high, rule = LIMITS[info.field_name]
        for value in bounds(domain):
            if not low <= value <= high:
                raise ValueError(f"{value:g} {rule}")
    return domain


@dataclass(frozen=True, slots=True)
class Dimension:
    """One searched coordinate: a range (low, high, log) or choices."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[ParameterValue, ...] = ()

    @property
    def any_value(self) -> ParameterValue:
        """Return some value of the dimension, for a coordinate that a configuration does not use."""
        return self.choices[0] if self.choices else self.low

    def nearest(self, value: ParameterValue) -> ParameterValue:
        """Return the value itself where it lies in the dimension, else one that does."""
        if self.choices:
            return value if value in self.choices else self.choices[0]
        return min(max(float(value or 0.0), self.low), self.high)


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
        """Return the batch sizes, ascending."""
        powers = (2**exponent for exponent in range(self.high.bit_length()))
        return tuple(power for power in powers if self.low <= power <= self.high)


BatchSize = Annotated[int, Field(ge=1)]


class RelativeLearningRate(StrictModel):
    """The learning rate at ``reference_batch``, from low to high on a log scale, and the rule that carries it over."""

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


class Sgd(StrictModel):
    """Stochastic gradient descent with (Nesterov) momentum."""

    name: Literal["sgd"] = "sgd"
    learning_rate_scale: float = Field(default=1.0, gt=0)
    momentum: Domain = 0.9
    nesterov: bool = True

    _limits = field_validator("momentum")(within_limits)

    @model_validator(mode="after")
    def _momentum_for_nesterov(self) -> Self:
        if self.nesterov and (low := bounds(self.momentum)[0]) <= 0:
            raise ValueError(f"nesterov needs momentum > 0, not {low:g}; set nesterov: false")
        return self


class AdamW(StrictModel):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    learning_rate_scale: float = Field(default=1.0, gt=0)
    beta1: Domain = 0.9
    beta2: Domain = 0.999
    epsilon: Domain = 1e-8

    _limits = field_validator("beta1", "beta2", "epsilon")(within_limits)


Optimizer = Annotated[Sgd | AdamW, Field(discriminator="name")]
OPTIMIZER_SETTINGS = {"name", "learning_rate_scale"}
ScheduleName = Literal["constant", "cosine", "linear"]


class Schedule(StrictModel):
    """What the learning rate does after warmup.

    Under ``cosine`` and ``linear`` it falls to zero at ``horizon_samples``, where the trial ends; the horizon is in
    samples, so that every batch size sees as much data.
    """

    name: (
        Annotated[ScheduleName, Tag("fixed")] | Annotated[tuple[ScheduleName, ...], Field(min_length=1), Tag("choices")]
    ) = Field(default="constant", discriminator=Discriminator(_kind))
    horizon_samples: Domain | None = None

    _limits = field_validator("horizon_samples")(within_limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the schedules to choose from."""
        return (self.name,) if isinstance(self.name, str) else self.name

    @model_validator(mode="after")
    def _horizon_goes_with_decay(self) -> Self:
        decays = [name for name in self.names if name != "constant"]
        if decays and self.horizon_samples is None:
            raise ValueError(f"a {decays[0]} schedule needs horizon_samples")
        if not decays and self.horizon_samples is not None:
            raise ValueError("a constant schedule takes no horizon_samples")
        return self


class SearchSpace(StrictModel):
    """Everything that trials may differ in."""

    batch_size: Annotated[
        Annotated[BatchSize, Tag("fixed")]
        | Annotated[BatchLadder, Tag("range")]
        | Annotated[tuple[BatchSize, ...], Field(min_length=1), Tag("choices")],
        Discriminator(_kind),
    ]
    learning_rate: Annotated[
        Annotated[PositiveRate, Tag("fixed")]
        | Annotated[RelativeLearningRate, Tag("range")]
        | Annotated[tuple[PositiveRate, ...], Field(min_length=1), Tag("choices")],
        Discriminator(_kind),
    ]
    warmup_epochs: Domain = 0.0
    weight_decay: Domain = 0.0
    dropout: Domain = 0.0
    label_smoothing: Domain = 0.0
    clip_norm: Domain | None = None
    optimizer: (
        Annotated[Optimizer, Tag("range")] | Annotated[tuple[Optimizer, ...], Field(min_length=1), Tag("choices")]
    ) = Field(default=Sgd(), discriminator=Discriminator(_kind))
    schedule: Schedule = Schedule()
    max_micro_batch_size: int | None = Field(default=None, ge=1)

    _limits = field_validator(*REGULAR, "clip_norm")(within_limits)

    @model_validator(mode="after")
    def _optimizers_differ(self) -> Self:
        names = [optimizer.name for optimizer in self.optimizers]
        if len(set(names)) < len(names):
            raise ValueError(f"optimizer lists {max(names, key=names.count)!r} twice")
        return self

    @property
    def optimizers(self) -> tuple[Sgd | AdamW, ...]:
        """Return the optimizers to choose from."""
        return self.optimizer if isinstance(self.optimizer, tuple) else (self.optimizer,)

    @property
    def rungs(self) -> tuple[int, ...]:
        """Return the batch sizes to try, ascending, each once."""
        if isinstance(self.batch_size, BatchLadder):
            return self.batch_size.rungs
        sizes = (self.batch_size,) if isinstance(self.batch_size, int) else self.batch_size
        return tuple(sorted(set(sizes)))

    def dimensions(self) -> tuple[Dimension, ...]:
        """Return what is searched at each batch size; fixed parameters are no dimensions."""
        return tuple(dimension for name, domain in self._domains() if (dimension := _dimension(name, domain)))

    def decode(self, batch_size: int, sampled: Mapping[str, ParameterValue]) -> Configuration:
        """Return the configuration to run at a batch size for sampled coordinates; the fixed ones are filled in."""
        values: dict[str, Any] = {name: sampled.get(name, domain) for name, domain in self._domains()}
        optimizer = self._optimizer(values["optimizer"])
        parameters = {name: values[self._coordinate(optimizer, name)] for name in _parameters(optimizer)}
        parameters["schedule"] = values["schedule"]
        if values["schedule"] != "constant":
            parameters["horizon_samples"] = round(values["horizon_samples"])
        if values["clip_norm"] is not None:
            parameters["clip_norm"] = float(values["clip_norm"])
        regular: dict[str, Any] = {name: float(values[name]) for name in REGULAR}
        micro_batch_size, accumulation_steps = split_batch(batch_size, self.max_micro_batch_size)
        return Configuration(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=accumulation_steps,
            learning_rate=float(values[REFERENCE_LEARNING_RATE]) * self._learning_rate_factor(batch_size, optimizer),
            optimizer=optimizer.name,
            parameters=parameters,
            **regular,
        )

    def encode(self, configuration: Configuration) -> dict[str, ParameterValue] | None:
        """Return a configuration in the space's coordinates, or None where it lies outside the space."""
        if configuration.batch_size not in self.rungs or configuration.optimizer not in self._optimizer_names:
            return None
        optimizer = self._optimizer(configuration.optimizer)
        factor = self._learning_rate_factor(configuration.batch_size, optimizer)
        values: dict[str, ParameterValue] = {
            REFERENCE_LEARNING_RATE: configuration.learning_rate / factor,
            "optimizer": configuration.optimizer,
            **{name: getattr(configuration, name) for name in REGULAR},
            **{self._coordinate(optimizer, name): value for name, value in configuration.parameters.items()},
        }
        sampled = {
            dimension.name: dimension.nearest(values.get(dimension.name, dimension.any_value))
            for dimension in self.dimensions()
        }
        again = self.decode(configuration.batch_size, sampled)
        same_rate = math.isclose(again.learning_rate, configuration.learning_rate, rel_tol=1e-9)
        return (
            sampled
            if same_rate and replace(again, learning_rate=configuration.learning_rate) == configuration
            else None
        )

    def at_edge(self, configuration: Configuration) -> bool:
        """Return whether the learning rate lies within 5 % (in log) of an end of its range, or beyond it."""
        if not isinstance(self.learning_rate, RelativeLearningRate):
            return False
        optimizer = self._optimizer(configuration.optimizer)
        rate = configuration.learning_rate / self._learning_rate_factor(configuration.batch_size, optimizer)
        low, high = math.log(self.learning_rate.low), math.log(self.learning_rate.high)
        return not 0.05 < (math.log(rate) - low) / (high - low) < 0.95

    @property
    def _optimizer_names(self) -> tuple[str, ...]:
        return tuple(optimizer.name for optimizer in self.optimizers)

    def _optimizer(self, name: str) -> Sgd | AdamW:
        return next((optimizer for optimizer in self.optimizers if optimizer.name == name), self.optimizers[0])

    def _coordinate(self, optimizer: Sgd | AdamW, parameter: str) -> str:
        shared = len(self.optimizers) == 1 or parameter not in _parameters(optimizer)
        return parameter if shared else f"{optimizer.name}.{parameter}"

    def _learning_rate_factor(self, batch_size: int, optimizer: Sgd | AdamW) -> float:
        rate = self.learning_rate
        if not isinstance(rate, RelativeLearningRate):
            return optimizer.learning_rate_scale
        return optimizer.learning_rate_scale * learning_rate_factor(rate.rule, batch_size, rate.reference_batch)

    def _domains(self) -> Iterator[tuple[str, Any]]:
        """Yield each coordinate's name and domain; a list of one is fixed."""
        rate: Any = self.learning_rate
        if isinstance(rate, RelativeLearningRate):
            rate = Range(low=rate.low, high=rate.high, log=True)
        domains: list[tuple[str, Any]] = [
            (REFERENCE_LEARNING_RATE, rate),
            *((name, getattr(self, name)) for name in (*REGULAR, "clip_norm")),
            ("optimizer", self._optimizer_names),
        ]
        for optimizer in self.optimizers:
            own = _parameters(optimizer).items()
            domains += [(self._coordinate(optimizer, name), domain) for name, domain in own]
        domains += [("schedule", self.schedule.names), ("horizon_samples", self.schedule.horizon_samples)]
        for name, domain in domains:
            yield name, domain[0] if isinstance(domain, tuple) and len(domain) == 1 else domain


def split_batch(batch_size: int, max_micro_batch_size: int | None) -> tuple[int, int]:
    """Return (micro-batch, accumulation steps): the largest divisor of the batch size that may run at once."""
    if max_micro_batch_size is None or batch_size <= max_micro_batch_size:
        return batch_size, 1
    micro = max(size for size in range(1, max_micro_batch_size + 1) if batch_size % size == 0)
    return micro, batch_size // micro


def _parameters(optimizer: Sgd | AdamW) -> dict[str, Any]:
    names = [name for name in type(optimizer).model_fields if name not in OPTIMIZER_SETTINGS]
    return {name: getattr(optimizer, name) for name in names}


def _dimension(name: str, domain: Any) -> Dimension | None:
    if isinstance(domain, Range):
        return Dimension(name, low=domain.low, high=domain.high, log=domain.is_log)
    return Dimension(name, choices=domain) if isinstance(domain, tuple) else None
