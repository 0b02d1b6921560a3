"""Submit, list, pause, resume and cancel queued studies."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bssearch.errors import CheckpointError, SpecError, UsageError, require, with_hint
from bssearch.records import TrialState
from bssearch.search.leases import is_alive
from bssearch.search.pruners.checkpoints import Checkpoints
from bssearch.settings import user_name
from bssearch.spec import is_number
from bssearch.spec.reader import shortened
from bssearch.spec.templates import (
    OFFERS_NONE,
    NewSubmission,
    Submission,
    SubmissionState,
    Value,
    WorkerRecord,
    checked_values,
    read_file,
    value_type,
)
from bssearch.storage.repository import Store
from bssearch.storage.statements import StudySummary


def cancel_study(store: Store, study: str) -> Submission:
    """Cancel a submission and its trials.

    Raises `NotFoundError` for an unknown study, and `UsageError` if the submission is done.

    Example: ``bssearch.cancel_study(bssearch.open_store("sqlite:///team.db"), "digits")``
    """
    found = store.queue.set_state(study, SubmissionState.CANCELLED, f"cancelled by {user_name()}")
    if study not in _served(store):
        settle_cancelled(store, study)  # if a worker serves the study, the worker settles it
    return found


def pause_study(store: Store, study: str) -> Submission:
    """Pause a submission.

    Raises `NotFoundError` for an unknown study, and `UsageError` if the submission is done, failed or cancelled.

    Example: ``bssearch.pause_study(bssearch.open_store("sqlite:///team.db"), "digits")``
    """
    return store.queue.set_state(study, SubmissionState.PAUSED, f"paused by {user_name()}")


def resume_study(store: Store, study: str) -> Submission:
    """Put a submission back in the queue.

    Raises `NotFoundError` for an unknown study, and `UsageError` if the submission is done.

    Example: ``bssearch.resume_study(bssearch.open_store("sqlite:///team.db"), "digits")``
    """
    return store.queue.set_state(study, SubmissionState.WAITING, "")


def settle_cancelled(store: Store, study: str) -> None:
    """End a cancelled study's paused and lost trials, and delete the checkpoints."""
    if (record := store.studies.find(study)) is not None:
        store.leases.mark_lost(study, is_alive=is_alive)
        store.trials.settle_paused(study, state=TrialState.CANCELLED)
        with suppress(CheckpointError):  # a remaining remote checkpoint does no harm
            Checkpoints(record).clear()


def settle_left_behind(store: Store) -> dict[str, str]:
    """End the remaining trials of cancelled studies whose workers were killed; return the errors by study."""
    problems: dict[str, str] = {}
    left = store.queue.unsettled()
    for study in {*left} - _served(store) if left else ():
        try:
            _settle_left_behind(store, study, left[study])
        except Exception as error:  # a bad or deleted row must not affect other studies
            problems[study] = f"{type(error).__name__}: {error}"
    return problems


def _settle_left_behind(store: Store, study: str, numbers: Collection[int]) -> None:
    store.leases.mark_lost(study, is_alive=is_alive)
    time = store.time()
    if any(until > time and is_alive(owner) is not False for owner, until in store.leases.ends(study).items()):
        return
    checkpoints = Checkpoints(store.studies.get(study))
    store.trials.settle_paused(study, numbers, TrialState.CANCELLED)
    for number in checkpoints.present() & {*numbers}:
        checkpoints.forget(number)
    checkpoints.close()


def _served(store: Store) -> set[str]:
    return {worker.serving for worker in store.queue.workers() if worker.is_here and worker.serving is not None}


CODE = frozenset({"workload", "command", "arguments", "report", "preset"})


@dataclass(frozen=True, slots=True)
class AskedStudy:
    """The template, values by dotted key, and optional study name of a submission file."""

    template: str
    values: Mapping[str, Value]
    name: str | None = None


def submit_study(
    store: Store,
    template: str,
    values: Mapping[str, Value],
    *,
    name: str,
    owner: str | None = None,
    priority: float = 1.0,
    tags: Sequence[str] = (),
    not_before: datetime | None = None,
) -> Submission:
    """Queue a study for workers that offer its template.

    Only workers with all ``tags`` serve the study. ``owner`` defaults to the current user. Raises `UsageError` for a
    taken name or wrong argument, or if all known workers reject the submission.

    ::

        with bssearch.open_store("sqlite:///team.db") as store:
            bssearch.submit_study(store, "digits", {"budget.trials": 40}, name="digits-40", priority=2.0)
    """
    new = NewSubmission(
        name=name,
        template=template,
        values=dict(values),
        owner=user_name() if owner is None else owner,
        priority=priority,
        tags=tuple(dict.fromkeys(tags)),
        not_before=not_before,
    )
    new.check()
    if (problem := why_not_offered(store.queue.workers(), template, new.values)) is not None:
        raise problem
    return store.queue.submit(new)


def why_not_offered(workers: Sequence[WorkerRecord], template: str, values: Mapping[str, Value]) -> UsageError | None:
    """Return an error if workers exist and all workers reject the template or the values, else None."""
    offers = [worker for worker in workers if template in worker.templates]
    if workers and not offers:
        known = ", ".join(sorted({name for worker in workers for name in worker.templates})) or "none"
        return UsageError(f"no worker has a template {shortened(template)}; choose from {known}")
    problems: list[UsageError] = []
    for worker in offers:
        try:
            checked_values(
                template, {key: value_type(one) for key, one in dict(worker.templates[template]).items()}, values
            )
            return None
        except (ValueError, TypeError):  # no worker wrote this row
            continue
        except UsageError as error:
            problems.append(error)
    return problems[0] if problems else None


