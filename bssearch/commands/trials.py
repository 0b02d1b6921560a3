"""A study's trials: progress, data frame, configurations added by hand, and reruns."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from pydantic import Field, ValidationError

from bssearch.analysis.objectives import Basis, fastest, objective_of, seconds_to_target, trial_basis
from bssearch.analysis.shape import Model
from bssearch.commands.launch import HERE, Launch
from bssearch.commands.opening import described, known_folder, refuse_unknown_address
from bssearch.commands.probes import run_request
from bssearch.errors import UsageError, problem_in_words
from bssearch.exchange.trial_rows import traceback, trial_table, with_first
from bssearch.executors.base import Executor
from bssearch.records import (
    BATCH_SCHEDULE,
    BATCH_STAGES,
    OWN_GROUPS,
    Configuration,
    Environment,
    Observation,
    ParameterValue,
    Phase,
    ProbeRecord,
    StudyRecord,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
    train_seconds_of,
)
from bssearch.records.batch_schedule import (
    NOISE_SCALE,
    NOISE_SHARE,
    PARAMETERS,
    RATE_RULE,
    BatchScheduleName,
    batch_schedule_of,
    sizes_in_words,
    with_batch_schedule,
)
from bssearch.records.intervals import median_known
from bssearch.records.text import nearest
from bssearch.search.calibration import refuse_where_nothing_fits
from bssearch.search.driver import Listener
from bssearch.search.history import trial_seed
from bssearch.search.stored_finding import stored_end
from bssearch.spec import StudySpec
from bssearch.spec.admission import admitted
from bssearch.spec.model import OBJECTIVE
from bssearch.spec.parts import DefaultSpec, whole_configuration
from bssearch.spec.reader import spec_of
from bssearch.spec.space import OPTIMIZER_SETTINGS, OPTIMIZERS
from bssearch.storage.repository import Store, open_store
from bssearch.storage.trials import archived
from bssearch.workloads.base import SHIPPED

if TYPE_CHECKING:
    import pandas as pd


def trials_frame(study: str, *, db: str | None = None) -> pd.DataFrame:
    """Data frame with a row per trial and the columns of ``trials.csv`` and more; time and searched parameters first.

    Raises `NotFoundError` and `DatabaseError`.

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

    Missing ``values`` are the default's; a missing learning rate follows the space's rule. The trial is never pruned.
    Raises `UsageError` outside the space, `LaunchError` if no batch size fits into memory.

    ::

        with bssearch.open_store() as store:
            number, configuration = bssearch.enqueue(store, "digits", {"batch_size": 64, "learning_rate": 0.1})
    """
    record = store.studies.get(study)
    if record.archived_at is not None:
        raise archived(study)
    spec = spec_of(record)
    configuration = configuration_of(spec, {name: one for name, one in values.items() if name not in PARAMETERS})
    trials, probes = store.trials.of(study), store.probes.by_batch_size(study)
    probe = probes.get(configuration.batch_size)
    if probe is not None:
        configuration = configuration.in_micro_batches(probe.micro_batch_size)
    configuration = with_schedule(spec, configuration, values, probes)
    phase = Phase.GROWTH if configuration.grows else Phase.SEARCH
    if record.environment is not None:
        refuse_where_nothing_fits(spec, store, record.environment)
    plan = TrialPlan(
        configuration=configuration,
        sampled=None if configuration.grows else spec.space.encode(configuration),
        phase=phase,
        seed=trial_seed(spec.seed, phase, len(trials)),
        train_seconds_limit=spec.budget.trial_train_seconds,
        eval_every_steps=(probe.eval_every_steps if probe else None) or 1,
        threads=spec.executor.threads,
        uncapped=True,
    )
    return store.trials.enqueue(study, plan), configuration


def with_schedule(
    spec: StudySpec,
    configuration: Configuration,
    values: Mapping[str, ParameterValue],
    probes: Mapping[int, ProbeRecord] = MappingProxyType({}),
) -> Configuration:
    """Add the batch schedule in ``values``, if any.

    Raises `UsageError` for an impossible schedule, or a program that cannot follow a schedule.
    """
    given = {name: values[name] for name in PARAMETERS if name in values}
    if not given:
        return configuration
    rule = spec.space.rate_rule(configuration.optimizer)
    name = NOISE_SCALE if NOISE_SHARE in given else "milestones"
    own = {**configuration.parameters, BATCH_SCHEDULE: name, RATE_RULE: str(rule), **given}
    schedule = batch_schedule_of(replace(configuration, parameters=own))
    if schedule is None:
        raise UsageError(f"{BATCH_SCHEDULE} = None must be one of {', '.join(get_args(BatchScheduleName))}")
    if NOISE_SHARE in given and not schedule.is_measured:
        raise UsageError(f"{NOISE_SHARE} = {given[NOISE_SHARE]}: a {schedule.name} schedule takes none")
    if spec.workload == OBJECTIVE:
        raise UsageError(f"{BATCH_STAGES}: a function is given one batch size; that of a script or a workload may grow")
    if spec.is_program and schedule.is_measured:
        raise UsageError(
            f"{BATCH_SCHEDULE} = {schedule.name!r}: a program of your own keeps its gradients to itself",
            hint="a schedule by samples: batch_stages='SAMPLES:SIZE …'",
        )
    for stage in schedule.stages[1:]:
        if stage.batch_size not in spec.batch_sizes:
            known = ", ".join(map(str, spec.batch_sizes))
            raise UsageError(f"batch_stages: {stage.batch_size} is not a batch size of the study: {known}")
    limit, spent = spec.budget.trial_train_seconds, 0.0
    for before, stage in itertools.pairwise(schedule.stages):
        seconds = probes[before.batch_size].step_seconds if before.batch_size in probes else None
        if seconds is None:
            break
        left = (limit - spent) / seconds * before.batch_size
        if stage.start_samples - before.start_samples > left:
            raise UsageError(
                f"batch_stages: batch {stage.batch_size} begins after {stage.start_samples} samples; the {limit:g} s "
                f"of a trial see {before.start_samples + left:.0f}"
            )
        spent += (stage.start_samples - before.start_samples) / before.batch_size * seconds
    stages = [
        replace(stage, micro_batch_size=probes[stage.batch_size].micro_batch_size)
        if stage.batch_size in probes and stage.accumulation_steps == 1
        else stage
        for stage in schedule.stages
    ]
    return with_batch_schedule(configuration, replace(schedule, stages=tuple(stages)))


def configuration_of(spec: StudySpec, values: Mapping[str, ParameterValue]) -> Configuration:
    """Default configuration with these values; raise `UsageError` outside the space."""
    configuration = any_configuration_of(spec, values)
    outside = spec.space.outside(configuration)
    if configuration.batch_size == spec.default.batch_size:
        outside = [one for one in outside if not one.startswith("batch_size")]
    if outside:
        raise UsageError(f"outside the study's space: {'; '.join(outside)}")
    return configuration


def any_configuration_of(spec: StudySpec, values: Mapping[str, ParameterValue]) -> Configuration:
    """Default configuration with these values, in the space or not."""
    base = spec.default_configuration
    optimizer = _optimizer(spec, str(values.get("optimizer", base.optimizer)))
    names = [name for name in type(spec.default).model_fields if name not in {"optimizer", *OWN_GROUPS}]
    own = [name for name in optimizer if name not in OPTIMIZER_SETTINGS]
    users = list(spec.space.own_domains)
    for name in values:
        if name not in [*names, *own, *users, "optimizer"]:
            known = [*names, *own, *users]
            advice = nearest(name, known, f"it takes optimizer, {', '.join(known)}")
            raise UsageError(f"unknown parameter {name!r}; {advice}")
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
        # A union type gives one problem per member; the last, for numbers, says the most.
        problems = {_name(one): f"{_name(one)} = {one['input']!r}: {problem_in_words(one)}" for one in error.errors()}
        raise UsageError("; ".join(problems.values())) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name in ("horizon_samples", "decay_share"):
        if values.get(name) is not None and name not in configuration.parameters:
            schedule = configuration.parameters["schedule"]
            raise UsageError(f"{name} = {values[name]}: a {schedule} schedule takes none")
    return configuration


def _optimizer(spec: StudySpec, name: str) -> dict[str, Any]:
    offered = {optimizer.name: optimizer for optimizer in spec.space.optimizers}
    if name not in offered:
        raise UsageError(f"optimizer = {name!r} is not {' or '.join(offered)}")
    default = spec.default.optimizer
    return (default if default is not None and default.name == name else offered[name]).model_dump()


def _name(problem: Any) -> str:
    tags = {*OPTIMIZERS, "optimizer", "fixed", "bool", "int", "float"}
    return ".".join(str(part) for part in problem["loc"] if part not in tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest trial, by measured seconds, or steps × step time if contended."""

    trial: int
    batch_size: int
    time_to_target_s: float | None
    basis: Basis = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's progress: spent trials, running trials, the fastest trial and counts by phase and state."""

    study: str
    is_imported: bool
    budget_trials: int
    spent_trials: int
    running: tuple[int, ...]
    train_seconds: float  # of all ended trials
    fastest: Fastest | None
    trials: dict[str, dict[str, int]]
    search_ended: str | None = None  # why the search ended

    def document(self) -> dict[str, Any]:
        """JSON values of ``bssearch study show``."""
        return {
            "study": self.study,
            "budget_trials": self.budget_trials,
            "spent_trials": self.spent_trials,
            "running": list(self.running),
            "search_ended": self.search_ended,
            "train_seconds": self.train_seconds,
            "fastest": self.fastest and asdict(self.fastest),
            "trials": self.trials,
        }


