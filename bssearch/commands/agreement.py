"""Whether a spec goes with its workload, with the stored study of its name, and with the versions it was run with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from bssearch import registry
from bssearch.analysis.objectives.base import objective_of
from bssearch.boards.named import boards_of, check_boards
from bssearch.errors import BSSearchError, QuestionChangedError, SpecError, UsageError
from bssearch.history import History
from bssearch.pruners.base import make_pruner
from bssearch.records import StudyRecord, WorkloadDescription
from bssearch.samplers.base import make_sampler
from bssearch.space import split_batch
from bssearch.space.batch_norm import batch_norm_caveats
from bssearch.spec import StudySpec
from bssearch.spec.changes import changed_fields
from bssearch.spec.model import OBJECTIVE
from bssearch.spec.parts import BudgetSpec
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store
from bssearch.workloads.base import lies_in_no_file

MAY_CHANGE = ("budget", "sampler", "pruner", "confirm")
"""The parts of a spec that are no part of its question, and whose change is told when a study goes on."""


def check_parts(spec: StudySpec) -> None:
    """Raise `UsageError` where the objective, sampler, pruner, executor or board of a spec cannot be loaded or made.

    Theirs may be the code of another package, or gone since the spec was written.
    """
    check_boards(boards_of(spec))
    makers: dict[str, Callable[[], object]] = {
        f"objective = {spec.objective!r}": lambda: objective_of(spec),
        f"sampler = {spec.sampler.name!r}": lambda: make_sampler(spec),
        f"pruner = {spec.pruner.name!r}": lambda: make_pruner(spec.pruner),
        f"executor = {spec.executor.name!r}": lambda: registry.load("executors", spec.executor.name),
    }
    for named, make in makers.items():
        try:
            make()
        except BSSearchError:
            raise
        except Exception as error:
            raise UsageError(f"{named} cannot be made: {type(error).__name__}: {error}") from error


def check_against_workload(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` where the spec asks for a metric or a batch size that the workload does not have."""
    target = spec.target
    if target.metric not in found.metrics:
        raise SpecError(f"target.metric = {target.metric!r}: the workload measures {', '.join(sorted(found.metrics))}")
    for field, sizes in (("space.batch_size", spec.space.rungs), ("default.batch_size", [spec.default.batch_size])):
        if found.train_samples is not None and sizes[-1] > found.train_samples:
            raise SpecError(
                f"{field} = {sizes[-1]}: larger than the training set of {found.train_samples} samples",
                hint=f"the largest batch size possible is {found.train_samples}",
            )


def check_target(spec: StudySpec, found: WorkloadDescription) -> None:
    """Raise `SpecError` where the target is out of its metric's bounds, or met by an untrained model."""
    target = spec.target
    metric = found.metrics[target.metric]
    low, high = metric.low, metric.high
    if (low is not None and target.value < low) or (high is not None and target.value > high):
        bound = f"[{'-∞' if low is None else f'{low:g}'}, {'∞' if high is None else f'{high:g}'}]"
        raise SpecError(
            f"target.value = {target.value:g}: {target.metric} lies in {bound}",
            hint="`bssearch target` proposes one that the default configuration reaches",
        )
    if target.metric not in found.model.initial_metrics:
        return  # A program that is evaluated after its first steps only.
    untrained = found.model.initial_metrics[target.metric]
    if untrained is not None and spec.record_target.is_met_by(untrained):
        raise SpecError(
            f"target.value = {target.value:g} (goal: {target.goal}) is met before the first step: "
            f"an untrained model has {target.metric} = {untrained:.4g}",
            hint="ask for a harder target (`bssearch target` proposes one); is it the right goal?",
        )
    if untrained is None:
        raise SpecError(
            f"target.metric = {target.metric!r}: of an untrained model it is not a finite number, and a trial ends "
            "where it is not"
        )


