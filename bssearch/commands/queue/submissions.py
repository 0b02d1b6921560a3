"""What people do with the queue: submit a study, list what is queued, cancel, pause and resume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bssearch.errors import CheckpointError, SpecError, UsageError
from bssearch.records import TrialState
from bssearch.search.leases import is_alive
from bssearch.search.pruners.checkpoints import Checkpoints
from bssearch.settings import user_name
from bssearch.spec.submission import NewSubmission, Submission, SubmissionState, Value, WorkerRecord
from bssearch.spec.templates import OFFERS_NONE, checked_values, read_file, value_type
from bssearch.spec.yaml_values import shortened
from bssearch.storage.repository import Store
from bssearch.storage.statements import StudySummary


def cancel_study(store: Store, study: str) -> Submission:
    """Cancel a submission: what runs of it is stopped, what waits of it does not go on.

    Raises `NotFoundError` where nobody submitted it, `UsageError` where it is done.
    """
    found = store.set_submission(study, SubmissionState.CANCELLED, f"cancelled by {user_name()}")
    if study not in _served(store):
        settle_cancelled(store, study)  # Else those that serve it do, once what runs has ended.
    return found


def pause_study(store: Store, study: str) -> Submission:
    """Pause a submission: what runs of it is saved and waits. Raises `NotFoundError`, `UsageError` where it is over."""
    return store.set_submission(study, SubmissionState.PAUSED, f"paused by {user_name()}")


def resume_study(store: Store, study: str) -> Submission:
    """Have a submission wait again that is not done; raises `NotFoundError`, and `UsageError` where it is done."""
    return store.set_submission(study, SubmissionState.WAITING, "")


def settle_cancelled(store: Store, study: str) -> None:
    """End the trials of a cancelled study that wait, or whose driver is gone; forget what is saved of them here."""
    record = store.find_study(study)
    if record is not None:
        store.mark_lost(study, is_alive=is_alive)
        store.settle_paused(study, state=TrialState.CANCELLED)
        with suppress(CheckpointError):  # what a store elsewhere does not delete now is of no use to anybody
            Checkpoints(record).clear()


def settle_left_behind(store: Store) -> dict[str, str]:
    """Settle the cancelled studies that a worker which was killed has left; none that any driver is at work on.

    Returns of which that failed, and why.
    """
    problems: dict[str, str] = {}
    left = store.unsettled()
    for study in {*left} - _served(store) if left else ():
        try:
            _settle_left_behind(store, study, left[study])
        except Exception as error:  # what somebody has written there, or deleted now, concerns no other study
            problems[study] = f"{type(error).__name__}: {error}"
    return problems


def _settle_left_behind(store: Store, study: str, numbers: Collection[int]) -> None:
    """End some trials of a study, those that wait and those whose driver is gone; forget what is saved of them here."""
    store.mark_lost(study, is_alive=is_alive)
    time = store.time()
    if any(until > time and is_alive(owner) is not False for owner, until in store.leases(study).items()):
        return
    checkpoints = Checkpoints(store.study(study))
    store.settle_paused(study, numbers, TrialState.CANCELLED)
    for number in checkpoints.present() & {*numbers}:
        checkpoints.forget(number)
    checkpoints.close()


def _served(store: Store) -> set[str]:
    """Return the studies that workers serve now."""
    return {worker.serving for worker in store.workers() if worker.is_here and worker.serving is not None}


CODE = frozenset({"workload", "command", "arguments", "report", "preset"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A template with values by dotted key, and the name of the study where a file gives one."""

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
    """Queue a study that a worker shall run from its template, with these values by dotted key of the spec.

    The owner is who asks, where none is given. Owners share the workers alike, the studies of one in proportion to
    ``priority``. Only a worker with all of the ``tags`` serves it, and none before the moment ``not_before``. Where
    workers have been seen, one of them must offer the template and take the values. Raises `UsageError` where none
    does, naming what there is, and where the name is taken.
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
    if (problem := why_not_offered(store.workers(), template, new.values)) is not None:
        raise problem
    return store.submit(new)


def why_not_offered(workers: Sequence[WorkerRecord], template: str, values: Mapping[str, Value]) -> UsageError | None:
    """Return why none of the workers takes the values of a template; None if one does, or there is no worker."""
    offers = [worker for worker in workers if template in worker.templates]
    if workers and not offers:
        known = ", ".join(sorted({name for worker in workers for name in worker.templates})) or "none"
        return UsageError(f"no worker has a template {shortened(template)}; there are {known}")
    problems: list[UsageError] = []
    for worker in offers:
        try:
            types = {key: value_type(one) for key, one in dict(worker.templates[template]).items()}
            checked_values(template, types, values)
            return None
        except (ValueError, TypeError):  # written by something else than a worker
            continue
        except UsageError as error:
            problems.append(error)
    return problems[0] if problems else None


def asked_in_file(path: Path) -> Asked:
    """Read a file of a submission: ``template``, ``name``, and values as a spec has them; raise `SpecError`."""
    data = read_file(path, "file of a submission", "a template is named without a suffix")
    if not isinstance(data, Mapping):
        raise SpecError(f"{path}: a submission is a mapping: template, name, and values as a spec has them")
    if code := sorted(CODE & {str(key) for key in data}):
        raise SpecError(
            f"{path}: {code[0]} cannot be submitted: a row of the queue carries no code, no path and no command",
            hint="write `template: NAME` in its place, one that a worker offers (see bssearch queue list), and the "
            "values that it takes; its operator puts the spec with the workload beside the worker",
        )
    if not isinstance(data.get("template"), str):
        raise SpecError(f"{path}: it must say which template of a worker it is for, as in `template: digits`")
    name = data.get("name")
    if name is not None and not isinstance(name, str):
        raise SpecError(f"{path}: name = {shortened(name)} must be a text")
    rest = {key: value for key, value in data.items() if key not in {"template", "name"}}
    values: dict[str, Value] = {}
    for key, value in _leaves(path, rest):
        if key in values:
            raise SpecError(f"{path}: {key} is given twice: {shortened(values[key])} and {shortened(value)}")
        values[key] = value
    return Asked(data["template"], values, name)


def _leaves(path: Path, data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(path, value, f"{dotted}.")
        else:
            yield dotted, checked_value(dotted, value, str(path))


def checked_value(key: str, value: Any, where: str) -> Value:
    """Return a value that a submission may carry; raise `SpecError` for one of no such type, or of no such field."""
    field = key.split(".")[0]
    if field in OFFERS_NONE:
        raise SpecError(f"{where}: {key} cannot be submitted: {field} is the worker's operator's")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
        return value
    raise SpecError(
        f"{where}: {key} = {shortened(value)} must be a number, true or false, a choice, or a list of numbers"
    )


class QueuedStudy(BaseModel):
    """A submission: ``position`` among those that wait, and the slot seconds for which it was served."""

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
    """A worker: whether it ``is_here``, what it serves, and what it offers."""

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
    """The queue, those first that are served next, and the workers seen in the last days."""

    submissions: list[QueuedStudy]
    workers: list[SeenWorker]


def queued_studies(store: Store, *, everything: bool = False) -> QueueListing:
    """Return the queue; with ``everything`` submissions that are done or cancelled, and workers that are gone, too.

    The reason of one that waits says why no worker that is here can serve it, or what kept the last one from it.
    """
    places = {name: number for number, name in enumerate(store.waiting(), start=1)}
    counts = {one.name: one for one in store.studies()}
    workers = store.workers()
    here = [worker for worker in workers if worker.is_here]
    left_out = () if everything else (SubmissionState.DONE, SubmissionState.CANCELLED)
    listed = [one for one in store.submissions() if one.state not in left_out]
    rows = [_queued(one, counts.get(one.name), here, places.get(one.name)) for one in listed]
    rows.sort(key=lambda row: (row.position is None, row.position or 0))
    return QueueListing(submissions=rows, workers=[_seen(one) for one in (workers if everything else here)])


def _queued(
    one: Submission, study: StudySummary | None, here: Sequence[WorkerRecord], position: int | None
) -> QueuedStudy:
    """Return a submission as it is listed; ``here`` are the workers that there are."""
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
    """Return why no worker that is here can serve a submission; nothing where one can, or none is here."""
    if (problem := why_not_offered(here, one.template, one.values)) is not None:
        return f"of the workers that are here none serves it: {problem}"
    takers = [worker for worker in here if why_not_offered([worker], one.template, one.values) is None]
    lacking = [sorted({*one.tags} - {*worker.tags}) for worker in takers]
    if not lacking or not all(lacking):
        return ""
    fewest = min(lacking, key=lambda tags: (len(tags), tags))
    return f"of the workers that are here none that takes it has the tag {', '.join(fewest)}"


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
