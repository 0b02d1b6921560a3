"""Check every configuration against the user's spec before training."""

# A database or an imported file can hold any values, and a command puts these values into shell words.

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bssearch.errors import UsageError
from bssearch.records import BATCH_STAGES, Configuration, Phase, TrialPlan, TrialRequest
from bssearch.records.batch_schedule import PARAMETERS, growing_schedule
from bssearch.spec.model import StudySpec
from bssearch.spec.parts import whole_configuration
from bssearch.spec.space import OPTIONAL, TRAINING_PARAMETERS
from bssearch.spec.space.domains import LIMITS, Range, describe, holds, is_number
from bssearch.spec.space.optimizers import LARGEST_NUMBER, OPTION_LIMITS, OwnRange, kind_of_value

COUNTS = ("batch_size", "micro_batch_size", "accumulation_steps", "world_size")
NUMBERS = ("learning_rate", *TRAINING_PARAMETERS)
A_NUMBER = f"a finite number of at most {LARGEST_NUMBER:g} in absolute value"

# Phases with configurations from rules of thumb, which may leave the space.
BEYOND_BOUNDS = frozenset({Phase.AUDIT, Phase.TO_BUDGET})


def admitted(spec: StudySpec, plan: TrialPlan, number: int, *, checkpoint: Path | None) -> TrialRequest:
    """Return the request for a planned trial. Raises `UsageError` if the spec does not allow the configuration.

    Values must be within the space's bounds, except in new search trials and `BEYOND_BOUNDS` phases.
    """
    problem = (
        problem_with(spec, plan.configuration, in_bounds=not plan.is_new_search and plan.phase not in BEYOND_BOUNDS)
        or _problem_with_counts({"seed": plan.seed}, least=0)
        or _problem_with_counts({"eval_every_steps": plan.eval_every_steps, "threads": plan.threads})
    )
    if problem is not None:
        raise UsageError(problem, hint="allow the value in the spec, or queue another configuration")
    return TrialRequest(
        number=number, plan=plan, target=spec.record_target, checkpoint=None if checkpoint is None else str(checkpoint)
    )


def problem_with(spec: StudySpec, configuration: Configuration, *, in_bounds: bool = True) -> str | None:
    """Return the reason why the spec does not allow a configuration, or None.

    Names, types, choices and optimizer options must match the space. If ``in_bounds``, all values must also be
    in range, unless the configuration is the default.
    """
    space = spec.space
    if (problem := _problem_with_types(configuration)) is not None:
        return problem
    if configuration.batch_size not in spec.batch_sizes:
        return f"batch_size = {configuration.batch_size} must be one of {', '.join(map(str, spec.batch_sizes))}"
    if configuration.world_size not in spec.executor.devices:
        return (
            f"world_size = {configuration.world_size} must be one of executor.devices = "
            f"{', '.join(map(str, spec.executor.devices))}"
        )
    if configuration.grows:
        problem = _problem_with_growth(spec, configuration)
        fixed = {name: value for name, value in configuration.parameters.items() if name not in PARAMETERS}
        configuration = replace(configuration, parameters=fixed)
    problem = problem or _problem_with_parameters(spec, configuration)
    if problem is not None or _is_default_of(spec, configuration) or space.encode(configuration) is not None:
        return problem
    found = space.outside(configuration) if in_bounds else _impossible(configuration)
    return "; ".join(one for one in found if not one.startswith("batch_size")) or None


def _problem_with_types(configuration: Configuration) -> str | None:
    # SQLite columns hold any type.
    if (problem := _problem_with_counts({name: getattr(configuration, name) for name in COUNTS})) is not None:
        return problem
    product = configuration.micro_batch_size * configuration.accumulation_steps * configuration.world_size
    if product != configuration.batch_size:
        return (
            f"batch_size = {configuration.batch_size} must be micro_batch_size × accumulation_steps × world_size = "
            f"{product}"
        )
    if wrong := [name for name in NUMBERS if not _is_number(getattr(configuration, name))]:
        return f"{wrong[0]} = {getattr(configuration, wrong[0])!r} must be {A_NUMBER}"
    if not configuration.learning_rate > 0:
        return f"learning_rate = {configuration.learning_rate} must be > 0"
    return next(
        (
            f"{name} = {value!r} must be {A_NUMBER}, true or false, or a string"
            for name, value in configuration.parameters.items()
            if not (value is None or isinstance(value, bool | str) or _is_number(value))
        ),
        None,
    )


