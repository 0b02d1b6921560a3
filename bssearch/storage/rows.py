"""Records to columns and back, by the names of their fields.

A record inside a record lies in the same row: its fields are columns, prefixed where `PREFIXES` says so.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import RowMapping

from bssearch.records import Configuration, DeviceUse, Environment, GradientNoise, StepTimeError, Target, TrialOutcome

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
