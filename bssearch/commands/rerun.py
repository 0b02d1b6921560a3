"""Reruns of a stored trial, compared with the trial."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from bssearch.analysis.objectives import objective_of
from bssearch.analysis.shape import Model
from bssearch.commands.launch import HERE, Launch
from bssearch.commands.opening import described, known_folder, refuse_unknown_sources
from bssearch.commands.probes import run_request
from bssearch.errors import UsageError, require
from bssearch.executors.base import Executor
from bssearch.records import (
    Environment,
    Observation,
    Phase,
    StudyRecord,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
    median_known,
    sizes_in_words,
)
from bssearch.search.driver import Listener
from bssearch.spec import StudySpec, admitted, spec_of
from bssearch.storage.repository import Store, open_store
from bssearch.workloads.base import SHIPPED

Known = str | int | float | bool | None

# States of trials that neither a limit nor a user stopped.
ENDS_BY_ITSELF = frozenset({TrialState.REACHED, TrialState.DIVERGED, TrialState.OOM, TrialState.FAILED})

FAILURES = ENDS_BY_ITSELF - {TrialState.REACHED}

# Fields about the workload's code, listed first as the likeliest cause.
CODE = ("workload_revision", "git_revision", "git_dirty")


class Compared(Model):
    """The metric of the stored trial and the rerun at one evaluation."""

    step: int
    then: float
    now: float


class Difference(Model):
    """A difference between the environments of the trial and the first rerun."""

    name: str
    then: Known
    now: Known


class Ran(Model):
    """A run's end, steps, seconds and metric."""

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
        return cls.model_validate({name: getattr(outcome, name) for name in cls.model_fields})


class RerunRun(Ran):
    """One rerun, compared with the stored trial."""

    # True if state, steps, steps to the target, failure reason and all metrics are equal. For a stopped trial, only
    # the metrics before the stop count. Null if the ends are alike, but the runs have no common evaluation.
    identical: bool | None
    evaluations: list[Compared]
    only_then: int  # evaluations of the stored trial only
    only_now: int
    first_difference_step: int | None
    largest_difference: float | None
    steps_ratio: float | None
    time_ratio: float | None


