"""The rows of a study that travel to another database, and valid values.

Rows name environments by digest and trials by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, create_model
from sqlalchemy import Column, Table

from bssearch.errors import UsageError
from bssearch.records.text import LONGEST_TEXT
from bssearch.storage.columns import MOST_SENTENCES, Sentences, json_fault
from bssearch.storage.integrity import LARGEST, LARGEST_WHOLE, OF_SCALARS, shown, storage_type
from bssearch.storage.models import (
    BranchRow,
    EnvironmentRow,
    FindingRow,
    LogRow,
    ObservationRow,
    ProbeRow,
    SpecRow,
    StudyRow,
    TrialRow,
    VisitRow,
)

# Columns that do not travel.
OWN = frozenset(
    {
        *("id", "study_id", "archived_at", "login", "stamp", "plan_id"),
        *("revision", "rewritten_at_revision", "probed_at_revision", "lease_owner", "lease_expires_at"),
    }
)

NAMES = {"environment_id": "environment", "trial_id": "trial"}

# Parts of a finding that trials cannot reproduce.
KEPT_OF_FINDINGS = ("quick", "search_end")

# Trial numbers are smaller, so that further trials fit.
MOST_TRIALS = 2**40

_FIRST, _END = datetime(1980, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


class Kind(StrEnum):
    """Kinds of rows; each follows the kinds that its rows refer to."""

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
    """A kind's table, key fields and row model."""

    table: Table
    keys: tuple[str, ...]
    model: type[BaseModel]


def checked(kind: Kind, row: object) -> dict[str, Any]:
    """Validate a row; raise `UsageError`."""
    try:
        return vars(LAYOUTS[kind].model.model_validate(row))
    except ValidationError as error:
        first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "row"
    problem = first["msg"].removeprefix("Value error, ")
    what = words(kind, row if isinstance(row, dict) else {})
    raise UsageError(f"{what}: {place} = {shown(first['input'])}: {problem}")


def words(kind: Kind, row: Mapping[str, Any]) -> str:
    """Return a row's name for messages."""
    if kind is Kind.TRIAL:
        return f"trial {shown(row.get('number'))}"
    keys = ", ".join(f"{name} {shown(row.get(name))}" for name in LAYOUTS[kind].keys)
    return f"{kind} ({keys})" if keys else str(kind)


def _bounded(value: float) -> float:
    if not (value == 0 or 1 / LARGEST <= abs(value) <= LARGEST):
        raise ValueError(f"must be 0, or between {1 / LARGEST:g} and {LARGEST:g} in size")
    return value + 0.0  # SQLite does not keep the sign of −0.0


def _storable(value: str) -> str:
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"{len(value):,} characters; at most {LONGEST_TEXT:,}")
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _on_one_line(value: str) -> str:
    return " ".join(_storable(value).split())


def _bounded_object(value: dict[str, Any], *, of_scalars: bool = False) -> dict[str, Any]:
    fault = json_fault(value, of_scalars=of_scalars)
    if fault is not None:
        raise ValueError(fault)
    return value


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    return _bounded_object(value, of_scalars=True)


def _kept(value: dict[str, Any]) -> dict[str, Any]:
    if set(value) != set(KEPT_OF_FINDINGS) or not all(one is None or isinstance(one, dict) for one in value.values()):
        raise ValueError(f"must hold the objects {' and '.join(KEPT_OF_FINDINGS)}")
    return _bounded_object(value)


_Text = Annotated[str, Field(strict=True), AfterValidator(_storable)]
_Line = Annotated[str, Field(strict=True), AfterValidator(_on_one_line)]
_Whole = Annotated[int, Field(strict=True, ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]

_TYPES: Mapping[type, Any] = {
    int: _Whole,
    str: _Text,
    bool: Annotated[bool, Field(strict=True)],
    float: Annotated[float, Field(strict=True), AfterValidator(_bounded)],
    datetime: Annotated[AwareDatetime, Field(ge=_FIRST, lt=_END)],
    dict: Annotated[dict[str, Any], AfterValidator(_bounded_object)],
}

_SPECIAL: Mapping[str, Any] = {
    "environment_id": _Text,
    "number": Annotated[int, Field(strict=True, ge=1, lt=MOST_TRIALS)],
    "answer": Annotated[dict[str, Any], AfterValidator(_kept)],
    **dict.fromkeys(OF_SCALARS, Annotated[dict[str, Any], AfterValidator(_flat)]),
}


def _field(column: Column[Any]) -> tuple[Any, Any]:
    if isinstance(column.type, Sentences):
        return Annotated[tuple[_Line, ...], Field(max_length=MOST_SENTENCES)], ()
    python_type = storage_type(column.type).python_type
    found = _SPECIAL.get(column.name, _TYPES.get(python_type, python_type))
    if column.nullable:
        return found | None, None
    return found, False if python_type is bool and column.server_default is not None else ...


def _layout(kind: Kind, table: Table, *keys: str) -> Layout:
    fields = {NAMES.get(column.name, column.name): _field(column) for column in table.columns if column.name not in OWN}
    ordered: dict[str, Any] = dict(sorted(fields.items()))
    return Layout(table, keys, create_model(kind.value, __config__=ConfigDict(extra="forbid"), **ordered))


_SPLIT = "environment", "batch_size", "micro_batch_size"

LAYOUTS: Mapping[Kind, Layout] = {
    Kind.ENVIRONMENT: _layout(Kind.ENVIRONMENT, EnvironmentRow.__table__, "digest"),
    Kind.STUDY: _layout(Kind.STUDY, StudyRow.__table__),
    Kind.SPEC: _layout(Kind.SPEC, SpecRow.__table__, "digest"),
    Kind.TRIAL: _layout(Kind.TRIAL, TrialRow.__table__, "number"),
    Kind.OBSERVATION: _layout(Kind.OBSERVATION, ObservationRow.__table__, "trial", "step"),
    Kind.LOG: _layout(Kind.LOG, LogRow.__table__, "trial"),
    Kind.PROBE: _layout(Kind.PROBE, ProbeRow.__table__, "kind", *_SPLIT),
    Kind.VISIT: _layout(Kind.VISIT, VisitRow.__table__, "visit", *_SPLIT),
    Kind.BRANCH: _layout(Kind.BRANCH, BranchRow.__table__, "environment", "digest"),
    Kind.FINDING: _layout(Kind.FINDING, FindingRow.__table__),
}
