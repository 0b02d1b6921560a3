"""The rows of a study by kind, and the values that bssearch may store."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
)
from sqlalchemy import (
    JSON,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Float,
    Integer,
    RowMapping,
    Select,
    Table,
    Text,
    TextClause,
    TypeDecorator,
    and_,
    cast,
    literal_column,
    select,
    type_coerce,
    union,
)
from sqlalchemy.types import NullType, TypeEngine

from bssearch.errors import UsageError, problem_in_words
from bssearch.records.text import LONGEST_TEXT
from bssearch.spec.reader import shortened
from bssearch.storage.connection.engine import from_json
from bssearch.storage.models import (
    BRANCH_ROWS,
    ENVIRONMENT_ROWS,
    FINDING_ROWS,
    LARGEST,
    LOG_ROWS,
    MOST_SENTENCES,
    OBSERVATION_ROWS,
    PROBE_ROWS,
    SPEC_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    VISIT_ROWS,
    Sentences,
    StorableText,
    json_fault,
)

LARGEST_WHOLE = 2**62

# Columns that a study file leaves out.
OWN = frozenset(
    {
        *("id", "study_id", "archived_at", "login", "stamp", "plan_id"),
        *("revision", "rewritten_at_revision", "probed_at_revision", "lease_owner", "lease_expires_at"),
    }
)

NAMES = {"environment_id": "environment", "trial_id": "trial"}

# Parts of a finding that trials cannot reproduce.
KEPT_OF_FINDINGS = ("quick", "search_end")

# Trial numbers are below this bound, so that further trials fit.
MOST_TRIALS = 2**40

_FIRST, _END = datetime(1980, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


class Kind(StrEnum):
    """Rows refer only to rows of the same or an earlier kind."""

    ENVIRONMENT = "environment"
    STUDY = "study"
    SPEC = "spec"
    TRIAL = "trial"
    OBSERVATION = "observation"
    LOG = "log"
    PROBE = "probe"
    VISIT = "visit"
    BRANCH = "branch"
    FINDING = "finding"


@dataclass(frozen=True, slots=True)
class Layout:
    """A kind's table, key fields, columns by field, and models of exported and of stored rows."""

    table: Table
    keys: tuple[str, ...]
    columns: Mapping[str, Column[Any]]
    exported: type[BaseModel]
    stored: type[BaseModel]


def first_fault(connection: Connection, study_id: int) -> str | None:
    """Describe a study's first invalid row, or return None."""
    dialect = connection.dialect.name
    for kind, layout in LAYOUTS.items():
        raw = {name: _raw(one, dialect) for name, one in columns_of(kind).items()}
        query = rows_of(kind, study_id, raw)
        columns = layout.columns.items()
        loaded = [(name, one) for name, one in columns if not isinstance(_storage_type(one.type), Float | Integer)]
        for row in connection.execute(query).mappings():
            try:
                layout.stored.model_validate({**row, **{name: _loaded(column, row[name]) for name, column in loaded}})
            except ValidationError as error:
                return _problem(kind, row, error)
        for broken, rule in _rules(layout.table):
            if (found := connection.execute(query.where(broken).limit(1)).mappings().first()) is not None:
                return f"{words(kind, found)}: {rule}"
    return None


def checked(kind: Kind, row: object) -> dict[str, Any]:
    """Validate an exported row, or raise `UsageError`."""
    try:
        return vars(LAYOUTS[kind].exported.model_validate(row))
    except ValidationError as error:
        raise UsageError(_problem(kind, row if isinstance(row, Mapping) else {}, error)) from None


