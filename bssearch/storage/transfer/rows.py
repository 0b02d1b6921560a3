"""The rows of a study as a database has them, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, select, union

from bssearch.errors import DatabaseError, UsageError
from bssearch.records import TrialState
from bssearch.storage.models import EnvironmentRow, StudyRow, TrialRow
from bssearch.storage.transfer.layout import KEPT_OF_FINDINGS, LAYOUTS, Kind, Layout, Row

AT_ONCE = 1000
"""Rows that are fetched, and stored, at once: a choice."""

_TRIAL = TrialRow.__table__
_ENVIRONMENT = EnvironmentRow.__table__


def query(kind: Kind, study_id: int, *conditions: ColumnElement[bool], of_running: bool = False) -> Select[Any]:
    """Return the query of a study's rows of a kind, by what they are known by, with their tables' primary keys.

    Trials that run have neither ended nor a lease elsewhere: they and what they have are not among the rows, or,
    ``of_running``, are all of them.
    """
    layout = LAYOUTS[kind]
    table = layout.table
    columns: list[ColumnElement[Any]] = [_column(layout, name).label(name) for name in layout.fields]
    columns += [column.label(f"_{column.name}") for column in table.primary_key]
    found = select(*columns)
    if "environment_id" in table.c:
        found = found.join(_ENVIRONMENT, table.c.environment_id == _ENVIRONMENT.c.id, isouter=True)
    if "trial_id" in table.c:
        found = found.join(_TRIAL, table.c.trial_id == _TRIAL.c.id)
    found = found.where(_scope(kind, study_id, of_running), *conditions)
    return found.order_by(*(_column(layout, name) for name in layout.keys))


def _column(layout: Layout, name: str) -> ColumnElement[Any]:
    if name == "trial":
        return _TRIAL.c.number
    if name == "environment":
        return _ENVIRONMENT.c.digest
    return layout.fields[name].column


def _scope(kind: Kind, study_id: int, of_running: bool) -> ColumnElement[bool]:
    table = LAYOUTS[kind].table
    if kind is Kind.ENVIRONMENT:
        tables = [one.table for one in LAYOUTS.values() if {"environment_id", "study_id"} <= {*one.table.c.keys()}]
        used = [select(one.c.environment_id).where(one.c.study_id == study_id) for one in tables]
        own = select(StudyRow.environment_id).where(StudyRow.id == study_id)
        return table.c.id.in_(union(own, *used))
    if kind is Kind.STUDY:
        return table.c.id == study_id
    if kind is Kind.TRIAL or "trial_id" in table.c:
        runs = _TRIAL.c.state == TrialState.RUNNING
        return (_TRIAL.c.study_id == study_id) & (runs if of_running else ~runs)
    return table.c.study_id == study_id


def encoded(connection: Connection, kind: Kind, statement: Select[Any]) -> Iterator[Row]:
    """Yield the rows of a `query`; they are not all in memory at once."""
    layout = LAYOUTS[kind]
    for row in connection.execute(statement, execution_options={"yield_per": AT_ONCE}):
        found = layout.encoded(row)
        if kind is not Kind.FINDING or any(found["answer"][name] is not None for name in KEPT_OF_FINDINGS):
            yield found


def travelling(connection: Connection, study_id: int, name: str) -> Iterator[tuple[Kind, Row]]:
    """Yield all rows of a study that travel, in the order of `Kind`.

    Raises `DatabaseError` for a row that bssearch has not stored so, as far as it would not be taken elsewhere.
    """
    for kind, layout in LAYOUTS.items():
        for row in encoded(connection, kind, query(kind, study_id)):
            try:
                layout.decoded(row)
            except UsageError as error:
                raise DatabaseError(
                    f"what is stored of the study {name!r} cannot be used: {error.message}",
                    hint="something else than bssearch has written it; other studies are not concerned",
                ) from None
            yield kind, row


def counts(connection: Connection, study_id: int) -> dict[str, int]:
    """Return how many rows of each kind `travelling` yields."""
    found = {}
    for kind in LAYOUTS:
        if kind is Kind.FINDING:
            found[kind.value] = len(list(encoded(connection, kind, query(kind, study_id))))
        else:
            inner = query(kind, study_id).order_by(None).subquery()
            found[kind.value] = connection.execute(select(func.count()).select_from(inner)).scalar_one()
    return found


def running(connection: Connection, study_id: int) -> Sequence[int]:
    """Return the numbers of a study's trials that run, and so do not travel."""
    where = TrialRow.study_id == study_id, TrialRow.state == TrialState.RUNNING
    return connection.scalars(select(TrialRow.number).where(*where).order_by(TrialRow.number)).all()