def status(store: Store, study: str, trials: Sequence[TrialRecord] | None = None) -> Status:
    """A study's progress; ``trials``, if given, are all of its trials."""
    spec = spec_of(store.studies.get(study))
    trials = store.trials.of(study) if trials is None else trials
    searched = [trial for trial in trials if spec.is_imported or trial.phase is Phase.SEARCH]
    best = fastest(searched)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        counts[trial.phase.value][trial.state.value] += 1
    return Status(
        study=study,
        is_imported=spec.is_imported,
        budget_trials=spec.budget.trials,
        spent_trials=sum(not trial.state.is_missing for trial in searched),
        running=tuple(trial.number for trial in trials if trial.state is TrialState.RUNNING),
        train_seconds=train_seconds_of(trials),
        fastest=None
        if best is None
        else Fastest(
            trial=best.number,
            batch_size=best.configuration.batch_size,
            time_to_target_s=seconds_to_target(best),
            basis=trial_basis(best),
        ),
        search_ended=None if spec.is_imported else _search_ended(store, spec, searched),
        trials={phase: dict(by_state) for phase, by_state in counts.items()},
    )


def _search_ended(store: Store, spec: StudySpec, searched: Sequence[TrialRecord]) -> str | None:
    if any(not trial.state.is_finished for trial in searched):
        return None
    end = stored_end(store, spec.name)
    spent = sum(not trial.state.is_missing for trial in searched)
    return end.reason if end is not None and (end.spent, end.budget) == (spent, spec.budget) else None


