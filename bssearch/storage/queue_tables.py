"""The tables of the queue: submissions and workers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import JSON, CheckConstraint, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from bssearch.queue.submission import Submission, SubmissionState
from bssearch.storage.columns import Sentences, enum, not_negative, positive
from bssearch.storage.models import Base, Id


class SubmissionRow(Base, holds=(Submission,)):
    """A study that somebody wants to be run; ``served_seconds`` are the slot seconds that workers have served it."""

    __tablename__ = "bss_submission"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint("name <> ''", name="name_not_empty"),
        *positive("priority"),
        *not_negative("served_seconds"),
    )

    id: Mapped[Id]
    name: Mapped[str]
    values: Mapped[Mapping[str, object]] = mapped_column(JSON)
    owner: Mapped[str] = mapped_column(index=True)
    priority: Mapped[float]
    not_before: Mapped[datetime | None]
    submitted_at: Mapped[datetime]
    state: Mapped[SubmissionState] = mapped_column(enum(SubmissionState, "state"), index=True)
    served_seconds: Mapped[float]


class WorkerRow(Base):
    """A worker, and the submission that it serves."""

    __tablename__ = "bss_worker"

    name: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[str]
    host: Mapped[str]
    tags: Mapped[tuple[str, ...]] = mapped_column(Sentences)
    slots: Mapped[str]
    device_name: Mapped[str | None]
    templates: Mapped[Mapping[str, Mapping[str, object]]] = mapped_column(JSON)
    seen_at: Mapped[datetime]
    left_at: Mapped[datetime | None]
    serving: Mapped[str | None]
    serving_since: Mapped[datetime | None]
