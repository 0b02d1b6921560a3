"""The statements of the store, and how rows become records and their absence errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    case,
    func,
    literal,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from bssearch.errors import NotFoundError
from bssearch.records import (
    Environment,
    NoiseMeasurement,
    Observation,
    ProbeRecord,
    StudyRecord,
    TrialRecord,
    TrialState,
)
from bssearch.storage.models import (
    Base,
    EnvironmentRow,
    ObservationRow,
    ProbeKind,
    ProbeRow,
    StudyRow,
    TrialRow,
    UtcDateTime,
)
from bssearch.storage.rows import PREFIXES, column_names, from_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """A study as a list shows it; ``target`` is text, ``trials`` counts all of them, ``reached`` those that did."""

    name: str
    workload: str
    target: str
    objective: str
    trials: int
    reached: int
    running: int
    created_by: str
    created_at: datetime
    archived_at: datetime | None = None


class database_now(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The database's clock, in UTC: what leases are measured by, whatever the clocks of the drivers say."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_now)
def _server_now(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    return "clock_timestamp()"


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


class database_started(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """When the database's server was started; NULL where there is no server."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_started)
def _server_started(element: database_started, compiler: SQLCompiler, **options: Any) -> str:
    return "pg_postmaster_start_time()"


@compiles(database_started, "sqlite")
def _sqlite_started(element: database_started, compiler: SQLCompiler, **options: Any) -> str:
    return "NULL"


def _columns(table: type[Base], record_type: type, *, without: str | None = None) -> list[Any]:
    return [getattr(table, name) for name in column_names(record_type, without=without)]


STUDY: Select[Any] = select(
    *_columns(StudyRow, StudyRecord, without="environment"),
    StudyRow.id,
    StudyRow.environment_id,
    *(getattr(EnvironmentRow, name).label(PREFIXES[Environment] + name) for name in column_names(Environment)),
).join(EnvironmentRow, isouter=True)

STUDIES: Select[Any] = (
    select(
        *_columns(StudyRow, StudyRecord, without="environment"),
        func.count(TrialRow.id).label("trials"),
        func.count(case((TrialRow.state == TrialState.REACHED, 1))).label("reached"),
        func.count(case((TrialRow.state == TrialState.RUNNING, 1))).label("running"),
    )
    .join(TrialRow, TrialRow.study_id == StudyRow.id, isouter=True)
    .group_by(StudyRow.id)
    .order_by(StudyRow.id)
)

TRIALS: Select[Any] = select(*_columns(TrialRow, TrialRecord)).order_by(TrialRow.number)

OBSERVATIONS: Select[Any] = (
    select(TrialRow.number, *_columns(ObservationRow, Observation))
    .join(TrialRow, TrialRow.id == ObservationRow.trial_id)
    .order_by(TrialRow.number, ObservationRow.step)
)

PROBES: Select[Any] = (
    select(*_columns(ProbeRow, ProbeRecord))
    .where(ProbeRow.kind == ProbeKind.STEP_TIME)
    .order_by(ProbeRow.batch_size, ProbeRow.measured_at, ProbeRow.id)
)

MICRO_BATCHES_PROBED: Select[int, bool, int | None] = (
    select(ProbeRow.micro_batch_size, ProbeRow.out_of_memory, EnvironmentRow.device_memory_bytes)
    .join(EnvironmentRow)
    .where(ProbeRow.kind.in_((ProbeKind.STEP_TIME, ProbeKind.MEMORY)))
    .distinct()
)

MICRO_BATCHES_TOO_LARGE: Select[int, bool, int | None] = (
    select(TrialRow.micro_batch_size, literal(True).label("out_of_memory"), EnvironmentRow.device_memory_bytes)
    .join(EnvironmentRow)
    .where(TrialRow.state == TrialState.OOM)
    .distinct()
)

ENVIRONMENTS: Select[Any] = select(*_columns(EnvironmentRow, Environment)).select_from(EnvironmentRow)