Known = str | int | float | bool | None

# Ends that do not depend on who runs the trial; others were stopped by a limit or from outside.
ENDS_BY_ITSELF = frozenset({TrialState.REACHED, TrialState.DIVERGED, TrialState.OOM, TrialState.FAILED})

FAILURES = ENDS_BY_ITSELF - {TrialState.REACHED}  # ends without reaching the target that a rerun must repeat


# Fields about the workload's code, listed first as the likeliest cause.
CODE = ("workload_revision", "git_revision", "git_dirty")


class Compared(Model):
    """Metric at one evaluation, of stored trial and rerun."""

    step: int
    then: float
    now: float


class Difference(Model):
    """A difference between two environments."""

    name: str
    then: Known
    now: Known


class Ran(Model):
    """A run's end, steps, and seconds to the target."""

    state: TrialState
    reason: str
    steps: int
    train_seconds: float
    steps_to_target: int | None
    time_to_target_s: float | None
    final_metric: float | None
    contended: bool

    @classmethod
    def of(cls, outcome: TrialOutcome) -> Ran:
        """The fields of an outcome that are compared."""
        return cls.model_validate({name: getattr(outcome, name) for name in cls.model_fields})


class RerunRun(Ran):
    """One rerun beside the stored trial."""

    # true if state, steps, steps to the target and failure reason are the same, and all metrics bit-equal; of a
    # stopped trial only the metrics up to its stop count; null without evaluations
    identical: bool | None
    evaluations: list[Compared]
    only_then: int  # evaluations of the stored trial only
    only_now: int
    first_difference_step: int | None
    largest_difference: float | None
    steps_ratio: float | None
    time_ratio: float | None


