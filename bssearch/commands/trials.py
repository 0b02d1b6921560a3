"""A study's trials: progress, data frame, and configurations added by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from bssearch.analysis.objectives import Basis, least_of, seconds_to_target, trial_basis
from bssearch.errors import UsageError, problem_in_words, require, required
from bssearch.exchange.trial_rows import traceback, trial_table, with_first
from bssearch.records import (
    BATCH_SCHEDULE,
    BATCH_STAGES,
    OWN_GROUPS,
    BatchSchedule,
    Configuration,
    ParameterValue,
    Phase,
    ProbeRecord,
    TrialPlan,
    TrialState,
    grouped,
)
from bssearch.records.batch_schedule import (
    NOISE_SCALE,
    NOISE_SHARE,
    PARAMETERS,
    RATE_RULE,
    BatchScheduleName,
    batch_schedule_of,
    with_batch_schedule,
)
from bssearch.records.text import nearest
from bssearch.search.history import trial_seed
from bssearch.search.stored_finding import stored_end
from bssearch.spec import OBJECTIVE, OPTIMIZER_SETTINGS, OPTIMIZERS, StudySpec, spec_of
from bssearch.spec.parts import DefaultSpec, whole_configuration
from bssearch.storage.repository import Store, open_store
from bssearch.storage.trials import archived

if TYPE_CHECKING:
    import pandas as pd


def trials_frame(study: str, *, db: str | None = None) -> pd.DataFrame:
    """Return a data frame with a row per trial; number, state, time to target and searched parameters come first.

    Raises `NotFoundError` for an unknown study.

    Example: ``print(bssearch.trials_frame("digits").head())``
    """
    import pandas as pd

    with open_store(db, write=False) as store:
        trials, searched = store.trials.of(study), spec_of(store.studies.get(study)).searched
    columns, rows = trial_table(trials)
    varied = [one for one in columns if one.rpartition(".")[2] in searched and not one.startswith("sampled.")]
    columns = with_first(["number", "state", "time_to_target_s", *varied], columns)
    whole = [
        {**row, "sampled": None if trial.sampled is None else dict(trial.sampled), "traceback": traceback(trial)}
        for trial, row in zip(trials, rows, strict=True)
    ]
    return pd.DataFrame(whole, columns=list(dict.fromkeys([*columns, "sampled", "traceback"])) if whole else None)


def enqueue(store: Store, study: str, values: Mapping[str, ParameterValue]) -> tuple[int, Configuration]:
    """Queue a configuration; return the trial's number and configuration.

    Default values replace missing ``values``. A missing learning rate follows the space's rule. No pruner stops the
    trial. Raises `UsageError` for invalid values or an archived study, and `LaunchError` if no batch size fits into
    memory.

    ::

        with bssearch.open_store() as store:
            number, configuration = bssearch.enqueue(store, "digits", {"batch_size": 64, "learning_rate": 0.1})
    """
    record = store.studies.get(study)
    if record.archived_at is not None:
        raise archived(study)
    spec = spec_of(record)
    configuration = configuration_of(spec, {name: one for name, one in values.items() if name not in PARAMETERS})
    probes = store.probes.by_batch_size(study)
    probe = probes.get(configuration.batch_size)
    if probe is not None:
        configuration = configuration.in_micro_batches(probe.micro_batch_size)
    configuration = with_schedule(spec, configuration, values, probes)
    phase = Phase.GROWTH if configuration.grows else Phase.SEARCH
    if record.environment is not None:
        from bssearch.search.calibration import refuse_where_nothing_fits  # this import loads the executors

        refuse_where_nothing_fits(spec, store, record.environment)
    return store.trials.enqueue(
        study,
        TrialPlan(
            configuration=configuration,
            sampled=None if configuration.grows else spec.space.encode(configuration),
            phase=phase,
            seed=trial_seed(spec.seed, phase, len(store.trials.of(study))),
            train_seconds_limit=spec.budget.trial_train_seconds,
            eval_every_steps=(probe.eval_every_steps if probe else None) or 1,
            threads=spec.executor.threads,
            uncapped=True,
        ),
    ), configuration


def with_schedule(
    spec: StudySpec,
    configuration: Configuration,
    values: Mapping[str, ParameterValue],
    probes: Mapping[int, ProbeRecord] = MappingProxyType({}),
) -> Configuration:
    """Add the batch schedule in ``values``, if any; raise `UsageError` if the schedule is invalid."""
    given = {name: values[name] for name in PARAMETERS if name in values}
    if not given:
        return configuration
    rule = spec.space.rate_rule(configuration.optimizer)
    name = NOISE_SCALE if NOISE_SHARE in given else "milestones"
    own = {**configuration.parameters, BATCH_SCHEDULE: name, RATE_RULE: str(rule), **given}
    schedule = required(
        batch_schedule_of(replace(configuration, parameters=own)),
        f"{BATCH_SCHEDULE} = None must be one of {', '.join(get_args(BatchScheduleName))}",
    )
    require(
        NOISE_SHARE not in given or schedule.is_measured,
        f"{NOISE_SHARE} = {given.get(NOISE_SHARE)} does not fit a {schedule.name} schedule, which follows "
        f"{BATCH_STAGES}; leave {NOISE_SHARE} out",
    )
    require(
        spec.workload != OBJECTIVE,
        "a batch schedule does not work with a function, whose batch size cannot grow; use a script or a workload",
    )
    require(
        not spec.is_program or not schedule.is_measured,
        f"{BATCH_SCHEDULE} = {schedule.name!r} does not work with a program, whose gradients bssearch cannot see",
        hint="use a schedule by samples: batch_stages='SAMPLES:SIZE …'",
    )
    for stage in schedule.stages[1:]:
        require(
            stage.batch_size in spec.batch_sizes,
            f"batch_stages: {stage.batch_size} is not a batch size of the study; choose from "
            f"{', '.join(map(str, spec.batch_sizes))}",
        )
    _check_starts(schedule, probes, spec.budget.trial_train_seconds)
    stages = (
        replace(stage, micro_batch_size=probes[stage.batch_size].micro_batch_size)
        if stage.batch_size in probes and stage.accumulation_steps == 1
        else stage
        for stage in schedule.stages
    )
    return with_batch_schedule(configuration, replace(schedule, stages=tuple(stages)))


def _check_starts(schedule: BatchSchedule, probes: Mapping[int, ProbeRecord], limit: float) -> None:
    spent = 0.0
    for before, stage in itertools.pairwise(schedule.stages):
        seconds = probes[before.batch_size].step_seconds if before.batch_size in probes else None
        if seconds is None:
            return
        left = (limit - spent) / seconds * before.batch_size
        require(
            stage.start_samples - before.start_samples <= left,
            f"batch_stages: batch {stage.batch_size} begins after {stage.start_samples} samples, but a trial of "
            f"{limit:g} s trains on only {before.start_samples + left:.0f} samples; begin this stage earlier",
        )
        spent += (stage.start_samples - before.start_samples) / before.batch_size * seconds


def configuration_of(spec: StudySpec, values: Mapping[str, ParameterValue]) -> Configuration:
    """Return the default configuration with ``values``.

    Raises `UsageError` for values outside the space, but admits the default's batch size.
    """
    configuration = any_configuration_of(spec, values)
    outside = spec.space.outside(configuration)
    if configuration.batch_size == spec.default.batch_size:
        outside = [one for one in outside if not one.startswith("batch_size")]
    require(
        not outside,
        f"the configuration is outside the study's space: {'; '.join(outside)}",
        hint="choose values inside the space",
    )
    return configuration


def any_configuration_of(spec: StudySpec, values: Mapping[str, ParameterValue]) -> Configuration:
    """Return the default configuration with ``values``, in the space or not; raise `UsageError` for invalid values."""
    base = spec.default_configuration
    optimizer = _optimizer(spec, str(values.get("optimizer", base.optimizer)))
    names = [name for name in type(spec.default).model_fields if name not in {"optimizer", *OWN_GROUPS}]
    own = [name for name in optimizer if name not in OPTIMIZER_SETTINGS]
    users = list(spec.space.own_domains)
    known = ["optimizer", *names, *own, *users]
    for name in values:
        advice = nearest(name, known, f"choose from {', '.join(known)}")
        require(name in known, f"unknown parameter {name!r}; {advice}")
    fields = spec.default.model_dump(exclude_none=True)
    fields |= {name: value for name, value in values.items() if name in names}
    for name in users:
        if name in values:
            group, _, bare = name.partition(".")
            fields[group] = {**fields.get(group, {}), bare: values[name]}
    fields["optimizer"] = optimizer | {name: value for name, value in values.items() if name in own}
    try:
        given = DefaultSpec.model_validate(fields)
        if "learning_rate" not in values:
            before = spec.space.learning_rate_factor(base.batch_size, base.optimizer)
            after = spec.space.learning_rate_factor(given.batch_size, str(optimizer["name"]))
            given = given.model_copy(update={"learning_rate": base.learning_rate * (after / before)})
        configuration = whole_configuration(given, spec.space)
    except ValidationError as error:
        # A union type gives a problem per member; the last problem, about numbers, is the most helpful.
        problems = {_name(one): f"{_name(one)} = {one['input']!r}: {problem_in_words(one)}" for one in error.errors()}
        raise UsageError("; ".join(problems.values())) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name in ("horizon_samples", "decay_share"):
        require(
            values.get(name) is None or name in configuration.parameters,
            f"{name} = {values.get(name)}: a {configuration.parameters.get('schedule')} schedule has no {name}; "
            f"leave {name} out",
        )
    return configuration


def _optimizer(spec: StudySpec, name: str) -> dict[str, Any]:
    offered = {optimizer.name: optimizer for optimizer in spec.space.optimizers}
    require(name in offered, f"optimizer = {name!r} must be {' or '.join(offered)}")
    default = spec.default.optimizer
    return (default if default is not None and default.name == name else offered[name]).model_dump()


def _name(problem: Any) -> str:
    tags = {*OPTIMIZERS, "optimizer", "fixed", "bool", "int", "float"}
    return ".".join(str(part) for part in problem["loc"] if part not in tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest trial by measured seconds, or by steps × step time for contended trials."""

    trial: int
    batch_size: int
    time_to_target_s: float | None
    basis: Basis = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's progress, as in ``bssearch study show``."""

    study: str
    is_imported: bool
    budget_trials: int
    spent_trials: int
    running: list[int]
    train_seconds: float  # train seconds of all ended trials
    fastest: Fastest | None
    trials: dict[str, dict[str, int]]
    search_ended: str | None = None  # why the search ended


