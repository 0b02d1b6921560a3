"""What of a study travels from one database into another: its rows by kind, with their columns as JSON values.

The columns are those of the tables. What is one database's own stays behind (`OWN`): ids, revisions, leases, whether
the study is put away, and who has rights on it there. A row names another by what that is known by: its
environment by the digest, its trial by the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Enum,
    Float,
    Integer,
    Table,
    Text,
    TypeDecorator,
)

from bssearch.errors import UsageError
from bssearch.storage.branches import BranchRow
from bssearch.storage.columns import Sentences
from bssearch.storage.integrity import LARGEST, LARGEST_WHOLE, LONGEST, OF_SCALARS, is_scalar
from bssearch.storage.models import (
    EnvironmentRow,
    FindingRow,
    LogRow,
    ObservationRow,
    ProbeRow,
    StudyRow,
    TrialRow,
    VisitRow,
)
from bssearch.storage.specs import SpecRow

Row = Mapping[str, Any]
"""The columns of a row that travel, as JSON values."""

OWN = frozenset(
    {
        *("id", "study_id", "archived_at", "login", "stamp"),
        *("revision", "rewritten_at_revision", "probed_at_revision", "lease_owner", "lease_expires_at"),
    }
)
"""The columns of a database's own: they do not travel."""

REFERENCES = {"environment_id": "environment", "trial_id": "trial"}
"""The columns that hold an id, with the name of what stands for it."""

KEPT_OF_FINDINGS = ("quick", "search_end")
"""What travels of a finding: what cannot be made anew from the trials."""

DEEPEST = 50
"""Levels of a JSON object: a choice, that of a spec."""

FIRST_YEAR, LAST_YEAR = 1980, 9000
"""No moment lies outside these years: a choice."""


