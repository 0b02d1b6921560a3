"""The statements that several parts of the store share."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from bssearch.records import (
    BATCH_STAGES,
    Environment,
    NoiseMeasurement,
    Observation,
    ProbeRecord,
    StudyRecord,
    TrialRecord,
    TrialState,
    Visit,
)
from bssearch.storage.clock import database_now
from bssearch.storage.models import (
    Base,
    EnvironmentRow,
    ObservationRow,
    ProbeKind,
    ProbeRow,
    StudyRow,
    TrialRow,
    VisitRow,
)
from bssearch.storage.rows import PREFIXES, column_types


def _columns(row: type[Base], record_type: type, *, without: str | None = None) -> list[ColumnElement[Any]]:
    """Return the columns of a record's fields; the table's own: each of the class's costs a comparison a query."""
    return [row.__table__.c[name] for name in column_types(record_type, without=without)]


STUDY: Select[Any] = select(
    *_columns(StudyRow, StudyRecord, without="environment"),
    StudyRow.id,
    StudyRow.environment_id,
    *(column.label(PREFIXES[Environment] + column.name) for column in _columns(EnvironmentRow, Environment)),
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

EVALUATIONS: Select[int, float, float] = (
    select(TrialRow.number, ObservationRow.train_seconds, ObservationRow.metric)
    .join(TrialRow, TrialRow.id == ObservationRow.trial_id)
    .order_by(TrialRow.number, ObservationRow.step)
)

PROBES: Select[Any] = (
    select(*_columns(ProbeRow, ProbeRecord, without="error"))
    .where(ProbeRow.kind == ProbeKind.STEP_TIME)
    .order_by(ProbeRow.batch_size, ProbeRow.measured_at, ProbeRow.id)
)

VISITS: Select[Any] = select(VisitRow.environment_id, *_columns(VisitRow, Visit)).order_by(
    VisitRow.measured_at, VisitRow.id
)

IS_REFUSED = (
    (ProbeRow.kind == ProbeKind.STEP_TIME) & ProbeRow.step_seconds.is_(None) & ProbeRow.out_of_memory.is_(False)
)
"""A batch size that a program of the user's own refuses: it says nothing of memory."""

MICRO_BATCHES_PROBED: Select[int, bool, int | None] = (
    select(ProbeRow.micro_batch_size, ProbeRow.out_of_memory, EnvironmentRow.device_memory_bytes)
    .join(EnvironmentRow)
    .where(ProbeRow.kind.in_((ProbeKind.STEP_TIME, ProbeKind.MEMORY)))
    .where(~IS_REFUSED)
    .distinct()
)

MICRO_BATCHES_TOO_LARGE: Select[int, int | None, int, datetime | None] = (
    select(
        TrialRow.micro_batch_size,
        EnvironmentRow.device_memory_bytes,
        func.count(),
        func.max(TrialRow.ended_at),
    )
    .join(EnvironmentRow)
    .where(TrialRow.state == TrialState.OOM, ~cast(TrialRow.parameters, Text).contains(BATCH_STAGES))
    .group_by(TrialRow.micro_batch_size, EnvironmentRow.device_memory_bytes)
)
"""How many trials ran out of memory at a size, and when the last one did; where a batch grew nobody knows at which."""

MICRO_BATCHES_FITTED: Select[int, int | None, datetime] = (
    select(ProbeRow.micro_batch_size, EnvironmentRow.device_memory_bytes, ProbeRow.measured_at)
    .join(EnvironmentRow)
    .where(ProbeRow.kind == ProbeKind.MEMORY, ProbeRow.out_of_memory.is_(False))
)
"""What fitted into the memory of a process of its own, and when."""

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


def insert_if_absent(connection: Connection, table: type[Base], columns: Mapping[str, Any]) -> bool:
    """Insert a row unless one has the same key; return whether it was inserted. The first of two writers wins."""
    kind = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = kind.insert(table.__table__).on_conflict_do_nothing().returning(literal_column("1"))
    return connection.execute(statement, columns).first() is not None


def is_running(study_id: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return the conditions of a study's running trials."""
    return TrialRow.study_id == study_id, TrialRow.state == TrialState.RUNNING


_ENDS = (
    update(TrialRow.__table__)
    .where(TrialRow.id == bindparam("of_trial"), TrialRow.state == TrialState.RUNNING)
    .values(ended_at=database_now())
)


def end_trial(connection: Connection, trial_id: int, columns: Mapping[str, Any]) -> bool:
    """End a trial if it is running; its lease is over, its owner stays known."""
    return connection.execute(_ENDS, {**columns, "lease_expires_at": None, "of_trial": trial_id}).rowcount == 1
