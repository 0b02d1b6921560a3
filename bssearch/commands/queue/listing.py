"""``queue``: the submissions with their places and shares, and the workers that serve them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel

from bssearch.queue.submission import SubmissionState
from bssearch.storage.repository import Store


class QueuedStudy(BaseModel):
    """A submission: ``position`` among those that wait, and the ``share`` of the workers' time that it is due."""

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
    share: float | None
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

    Shares are of the time of workers that serve everybody: a study that few may serve gets less.
    """
    ledger = store.ledger()
    places = {name: number for number, name in enumerate(ledger.order(), start=1)}
    shares = ledger.shares()
    counts = {one.name: one for one in store.studies()}
    workers = store.workers()
    rows = []
    for one in store.submissions():
        if not everything and one.state in {SubmissionState.DONE, SubmissionState.CANCELLED}:
            continue
        count = counts.get(one.name)
        rows.append(
            QueuedStudy(
                study=one.name,
                state=one.state,
                reason=one.reason,
                owner=one.owner,
                priority=one.priority,
                template=one.template,
                values=one.values,
                tags=list(one.tags),
                not_before=one.not_before,
                submitted_at=one.submitted_at,
                position=places.get(one.name),
                share=shares.get(one.name),
                served_seconds=one.served_seconds,
                trials=count.trials if count else 0,
                reached=count.reached if count else 0,
                running=count.running if count else 0,
                workers=[worker.host for worker in workers if worker.is_here and worker.serving == one.name],
            )
        )
    rows.sort(key=lambda row: (row.position is None, row.position or 0))
    return QueueListing(
        submissions=rows,
        workers=[
            SeenWorker(
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
            for worker in workers
            if everything or worker.is_here
        ],
    )