def _problem_with_counts(values: Mapping[str, Any], least: int = 1) -> str | None:
    return next(
        (
            f"{name} = {value!r} must be a whole number >= {least}"
            for name, value in values.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < least
        ),
        None,
    )


def _problem_with_growth(spec: StudySpec, configuration: Configuration) -> str | None:
    try:
        schedule = growing_schedule(configuration)
    except UsageError as error:
        return error.message
    text = configuration.parameters[BATCH_STAGES]
    if text != schedule.text:
        return f"{BATCH_STAGES} = {text!r} must be written {schedule.text!r}"
    return next(
        (
            f"{BATCH_STAGES}: batch {stage.batch_size} must be one of {', '.join(map(str, spec.batch_sizes))}"
            for stage in schedule.stages
            if stage.batch_size not in spec.batch_sizes
        ),
        None,
    )


def _problem_with_parameters(spec: StudySpec, configuration: Configuration) -> str | None:
    space, default = spec.space, spec.default_configuration
    offered = {one.name: one for one in space.optimizers}
    if configuration.optimizer not in {*offered, default.optimizer}:
        return f"optimizer = {configuration.optimizer!r} must be one of {', '.join(offered)}"
    optimizer = offered.get(configuration.optimizer) or spec.default.optimizer
    required = {**(optimizer.options if optimizer else {}), "schedule": space.schedule.names, **space.own_domains}
    numbers = (*OPTIONAL, "horizon_samples", "decay_share")
    if missing := [name for name in required if name not in configuration.parameters]:
        return f"the parameter {missing[0]!r}, which the spec requires, is missing"
    for name, value in configuration.parameters.items():
        if name not in required and name not in numbers:
            return f"unknown parameter {name!r}; choose from {', '.join(sorted({*required, *numbers}))}"
        domain = required.get(name, 0.0)
        some = domain.low if isinstance(domain, Range) else domain[0] if isinstance(domain, tuple) else domain
        if kind_of_value(value) != kind_of_value(some):
            return f"{name} = {value!r} must be {kind_of_value(some)}"
        is_number_of_bssearch = kind_of_value(value) == "a number" and name not in space.own_domains
        is_broken = isinstance(domain, OwnRange) and domain.is_integer and not float(value or 0).is_integer()
        is_free = is_number_of_bssearch or value == default.parameters.get(name)
        if not is_free and (is_broken or not holds(domain, value)):
            return f"{name} = {value!r} must be {describe(domain)}"
    return None


def _is_default_of(spec: StudySpec, configuration: Configuration) -> bool:
    # Also true for the default carried to another batch size.
    default, space, size = spec.default_configuration, spec.space, configuration.batch_size
    if configuration.trains_like(default):
        return True
    before, after = (space.learning_rate_factor(one, default.optimizer) for one in (default.batch_size, size))
    changes = {"batch_size": size, "learning_rate": default.learning_rate * (after / before)}
    return configuration.trains_like(whole_configuration(spec.default.model_copy(update=changes), space))


def _impossible(configuration: Configuration) -> list[str]:
    limits = {**OPTION_LIMITS, **LIMITS}
    values = {name: getattr(configuration, name) for name in TRAINING_PARAMETERS} | dict(configuration.parameters)
    return [
        f"{name} = {value:g} {limits[name][2]}"
        for name, value in values.items()
        if name in limits and value is not None and not limits[name][0] <= value <= limits[name][1]
    ]


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) <= LARGEST_NUMBER