class Rerun(Model):
    """A trial's reruns: the contract of ``trial rerun --format json``."""

    schema_version: int = 1
    study: str
    trial: int
    batch_size: int
    seed: int
    then: Ran
    runs: list[RerunRun] = Field(min_length=1)
    identical: bool | None
    steps_ratio: float | None  # median of the reruns' steps to the target over the stored trial's
    time_ratio: float | None  # of train seconds, up to the last common evaluation if one run missed the target
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored trial with its original ``spec`` and worker's ``request``."""

    study: StudyRecord
    spec: StudySpec
    trial: TrialRecord
    outcome: TrialOutcome
    curve: Sequence[Observation]
    environment: Environment
    request: TrialRequest

    @property
    def until_step(self) -> int | None:
        """The step to stop at; None if the trial ended by itself."""
        if self.outcome.state in ENDS_BY_ITSELF:
            return None
        return self.curve[-1].step

    @property
    def was_stopped(self) -> bool:
        """True if a limit or a user stopped the trial."""
        return self.outcome.state not in ENDS_BY_ITSELF or (
            self.outcome.state is TrialState.REACHED and not self.request.plan.stop_at_target
        )


def rerun(study: str, trial: int, launch: Launch = HERE, *, runs: int = 1) -> Rerun:
    """Train a stored trial again and compare; nothing is stored.

    Runs in one slot within ``budget.trial_train_seconds``; a stopped trial stops again at its last evaluation. The
    workload must be known on this machine, or given by ``launch.workload``.

    Raises `UsageError` for ``runs`` < 1, an unsuitable trial or unknown code, and the errors of `run_study`.

    Example: ``print(bssearch.rerun("digits", 12, runs=2))``
    """
    if runs < 1:
        raise UsageError(f"runs = {runs} must be >= 1")
    with open_store(launch.db, write=False) as store:
        stored = stored_trial(store, study, trial)
    if launch.workload is None:
        launch = replace(launch, folder=known_folder(stored.spec, stored.study, Path(launch.folder)))
    refuse_unknown_address(stored.spec, stored.study)
    listener = launch.listener or Listener()
    alone = stored.spec.executor.model_copy(update={"slots": 1, "threads": stored.trial.threads})
    spec = stored.spec.model_copy(update={"executor": alone})
    with described(spec, launch, keeps_name=True) as (executor, found):
        _warn(stored, found.environment, listener)
        made = [_run(stored, executor, index, runs, listener) for index in range(runs)]
    return _compared(stored, made, found.environment)


def stored_trial(store: Store, study: str, number: int) -> Stored:
    """Load a trial to rerun."""
    record = store.studies.get(study)
    trial = store.trials.get(study, number)
    kept = store.trials.spec(study, number)
    spec = spec_of(record if kept is None else replace(record, spec={**kept, "name": study}))
    environment, curve = store.trials.environment(study, number), store.trials.observations(study, number)
    reason, has_failed = ("", False) if trial.outcome is None else (trial.outcome.reason, trial.state in FAILURES)
    reasons = {
        "it was made elsewhere and imported, so there is no workload to run": spec.is_imported,
        "it has not started yet; `bssearch run` starts it": trial.state is TrialState.QUEUED,
        "it still runs": trial.outcome is None,
        f"it ended before its first evaluation ({trial.state}: {reason})": not curve and not has_failed,
    }
    for why_not, holds in reasons.items():
        if holds:
            raise UsageError(f"trial {number} of {study!r} cannot be run again: {why_not}")
    assert trial.outcome is not None and environment is not None, "the trial has ended"
    return Stored(record, spec, trial, trial.outcome, curve, environment, _request(spec, trial))


