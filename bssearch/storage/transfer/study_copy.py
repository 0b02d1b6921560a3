"""A whole study in memory, validated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, select, union

from bssearch.errors import DatabaseError, SpecError, UsageError
from bssearch.records import Environment, StudyRecord, TrialState, spec_digest
from bssearch.spec.reader import check_study_name, spec_of
from bssearch.storage.columns import from_columns, to_columns
from bssearch.storage.database import environment_digest
from bssearch.storage.integrity import shown
from bssearch.storage.models import EnvironmentRow, StudyRow, TrialRow
from bssearch.storage.transfer.layout import KEPT_OF_FINDINGS, LAYOUTS, NAMES, Kind, checked, words

Row = dict[str, Any]
Key = tuple[Any, ...]

AT_ONCE = 1000

_REFERENCES = {"environment": Kind.ENVIRONMENT, "trial": Kind.TRIAL, "retry_of": Kind.TRIAL}

_TRIAL = TrialRow.__table__
_ENVIRONMENT = EnvironmentRow.__table__
_RUNS = _TRIAL.c.state == TrialState.RUNNING


@dataclass(slots=True)
class Copy:
    """A study's rows by kind and key, in the order of writing.

    ``source`` names the file or database in messages; ``running`` are omitted trials.
    """

    source: str
    rows: dict[Kind, dict[Key, Row]] = field(default_factory=lambda: {kind: {} for kind in Kind})
    running: Sequence[int] = ()

    @property
    def study(self) -> Row:
        """The study's own row."""
        return self.rows[Kind.STUDY][()]

    @property
    def name(self) -> str:
        """The study's name."""
        return str(self.study["name"])

    @property
    def environment(self) -> Environment | None:
        """The binding environment."""
        digest = self.study["environment"]
        return None if digest is None else from_columns(Environment, self.rows[Kind.ENVIRONMENT][(digest,)])

    def curves(self) -> dict[int, dict[str, Row]]:
        """Observations by trial and step."""
        found: dict[int, dict[str, Row]] = defaultdict(dict)
        for (trial, step), row in self.rows[Kind.OBSERVATION].items():
            found[trial][f"evaluation at step {step}"] = row
        return found

    def add(self, kind: Kind, row: object) -> None:
        """Add a row; raise `UsageError` if invalid, duplicate or dangling."""
        values = checked(kind, row)
        key = tuple(values[name] for name in LAYOUTS[kind].keys)
        if key in self.rows[kind]:
            raise UsageError(f"{words(kind, values)} occurs twice")
        for name, other in _REFERENCES.items():
            value = values.get(name)
            if value is not None and (value,) not in self.rows[other]:
                raise UsageError(f"{words(kind, values)}: {name} = {shown(value)} does not exist")
        _check_digest(kind, values)
        self.rows[kind][key] = values


def read_copy(connection: Connection, study_id: int, source: str, *, with_running: bool = False) -> Copy:
    """Read a study; raise `DatabaseError` for an invalid row.

    Running trials need ``with_running``, because leases do not travel.
    """
    copy = Copy(source)
    try:
        for kind in Kind:
            for row in _rows(connection, kind, study_id, with_running):
                copy.add(kind, row)
    except UsageError as error:
        name = connection.scalar(select(StudyRow.name).where(StudyRow.id == study_id))
        raise DatabaseError(
            f"study {name!r} of {source} has an invalid row: {error.message}",
            hint="another program wrote this row; other studies are not affected",
        ) from None
    running = select(TrialRow.number).where(TrialRow.study_id == study_id, _RUNS).order_by(TrialRow.number)
    copy.running = connection.scalars(running).all()
    return copy


def check_study(copy: Copy) -> None:
    """Raise `UsageError` for an invalid name or other spec, `SpecError` if unreadable."""
    study = copy.study
    check_study_name(copy.name)
    try:
        spec = spec_of(from_columns(StudyRecord, {**study, "archived_at": None}, absent="environment"))
    except DatabaseError as error:
        raise SpecError(f"{copy.source}: {error.message}", hint=error.hint) from None
    asked = to_columns(spec.new_study(study["created_by"]))
    for name in sorted(asked.keys() & study.keys() - {"spec"}):
        if asked[name] != study[name]:
            raise UsageError(
                f"{copy.source}: study {copy.name!r}: {name} = {shown(study[name])}, but its spec says "
                f"{shown(asked[name])}"
            )


def _check_digest(kind: Kind, values: Mapping[str, Any]) -> None:
    if kind is Kind.ENVIRONMENT:
        digest = environment_digest(from_columns(Environment, values))
    elif kind is Kind.SPEC:
        digest = spec_digest(values["spec"])
    else:
        return
    if digest != values["digest"]:
        raise UsageError(f"{words(kind, values)}: the digest of its content is {digest}")


def _rows(connection: Connection, kind: Kind, study_id: int, with_running: bool) -> Iterator[Row]:
    query = _query(kind, study_id, with_running)
    for found in connection.execute(query, execution_options={"yield_per": AT_ONCE}).mappings():
        row = dict(found)
        if kind is Kind.FINDING:
            row["answer"] = {name: row["answer"].get(name) for name in KEPT_OF_FINDINGS}
        if kind is not Kind.FINDING or any(row["answer"].values()):
            yield row


def _query(kind: Kind, study_id: int, with_running: bool) -> Select[Any]:
    table = LAYOUTS[kind].table
    replaced = {"environment": _ENVIRONMENT.c.digest, "trial": _TRIAL.c.number}
    columns: dict[str, ColumnElement[Any]] = {NAMES.get(one.name, one.name): one for one in table.columns}
    columns |= {name: replaced[name] for name in columns.keys() & replaced.keys()}
    query = select(*(columns[name].label(name) for name in LAYOUTS[kind].model.model_fields))
    if "environment_id" in table.c:
        query = query.join(_ENVIRONMENT, table.c.environment_id == _ENVIRONMENT.c.id, isouter=True)
    if "trial_id" in table.c:
        query = query.join(_TRIAL, table.c.trial_id == _TRIAL.c.id)
    query = query.where(_scope(kind, study_id, with_running))
    return query.order_by(*(columns[name] for name in LAYOUTS[kind].keys))


def _scope(kind: Kind, study_id: int, with_running: bool) -> ColumnElement[bool]:
    table = LAYOUTS[kind].table
    if kind is Kind.ENVIRONMENT:
        tables = [one.table for one in LAYOUTS.values() if {"environment_id", "study_id"} <= {*one.table.c.keys()}]
        used = [select(one.c.environment_id).where(one.c.study_id == study_id) for one in tables]
        return table.c.id.in_(union(select(StudyRow.environment_id).where(StudyRow.id == study_id), *used))
    if kind is Kind.STUDY:
        return table.c.id == study_id
    if kind is Kind.TRIAL or "trial_id" in table.c:
        ours = _TRIAL.c.study_id == study_id
        return ours if with_running else ours & ~_RUNS
    return table.c.study_id == study_id
