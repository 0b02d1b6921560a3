"""The tables and their column types. Columns have the names of records' fields (`to_columns`).

Times are in UTC. Only mappings are stored as JSON.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Enum,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    RowMapping,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    and_,
    false,
    select,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import SchemaItem
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from bssearch.records import (
    BranchMeasurement,
    Configuration,
    DeviceUse,
    Environment,
    Goal,
    GradientNoise,
    MemoryBasis,
    NewStudy,
    NoiseMeasurement,
    Observation,
    ParameterValue,
    Phase,
    SecondsBasis,
    StepTime,
    StepTimeError,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
    Visit,
)
from bssearch.records.text import plural, shortened, storable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LARGEST = 1e300  # absolute values of measured numbers are between 1/LARGEST and LARGEST, or 0

# Bounds of stored values, so that a command reads any row within a second.
MOST_SENTENCES = 1_000
MOST_KEYS = 1_000  # keys of a configuration
LONGEST_VALUE = 10_000  # characters of a key or value of a configuration
MOST_VALUES = 200_000  # values in a spec or an answer
DEEPEST = 50

NAMING_CONVENTION = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """Datetimes with a time zone, stored in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} must have a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))


class FiniteFloat(TypeDecorator[float]):
    """A finite double in Python and in rows. SQLite would silently store NaN as NULL."""

    impl = Float(53)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return value

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[float | None], float | None]:
        return partial(self.process_bind_param, dialect=dialect)  # fewer calls, because a trial has 37 floats


class StorableText(TypeDecorator[str]):
    """A text type that replaces NUL and lone surrogates, and cuts long texts."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return shortened(value) if isinstance(value, str) else value  # SQLite stores any type


class Sentences(TypeDecorator[tuple[str, ...]]):
    """A tuple of sentences, stored as lines."""

    impl = StorableText
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        return None if value is None else "\n".join(" ".join(sentence.split()) for sentence in value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:
        if value is None:
            return None
        found = value.splitlines()
        if len(found) > MOST_SENTENCES:
            found = [*found[: MOST_SENTENCES - 1], f"… ({len(found):,} sentences)"]
        return tuple(found)


def json_kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    kinds = {type(None): "null", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def json_fault(value: object, *, of_scalars: bool) -> str | None:
    """The reason why a JSON value cannot be a stored object, or None.

    If ``of_scalars``, the object may hold only booleans, numbers, strings and nulls.
    """
    if not isinstance(value, dict):
        return f"{json_kind(value)}; expected an object"
    if not of_scalars:
        return _size_fault(value)
    if len(value) > MOST_KEYS:
        return f"{len(value):,} keys; expected at most {MOST_KEYS:,}"
    for name, one in value.items():
        if not (one is None or isinstance(one, bool | int | float | str)):
            return f"{shortened(name, 60)!r} is {json_kind(one)}; expected a boolean, number, string or null"
        longest = max(len(name), len(one) if isinstance(one, str) else 0)
        if longest > LONGEST_VALUE:
            return f"{shortened(name, 60)!r} has {longest:,} characters; expected at most {LONGEST_VALUE:,}"
    return None


def _size_fault(value: object) -> str | None:
    level, values = [value], 1
    for _ in range(DEEPEST):
        inside = [inner for one in level for inner in _inside(one)]
        values += len(inside)
        if values > MOST_VALUES:
            return f"more than {MOST_VALUES:,} values"
        level = [one for one in inside if isinstance(one, dict | list)]
        if not level:
            return None
    return f"more than {plural(DEEPEST, 'level')}"


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class StoredObject(TypeDecorator[Mapping[str, Any]]):
    """A JSON object within the bounds of `json_fault`."""

    impl = JSON
    cache_ok = True

    def __init__(self, *, of_scalars: bool = False) -> None:
        super().__init__(none_as_null=of_scalars)
        self.of_scalars = of_scalars

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        fault = None if value is None else json_fault(value, of_scalars=self.of_scalars)
        if fault is not None:
            raise ValueError(f"a stored object is invalid: {fault}")
        return value

    process_result_value = process_bind_param  # another program may have stored the value; the store names the row


def enum(kind: type[StrEnum], name: str) -> Enum:
    return Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


def _checked(rule: str, name: str, *columns: str) -> list[CheckConstraint]:
    return [CheckConstraint(rule.format(column), name=f"{column}_{name}") for column in columns]


# CHECKs of columns
positive = partial(_checked, "{0} > 0", "positive")
not_negative = partial(_checked, "{0} >= 0", "not_negative")
below_one = partial(_checked, "{0} >= 0 AND {0} < 1", "share")
at_most_one = partial(_checked, "{0} >= 0 AND {0} <= 1", "share")


def are_finite(*columns: ColumnElement[float]) -> ColumnElement[bool]:
    # Other programs may store infinities or NaN.
    return and_(*(column <= LARGEST for column in columns))


# Leases use the database's clock, because drivers' clocks may differ.


class database_now(FunctionElement[datetime]):  # noqa: N801 - named like an SQL function
    """The database's clock."""

    type = UtcDateTime()
    inherit_cache = True


