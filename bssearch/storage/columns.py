"""Column types, checks, and the mapping of records to columns."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    JSON,
    CheckConstraint,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Enum,
    Float,
    RowMapping,
    Text,
    TypeDecorator,
    and_,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.functions import FunctionElement

from bssearch.records import Configuration, DeviceUse, Environment, GradientNoise, StepTimeError, Target, TrialOutcome
from bssearch.records.text import plural, shortened, storable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST = 1e300

# Bounds of stored values: whatever a row holds, a command reads it within a second.
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
    """Aware datetimes in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; raise `ValueError` without a time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} must have a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Read a stored time as UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FiniteFloat(TypeDecorator[float]):
    """A finite double; SQLite would silently store NaN as NULL."""

    impl = Float(53)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        """Raise `ValueError` for NaN and infinities."""
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return value

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[float | None], float | None]:
        """Refuse NaN and infinities in rows, too."""
        return partial(self.process_bind_param, dialect=dialect)  # one call per value: a trial has 37 floats


class StorableText(TypeDecorator[str]):
    """Text; NUL and lone surrogates become replacement characters, long texts are cut."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Make a text storable."""
        return None if value is None else storable(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Cut a text that another program stored."""
        return shortened(value) if isinstance(value, str) else value  # SQLite stores any type


class Sentences(TypeDecorator[tuple[str, ...]]):
    """Sentences, one per line."""

    impl = StorableText
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        """Join sentences to lines."""
        return None if value is None else "\n".join(" ".join(sentence.split()) for sentence in value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:
        """Split a text into sentences."""
        if value is None:
            return None
        found = value.splitlines()
        if len(found) > MOST_SENTENCES:
            found = [*found[: MOST_SENTENCES - 1], f"… ({len(found):,} sentences)"]
        return tuple(found)


def json_kind(value: object) -> str:
    """Kind of a JSON value in words."""
    if isinstance(value, bool):
        return "a boolean"
    kinds = {type(None): "null", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def json_fault(value: object, *, of_scalars: bool) -> str | None:
    """Reason why a JSON value cannot be a stored object, or None.

    ``of_scalars``: the object may hold only booleans, numbers, texts and nulls.
    """
    if not isinstance(value, dict):
        return f"{json_kind(value)}; expected an object"
    if not of_scalars:
        return _size_fault(value)
    if len(value) > MOST_KEYS:
        return f"{len(value):,} keys; at most {MOST_KEYS:,}"
    for name, one in value.items():
        if not (one is None or isinstance(one, bool | int | float | str)):
            return f"{shortened(name, 60)!r} is {json_kind(one)}; expected a boolean, number, text or null"
        longest = max(len(name), len(one) if isinstance(one, str) else 0)
        if longest > LONGEST_VALUE:
            return f"{shortened(name, 60)!r} has {longest:,} characters; at most {LONGEST_VALUE:,}"
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
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class StoredObject(TypeDecorator[Mapping[str, Any]]):
    """A JSON object within the bounds of `json_fault`."""

    impl = JSON
    cache_ok = True

    def __init__(self, *, of_scalars: bool = False) -> None:
        super().__init__(none_as_null=of_scalars)
        self.of_scalars = of_scalars

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Raise `ValueError` for a value that could not be read again."""
        fault = None if value is None else json_fault(value, of_scalars=self.of_scalars)
        if fault is not None:
            raise ValueError(f"a stored object is {fault}")
        return value

    process_result_value = process_bind_param  # another program may have stored the value; the store names the row


def enum(kind: type[StrEnum], name: str) -> Enum:
    """Text type with a CHECK of allowed values."""
    return Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


def positive(*columns: str) -> list[CheckConstraint]:
    """CHECKs for > 0."""
    return [CheckConstraint(f"{column} > 0", name=f"{column}_positive") for column in columns]


def not_negative(*columns: str) -> list[CheckConstraint]:
    """CHECKs for >= 0."""
    return [CheckConstraint(f"{column} >= 0", name=f"{column}_not_negative") for column in columns]


def are_finite(*columns: ColumnElement[float] | InstrumentedAttribute[float]) -> ColumnElement[bool]:
    """Condition that columns are finite: other programs may store infinities or NaN."""
    return and_(*(column <= LARGEST for column in columns))


def below_one(*columns: str) -> list[CheckConstraint]:
    """CHECKs for the range [0, 1)."""
    return [CheckConstraint(f"{column} >= 0 AND {column} < 1", name=f"{column}_share") for column in columns]


def at_most_one(*columns: str) -> list[CheckConstraint]:
    """CHECKs for the range [0, 1]."""
    return [CheckConstraint(f"{column} >= 0 AND {column} <= 1", name=f"{column}_share") for column in columns]


# Leases use the database's clock, because drivers' clocks may differ.


class database_now(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The database's clock."""

    type = UtcDateTime()
    inherit_cache = True


compiles(database_now)(lambda *_, **__: "clock_timestamp()")
compiles(database_now, "sqlite")(lambda *_, **__: "strftime('%Y-%m-%d %H:%M:%f000', 'now')")


class database_started(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The server's start; NULL on SQLite."""

    type = UtcDateTime()
    inherit_cache = True


compiles(database_started)(lambda *_, **__: "pg_postmaster_start_time()")
compiles(database_started, "sqlite")(lambda *_, **__: "NULL")


def now(connection: Connection) -> datetime:
    """The database's time."""
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
    """Fields of a record type, each with its nested record type or None."""
    hints = typing.get_type_hints(record_type)
    return {field.name: _nested(hints[field.name]) for field in fields(record_type)}


def _nested(hint: object) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if option in PREFIXES), None)


def column_types(record_type: type, *, without: str | None = None) -> dict[str, Any]:
    """Columns of a record type, in order, with their Python types."""
    hints = typing.get_type_hints(record_type)
    found: dict[str, Any] = {}
    for name, nested in layout(record_type).items():
        if name != without:
            inner = {"": hints[name]} if nested is None else column_types(nested)
            prefix = name if nested is None else PREFIXES[nested]
            found |= {prefix + key: kind for key, kind in inner.items()}
    return found


def paths(record_type: type, path: str = "") -> dict[str, str]:
    """Columns of a record type and its nested records, with the paths of their attributes."""
    prefix = PREFIXES[record_type]
    found: dict[str, str] = {}
    for name, nested in layout(record_type).items():
        found |= {prefix + name: path + name} if nested is None else paths(nested, f"{path}{name}.")
    return found


def to_columns(record: DataclassInstance, prefix: str = "") -> dict[str, Any]:
    """Column values of a record; a nested record that is None adds none."""
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
    """Build a record from its columns; the nested record ``absent`` is None."""
    names, own_columns, nested = _plan(record_type, prefix)
    values = dict(zip(names, own_columns(columns), strict=True))
    for name, inner in nested.items():
        values[name] = None if name == absent else from_columns(inner, columns, prefix=PREFIXES[inner])
    return record_type(**values)


@cache
def _plan(record_type: type, prefix: str) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], dict[str, type]]:
    # a record's own fields, a function that takes their values from a row, and its nested records
    found = layout(record_type)
    nested = {name: inner for name, inner in found.items() if inner is not None}
    names = [name for name in found if name not in nested]
    return names, itemgetter(*(prefix + name for name in names)), nested
