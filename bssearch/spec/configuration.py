"""A spec's default as a whole configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bssearch.records import OWN_GROUPS, Configuration, ParameterValue
from bssearch.space import (
    DECAY_SHARE,
    OPTIONAL,
    TRAINING_PARAMETERS,
    Domain,
    SearchSpace,
    bounds,
    split_batch,
)
from bssearch.space.domains import Range
from bssearch.space.own_parameters import OwnRange, as_in_domain
from bssearch.spec.parts import DefaultSpec


def whole_configuration(default: DefaultSpec, space: SearchSpace) -> Configuration:
    """Return a default as a whole configuration: what it leaves out takes the space's fixed value at its batch size.

    Raises `ValueError` naming what the space searches and the default does not give.
    """

    def fixed(name: str, given: Any, domain: Domain | None) -> Any:
        if given is not None or domain is None:
            return given
        low, high = bounds(domain)
        if low != high:
            raise ValueError(f"{name} is searched, so the default must give it")
        bare = name.rpartition(".")[2]
        return space.carried({bare: low}, default.batch_size)[bare]

    optimizer = default.optimizer or _only(space.optimizers, "optimizer")
    parameters: dict[str, ParameterValue] = {}
    for name, value in optimizer.options.items():
        given = value if default.optimizer is not None and not isinstance(value, Range | tuple) else None
        parameters[name] = value if isinstance(value, bool) else fixed(f"optimizer.{name}", given, value)
    schedule = default.schedule or _only(space.schedule.names, "schedule")
    parameters["schedule"] = schedule
    if schedule != "constant":
        horizon = fixed("horizon_samples", default.horizon_samples, space.schedule.horizon_samples)
        if horizon is None:
            raise ValueError(f"a {schedule} schedule needs horizon_samples")
        parameters["horizon_samples"] = round(horizon)
    if schedule == "warmup_stable_decay":
        share = fixed("decay_share", default.decay_share, space.schedule.decay_share or DECAY_SHARE)
        parameters["decay_share"] = float(share)
    for name in OPTIONAL:
        value = fixed(name, getattr(default, name), getattr(space, name))
        if value is not None:
            parameters[name] = float(value)
    parameters |= _own_values(default, space)
    regular: dict[str, Any] = {
        name: float(fixed(name, getattr(default, name), getattr(space, name))) for name in TRAINING_PARAMETERS
    }
    micro_batch_size, accumulation_steps = split_batch(default.batch_size, space.max_micro_batch_size)
    return Configuration(
        batch_size=default.batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        learning_rate=default.learning_rate,
        optimizer=optimizer.name,
        parameters=parameters,
        **regular,
    )


def _own_values(default: DefaultSpec, space: SearchSpace) -> dict[str, ParameterValue]:
    """Return the values of the user's own parameters; a fixed one and a single choice need not be given."""
    given = {
        f"{group}.{name}": value for group in OWN_GROUPS for name, value in (getattr(default, group) or {}).items()
    }
    domains = space.own_domains
    if unknown := [name for name in given if name not in domains]:
        raise ValueError(f"default.{unknown[0]} is given, but there is no space.{unknown[0]}; fix or search it there")
    values: dict[str, ParameterValue] = {}
    for name, domain in domains.items():
        if name in given:
            values[name] = as_in_domain(name, given[name], domain)
        elif isinstance(domain, OwnRange):
            raise ValueError(f"{name} is searched, so the default must give it")
        else:
            values[name] = _only(domain, name) if isinstance(domain, tuple) else domain
    return values


def _only(choices: Sequence[Any], name: str) -> Any:
    if len(choices) > 1:
        raise ValueError(f"{name} is searched, so the default must give it")
    return choices[0]