def _request(spec: StudySpec, trial: TrialRecord) -> TrialRequest:
    full = spec.budget.trial_train_seconds
    # The full limit, because the trial's own limit could end a slower rerun too early.
    kept = trial.kept | {"train_seconds_limit": max(trial.train_seconds_limit, full)}
    plan = TrialPlan(
        **kept,
        limit_state=TrialState.EXHAUSTED if trial.train_seconds_limit >= full else TrialState.CAPPED,
        stop_at_target=trial.phase is not Phase.TO_BUDGET and objective_of(spec).stops_at_target,
    )
    try:
        return admitted(spec, plan, trial.number, checkpoint=None)
    except UsageError as error:
        raise UsageError(f"trial {trial.number} of {spec.name!r} cannot be run again: {error.message}") from None


def _warn(stored: Stored, now: Environment, listener: Listener) -> None:
    then = stored.environment
    if then.fingerprint != now.fingerprint:
        listener.note(
            f"trial {stored.trial.number} ran on {then.fingerprint}, this is {now.fingerprint}: seconds of two kinds "
            "of device do not compare, and steps may differ"
        )
    if then.workload_revision != now.workload_revision:
        listener.note(
            f"the workload's file has changed since trial {stored.trial.number} ran "
            f"({then.workload_revision} → {now.workload_revision}): it may train something else now"
        )


def _run(
    stored: Stored, executor: Executor, index: int, runs: int, listener: Listener
) -> tuple[TrialOutcome, list[Observation]]:
    configuration = stored.trial.configuration
    listener.note(
        f"run {index + 1} of {runs}: trial {stored.trial.number} of {stored.study.name}, "
        f"batch {sizes_in_words(configuration)}, seed {stored.trial.seed}"
    )
    outcome, curve = run_request(executor, stored.request, until_step=stored.until_step)
    if outcome.state is TrialState.CANCELLED:
        reason = f"stopped at step {stored.until_step}, as far as trial {stored.trial.number} came"
        outcome = replace(outcome, state=stored.outcome.state, reason=reason)
    return outcome, curve


def _compared(stored: Stored, made: Sequence[tuple[TrialOutcome, list[Observation]]], now: Environment) -> Rerun:
    ran = [_against(stored, outcome, curve) for outcome, curve in made]
    alike = {one.identical for one in ran}
    return Rerun(
        study=stored.study.name,
        trial=stored.trial.number,
        batch_size=stored.trial.configuration.batch_size,
        seed=stored.trial.seed,
        then=Ran.of(stored.outcome),
        runs=ran,
        identical=False if False in alike else None if None in alike else True,
        steps_ratio=median_known([one.steps_ratio for one in ran]),
        time_ratio=median_known([one.time_ratio for one in ran]),
        differences=list(differences(stored, now, made[0][0])),
    )


def _against(stored: Stored, outcome: TrialOutcome, curve: Sequence[Observation]) -> RerunRun:
    then = {one.step: one for one in stored.curve}
    both = [(then[one.step], one) for one in curve if one.step in then]
    differing = [(old.step, abs(new.metric - old.metric)) for old, new in both if old.metric != new.metric]
    last = stored.curve[-1].step if stored.was_stopped else math.inf
    only_now = sum(one.step <= last and one.step not in then for one in curve)
    only_then = len(then) - len(both)
    is_same = _ended_alike(stored, outcome) and not (differing or only_then or only_now)
    return RerunRun(
        **Ran.of(outcome).model_dump(),
        identical=None if is_same and not both else is_same,
        evaluations=[Compared(step=old.step, then=old.metric, now=new.metric) for old, new in both],
        only_then=only_then,
        only_now=only_now,
        first_difference_step=differing[0][0] if differing else None,
        largest_difference=max((size for _, size in differing), default=None),
        steps_ratio=_ratio(outcome.steps_to_target, stored.outcome.steps_to_target),
        time_ratio=_time_ratio(stored.outcome, outcome, both),
    )