def check_question(spec: StudySpec, stored: StudyRecord) -> None:
    """Raise `QuestionChangedError` where a spec asks another question than the stored study of its name."""
    before = spec_of(stored)
    differing = changed_fields(before.question, spec.question)
    threads = before.executor.threads, spec.executor.threads
    if threads[0] != threads[1]:  # seconds on another number of threads do not compare
        differing["executor.threads"] = threads
    if differing:
        listed = "; ".join(f"{field}: {old!r} → {new!r}" for field, (old, new) in differing.items())
        raise QuestionChangedError(
            f"study {spec.name!r} exists and asks another question: {listed}",
            changes=differing,
            hint="give the spec another name, or undo the change; budget, sampler, pruner, confirm, seed, slots and "
            "log may change",
        )


def with_all_that_is_asked(spec: StudySpec, stored: StudyRecord, store: Store) -> StudySpec:
    """Return the spec under which a study that ended by itself runs all of a larger budget: more trials or seconds.

    That is kept in ``budget.least_trials``, also where the study is asked for again with the same budget.
    """
    earlier = spec_of(stored)
    before, now = earlier.budget, spec.budget
    least = min(before.least_trials, now.trials)
    if now.trials > before.trials or _seconds(now) > _seconds(before):
        history = History(earlier, store.trials(spec.name))
        if 0 < history.spent < before.trials and history.time_share < 1:
            least = now.trials
    return spec.model_copy(update={"budget": now.model_copy(update={"least_trials": max(least, now.least_trials)})})


def _seconds(budget: BudgetSpec) -> float:
    """Return the wall seconds of a search's budget, ∞ where they have no bound."""
    return math.inf if budget.wall_seconds is None else budget.wall_seconds


def batch_normalisation_caveats(spec: StudySpec, found: WorkloadDescription) -> Iterator[tuple[str, str]]:
    """Yield how batch normalisation distorts a comparison of the spec's batch sizes, as (code, sentence)."""
    micro_batches = {size: split_batch(size, spec.space.max_micro_batch_size)[0] for size in spec.batch_sizes}
    yield from batch_norm_caveats(
        found.model.batch_norm_layers,
        min(micro_batches.values()),
        accumulates=any(micro < size for size, micro in micro_batches.items()),
        ghost_batch_size=spec.training.ghost_batch_size,
    )


def workload_has_changed(study: StudyRecord, found: WorkloadDescription) -> bool:
    """Return whether the workload's file is another than when the study was bound to its device."""
    before = study.environment
    return before is not None and before.workload_revision != found.environment.workload_revision


def refuse_changed_workload(study: StudyRecord, store: Store) -> None:
    """Raise `UsageError` where the study has trials of the earlier code that are not merely lost or failed."""
    if all(trial.state.is_missing for trial in store.trials(study.name)):
        return
    name = str(study.spec["workload"])
    where = "source" if name == OBJECTIVE or lies_in_no_file(name) else "file"
    raise UsageError(
        f"the {where} of workload {study.spec['workload']!r} has changed since the study {study.name!r} began: what it "
        "trains now does not compare with the trials that are stored",
        hint=f"give the spec another name, or `bssearch delete {study.name}`; "
        "`run --allow-changed-workload` (in Python `allow_changed_workload=True`) where the change does not matter",
    )


def differences(spec: StudySpec, study: StudyRecord, found: WorkloadDescription) -> Iterator[str]:
    """Yield the settings and versions that differ from the study's last run and do not keep it from going on."""
    now = spec.model_dump(mode="json")
    for part in MAY_CHANGE:
        before: Any = study.spec[part]
        for field, (old, new) in changed_fields(before, now[part]).items():
            if field in before:  # what this version has brought had no value
                was, now_is = ("not given" if one is None else one for one in (old, new))
                yield f"{part}.{field} was {was}, from now on it is {now_is}"
    if study.environment is None:
        return
    for what, old, new in (
        ("the workload's file", study.environment.workload_revision, found.environment.workload_revision),
        ("Python", study.environment.python_version, found.environment.python_version),
        ("torch", study.environment.torch_version, found.environment.torch_version),
    ):
        if old != new:
            yield f"{what} has changed since the study began ({old} → {new}): are its earlier trials still comparable?"
