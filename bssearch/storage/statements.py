"""SQL statements of several parts of the store."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    RowMapping,
    ScalarSelect,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from bssearch.errors import NotFoundError
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
    field_values,
)
from bssearch.records.text import nearest
from bssearch.settings import in_parent_folder
from bssearch.storage.connection.engine import masked
from bssearch.storage.models import (
    CLAIM_ROWS,
    ENVIRONMENT_ROWS,
    OBSERVATION_ROWS,
    PREFIXES,
    PROBE_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    VISIT_ROWS,
    ProbeKind,
    column_types,
    database_now,
    from_columns,
)


def _columns(rows: Table, record_type: type, *, without: str | None = None) -> list[ColumnElement[Any]]:
    return [rows.c[name] for name in column_types(record_type, without=without)]


STUDY: Select[Any] = select(
    *_columns(STUDY_ROWS, StudyRecord, without="environment"),
    STUDY_ROWS.c.id,
    STUDY_ROWS.c.environment_id,
    *(column.label(PREFIXES[Environment] + column.name) for column in _columns(ENVIRONMENT_ROWS, Environment)),
).join(ENVIRONMENT_ROWS, isouter=True)


def _trials(*of: ColumnElement[bool]) -> ScalarSelect[int]:
    return select(func.count(TRIAL_ROWS.c.id)).where(TRIAL_ROWS.c.study_id == STUDY_ROWS.c.id, *of).scalar_subquery()


STUDIES: Select[Any] = STUDY.add_columns(
    _trials().label("trials"),
    _trials(TRIAL_ROWS.c.state == TrialState.REACHED).label("reached"),
    _trials(TRIAL_ROWS.c.state == TrialState.RUNNING).label("running"),
).order_by(STUDY_ROWS.c.id)

TRIALS: Select[Any] = select(*_columns(TRIAL_ROWS, TrialRecord)).order_by(TRIAL_ROWS.c.number)

OBSERVATIONS: Select[Any] = (
    select(TRIAL_ROWS.c.number, *_columns(OBSERVATION_ROWS, Observation))
    .join(TRIAL_ROWS, TRIAL_ROWS.c.id == OBSERVATION_ROWS.c.trial_id)
    .order_by(TRIAL_ROWS.c.number, OBSERVATION_ROWS.c.step)
)

EVALUATIONS: Select[int, float, float] = (
    select(TRIAL_ROWS.c.number, OBSERVATION_ROWS.c.train_seconds, OBSERVATION_ROWS.c.metric)
    .join(TRIAL_ROWS, TRIAL_ROWS.c.id == OBSERVATION_ROWS.c.trial_id)
    .where(
        TRIAL_ROWS.c.study_id == bindparam("study_id"), TRIAL_ROWS.c.number.in_(bindparam("numbers", expanding=True))
    )
    .order_by(TRIAL_ROWS.c.number, OBSERVATION_ROWS.c.step)
)

PROBES: Select[Any] = (
    select(*_columns(PROBE_ROWS, ProbeRecord, without="error"))
    .where(PROBE_ROWS.c.kind == ProbeKind.STEP_TIME)
    .order_by(PROBE_ROWS.c.batch_size, PROBE_ROWS.c.measured_at, PROBE_ROWS.c.id)
)

VISITS: Select[Any] = select(VISIT_ROWS.c.environment_id, *_columns(VISIT_ROWS, Visit)).order_by(
    VISIT_ROWS.c.measured_at, VISIT_ROWS.c.id
)

# The user's program refused the batch size; such a refusal is no evidence about memory.
IS_REFUSED = (
    (PROBE_ROWS.c.kind == ProbeKind.STEP_TIME)
    & PROBE_ROWS.c.step_seconds.is_(None)
    & PROBE_ROWS.c.out_of_memory.is_(False)
)

MICRO_BATCHES_PROBED: Select[int, bool, int | None] = (
    select(PROBE_ROWS.c.micro_batch_size, PROBE_ROWS.c.out_of_memory, ENVIRONMENT_ROWS.c.device_memory_bytes)
    .join(ENVIRONMENT_ROWS)
    .where(PROBE_ROWS.c.kind.in_((ProbeKind.STEP_TIME, ProbeKind.MEMORY)))
    .where(~IS_REFUSED)
    .distinct()
)

# Exclude trials with growing batches, because their batch size at the failure is unknown.
MICRO_BATCHES_TOO_LARGE: Select[int, int | None, int, datetime | None] = (
    select(
        TRIAL_ROWS.c.micro_batch_size,
        ENVIRONMENT_ROWS.c.device_memory_bytes,
        func.count(),
        func.max(TRIAL_ROWS.c.ended_at),
    )
    .join(ENVIRONMENT_ROWS)
    .where(TRIAL_ROWS.c.state == TrialState.OOM, ~cast(TRIAL_ROWS.c.parameters, Text).contains(BATCH_STAGES))
    .group_by(TRIAL_ROWS.c.micro_batch_size, ENVIRONMENT_ROWS.c.device_memory_bytes)
)

MICRO_BATCHES_FITTED: Select[int, int | None, datetime] = (
    select(PROBE_ROWS.c.micro_batch_size, ENVIRONMENT_ROWS.c.device_memory_bytes, PROBE_ROWS.c.measured_at)
    .join(ENVIRONMENT_ROWS)
    .where(PROBE_ROWS.c.kind == ProbeKind.MEMORY, PROBE_ROWS.c.out_of_memory.is_(False))
)

ENVIRONMENTS: Select[Any] = select(*_columns(ENVIRONMENT_ROWS, Environment)).select_from(ENVIRONMENT_ROWS)


def of_its_kind(environment: Environment) -> tuple[ColumnElement[bool], ...]:
    return (
        ENVIRONMENT_ROWS.c.device_name == environment.device_name,
        ENVIRONMENT_ROWS.c.precision == environment.precision,
        ENVIRONMENT_ROWS.c.compile_mode == environment.compile_mode,
    )


MEMORY: Select[Any] = (
    select(*(PROBE_ROWS.c[name] for name in ("micro_batch_size", "out_of_memory", "peak_memory_bytes", "reason")))
    .join(ENVIRONMENT_ROWS)
    .where(PROBE_ROWS.c.kind == ProbeKind.MEMORY)
    .order_by(PROBE_ROWS.c.micro_batch_size)
)

NOISE: Select[Any] = (
    select(*_columns(PROBE_ROWS, NoiseMeasurement))
    .where(PROBE_ROWS.c.kind == ProbeKind.NOISE_SCALE)
    .order_by(PROBE_ROWS.c.measured_at.desc(), PROBE_ROWS.c.id.desc())
)


def insert_if_absent(connection: Connection, table: Table, columns: Mapping[str, Any]) -> bool:
    kind = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = kind.insert(table).on_conflict_do_nothing().returning(literal_column("1"))
    return connection.execute(statement, columns).first() is not None


def is_running(study_id: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return TRIAL_ROWS.c.study_id == study_id, TRIAL_ROWS.c.state == TrialState.RUNNING


_ENDS = (
    update(TRIAL_ROWS)
    .where(TRIAL_ROWS.c.id == bindparam("of_trial"), TRIAL_ROWS.c.state == TrialState.RUNNING)
    .values(ended_at=database_now())
)
_ENDS_OWN = _ENDS.where(TRIAL_ROWS.c.lease_owner == bindparam("of_owner"))


def end_trial(connection: Connection, trial_id: int, columns: Mapping[str, Any], owner: str | None = None) -> bool:
    """End a running trial and its lease. Returns False if the trial is not running or has another owner."""
    values = {**columns, "lease_expires_at": None, "of_trial": trial_id}
    statement, of = (_ENDS, {}) if owner is None else (_ENDS_OWN, {"of_owner": owner})
    return connection.execute(statement, {**values, **of}).rowcount == 1


# Built once: SQLAlchemy walks all columns of a new statement.
_TRIAL = TRIALS.where(TRIAL_ROWS.c.study_id == bindparam("study_id"), TRIAL_ROWS.c.number == bindparam("number"))
LARGEST_NUMBER = 2**63 - 1  # largest integer of a column in SQLite and PostgreSQL
_TRIAL_IDS = select(TRIAL_ROWS.c.number, TRIAL_ROWS.c.id).where(
    TRIAL_ROWS.c.study_id == bindparam("study_id"), TRIAL_ROWS.c.number.in_(bindparam("numbers", expanding=True))
)
_HELD_IDS = _TRIAL_IDS.add_columns(
    ((TRIAL_ROWS.c.state == TrialState.RUNNING) & (TRIAL_ROWS.c.lease_owner == bindparam("owner"))).label("is_held")
).with_for_update()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary(StudyRecord):
    """A study with its trial counts."""

    trials: int
    reached: int
    running: int


def study_record(row: RowMapping) -> StudyRecord:
    return from_columns(StudyRecord, row, absent="environment" if row["environment_id"] is None else None)


def study_summary(row: RowMapping) -> StudySummary:
    counts = {name: row[name] for name in ("trials", "reached", "running")}
    return StudySummary(**field_values(study_record(row)), **counts)


def trial_record(row: RowMapping) -> TrialRecord:
    return from_columns(TrialRecord, row, absent=None if row["state"].is_finished else "outcome")


def stored_trial(connection: Connection, study_id: int, number: int) -> TrialRecord:
    known = number <= LARGEST_NUMBER
    row = connection.execute(_TRIAL, {"study_id": study_id, "number": number}).mappings().first() if known else None
    if row is None:
        raise no_trial(connection, study_id, number)
    return trial_record(row)


def trial_ids_of(
    connection: Connection, study_id: int, numbers: Collection[int], owner: str | None = None
) -> dict[int, int]:
    """Return the row ids of trials by trial number. Raises `NotFoundError` for a missing trial.

    With ``owner``, lock the trials until the transaction ends, and return only trials that this owner runs.
    """
    query: Executable = _TRIAL_IDS if owner is None else _HELD_IDS
    rows = connection.execute(query, {"study_id": study_id, "numbers": list(numbers), "owner": owner}).all()
    for number in {*numbers} - {row.number for row in rows}:
        raise no_trial(connection, study_id, number)
    return {row.number: row.id for row in rows if owner is None or row.is_held}


def holds_claim(connection: Connection, study_id: int, name: str, owner: str) -> bool:
    """True if ``owner`` holds the claim, even if the claim's lease has ended."""
    place = CLAIM_ROWS.c.study_id == study_id, CLAIM_ROWS.c.name == name, CLAIM_ROWS.c.owner == owner
    return connection.scalar(select(CLAIM_ROWS.c.name).where(*place)) is not None