class Kind(StrEnum):
    """The kinds of rows, in the order in which they are written: what a row refers to comes before it."""

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
class Field:
    """A column that travels: its ``name`` in a row, and how its value becomes a JSON value and back."""

    name: str
    column: Column[Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    is_required: bool
    may_lack: bool
    """Whether a row of an earlier version may be without it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a kind: their table, the names that they are known by within a study, and their fields by name.

    ``most`` is how many of them a study may have: a choice, far beyond what one has.
    """

    kind: Kind
    table: Table
    keys: tuple[str, ...]
    most: int
    fields: Mapping[str, Field] = field(default_factory=dict)

    def key(self, row: Row) -> tuple[Any, ...]:
        """Return what a row is known by within its study."""
        return tuple(row[name] for name in self.keys)

    def words(self, row: Row) -> str:
        """Return what a row is called in a message."""
        if self.kind is Kind.TRIAL:
            return f"trial {shown(row.get('number'))}"
        return f"{self.kind} ({', '.join(f'{name} {shown(row.get(name))}' for name in self.keys)})"

    def encoded(self, values: Iterable[Any]) -> dict[str, Any]:
        """Return the JSON values of a row as a database gives it, in the order of the fields, by their names."""
        pairs = zip(self.fields.items(), values, strict=False)  # a row's ids may follow
        return {name: None if value is None else one.encode(value) for (name, one), value in pairs}

    def decoded(self, row: object, *, complete: bool = True) -> dict[str, Any]:
        """Return the values of a row by the names of its fields; a reference stays the text or number that it is.

        With ``complete`` no field may be lacking; else those that are not required are left out. Raises `UsageError`
        for what bssearch has not written so.
        """
        if not isinstance(row, dict):
            raise UsageError(f"{self.kind}: {shown(row)} must be an object")
        if row.keys() != self.fields.keys():
            self._check_columns(row, complete)
        values = {}
        for name, value in row.items():
            one = self.fields[name]
            try:
                if value is None and one.is_required:
                    raise ValueError("must be there")
                values[name] = None if value is None else one.decode(value)
            except ValueError as error:
                raise UsageError(f"{self.words(row)}: {name} = {shown(value)} {error}") from None
        return values

    def _check_columns(self, row: Row, complete: bool) -> None:
        unknown = sorted(row.keys() - self.fields.keys())
        if unknown:
            raise UsageError(f"{self.kind}: {shown(unknown[0])} is no column of a row of this kind")
        for name, one in self.fields.items():
            if name not in row and (complete or not one.may_lack):
                raise UsageError(f"{self.words(row)}: {name} is missing")


def shown(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _same(value: Any) -> Any:
    return value


def _encode_float(value: float) -> float:
    return float(value) + 0.0  # SQLite does not keep the sign of −0.0


def _encode_moment(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds")


def _encode_object(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(value)


def _decode_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not (value == 0 or 1 / LARGEST <= abs(value) <= LARGEST):
        raise ValueError(f"must be 0 or between {1 / LARGEST:g} and {LARGEST:g}, but for its sign")
    return float(value)


def _decode_whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    if abs(value) > LARGEST_WHOLE:
        raise ValueError(f"must be at most {LARGEST_WHOLE:,}, but for its sign")
    return value


def _decode_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _decode_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _decode_sentences(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("must be a list of texts")
    return tuple(" ".join(_decode_text(one).split()) for one in value)


def _decode_moment(value: object) -> datetime:
    if not isinstance(value, str):
        raise ValueError("must be a moment as a text")
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("must be a moment, as 2026-01-31T12:00:00.000000+00:00") from None
    if moment.tzinfo is None:
        raise ValueError("must say its offset from UTC")
    if not FIRST_YEAR <= moment.year < LAST_YEAR:
        raise ValueError(f"must lie between the years {FIRST_YEAR} and {LAST_YEAR}")
    return moment.astimezone(UTC)


def _decode_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    _check_depth(value, DEEPEST)
    return value


def _decode_scalars(value: object) -> dict[str, Any]:
    found = _decode_object(value)
    if not all(map(is_scalar, found.values())):
        raise ValueError("must hold truths, numbers, texts and nulls alone")
    return found


def _check_depth(value: object, levels: int) -> None:
    if isinstance(value, dict | list):
        if levels == 0:
            raise ValueError(f"must have at most {DEEPEST} levels")
        for one in value.values() if isinstance(value, dict) else value:
            _check_depth(one, levels - 1)


def _encode_finding(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.get(name) for name in KEPT_OF_FINDINGS}


def _decode_finding(value: object) -> dict[str, Any]:
    found = _decode_object(value)
    if set(found) != set(KEPT_OF_FINDINGS):
        raise ValueError(f"must have {' and '.join(KEPT_OF_FINDINGS)} alone")
    if not all(one is None or isinstance(one, dict) for one in found.values()):
        raise ValueError("must hold objects alone")
    return {"made_by": 0, "answer": None, **found}


def _choice(kind: Enum) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    by_value = {one.value: one for one in kind.enum_class or ()}

    def decode(value: object) -> Any:
        if not isinstance(value, str) or value not in by_value:
            raise ValueError(f"must be one of {', '.join(by_value)}")
        return by_value[value]

    return lambda value: value.value, decode


def _codec(column: Column[Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return how a column's value becomes a JSON value, and how it is read from one."""
    if column is FindingRow.__table__.c.answer:
        return _encode_finding, _decode_finding
    if isinstance(column.type, Sentences):
        return list, _decode_sentences
    kind: Any = column.type
    while isinstance(kind, TypeDecorator):
        kind = kind.impl_instance
    if isinstance(kind, Enum):
        return _choice(kind)
    if isinstance(kind, JSON):
        return _encode_object, _decode_scalars if column.name in OF_SCALARS else _decode_object
    if isinstance(kind, DateTime):
        return _encode_moment, _decode_moment
    if isinstance(kind, Float):
        return _encode_float, _decode_float
    if isinstance(kind, Boolean):
        return _same, _decode_flag
    if isinstance(kind, Integer | BigInteger):
        return _same, _decode_whole
    if isinstance(kind, Text):
        return _same, _decode_text
    raise TypeError(f"{column}: no way is known for {column.type!r} to travel")


def _fields(table: Table) -> Iterator[Field]:
    for column in table.columns:
        if column.name in OWN:
            continue
        required = not column.nullable
        if column.name in REFERENCES:
            decode = _decode_text if column.name == "environment_id" else _decode_whole
            yield Field(REFERENCES[column.name], column, _same, decode, required, may_lack=False)
        else:
            may_lack = not required or column.server_default is not None
            yield Field(column.name, column, *_codec(column), required, may_lack)


def _layout(kind: Kind, table: Table, most: int, *keys: str) -> Layout:
    fields = sorted(_fields(table), key=lambda one: one.name)
    return Layout(kind, table, keys, most, {one.name: one for one in fields})


_SPLIT = "environment", "batch_size", "micro_batch_size"

LAYOUTS: Mapping[Kind, Layout] = {
    one.kind: one
    for one in (
        _layout(Kind.ENVIRONMENT, EnvironmentRow.__table__, 100_000, "digest"),
        _layout(Kind.STUDY, StudyRow.__table__, 1, "name"),
        _layout(Kind.SPEC, SpecRow.__table__, 100_000, "digest"),
        _layout(Kind.TRIAL, TrialRow.__table__, 10_000_000, "number"),
        _layout(Kind.OBSERVATION, ObservationRow.__table__, 10_000_000_000, "trial", "step"),
        _layout(Kind.LOG, LogRow.__table__, 10_000_000, "trial"),
        _layout(Kind.PROBE, ProbeRow.__table__, 1_000_000, "kind", *_SPLIT),
        _layout(Kind.VISIT, VisitRow.__table__, 1_000_000, "visit", *_SPLIT),
        _layout(Kind.BRANCH, BranchRow.__table__, 1_000_000, "environment", "digest"),
        _layout(Kind.FINDING, FindingRow.__table__, 1, "found_at"),
    )
}
"""All kinds of rows, in their order."""