def asked_in_file(path: Path) -> AskedStudy:
    data = read_file(path, "file of a submission", "name a template without a suffix")
    if not isinstance(data, Mapping):
        raise SpecError(f"{path} holds {shortened(data)}; write a mapping of template, name and values of a spec")
    if code := sorted(CODE & {str(key) for key in data}):
        raise SpecError(
            f"{path}: {code[0]} cannot be submitted, because the queue stores no code, path or command",
            hint="write `template: NAME` and values instead, with a template from `bssearch queue list`",
        )
    template, name = data.get("template"), data.get("name")
    if not isinstance(template, str):
        raise SpecError(
            f"{path}: template = {shortened(template)} must name a worker's template, as in `template: digits`"
        )
    require(
        name is None or isinstance(name, str),
        f"{path}: name = {shortened(name)} must be a string; put the name in quotes",
        error=SpecError,
    )
    values: dict[str, Value] = {}
    for key, value in _leaves(path, {key: value for key, value in data.items() if key not in {"template", "name"}}):
        twice = f"{path}: {key} appears twice: {shortened(values.get(key))} and {shortened(value)}; delete one value"
        require(key not in values, twice, error=SpecError)
        values[key] = value
    return AskedStudy(template, values, name)


def _leaves(path: Path, data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(path, value, f"{dotted}.")
        else:
            yield dotted, checked_value(dotted, value, str(path))


def checked_value(key: str, value: Any, where: str) -> Value:
    field = key.split(".")[0]
    require(
        field not in OFFERS_NONE,
        f"{where}: {key} cannot be submitted, because only the worker's operator sets {field}",
        hint=f"delete {key}",
        error=SpecError,
    )
    if isinstance(value, bool | int | float | str) or (isinstance(value, list) and all(map(is_number, value))):
        return value
    raise SpecError(
        f"{where}: {key} = {shortened(value)} must be a number, true or false, a string, or a list of numbers"
    )


class QueuedStudy(BaseModel):
    """A submission with its queue ``position`` and trial counts."""

    study: str
    state: SubmissionState
    reason: str
    owner: str
    priority: float
    template: str
    values: Any
    tags: list[str]
    not_before: datetime | None
    submitted_at: datetime
    position: int | None
    served_seconds: float
    trials: int
    reached: int
    running: int
    workers: list[str]


class SeenWorker(BaseModel):
    """A worker, its study and its templates."""

    worker: str
    host: str
    user: str
    is_here: bool
    tags: list[str]
    slots: str
    device: str | None
    serving: str | None
    serving_since: datetime | None
    seen_at: datetime
    templates: Any


class QueueListing(BaseModel):
    """The queue in service order, and recent workers."""

    submissions: list[QueuedStudy]
    workers: list[SeenWorker]


def queued_studies(store: Store, *, everything: bool = False) -> QueueListing:
    """List the queue; ``everything`` adds done and cancelled submissions, and departed workers.

    Example: ``bssearch.queued_studies(bssearch.open_store("sqlite:///team.db"), everything=True)``
    """
    places = {name: number for number, name in enumerate(store.queue.waiting(), start=1)}
    counts = {one.name: one for one in store.studies.summaries()}
    workers = store.queue.workers()
    here = [worker for worker in workers if worker.is_here]
    left_out = () if everything else (SubmissionState.DONE, SubmissionState.CANCELLED)
    listed = [one for one in store.queue.submissions() if one.state not in left_out]
    rows = [_queued(one, counts.get(one.name), here, places.get(one.name)) for one in listed]
    rows.sort(key=lambda row: (row.position is None, row.position or 0))
    return QueueListing(submissions=rows, workers=[_seen(one) for one in (workers if everything else here)])


def _queued(
    one: Submission, study: StudySummary | None, here: Sequence[WorkerRecord], position: int | None
) -> QueuedStudy:
    serving = [worker.host for worker in here if worker.serving == one.name]
    waits_alone = one.state is SubmissionState.WAITING and not serving and not one.reason
    return QueuedStudy(
        study=one.name,
        state=one.state,
        reason=_why_unserved(one, here) if waits_alone else one.reason,
        owner=one.owner,
        priority=one.priority,
        template=one.template,
        values=one.values,
        tags=list(one.tags),
        not_before=one.not_before,
        submitted_at=one.submitted_at,
        position=position,
        served_seconds=one.served_seconds,
        trials=study.trials if study else 0,
        reached=study.reached if study else 0,
        running=study.running if study else 0,
        workers=serving,
    )


def _why_unserved(one: Submission, here: Sequence[WorkerRecord]) -> str:
    if (problem := why_not_offered(here, one.template, one.values)) is not None:
        return f"no present worker serves this study: {with_hint(problem)}"
    takers = [worker for worker in here if why_not_offered([worker], one.template, one.values) is None]
    lacking = [sorted({*one.tags} - {*worker.tags}) for worker in takers]
    if not lacking or not all(lacking):
        return ""
    fewest = min(lacking, key=lambda tags: (len(tags), tags))
    missing = ", ".join(fewest)
    return (
        f"no present worker with this template has all tags of the study (fewest missing: {missing}); start a worker "
        "with all tags"
    )


def _seen(worker: WorkerRecord) -> SeenWorker:
    return SeenWorker(
        worker=worker.name,
        host=worker.host,
        user=worker.user,
        is_here=worker.is_here,
        tags=list(worker.tags),
        slots=worker.slots,
        device=worker.device_name,
        serving=worker.serving if worker.is_here else None,
        serving_since=worker.serving_since if worker.is_here else None,
        seen_at=worker.seen_at,
        templates=worker.templates,
    )