def trial_id_of(connection: Connection, study_id: int, number: int) -> int:
    return trial_ids_of(connection, study_id, [number])[number]


def no_trial(connection: Connection, study_id: int, number: int) -> NotFoundError:
    study = select(STUDY_ROWS.c.name).where(STUDY_ROWS.c.id == study_id).scalar_subquery()
    name, low, high = connection.execute(
        select(study, func.min(TRIAL_ROWS.c.number), func.max(TRIAL_ROWS.c.number)).where(
            TRIAL_ROWS.c.study_id == study_id
        )
    ).one()
    there_are = "the study has no trials yet" if low is None else f"the trials are {low} to {high}"
    return NotFoundError(
        f"the study {name!r} has no trial {number}: {there_are}",
        hint=f"run the study with `bssearch run {name}`"
        if low is None
        else f"list the trials with `bssearch trial list {name}`",
    )


def no_study(connection: Connection, name: str) -> NotFoundError:
    names = connection.scalars(select(STUDY_ROWS.c.name).order_by(STUDY_ROWS.c.name)).all()
    guess, other = nearest(name, names, ""), in_parent_folder(masked(connection.engine.url))
    hint = "; ".join(filter(None, (guess, "list all studies with `bssearch study list`", other)))
    return NotFoundError(f"no study {name!r} in this database", hint=hint)