def _ended_alike(stored: Stored, outcome: TrialOutcome) -> bool:
    before = stored.outcome
    if before.state not in ENDS_BY_ITSELF:
        return outcome.state not in ENDS_BY_ITSELF
    same = (before.state, before.steps_to_target) == (outcome.state, outcome.steps_to_target)
    if stored.was_stopped:
        return same
    # The reason of an out-of-memory end names bytes of other processes, so it may differ.
    is_told_by_reason = before.state in FAILURES - {TrialState.OOM}
    return same and before.steps == outcome.steps and (not is_told_by_reason or before.reason == outcome.reason)


def _time_ratio(then: TrialOutcome, now: TrialOutcome, both: Sequence[tuple[Observation, Observation]]) -> float | None:
    to_target = _ratio(now.time_to_target_s, then.time_to_target_s)
    if to_target is not None or not both:
        return to_target
    old, new = both[-1]
    return _ratio(new.train_seconds, old.train_seconds)


def _ratio(now: float | None, then: float | None) -> float | None:
    return None if now is None or not then else now / then


def differences(stored: Stored, now: Environment, outcome: TrialOutcome) -> Iterator[Difference]:
    """Yield differences of environment and GPU between trial and rerun."""
    then_known, now_known = _facts(stored.environment, stored.outcome), _facts(now, outcome)
    for name, then in then_known.items():
        if then is not None and then != now_known[name]:
            yield Difference(name=name, then=then, now=now_known[name])
    before, after = stored.environment.library_versions, now.library_versions
    for name in sorted({*before, *after}) if before and after else ():
        if before.get(name) != after.get(name):
            yield Difference(name=name, then=before.get(name), now=after.get(name))


def _facts(environment: Environment, outcome: TrialOutcome) -> dict[str, Known]:
    told: dict[str, Any] = asdict(environment)
    del told["libraries"]
    first = {name: told.pop(name) for name in CODE}
    return {**first, **told, "device_uuid": outcome.device_uuid, "contended": outcome.contended}


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The ``command`` that repeats a trial, and notes on its requirements."""

    command: str
    notes: tuple[str, ...]


def reproduction(store: Store, study: str, trial: int, *, names_database: bool = False) -> Reproduction:
    """Command that repeats a stored trial, without a password; raise `UsageError` if the trial cannot run again."""
    stored = stored_trial(store, study, trial)
    words = ["bssearch", "trial", "rerun", study, str(trial)]
    notes = list(_notes(stored))
    if names_database and store.has_secret:
        notes.append(f"BSSEARCH_DB_URL must name {store.masked_url}")
    elif names_database:
        words += ["--db", store.masked_url]
    return Reproduction(shlex.join(words), tuple(notes))


def _notes(stored: Stored) -> Iterator[str]:
    trial, environment = stored.trial, stored.environment
    started = f", started by {trial.started_by}" if trial.started_by else ""
    yield f"trial {trial.number} of {stored.study.name}: {trial.state}, seed {trial.seed}{started}"
    code = [
        f"workload {stored.spec.workload}",
        environment.workload_revision and f"its file of digest {environment.workload_revision}",
        environment.git_revision and f"git revision {environment.git_revision}",
    ]
    dirty = " with changes that are not committed" if environment.git_dirty else ""
    yield f"code: {', '.join(filter(None, code))}{dirty}" + (
        ""
        if stored.spec.workload in SHIPPED
        else "; its file is looked up from this folder; one that has changed since is run with --workload"
    )
    device = environment.device_name + (f" ({uuid})" if (uuid := stored.outcome.device_uuid) else "")
    yield (
        f"device: {device}, precision {environment.precision}, compile {environment.compile_mode}, "
        f"threads {trial.threads}, host {environment.host}"
    )
    known = {
        "Python": environment.python_version,
        "torch": environment.torch_version,
        "CUDA": environment.cuda_version,
        "cuDNN": environment.cudnn_version,
        "driver": environment.driver_version,
        **environment.library_versions,
    }
    yield f"versions: {', '.join(f'{name} {version}' for name, version in known.items() if version)}"
