"""Types of columns: what a database is given, and gives back, of a Python value; and their checks, with names."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
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
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from bssearch.records import Configuration, DeviceUse, Environment, GradientNoise, StepTimeError, Target, TrialOutcome

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST = 1e300
"""What no column of numbers reaches."""

NAMING_CONVENTION = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """A moment: takes aware datetimes, stores UTC, returns aware ones, from SQLite too."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the moment in UTC; raise `ValueError` where it does not say its offset."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} must have a time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the stored moment as an aware datetime."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FiniteFloat(TypeDecorator[float]):
    """A double that is a number: SQLite would quietly make NULL of a NaN."""

    impl = Float(53)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        """Return the value as it is; raise `ValueError` for NaN and the infinities."""
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        return value

    process_result_value = process_bind_param  # another program may have stored what is no number


class StorableText(TypeDecorator[str]):
    """A text without what a database cannot hold: NUL (PostgreSQL) and lone surrogates become replacement marks."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the text fit to be stored: what a worker wrote may hold anything."""
        if value is None:
            return None
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


class Sentences(TypeDecorator[tuple[str, ...]]):
    """Some sentences, one a line."""

    impl = StorableText
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        """Return the sentences as lines; a line break inside one becomes a space."""
        return None if value is None else "\n".join(" ".join(sentence.split()) for sentence in value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:
        """Return the lines."""
        return None if value is None else tuple(value.splitlines())


def enum(kind: type[StrEnum], name: str) -> Enum:
    """Return a text column type with a CHECK of its values, the same on every database."""
    return Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


def positive(*columns: str) -> list[CheckConstraint]:
    """Return the checks that columns are > 0."""
    return [CheckConstraint(f"{column} > 0", name=f"{column}_positive") for column in columns]


def not_negative(*columns: str) -> list[CheckConstraint]:
    """Return the checks that columns are >= 0."""
    return [CheckConstraint(f"{column} >= 0", name=f"{column}_not_negative") for column in columns]


def are_finite(*columns: ColumnElement[float] | InstrumentedAttribute[float]) -> ColumnElement[bool]:
    """Return the condition that columns hold numbers, for rows that something else may have written.

    An infinity is a number to SQLite and PostgreSQL, and to the latter NaN is larger than all.
    """
    return and_(*(column <= LARGEST for column in columns))


def below_one(*columns: str) -> list[CheckConstraint]:
    """Return the checks that columns are >= 0 and < 1."""
    return [CheckConstraint(f"{column} >= 0 AND {column} < 1", name=f"{column}_share") for column in columns]


def at_most_one(*columns: str) -> list[CheckConstraint]:
    """Return the checks that columns are >= 0 and <= 1."""
    return [CheckConstraint(f"{column} >= 0 AND {column} <= 1", name=f"{column}_share") for column in columns]


# The database's clock, by which leases are measured whatever the clocks of the drivers say.


class database_now(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The time of the database's clock, in UTC."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_now)
def _server_now(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    return "clock_timestamp()"


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


class database_started(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The time at which the database's server was started; NULL where there is no server."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_started)
def _server_started(element: database_started, compiler: SQLCompiler, **options: Any) -> str:
    return "pg_postmaster_start_time()"


@compiles(database_started, "sqlite")
def _sqlite_started(element: database_started, compiler: SQLCompiler, **options: Any) -> str:
    return "NULL"


def now(connection: Connection) -> datetime:
    """Return the database's time."""
    return connection.execute(select(database_now())).scalar_one()


# Records to columns and back, by the names of their fields.

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
"""The records that lie inside others; an environment has its own table and lies so only in a joined row, and the error
of a step time is not stored: it follows from the visits."""


@cache
def layout(record_type: type) -> dict[str, type | None]:
    """Return the record's fields; those that hold a record of `PREFIXES` with its type."""
    hints = typing.get_type_hints(record_type)
    return {field.name: _nested(hints[field.name]) for field in fields(record_type)}


def _nested(hint: object) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if option in PREFIXES), None)


def column_types(record_type: type, *, without: str | None = None) -> dict[str, Any]:
    """Return the columns that hold a record's fields, with their types, but for the field ``without``; in order."""
    hints = typing.get_type_hints(record_type)
    found: dict[str, Any] = {}
    for name, nested in layout(record_type).items():
        if name != without:
            inner = {"": hints[name]} if nested is None else column_types(nested)
            prefix = name if nested is None else PREFIXES[nested]
            found |= {prefix + key: kind for key, kind in inner.items()}
    return found


def to_columns(record: DataclassInstance, prefix: str = "") -> dict[str, Any]:
    """Return the column values of a record; of an inner record that is None there are none."""
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
    """Return the record whose fields these columns hold; the inner record ``absent`` is None."""
    values: dict[str, Any] = {}
    for name, nested in layout(record_type).items():
        if name == absent:
            values[name] = None
        elif nested is None:
            values[name] = columns[prefix + name]
        else:
            values[name] = from_columns(nested, columns, prefix=PREFIXES[nested])
    return record_type(**values)