def _problem(kind: Kind, row: Mapping[str, Any] | RowMapping, error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "row"
    value = row.get(place, first["input"])
    return f"{words(kind, row)}: {place} = {shortened(value)}: {problem_in_words(first)}"


def words(kind: Kind, row: Mapping[str, Any] | RowMapping) -> str:
    """Name a row in messages, such as ``trial 3``."""
    if kind in (Kind.STUDY, Kind.TRIAL):
        return f"{kind} {shortened(row.get('name' if kind is Kind.STUDY else 'number'))}"
    keys = ", ".join(f"{name} {shortened(row.get(name))}" for name in LAYOUTS[kind].keys)
    return f"{kind} ({keys})" if keys else str(kind)


def columns_of(kind: Kind) -> dict[str, ColumnElement[Any]]:
    """Return a kind's columns by field. Digests and trial numbers replace the ids of other rows."""
    replaced = {"environment": ENVIRONMENT_ROWS.c.digest, "trial": TRIAL_ROWS.c.number}
    return {name: replaced.get(name, column) for name, column in LAYOUTS[kind].columns.items()}


def rows_of(kind: Kind, study_id: int, columns: Mapping[str, ColumnElement[Any]]) -> Select[Any]:
    table, keys = LAYOUTS[kind].table, columns_of(kind)
    query = select(*(column.label(name) for name, column in columns.items()))
    if "environment_id" in table.c:
        query = query.join(ENVIRONMENT_ROWS, table.c.environment_id == ENVIRONMENT_ROWS.c.id, isouter=True)
    if "trial_id" in table.c:
        query = query.join(TRIAL_ROWS, table.c.trial_id == TRIAL_ROWS.c.id)
    return query.where(_scope(kind, study_id)).order_by(*(keys[name] for name in LAYOUTS[kind].keys))


def _scope(kind: Kind, study_id: int) -> ColumnElement[bool]:
    table = LAYOUTS[kind].table
    if kind is Kind.ENVIRONMENT:
        tables = [one.table for one in LAYOUTS.values() if {"environment_id", "study_id"} <= {*one.table.c.keys()}]
        used = [select(one.c.environment_id).where(one.c.study_id == study_id) for one in tables]
        return table.c.id.in_(union(select(STUDY_ROWS.c.environment_id).where(STUDY_ROWS.c.id == study_id), *used))
    if kind is Kind.STUDY:
        return table.c.id == study_id
    return (TRIAL_ROWS if "trial_id" in table.c else table).c.study_id == study_id


def _raw(column: ColumnElement[Any], dialect: str) -> ColumnElement[Any]:
    # The database driver would parse JSON, and fail without naming the row.
    is_parsed = dialect == "postgresql" and isinstance(_storage_type(column.type), JSON)
    return cast(column, Text) if is_parsed else type_coerce(column, NullType())


def _loaded(column: Column[Any], raw: Any) -> Any:
    # Convert a value to Python, because SQLite columns hold any type. The model refuses values that stay unconverted.
    kind = _storage_type(column.type)
    with suppress(ValueError, TypeError, AttributeError, LookupError):
        if isinstance(column.type, StorableText | Sentences):
            return column.type.process_result_value(raw, None)  # type: ignore[arg-type]
        if isinstance(kind, JSON):
            return from_json(raw)
        if isinstance(kind, DateTime):
            return datetime.fromisoformat(raw).replace(tzinfo=UTC)
        if isinstance(kind, Boolean):
            return {0: False, 1: True}[raw]
    return raw


def _storage_type(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    while isinstance(kind, TypeDecorator):
        kind = kind.impl_instance
    return kind


def _rules(table: Table) -> Iterator[tuple[ColumnElement[bool], str]]:
    same = table.alias()  # inside a query of this table alone, a rule's column names are not ambiguous
    row = select(1).select_from(same).where(*(same.c[one.name] == one for one in table.primary_key))
    for constraint in table.constraints:
        if isinstance(constraint, CheckConstraint) and isinstance(constraint.sqltext, TextClause):
            rule = constraint.sqltext.text
            yield row.where(literal_column(f"NOT ({rule})")).exists(), f"the row breaks the rule {rule}"
    for key in table.foreign_key_constraints:
        there = key.referred_table.alias()
        pairs = [(one.parent, there.c[one.column.name]) for one in key.elements]
        is_there = select(1).select_from(there).where(*(own == other for own, other in pairs)).exists()
        names = ", ".join(own.name for own, _ in pairs)
        yield and_(*(own.is_not(None) for own, _ in pairs), ~is_there), f"the row that {names} refers to is missing"


def _bounded(value: float) -> float:
    if not (value == 0 or 1 / LARGEST <= abs(value) <= LARGEST):
        raise ValueError(f"must be 0, or have an absolute value from {1 / LARGEST:g} to {LARGEST:g}")
    return value + 0.0  # SQLite does not keep the sign of −0.0


def _moment(value: object) -> object:
    # Pydantic would also take numbers, as seconds since 1970.
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def _storable(value: str) -> str:
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"the string has {len(value):,} characters; expected at most {LONGEST_TEXT:,}")
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _object(value: Any, *, of_scalars: bool = False) -> dict[str, Any]:
    if (fault := json_fault(value, of_scalars=of_scalars)) is not None:
        raise ValueError(fault)
    return value  # type: ignore[no-any-return]


def _kept(value: Any) -> dict[str, Any]:
    found = _object(value)
    if set(found) != set(KEPT_OF_FINDINGS) or not all(one is None or isinstance(one, dict) for one in found.values()):
        raise ValueError(f"must hold {' and '.join(KEPT_OF_FINDINGS)}, each an object or null")
    return found


_Text = Annotated[str, Field(strict=True), AfterValidator(_storable)]
_Line = Annotated[_Text, AfterValidator(lambda value: " ".join(value.split()))]
_Scalars = Annotated[dict[str, Any], PlainValidator(partial(_object, of_scalars=True))]

_TYPES: Mapping[type, Any] = {
    int: Annotated[int, Field(strict=True, ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)],
    str: _Text,
    bool: Annotated[bool, Field(strict=True)],
    float: Annotated[float, Field(strict=True), AfterValidator(_bounded)],
    datetime: Annotated[AwareDatetime, Field(strict=True, ge=_FIRST, lt=_END), BeforeValidator(_moment)],
    dict: Annotated[dict[str, Any], PlainValidator(_object)],
}

_SPECIAL: Mapping[str, Any] = {
    "environment_id": _Text,
    "number": Annotated[int, Field(strict=True, ge=1, lt=MOST_TRIALS)],
    **dict.fromkeys(("parameters", "sampled", "further_test_metrics"), _Scalars),
}

_ABSENT: Mapping[type, Any] = {bool: False, int: 1}  # files of earlier versions lack `contended` and `world_size`


def _field(column: Column[Any]) -> tuple[Any, Any]:
    if isinstance(column.type, Sentences):
        return Annotated[tuple[_Line, ...], Field(max_length=MOST_SENTENCES)], ()
    kind = _storage_type(column.type)
    python_type = dict if isinstance(kind, JSON) else kind.python_type  # SQLAlchemy 2.1 says `object` for JSON
    found = _SPECIAL.get(column.name, _TYPES.get(python_type, python_type))
    if column.nullable:
        return found | None, None
    return found, ... if column.server_default is None else _ABSENT.get(python_type, ...)


def _layout(kind: Kind, table: Table, *keys: str) -> Layout:
    columns = {NAMES.get(column.name, column.name): column for column in table.columns}
    stored: dict[str, Any] = {name: _field(column) for name, column in columns.items()}
    exported = {name: one for name, one in sorted(stored.items()) if name not in OWN}
    if kind is Kind.FINDING:
        exported["answer"] = Annotated[dict[str, Any], PlainValidator(_kept)], ...
    strict = ConfigDict(extra="forbid")
    models = (create_model(kind.value, __config__=strict, **one) for one in (exported, stored))
    return Layout(table, keys, columns, *models)


_SPLIT = "environment", "batch_size", "micro_batch_size", "world_size"

LAYOUTS: Mapping[Kind, Layout] = {
    Kind.ENVIRONMENT: _layout(Kind.ENVIRONMENT, ENVIRONMENT_ROWS, "digest"),
    Kind.STUDY: _layout(Kind.STUDY, STUDY_ROWS),
    Kind.SPEC: _layout(Kind.SPEC, SPEC_ROWS, "digest"),
    Kind.TRIAL: _layout(Kind.TRIAL, TRIAL_ROWS, "number"),
    Kind.OBSERVATION: _layout(Kind.OBSERVATION, OBSERVATION_ROWS, "trial", "step"),
    Kind.LOG: _layout(Kind.LOG, LOG_ROWS, "trial"),
    Kind.PROBE: _layout(Kind.PROBE, PROBE_ROWS, "kind", *_SPLIT),
    Kind.VISIT: _layout(Kind.VISIT, VISIT_ROWS, "visit", *_SPLIT),
    Kind.BRANCH: _layout(Kind.BRANCH, BRANCH_ROWS, "environment", "digest"),
    Kind.FINDING: _layout(Kind.FINDING, FINDING_ROWS),
}