compiles(database_now)(lambda *_, **__: "clock_timestamp()")
compiles(database_now, "sqlite")(lambda *_, **__: "strftime('%Y-%m-%d %H:%M:%f000', 'now')")


class database_started(FunctionElement[datetime]):  # noqa: N801 - named like an SQL function
    """The server's start time, or NULL on SQLite."""

    type = UtcDateTime()
    inherit_cache = True


compiles(database_started)(lambda *_, **__: "pg_postmaster_start_time()")
compiles(database_started, "sqlite")(lambda *_, **__: "NULL")


def now(connection: Connection) -> datetime:
    return connection.execute(select(database_now())).scalar_one()


Record = TypeVar("Record", bound="DataclassInstance")

PREFIXES: Mapping[type, str] = {
    Configuration: "",
    TrialOutcome: "",
    Target: "target_",
    Environment: "environment_",
    GradientNoise: "noise_",
    DeviceUse: "",
    StepTimeError: "error_",
}


@cache
def layout(record_type: type) -> dict[str, type | None]:
    """Return a record type's fields, each with the nested record type or None."""
    hints = typing.get_type_hints(record_type)
    return {field.name: _nested(hints[field.name]) for field in fields(record_type)}


def _nested(hint: object) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if option in PREFIXES), None)


def leaves(record_type: type, path: str = "", *, without: str | None = None) -> dict[str, tuple[str, Any]]:
    """Return the attribute path and Python type of each column, nested records included."""
    hints = typing.get_type_hints(record_type)
    found: dict[str, tuple[str, Any]] = {}
    for name, nested in layout(record_type).items():
        if name != without:
            inner = {"": (path + name, hints[name])} if nested is None else leaves(nested, f"{path}{name}.")
            prefix = name if nested is None else PREFIXES[nested]
            found |= {prefix + key: leaf for key, leaf in inner.items()}
    return found


def column_types(record_type: type, *, without: str | None = None) -> dict[str, Any]:
    return {name: kind for name, (_, kind) in leaves(record_type, without=without).items()}


def to_columns(record: DataclassInstance, prefix: str = "") -> dict[str, Any]:
    """Return the column values of a record. A nested record that is None adds no column."""
    columns: dict[str, Any] = {}
    for name, nested in layout(type(record)).items():
        value = getattr(record, name)
        if nested is None:
            columns[prefix + name] = dict(value) if isinstance(value, Mapping) else value
        elif value is not None:
            columns.update(to_columns(value, PREFIXES[nested]))
    return columns


def from_columns(
    record_type: type[Record], columns: Mapping[str, Any] | RowMapping, *, absent: str | None = None, prefix: str = ""
) -> Record:
    """Build a record from column values. The nested record ``absent`` is None."""
    names, own_columns, nested = _plan(record_type, prefix)
    values = dict(zip(names, own_columns(columns), strict=True))
    for name, inner in nested.items():
        values[name] = None if name == absent else from_columns(inner, columns, prefix=PREFIXES[inner])
    return record_type(**values)


@cache
def _plan(record_type: type, prefix: str) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], dict[str, type]]:
    # a record type's own fields, a function that reads the values of these fields from a row, and nested record types
    found = layout(record_type)
    nested = {name: inner for name, inner in found.items() if inner is not None}
    names = [name for name in found if name not in nested]
    return names, itemgetter(*(prefix + name for name in names)), nested


UNFINISHED = "state IN ('queued', 'running')"


class ProbeKind(StrEnum):
    """The kinds of probes."""

    MEMORY = "memory"
    STEP_TIME = "step_time"
    NOISE_SCALE = "noise_scale"


_ENUMS: Mapping[type[StrEnum], str] = {
    Goal: "target_goal",
    TrialState: "state",
    Phase: "phase",
    MemoryBasis: "peak_memory_basis",
    SecondsBasis: "seconds_basis",
    ProbeKind: "kind",
}