def of_its_kind(environment: Environment) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on `EnvironmentRow` under which seconds and bytes compare (`Environment.fingerprint`)."""
    return (
        EnvironmentRow.device_name == environment.device_name,
        EnvironmentRow.precision == environment.precision,
        EnvironmentRow.compile_mode == environment.compile_mode,
    )


MEMORY: Select[Any] = (
    select(*(getattr(ProbeRow, name) for name in ("micro_batch_size", "out_of_memory", "peak_memory_bytes", "reason")))
    .join(EnvironmentRow)
    .where(ProbeRow.kind == ProbeKind.MEMORY)
    .order_by(ProbeRow.micro_batch_size)
)

NOISE: Select[Any] = (
    select(*_columns(ProbeRow, NoiseMeasurement))
    .where(ProbeRow.kind == ProbeKind.NOISE_SCALE)
    .order_by(ProbeRow.measured_at.desc(), ProbeRow.id.desc())
)


def study_record(row: RowMapping) -> StudyRecord:
    """Return the study of a row of `STUDY`."""
    return from_columns(StudyRecord, row, absent="environment" if row["environment_id"] is None else None)


def study_summary(row: RowMapping) -> StudySummary:
    """Return the summary of a row of `STUDIES`."""
    return StudySummary(
        name=row["name"],
        workload=str(row["spec"].get("workload", "")),
        target=f"{row['target_metric']} {row['target_goal'].sign} {row['target_value']:g}",
        objective=row["objective"],
        trials=row["trials"],
        reached=row["reached"],
        running=row["running"],
        created_by=row["created_by"],
        created_at=row["created_at"],
        archived_at=row["archived_at"],
    )


def trial_record(row: RowMapping) -> TrialRecord:
    """Return the trial of a row of `TRIALS`; one that has not finished has no outcome."""
    return from_columns(TrialRecord, row, absent=None if row["state"].is_finished else "outcome")


def insert_if_absent(connection: Connection, table: type[Base], columns: Mapping[str, Any]) -> bool:
    """Insert a row unless one has the same key; return whether it was inserted. The first of two writers wins."""
    kind = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = kind.insert(table).values(columns).on_conflict_do_nothing().returning(literal_column("1"))
    return connection.execute(statement).first() is not None


def is_running(study_id: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return the conditions of a study's running trials."""
    return TrialRow.study_id == study_id, TrialRow.state == TrialState.RUNNING


def end_trial(connection: Connection, trial_id: int, columns: Mapping[str, Any]) -> bool:
    """End a trial if it is running; its lease is over, its owner stays known."""
    result = connection.execute(
        update(TrialRow)
        .where(TrialRow.id == trial_id, TrialRow.state == TrialState.RUNNING)
        .values(**columns, ended_at=database_now(), lease_expires_at=None)
    )
    return result.rowcount == 1


def trial_id_of(connection: Connection, study: str, study_id: int, number: int) -> int:
    """Return the id of a trial; raise `NotFoundError` naming the numbers there are."""
    query = select(TrialRow.id).where(TrialRow.study_id == study_id, TrialRow.number == number)
    found = connection.scalar(query)
    if found is None:
        raise no_trial(connection, study, study_id, number)
    return found


def no_trial(connection: Connection, study: str, study_id: int, number: int) -> NotFoundError:
    """Return the error for a trial that is not, naming the numbers there are."""
    low, high = connection.execute(
        select(func.min(TrialRow.number), func.max(TrialRow.number)).where(TrialRow.study_id == study_id)
    ).one()
    there_are = "it has none yet" if low is None else f"its trials are {low} to {high}"
    return NotFoundError(f"the study {study!r} has no trial {number}: {there_are}")


def no_study(connection: Connection, name: str) -> NotFoundError:
    """Return the error for a study that is not, naming those with a name like it."""
    names = connection.scalars(select(StudyRow.name).order_by(StudyRow.name)).all()
    near = difflib.get_close_matches(name, names, n=3)
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return NotFoundError(f"no study {name!r} in this database", hint=f"{guess}`bssearch studies` lists them")
