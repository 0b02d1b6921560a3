"""``queue``: the submissions with their places, and the workers that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from bssearch.commands.queue.submitting import check_offered
from bssearch.errors import UsageError
from bssearch.queue.submission import Submission, SubmissionState, WorkerRecord
from bssearch.storage.lookups import StudySummary
from bssearch.storage.repository import Store


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
    rows = []
    for one in store.submissions():
        if not everything and one.state in {SubmissionState.DONE, SubmissionState.CANCELLED}:
            continue
        rows.append(_queued(one, counts.get(one.name), here, places.get(one.name)))
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
    try:
        check_offered(here, one.template, one.values)
    except UsageError as error:
        return f"of the workers that are here none serves it: {error}"
    lacking = [sorted({*one.tags} - {*worker.tags}) for worker in here if _takes(worker, one)]
    if not lacking or not all(lacking):
        return ""
    fewest = min(lacking, key=len)
    return f"of the workers that are here none that takes it has the tag {', '.join(fewest)}"


def _takes(worker: WorkerRecord, one: Submission) -> bool:
    """Return whether a worker offers the template of a submission and takes its values."""
    try:
        check_offered([worker], one.template, one.values)
    except UsageError:
        return False
    return True


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