METADATA = MetaData(naming_convention=NAMING_CONVENTION)

# SQL types of the Python types that records' fields have.
_SQL_TYPES: Mapping[Any, TypeEngine[Any]] = {
    int: BigInteger(),
    float: FiniteFloat(),
    str: StorableText(),
    bool: Boolean(),
    datetime: UtcDateTime(),
    tuple[str, ...]: Sentences(),
    Mapping[str, object]: StoredObject(),
    Mapping[str, ParameterValue]: StoredObject(of_scalars=True),
    Mapping[str, float]: StoredObject(of_scalars=True),
    **{kind: enum(kind, name) for kind, name in _ENUMS.items()},
}


def column(name: str, kind: Any, *further: SchemaItem, **options: Any) -> Column[Any]:
    """Make a column for values of a Python type. ``X | None`` makes the column nullable."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    [own] = {*kinds} - {types.NoneType}
    return Column(name, _SQL_TYPES.get(own, own), *further, nullable=types.NoneType in kinds, **options)


def table(name: str, *parts: SchemaItem, holds: Sequence[type] = (), without: str | None = None) -> Table:
    """Make a table of ``parts`` plus a column for each remaining field of the records ``holds``."""
    own = {part.name: part for part in parts if isinstance(part, Column)}
    kinds = {field: kind for record in holds for field, kind in column_types(record, without=without).items()}
    further = (column(field, kind) for field, kind in kinds.items() if field not in own)
    return Table(name, METADATA, *own.values(), *further, *(part for part in parts if not isinstance(part, Column)))


def _id() -> Column[int]:
    return Column("id", Integer, primary_key=True)


def _reference(to: str, *, deletes: bool = True, **options: Any) -> Column[int]:
    # Id of a row of the table ``to``. If ``deletes``, deleting that row deletes the referring row; otherwise the
    # database refuses the deletion.
    key = ForeignKey(f"bss_{to}.id", ondelete="CASCADE" if deletes else "RESTRICT")
    return Column(f"{to}_id", Integer, key, **{"nullable": False, **options})


# ``digest`` hashes the whole record.
ENVIRONMENT_ROWS = table(
    "bss_environment",
    _id(),
    column("digest", str),
    column("libraries", tuple[str, ...], server_default=""),
    UniqueConstraint("digest"),
    holds=[Environment],
)

# ``revision`` counts changes; ``rewritten_at_revision`` is the last revision that deleted or rewrote rows. The last
# revision that stored a probe is ``probed_at_revision``. On PostgreSQL, only the login ``login`` and owners may rename,
# archive or delete the study.
STUDY_ROWS = table(
    "bss_study",
    _id(),
    column("created_at", datetime),
    column("archived_at", datetime | None),
    _reference("environment", deletes=False, nullable=True, index=True),
    *(column(f"{prefix}revision", int, server_default=text("0")) for prefix in ("", "rewritten_at_", "probed_at_")),
    column("login", str | None),
    UniqueConstraint("name"),
    CheckConstraint("name <> ''", name="name_not_empty"),
    CheckConstraint("length(objective) >= 1 AND length(objective) <= 64", name="objective_length"),
    holds=[NewStudy],
)

# A trial's configuration, its lease while running, and its outcome (zeros before the end). ``plan_id`` is the last plan
# that started or queued the trial; ``revision`` is the study's revision then.
TRIAL_ROWS = table(
    "bss_trial",
    _id(),
    _reference("study"),
    _reference("environment", deletes=False, nullable=True, index=True),
    column("revision", int, server_default=text("0")),
    column("plan_id", str | None),
    column("warnings", tuple[str, ...], server_default=""),
    UniqueConstraint("study_id", "number"),
    UniqueConstraint("plan_id"),
    ForeignKeyConstraint(
        ["study_id", "retry_of"],
        ["bss_trial.study_id", "bss_trial.number"],
        name="fk_bss_trial_retry_of",
        ondelete="CASCADE",
    ),
    Index(None, "study_id", "state"),
    Index(None, "study_id", "retry_of"),
    Index(None, "study_id", "revision"),
    CheckConstraint(f"(ended_at IS NULL) = ({UNFINISHED})", name="ended_at_when_finished"),
    CheckConstraint("time_to_target_s IS NULL OR state = 'reached'", name="time_to_target_s_when_reached"),
    CheckConstraint(
        "state <> 'running' OR (lease_owner IS NOT NULL AND lease_expires_at IS NOT NULL)",
        name="lease_when_running",
    ),
    CheckConstraint("state = 'queued' OR environment_id IS NOT NULL", name="environment_when_started"),
    CheckConstraint("retry_of < number", name="retry_of_earlier"),
    *positive("number", "batch_size", "micro_batch_size", "accumulation_steps", "world_size"),
    *positive("learning_rate", "train_seconds_limit", "eval_every_steps", "threads"),
    *not_negative("warmup_epochs", "weight_decay", "steps", "samples", "train_seconds"),
    *not_negative("evaluation_seconds", "warmup_seconds", "other_seconds", "wall_seconds"),
    *not_negative("tokens", "time_to_target_s", "steps_to_target", "steps_x_step_time_s"),
    *not_negative("skipped_steps", "energy_joules", "mean_power_watts", "noise_passes", "noise_seconds"),
    *not_negative("data_seconds"),
    *below_one("dropout", "label_smoothing"),
    *at_most_one("host_bound_share"),
    holds=[TrialRecord],
)

# Evaluations; append-only.
OBSERVATION_ROWS = table(
    "bss_observation",
    _reference("trial", primary_key=True),
    column("step", int, primary_key=True),
    *not_negative("step", "samples", "train_seconds"),
    holds=[Observation],
)


# Probes by batch size and by the split into micro-batches. Memory probes have ``batch_size`` = ``micro_batch_size``;
# only noise scales have ``step`` and ``metric``.
PROBE_ROWS = table(
    "bss_probe",
    _id(),
    _reference("study"),
    _reference("environment", deletes=False, index=True),
    column("kind", ProbeKind),
    column("measured_at", datetime),
    column("world_size", int, server_default=text("1")),
    column("contended", bool, server_default=false()),
    column("eval_every_steps", int | None),
    column("step", int | None),
    column("metric", float | None),
    UniqueConstraint(
        "study_id",
        "environment_id",
        "kind",
        "batch_size",
        "micro_batch_size",
        "world_size",
        name="uq_bss_probe_measurement",  # the convention's name would be too long for PostgreSQL
    ),
    *positive("batch_size", "micro_batch_size", "world_size", "step_seconds", "eval_every_steps"),
    *not_negative("evaluation_seconds", "steps_timed", "update_seconds", "step", "noise_passes", "noise_seconds"),
    *at_most_one("host_bound_share"),
    holds=[StepTime, NoiseMeasurement],
)

# Step times by visit; append-only. Environment and number identify a visit.
VISIT_ROWS = table(
    "bss_visit",
    _id(),
    _reference("study"),
    _reference("environment", deletes=False, index=True),
    column("measured_at", datetime),
    column("world_size", int, server_default=text("1")),
    column("contended", bool, server_default=false()),
    UniqueConstraint(
        "study_id",
        "environment_id",
        "visit",
        "batch_size",
        "micro_batch_size",
        "world_size",
        name="uq_bss_visit_measurement",  # the convention's name would be too long for PostgreSQL
    ),
    *positive("visit", "batch_size", "micro_batch_size", "world_size", "step_seconds"),
    *at_most_one("host_bound_share"),
    holds=[Visit],
)

# Answers, each with the study's ``stamp`` before its computation.
FINDING_ROWS = table(
    "bss_finding",
    _reference("study", primary_key=True),
    column("stamp", str),
    column("found_at", datetime),
    column("answer", Mapping[str, object]),
)

# The end of a trial's output.
LOG_ROWS = table("bss_log", _reference("trial", primary_key=True), column("text", str))

# Leases of tasks that only one driver may do at a time.
CLAIM_ROWS = table(
    "bss_claim",
    _reference("study", primary_key=True),
    column("name", str, primary_key=True),
    column("owner", str),
    column("expires_at", datetime),
)

# Measured branches, by a digest of all their inputs; append-only.
BRANCH_ROWS = table(
    "bss_branch",
    _id(),
    _reference("study"),
    _reference("environment", deletes=False, index=True),
    column("measured_at", datetime),
    UniqueConstraint("study_id", "environment_id", "digest"),
    *positive("batch_size", "micro_batch_size", "samples", "learning_rate"),
    *not_negative("start_samples"),
    holds=[BranchMeasurement],
)

# Specs; append-only. ``digest`` is `bssearch.records.spec_digest`.
SPEC_ROWS = table(
    "bss_spec",
    _reference("study", primary_key=True),
    column("digest", str, primary_key=True),
    column("spec", Mapping[str, object]),
)
