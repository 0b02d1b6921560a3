"""The tables of the queue: submissions, the accounts of their owners, and the workers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import JSON, CheckConstraint, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from bssearch.queue.submission import SubmissionState
from bssearch.storage.columns import Sentences, enum, not_negative, positive
from bssearch.storage.models import Base, Id


class SubmissionRow(Base):
    """A study that somebody wants to be run; ``virtual_time``, ``started_at`` and ``has_joined`` are its account."""

    __tablename__ = "bss_submission"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint("name <> ''", name="name_not_empty"),
        *positive("priority"),
        *not_negative("served_seconds", "virtual_time", "started_at"),
    )

    id: Mapped[Id]
    name: Mapped[str]
    template: Mapped[str]
    values: Mapped[Mapping[str, object]] = mapped_column(JSON)
    owner: Mapped[str] = mapped_column(index=True)
    login: Mapped[str | None]
    priority: Mapped[float]
    tags: Mapped[tuple[str, ...]] = mapped_column(Sentences)
    not_before: Mapped[datetime | None]
    submitted_at: Mapped[datetime]
    state: Mapped[SubmissionState] = mapped_column(enum(SubmissionState, "state"), index=True)
    reason: Mapped[str]
    served_seconds: Mapped[float]
    virtual_time: Mapped[float]
    started_at: Mapped[float]
    has_joined: Mapped[bool]


class ShareRow(Base):
    """The account of an owner of submissions."""

    __tablename__ = "bss_share"
    __table_args__ = (*not_negative("virtual_time", "started_at"),)

    owner: Mapped[str] = mapped_column(primary_key=True)
    virtual_time: Mapped[float]
    started_at: Mapped[float]


class WorkerRow(Base):
    """A worker; ``charged_seconds`` is what the submission that it serves has been charged and not yet used."""

    __tablename__ = "bss_worker"
    __table_args__ = (*not_negative("charged_seconds"),)

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
    charged_seconds: Mapped[float]