def status(store: Store, study: str) -> Status:
    spec, groups = spec_of(store.studies.get(study)), store.trials.counts(study)
    best = least_of(store.trials.fast(study, None if spec.is_imported else Phase.SEARCH))
    counts = grouped((phase.value, (state.value, count)) for phase, state, count, _ in groups)
    searched = [(state, count) for phase, state, count, _ in groups if spec.is_imported or phase is Phase.SEARCH]
    return Status(
        study=study,
        is_imported=spec.is_imported,
        budget_trials=spec.budget.trials,
        spent_trials=sum(count for state, count in searched if not state.is_missing),
        running=[trial.number for trial in store.trials.of(study, states=[TrialState.RUNNING])],
        train_seconds=math.fsum(seconds for _, state, _, seconds in groups if state.is_finished),
        fastest=None
        if best is None
        else Fastest(
            trial=best.number,
            batch_size=best.configuration.batch_size,
            time_to_target_s=seconds_to_target(best),
            basis=trial_basis(best),
        ),
        search_ended=None if spec.is_imported else _search_ended(store, spec, searched),
        trials={phase: dict(states) for phase, states in counts.items()},
    )


def _search_ended(store: Store, spec: StudySpec, searched: Collection[tuple[TrialState, int]]) -> str | None:
    if any(not state.is_finished for state, _ in searched):
        return None
    end = stored_end(store, spec.name)
    spent = sum(count for state, count in searched if not state.is_missing)
    return end.reason if end is not None and (end.spent, end.budget) == (spent, spec.budget) else None