# Built once: SQLAlchemy walks all columns of a new statement.
TRIALS_OF = TRIALS.where(TRIAL_ROWS.c.study_id == bindparam("study_id")).order_by(None)
NEWER = TRIALS_OF.where(TRIAL_ROWS.c.revision > bindparam("since"))
_COUNTERS = select(
    STUDY_ROWS.c.id,
    STUDY_ROWS.c.created_at,
    STUDY_ROWS.c.revision,
    STUDY_ROWS.c.rewritten_at_revision,
    STUDY_ROWS.c.probed_at_revision,
)
_OF_ID = _COUNTERS.where(STUDY_ROWS.c.id == bindparam("study"))
_OF_NAME = _COUNTERS.where(STUDY_ROWS.c.name == bindparam("study"))

_RAISED = (
    update(STUDY_ROWS)
    .where(STUDY_ROWS.c.id == bindparam("of_study"))
    .values(revision=STUDY_ROWS.c.revision + 1)
    .returning(STUDY_ROWS.c.revision)
)
_AMONG = TRIAL_ROWS.c.study_id == bindparam("of_study"), TRIAL_ROWS.c.number.in_(bindparam("numbers", expanding=True))
_CHANGED = update(TRIAL_ROWS).where(*_AMONG)
_ENDED = select(TRIAL_ROWS.c.number).where(*_AMONG, TRIAL_ROWS.c.state != TrialState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The trials of a study that changed after a revision.

    A trial changes when stored, started, paused, resumed, ended, or observed after the end.

    Attributes:
        is_rewritten: True if rows were deleted or rewritten, or the name belongs to another study. In these cases,
            ``trials`` has all trials.
        has_new_probes: True if step times may have changed.
    """

    revision: int
    is_rewritten: bool
    has_new_probes: bool
    trials: list[TrialRecord]


def raise_revision(connection: Connection, study_id: int) -> int:
    return int(connection.execute(_RAISED, {"of_study": study_id}).scalar_one())


def mark_changed(connection: Connection, study_id: int, numbers: Collection[int]) -> None:
    if numbers:
        changed = {"of_study": study_id, "numbers": list(numbers)}
        connection.execute(_CHANGED, {**changed, "revision": raise_revision(connection, study_id)})


def mark_observed(connection: Connection, study_id: int, numbers: Collection[int]) -> None:
    among = {"of_study": study_id, "numbers": list(numbers)}
    mark_changed(connection, study_id, connection.scalars(_ENDED, among).all())


def mark_probed(connection: Connection, study_id: int) -> None:
    revision = raise_revision(connection, study_id)
    connection.execute(update(STUDY_ROWS).where(STUDY_ROWS.c.id == study_id).values(probed_at_revision=revision))


@dataclass(frozen=True, slots=True)
class Counters:
    """The revision counters of a study."""

    study_id: int
    created_at: datetime
    revision: int
    rewritten_at_revision: int
    probed_at_revision: int


def counters(connection: Connection, study: str | int) -> Counters:
    query, value = (_OF_ID, study) if isinstance(study, int) else (_OF_NAME, study)
    row = connection.execute(query, {"study": value}).first()
    if row is None:
        raise no_study(connection, str(study))
    return Counters(*row)