class Rerun(Model):
    """A trial's reruns, as in ``trial rerun --format json``."""

    schema_version: int = 1
    study: str
    trial: int
    batch_size: int
    seed: int
    then: Ran
    runs: list[RerunRun] = Field(min_length=1)
    identical: bool | None
    steps_ratio: float | None  # median ratio of steps to the target, rerun over stored trial
    time_ratio: float | None  # ratio of train seconds, up to the last common evaluation if a run missed the target
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored trial with its ``spec``, and the ``request`` of a rerun."""

    study: StudyRecord
    spec: StudySpec
    trial: TrialRecord
    outcome: TrialOutcome
    curve: Sequence[Observation]
    environment: Environment
    request: TrialRequest

    @property
    def until_step(self) -> int | None:
        """The step to stop at, or None if the trial ended by itself."""
        return None if self.outcome.state in ENDS_BY_ITSELF else self.curve[-1].step

    @property
    def was_stopped(self) -> bool:
        return self.outcome.state not in ENDS_BY_ITSELF or (
            self.outcome.state is TrialState.REACHED and not self.request.plan.stop_at_target
        )


def rerun(study: str, trial: int, launch: Launch = HERE, *, runs: int = 1) -> Rerun:
    """Train a stored trial again, and compare the runs without storing them.

    A rerun takes one slot, and stops at the time limit of the study or the trial, whichever is longer. A rerun of a
    stopped trial stops at the trial's last evaluation. Set ``launch.workload`` if you have not run the code on
    this machine.

    Raises `UsageError` if ``runs`` < 1, if the trial cannot run again, or if you have not run the study with
    this code, cluster and OptunaHub package on this machine. Other errors are as in `run_study`.

    Example: ``print(bssearch.rerun("digits", 12, runs=2))``
    """
    require(runs >= 1, f"runs = {runs} must be >= 1")
    with open_store(launch.db, write=False) as store:
        stored = stored_trial(store, study, trial)
    if launch.workload is None:
        launch = replace(launch, folder=known_folder(stored.spec, stored.study, Path(launch.folder)))
    refuse_unknown_sources(stored.spec, stored.study)
    listener = launch.listener or Listener()
    spec = stored.spec.model_copy(
        update={"executor": stored.spec.executor.model_copy(update={"slots": 1, "threads": stored.trial.threads})}
    )
    with described(spec, launch, keeps_name=True) as (executor, found):
        _warn(stored, found.environment, listener)
        made = [_run(stored, executor, index, runs, listener) for index in range(runs)]
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
        differences=list(differences(stored, found.environment, made[0][0])),
    )


def stored_trial(store: Store, study: str, number: int) -> Stored:
    """Load a trial to rerun; raise `UsageError` if the trial cannot run again."""
    record = store.studies.get(study)
    trial = store.trials.get(study, number)
    kept = store.trials.spec(study, number)
    spec = spec_of(record if kept is None else replace(record, spec={**kept, "name": study}))
    environment, curve = store.trials.environments(study).get(number), store.trials.observations(study, number)
    reason, has_failed = ("", False) if trial.outcome is None else (trial.outcome.reason, trial.state in FAILURES)
    reasons = {
        "the trial was imported and has no workload; repeat the run in the original program": spec.is_imported,
        "the trial has not started yet; start the study with `bssearch run`": trial.state is TrialState.QUEUED,
        "the trial still runs; wait until the trial ends": trial.outcome is None,
        f"the trial ended before its first evaluation ({trial.state}: {reason}); choose another trial": not curve
        and not has_failed,
    }
    for why_not, holds in reasons.items():
        require(not holds, f"cannot rerun trial {number} of {study!r}: {why_not}")
    assert trial.outcome is not None and environment is not None, "the trial has ended"
    return Stored(record, spec, trial, trial.outcome, curve, environment, _request(spec, trial))


def _request(spec: StudySpec, trial: TrialRecord) -> TrialRequest:
    full = spec.budget.trial_train_seconds
    # The request has the full limit, because the trial's own limit could end a slower rerun too early.
    plan = TrialPlan(
        **trial.kept | {"train_seconds_limit": max(trial.train_seconds_limit, full)},
        limit_state=TrialState.EXHAUSTED if trial.train_seconds_limit >= full else TrialState.CAPPED,
        stop_at_target=trial.phase is not Phase.TO_BUDGET and objective_of(spec).stops_at_target,
    )
    try:
        return admitted(spec, plan, trial.number, checkpoint=None)
    except UsageError as error:
        raise UsageError(
            f"cannot rerun trial {trial.number} of {spec.name!r}: {error.message}", hint=error.hint
        ) from None


def _warn(stored: Stored, now: Environment, listener: Listener) -> None:
    then = stored.environment
    if then.fingerprint != now.fingerprint:
        listener.note(
            f"trial {stored.trial.number} ran on {then.fingerprint}, but this device is {now.fingerprint}, so the "
            "seconds are not comparable and the steps may differ"
        )
    if then.workload_revision != now.workload_revision:
        listener.note(
            f"the workload's file has changed since trial {stored.trial.number} ran "
            f"({then.workload_revision} → {now.workload_revision}), so the training may differ"
        )


def _run(
    stored: Stored, executor: Executor, index: int, runs: int, listener: Listener
) -> tuple[TrialOutcome, list[Observation]]:
    listener.note(
        f"run {index + 1} of {runs}: trial {stored.trial.number} of {stored.study.name}, "
        f"batch {sizes_in_words(stored.trial.configuration)}, seed {stored.trial.seed}"
    )
    outcome, curve = run_request(executor, stored.request, until_step=stored.until_step)
    if outcome.state is TrialState.CANCELLED:
        outcome = replace(
            outcome,
            state=stored.outcome.state,
            reason=f"stopped at step {stored.until_step}, the last evaluation of trial {stored.trial.number}",
        )
    return outcome, curve


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
    # The reason of an out-of-memory end names bytes of other processes, so the reason may differ.
    needs_reason = before.state in FAILURES - {TrialState.OOM}
    return same and before.steps == outcome.steps and (not needs_reason or before.reason == outcome.reason)


def _time_ratio(then: TrialOutcome, now: TrialOutcome, both: Sequence[tuple[Observation, Observation]]) -> float | None:
    to_target = _ratio(now.time_to_target_s, then.time_to_target_s)
    if to_target is not None or not both:
        return to_target
    old, new = both[-1]
    return _ratio(new.train_seconds, old.train_seconds)


def _ratio(now: float | None, then: float | None) -> float | None:
    return None if now is None or not then else now / then


def differences(stored: Stored, now: Environment, outcome: TrialOutcome) -> Iterator[Difference]:
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
    """The ``command`` that repeats a trial, and notes on the requirements."""

    command: str
    notes: tuple[str, ...]


def reproduction(store: Store, study: str, trial: int, *, names_database: bool = False) -> Reproduction:
    """Return the command that repeats a stored trial, without the database's password.

    Raises `UsageError` if the trial cannot run again.
    """
    stored = stored_trial(store, study, trial)
    words = ["bssearch", "trial", "rerun", study, str(trial)]
    notes = list(_notes(stored))
    if names_database and store.has_secret:
        notes.append(f"set BSSEARCH_DB_URL to {store.masked_url}, with the secret instead of ***")
    elif names_database:
        words += ["--db", store.masked_url]
    return Reproduction(shlex.join(words), tuple(notes))


def _notes(stored: Stored) -> Iterator[str]:
    trial, environment = stored.trial, stored.environment
    started = f", started by {trial.started_by}" if trial.started_by else ""
    yield f"trial {trial.number} of {stored.study.name}: {trial.state}, seed {trial.seed}{started}"
    code = [
        f"workload {stored.spec.workload}",
        environment.workload_revision and f"file digest {environment.workload_revision}",
        environment.git_revision and f"git revision {environment.git_revision}",
    ]
    dirty = " with uncommitted changes" if environment.git_dirty else ""
    yield f"code: {', '.join(filter(None, code))}{dirty}" + (
        ""
        if stored.spec.workload in SHIPPED
        else "; run the command in the workload's folder, with --workload unless you ran this version on this machine"
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
