"""The search space, its coordinates and configurations."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from bssearch.records import (
    OWN_GROUPS,
    Configuration,
    LearningRateRule,
    ParameterValue,
    learning_rate_factor,
    rule_of_optimizer,
)
from bssearch.spec.space.domains import (
    DECAY_SHARE,
    OPTIONAL,
    TRAINING_PARAMETERS,
    WORKLOAD_PARAMETERS,
    BatchLadder,
    BatchSize,
    Dimension,
    Domain,
    Positive,
    Range,
    RelativeLearningRate,
    Schedule,
    StrictModel,
    bounds,
    describe,
    domain_kind,
    holds,
    within_limits,
)
from bssearch.spec.space.micro_batches import BatchGrowth, BatchRules, split_batch
from bssearch.spec.space.optimizers import (
    Optimizer,
    OptimizerOptions,
    OwnDomains,
    OwnRange,
    Sgd,
    check_groups,
    from_coordinate,
)

REFERENCE_LEARNING_RATE = "reference_learning_rate"


class SearchSpace(StrictModel):
    """All parameters that may differ between trials."""

    batch_size: Annotated[
        Annotated[BatchSize, Tag("fixed")]
        | Annotated[BatchLadder, Tag("range")]
        | Annotated[tuple[BatchSize, ...], Field(min_length=1), Tag("choices")],
        Discriminator(domain_kind),
    ]
    learning_rate: Annotated[
        Annotated[Positive, Tag("fixed")]
        | Annotated[RelativeLearningRate, Tag("range")]
        | Annotated[tuple[Positive, ...], Field(min_length=1), Tag("choices")],
        Discriminator(domain_kind),
    ]
    warmup_epochs: Domain = 0.0
    weight_decay: Domain = 0.0
    dropout: Domain = 0.0
    label_smoothing: Domain = 0.0
    clip_norm: Domain | None = None
    ema_decay: Domain | None = None
    optimizer: (
        Annotated[Optimizer, Tag("range")] | Annotated[tuple[Optimizer, ...], Field(min_length=1), Tag("choices")]
    ) = Field(default=Sgd(), discriminator=Discriminator(domain_kind))
    schedule: Schedule = Schedule()
    batch_schedule: BatchGrowth | None = None
    batch_rules: BatchRules = BatchRules()
    max_micro_batch_size: int | None = Field(default=None, ge=1)
    model: OwnDomains = None
    loss: OwnDomains = None
    augmentation: OwnDomains = None

    _limits = field_validator(*TRAINING_PARAMETERS, *OPTIONAL)(within_limits)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        listed = self._optimizer_names
        if len(set(listed)) < len(listed):
            raise ValueError(f"optimizer lists {max(listed, key=listed.count)!r} twice; list each optimizer once")
        if self.batch_rules.followed and not isinstance(self.learning_rate, RelativeLearningRate):
            name, rule = next(iter(self.batch_rules.followed.items()))
            raise ValueError(f"batch_rules.{name} = {rule} needs learning_rate: {{reference_batch, low, high}}")
        names = {name for optimizer in self.optimizers for name in optimizer.options}
        names |= {name for name in OPTIONAL if getattr(self, name) is not None}
        self.batch_rules.check(names | ({"weight_decay"} if bounds(self.weight_decay)[1] > 0 else set()))
        if self.batch_schedule is not None:
            self.batch_schedule.check(self.rungs, self.schedule.names)
        check_groups({group: getattr(self, group) or {} for group in OWN_GROUPS})
        return self

    @property
    def own_domains(self) -> dict[str, Any]:
        return {
            f"{group}.{name}": domain for group in OWN_GROUPS for name, domain in (getattr(self, group) or {}).items()
        }

    @property
    def optimizers(self) -> tuple[OptimizerOptions, ...]:
        return self.optimizer if isinstance(self.optimizer, tuple) else (self.optimizer,)

    @property
    def rungs(self) -> tuple[int, ...]:
        if isinstance(self.batch_size, BatchLadder):
            return self.batch_size.rungs
        return tuple(sorted(set((self.batch_size,) if isinstance(self.batch_size, int) else self.batch_size)))

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The ends of the range, else all distinct learning rates, ascending."""
        rate = self.learning_rate
        if isinstance(rate, RelativeLearningRate):
            return rate.low, rate.high
        return tuple(sorted(set(rate))) if isinstance(rate, tuple) else (rate,)

    def dimensions(self) -> tuple[Dimension, ...]:
        return tuple(dimension for name, domain in self._domains() if (dimension := _dimension(name, domain)))

    def candidates(self, batch_sizes: Sequence[int]) -> Any:
        """Return the candidate points if a subclass has a fixed list, else None."""
        return None

    def decode(self, batch_size: int, sampled: Mapping[str, ParameterValue]) -> Configuration:
        values: dict[str, Any] = {name: sampled.get(name, domain) for name, domain in self._domains()}
        optimizer = self._optimizer(values["optimizer"])
        schedule = values["schedule"]
        parameters = {
            **{name: values[self._coordinate(optimizer, name)] for name in optimizer.options},
            "schedule": schedule,
            **({} if schedule == "constant" else {"horizon_samples": round(values["horizon_samples"])}),
            **({"decay_share": float(values["decay_share"])} if schedule == "warmup_stable_decay" else {}),
            **{name: float(values[name]) for name in OPTIONAL if values[name] is not None},
            **{name: from_coordinate(values[name], domain) for name, domain in self.own_domains.items()},
        }
        micro_batch_size, accumulation_steps = split_batch(batch_size, self.max_micro_batch_size)
        return Configuration(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=accumulation_steps,
            learning_rate=float(values[REFERENCE_LEARNING_RATE])
            * self.learning_rate_factor(batch_size, optimizer.name),
            optimizer=optimizer.name,
            parameters=self.carried(parameters, batch_size),
            **self.carried({name: float(values[name]) for name in TRAINING_PARAMETERS}, batch_size),
        )

    def encode(self, configuration: Configuration) -> dict[str, ParameterValue] | None:
        """Return the configuration's coordinates, or None if the configuration is outside the space."""
        if configuration.batch_size not in self.rungs or configuration.optimizer not in self._optimizer_names:
            return None
        sampled = self._nearest(self._coordinates(configuration))
        return sampled if is_alike(self.decode(configuration.batch_size, sampled), configuration) else None

    def with_all_regularisation(self, configuration: Configuration) -> Configuration:
        """Switch on dropout and label smoothing, as far as the space allows."""
        # Probes measure step time and memory once for all trials.
        switched_on: dict[str, Any] = {
            name: high
            for name in WORKLOAD_PARAMETERS
            if getattr(configuration, name) == 0 and (high := float(bounds(getattr(self, name))[1])) > 0
        }
        return replace(configuration, **switched_on)

    def outside(self, configuration: Configuration) -> list[str]:
        found = []
        if configuration.batch_size not in self.rungs:
            found.append(f"batch_size = {configuration.batch_size} is not one of {', '.join(map(str, self.rungs))}")
        if configuration.optimizer not in self._optimizer_names:
            return [*found, f"optimizer = {configuration.optimizer!r} is not {' or '.join(self._optimizer_names)}"]
        values = self._coordinates(configuration)
        for name, domain in self._domains():
            value = values.get(name)
            if value is None or holds(domain, value):
                continue
            if domain is None:
                found.append(f"{name} = {value} is not in the space, which has no {name}")
            elif name != REFERENCE_LEARNING_RATE:
                found.append(f"{name} = {value} is not {describe(domain)}")
            else:
                found.append(
                    f"learning_rate = {configuration.learning_rate:g} at batch_size {configuration.batch_size} "
                    f"is not {describe(domain, configuration.learning_rate / float(value))}"
                )
        return found

    def at_edge(self, configuration: Configuration) -> bool:
        """True if the learning rate is beyond the range, or within 5 % (log scale) of an end."""
        if not isinstance(self.learning_rate, RelativeLearningRate):
            return False
        rate = configuration.learning_rate / self.learning_rate_factor(
            configuration.batch_size, configuration.optimizer
        )
        low, high = math.log(self.learning_rate.low), math.log(self.learning_rate.high)
        return not 0.05 < (math.log(rate) - low) / (high - low) < 0.95

    def learning_rate_factor(self, batch_size: int, optimizer: str) -> float:
        rate, scale = self.learning_rate, self._optimizer(optimizer).learning_rate_scale
        if not isinstance(rate, RelativeLearningRate):
            return scale
        return scale * learning_rate_factor(rate.rule, batch_size, rate.reference_batch)

    def rate_rule(self, optimizer: str) -> LearningRateRule:
        rate = self.learning_rate
        return rate.rule if isinstance(rate, RelativeLearningRate) else rule_of_optimizer(optimizer)

    def plain_learning_rate(self, batch_size: int, sampled: Mapping[str, ParameterValue]) -> float:
        """The learning rate without the optimizer's ``learning_rate_scale``."""
        rate = self.learning_rate
        if isinstance(rate, RelativeLearningRate):
            return float(sampled[REFERENCE_LEARNING_RATE] or 0.0) * learning_rate_factor(
                rate.rule, batch_size, rate.reference_batch
            )
        return float(sampled.get(REFERENCE_LEARNING_RATE, rate[0] if isinstance(rate, tuple) else rate) or 0.0)

    def nearest(self, configuration: Configuration) -> tuple[int, dict[str, ParameterValue]]:
        batch_size = min(self.rungs, key=lambda size: abs(math.log(size / configuration.batch_size)))
        factor = self.learning_rate_factor(batch_size, configuration.optimizer)
        return batch_size, self._nearest(
            {**self._coordinates(configuration), REFERENCE_LEARNING_RATE: configuration.learning_rate / factor}
        )

    def _nearest(self, values: Mapping[str, Any]) -> dict[str, ParameterValue]:
        return {
            dimension.name: dimension.nearest(values.get(dimension.name, dimension.any_value))
            for dimension in self.dimensions()
        }

    def _coordinates(self, configuration: Configuration) -> dict[str, ParameterValue]:
        optimizer, batch_size = self._optimizer(configuration.optimizer), configuration.batch_size
        own = self.carried(configuration.parameters, batch_size, back=True)
        return {
            REFERENCE_LEARNING_RATE: configuration.learning_rate
            / self.learning_rate_factor(batch_size, optimizer.name),
            "optimizer": configuration.optimizer,
            **self.carried({name: getattr(configuration, name) for name in TRAINING_PARAMETERS}, batch_size, back=True),
            **{self._coordinate(optimizer, name): value for name, value in own.items()},
        }

    def carried(self, values: Mapping[str, Any], batch_size: int, *, back: bool = False) -> dict[str, Any]:
        """Carry values from the reference batch to a batch size, or with ``back`` in reverse."""
        rate = self.learning_rate
        if not self.batch_rules.followed or not isinstance(rate, RelativeLearningRate):
            return dict(values)
        ratio = batch_size / rate.reference_batch
        factor = learning_rate_factor(rate.rule, batch_size, rate.reference_batch)
        return self.batch_rules.carried(values, 1 / ratio if back else ratio, 1 / factor if back else factor)

    @property
    def _optimizer_names(self) -> tuple[str, ...]:
        return tuple(optimizer.name for optimizer in self.optimizers)

    def _optimizer(self, name: str) -> OptimizerOptions:
        return next((optimizer for optimizer in self.optimizers if optimizer.name == name), self.optimizers[0])

    def _coordinate(self, optimizer: OptimizerOptions, parameter: str) -> str:
        shared = len(self.optimizers) == 1 or parameter not in optimizer.options
        return parameter if shared else f"{optimizer.name}.{parameter}"

    def _domains(self) -> Iterator[tuple[str, Any]]:
        rate: Any = self.learning_rate
        is_relative = isinstance(rate, RelativeLearningRate)
        domains: list[tuple[str, Any]] = [
            (REFERENCE_LEARNING_RATE, Range(low=rate.low, high=rate.high, log=True) if is_relative else rate),
            *((name, getattr(self, name)) for name in (*TRAINING_PARAMETERS, *OPTIONAL)),
            ("optimizer", self._optimizer_names),
            *(
                (self._coordinate(optimizer, name), domain)
                for optimizer in self.optimizers
                for name, domain in optimizer.options.items()
            ),
            ("schedule", self.schedule.names),
            ("horizon_samples", self.schedule.horizon_samples),
            ("decay_share", self.schedule.decay_share or DECAY_SHARE),
            *self.own_domains.items(),
        ]
        for name, domain in domains:
            yield name, domain[0] if isinstance(domain, tuple) and len(domain) == 1 else domain


def is_alike(one: Configuration, other: Configuration) -> bool:
    """True if two configurations train alike, up to rounding."""

    def near(mine: Any, theirs: Any) -> bool:
        both = isinstance(mine, float) and isinstance(theirs, float)
        return math.isclose(mine, theirs, rel_tol=1e-9) if both else bool(mine == theirs)

    if one.parameters.keys() != other.parameters.keys():
        return False
    rounded = {name: theirs for name, theirs in other.parameters.items() if near(one.parameters[name], theirs)}
    numbers = {
        name: getattr(other, name)
        for name in ("learning_rate", *TRAINING_PARAMETERS)
        if near(getattr(one, name), getattr(other, name))
    }
    return replace(one, parameters={**one.parameters, **rounded}, **numbers).trains_like(other)


def _dimension(name: str, domain: Any) -> Dimension | None:
    if isinstance(domain, Range):
        integer = isinstance(domain, OwnRange) and domain.is_integer
        return Dimension(name, low=domain.low, high=domain.high, log=domain.is_log, integer=integer)
    return Dimension(name, choices=domain) if isinstance(domain, tuple) else None
