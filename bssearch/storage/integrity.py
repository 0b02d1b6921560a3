"""Search for rows that bssearch cannot have stored, after an error."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Enum,
    Float,
    Integer,
    Table,
    Text,
    TextClause,
    TypeDecorator,
    and_,
    case,
    cast,
    func,
    literal_column,
    or_,
    select,
    true,
    type_coerce,
)
from sqlalchemy.types import NullType, TypeEngine

from bssearch.storage.connection.engine import from_json
from bssearch.storage.models import (
    BRANCH_ROWS,
    ENVIRONMENT_ROWS,
    FINDING_ROWS,
    OBSERVATION_ROWS,
    PROBE_ROWS,
    SPEC_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    VISIT_ROWS,
    json_fault,
)

# Measured numbers lie between the inverse of this number and this number.
LARGEST = 1e300

LARGEST_WHOLE = 2**62

# Columns of JSON objects of booleans, numbers, texts and nulls.
OF_SCALARS = frozenset({"parameters", "sampled", "further_test_metrics"})

LONGEST = 60


def first_fault(connection: Connection, study_id: int) -> str | None:
    """Describe a study's first invalid row, or return None."""
    for table, words, label, scope in _rows_of(study_id):
        for column in table.columns:
            kind = storage_type(column.type)
            value: ColumnElement[Any] = type_coerce(column, NullType())
            if isinstance(kind, JSON) and connection.dialect.name == "postgresql":
                value = cast(column, Text)  # parsed by the database driver, JSON could fail unnamed
            wrong = _is_wrong(column, connection.dialect.name)
            query = select(label, value).select_from(table).where(scope, wrong).order_by(label)
            if (found := connection.execute(query.limit(1)).first()) is not None:
                why = _fault(found[1], column.name in OF_SCALARS) if isinstance(kind, JSON) else None
                return f"{words} {found[0]}: {column.name} = {shown(found[1])}{'' if why is None else f': {why}'}"
            if isinstance(kind, JSON):
                for known, found in connection.execute(select(label, value).select_from(table).where(scope)):
                    if found is not None and (why := _fault(found, column.name in OF_SCALARS)) is not None:
                        return f"{words} {known}: {column.name} = {shown(found)}: {why}"
        for broken, rule in _rules(table):
            query = select(label).select_from(table).where(scope, broken).limit(1)
            if (found := connection.execute(query).first()) is not None:
                return f"{words} {found[0]}: {rule}"
    return None


def _rules(table: Table) -> Iterator[tuple[ColumnElement[bool], str]]:
    for constraint in table.constraints:
        if isinstance(constraint, CheckConstraint) and isinstance(constraint.sqltext, TextClause):
            yield literal_column(f"NOT ({constraint.sqltext.text})"), f"not {constraint.sqltext.text}"
    for key in table.foreign_key_constraints:
        there = key.referred_table.alias()
        pairs = [(one.parent, there.c[one.column.name]) for one in key.elements]
        is_there = select(1).select_from(there).where(*(own == other for own, other in pairs)).exists()
        names = ", ".join(own.name for own, _ in pairs)
        yield and_(*(own.is_not(None) for own, _ in pairs), ~is_there), f"the row that {names} refers to is missing"


def _rows_of(study_id: int) -> Iterator[tuple[Table, str, ColumnElement[Any], ColumnElement[bool]]]:
    trial = TRIAL_ROWS
    yield STUDY_ROWS, "study", STUDY_ROWS.c.name, STUDY_ROWS.c.id == study_id
    environments = select(TRIAL_ROWS.c.environment_id).where(TRIAL_ROWS.c.study_id == study_id)
    environment = ENVIRONMENT_ROWS
    yield environment, "environment", environment.c.id, ENVIRONMENT_ROWS.c.id.in_(environments)
    yield trial, "trial", trial.c.number, TRIAL_ROWS.c.study_id == study_id
    observation = OBSERVATION_ROWS
    number = select(trial.c.number).where(trial.c.id == observation.c.trial_id).scalar_subquery()
    trials = select(TRIAL_ROWS.c.id).where(TRIAL_ROWS.c.study_id == study_id)
    yield observation, "an evaluation of trial", number, OBSERVATION_ROWS.c.trial_id.in_(trials)
    spec = SPEC_ROWS
    yield spec, "the spec", spec.c.digest, SPEC_ROWS.c.study_id == study_id
    for row, words in ((PROBE_ROWS, "a probe"), (VISIT_ROWS, "a visit"), (BRANCH_ROWS, "a branch")):
        yield row.__table__, f"{words} of batch size", row.__table__.c.batch_size, row.study_id == study_id
    finding = FINDING_ROWS
    found_at = type_coerce(finding.c.found_at, NullType())  # the stored value may not be a time
    yield finding, "the answer of", found_at, FINDING_ROWS.c.study_id == study_id


def _is_wrong(column: Column[Any], dialect: str) -> ColumnElement[bool]:
    raw = type_coerce(column, NullType())
    kind = storage_type(column.type)
    wrong: list[ColumnElement[bool]] = [] if column.nullable else [raw.is_(None)]
    wrong += [and_(raw.is_not(None), one) for one in _of_another_kind(raw, kind, dialect)]
    return or_(*wrong) if wrong else ~true()


def storage_type(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """SQL type under any `TypeDecorator`."""
    while isinstance(kind, TypeDecorator):
        kind = kind.impl_instance
    return kind


def _of_another_kind(raw: ColumnElement[Any], kind: TypeEngine[Any], dialect: str) -> Iterator[ColumnElement[bool]]:
    is_sqlite = dialect == "sqlite"  # SQLite accepts any type in any column; PostgreSQL does not
    stored = func.typeof(raw)
    if isinstance(kind, Float):
        if is_sqlite:
            yield stored.not_in(("real", "integer"))
        yield ~raw.between(-LARGEST, LARGEST)
        yield and_(raw != 0, raw.between(-1 / LARGEST, 1 / LARGEST))
    elif isinstance(kind, JSON):
        if is_sqlite:
            yield case((func.json_valid(raw) == 1, func.json_type(raw) != "object"), else_=true())
        else:
            yield func.json_typeof(raw) != "object"
    elif isinstance(kind, Enum):
        yield raw.not_in(kind.enums)
    elif not is_sqlite:
        return
    elif isinstance(kind, Boolean):
        yield raw.not_in((0, 1))
    elif isinstance(kind, Integer | BigInteger):
        yield or_(stored != "integer", ~raw.between(-LARGEST_WHOLE, LARGEST_WHOLE))
    elif isinstance(kind, DateTime):
        yield or_(stored != "text", func.julianday(raw).is_(None), raw < "1980-", raw > "9000-")
    else:
        yield stored != "text"


def _fault(found: Any, is_of_scalars: bool) -> str | None:
    try:
        value = from_json(found) if isinstance(found, str | bytes) else found
    except ValueError as error:
        return str(error)
    return json_fault(value, of_scalars=is_of_scalars)


def shown(value: object) -> str:
    """Short text of a value for a message."""
    if isinstance(value, str | bytes):
        value = value[: LONGEST + 1]  # else `repr` would escape 10 MB
    text = "null" if value is None else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
