"""Rows of the queue read, though something else may have written them: what is wrong with one hides no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Text, and_, cast, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from bssearch.queue.submission import EARLIEST, LATEST, Submission, WorkerRecord
from bssearch.storage.columns import are_finite
from bssearch.storage.connection.engine import from_json
from bssearch.storage.models import Base
from bssearch.storage.queue_tables import SubmissionRow, WorkerRow


def _columns(row: type[Base], names: Iterable[str], json: str) -> list[ColumnElement[Any]]:
    """Return columns, that of JSON as its text: it is read row by row."""
    table = row.__table__
    return [cast(table.c[name], Text).label(name) if name == json else table.c[name] for name in names]


def _are_moments(
    *columns: InstrumentedAttribute[datetime] | InstrumentedAttribute[datetime | None],
) -> ColumnElement[bool]:
    """Return the condition that columns hold moments, or nothing: PostgreSQL has infinities and years beyond ours."""
    return and_(*(or_(column.is_(None), column.between(EARLIEST, LATEST)) for column in columns))


SUBMISSIONS = (
    select(*_columns(SubmissionRow, (one.name for one in fields(Submission)), json="values"))
    .where(
        are_finite(SubmissionRow.priority, SubmissionRow.served_seconds),
        _are_moments(SubmissionRow.submitted_at, SubmissionRow.not_before),
    )
    .order_by(SubmissionRow.id)
)
"""The submissions in the order in which they came, but for rows whose numbers are none, or moments."""

WORKERS = (
    select(*_columns(WorkerRow, (one.name for one in fields(WorkerRecord) if one.name != "is_here"), json="templates"))
    .where(_are_moments(WorkerRow.seen_at, WorkerRow.left_at, WorkerRow.serving_since))
    .order_by(WorkerRow.seen_at.desc())
)
"""The workers, the newest sign of life first, but for rows whose moments are none."""


def submission_record(row: RowMapping) -> Submission:
    """Return a submission; values that cannot be read are the text that they are, which is no mapping."""
    return Submission(**{**row, "values": _value(row["values"])})


def worker_record(row: RowMapping, time: datetime, seen_within_s: float) -> WorkerRecord:
    """Return a worker as it is at a ``time``; one whose templates cannot be read offers none."""
    templates = _value(row["templates"])
    offered = templates if isinstance(templates, Mapping) else {}
    is_here = row["left_at"] is None and time - row["seen_at"] <= timedelta(seconds=seen_within_s)
    return WorkerRecord(**{**row, "templates": offered}, is_here=is_here)


def _value(stored: str) -> Any:
    try:
        return from_json(stored)
    except ValueError:
        return stored
