"""Studies on their way into a database: laid out in a temporary one of the same tables, and checked there.

Whatever a file or another database holds, what has come through here could be rows of bssearch's own: the types, the
checks of the tables, what rows refer to, the digests of environments and specs, and the spec. The temporary database
lies in memory while it is small, and on disk where it is not.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError
from sqlalchemy import Connection, Engine, create_engine, event, insert
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable

from bssearch.errors import SpecError, UsageError
from bssearch.records import Environment, spec_digest
from bssearch.spec import StudySpec
from bssearch.storage.connection.engine import from_json
from bssearch.storage.database import environment_digest
from bssearch.storage.keeping import check_name
from bssearch.storage.models import Base
from bssearch.storage.rows import column_names, from_columns, to_columns
from bssearch.storage.transfer.layout import LAYOUTS, Kind, shown
from bssearch.storage.transfer.rows import AT_ONCE
from bssearch.storage.transfer.rules import QUESTION
from bssearch.storage.transfer.study_file import Line

MOST_TRIALS = 2**40
"""The numbers of trials lie below this: a choice."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A study that was laid out: its ``study_id`` there, and whence it comes."""

    study_id: int
    name: str
    source: str


class Staging:
    """A temporary database with studies that came whole; to be used with ``with``."""

    def __init__(self) -> None:
        self.connection: Connection = _engine().connect()
        self._environment_ids: dict[str, int] = {}
        self._studies = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget all studies."""
        self.connection.close()

    def add(self, source: str, lines: Iterable[Line], *, complete: bool = True) -> Staged:
        """Lay out a study, and return where it is.

        Without ``complete`` its rows may lack columns that came to the tables later. Raises `UsageError` naming the
        place of a row that no study of bssearch's has, and `SpecError` for a spec that this version cannot read.
        """
        self._studies += 1
        batch = _Batch(self.connection)
        name, environments = None, set[str]()
        for line in lines:
            try:
                values = LAYOUTS[line.kind].decoded(line.row, complete=complete)
                check_digest(line.kind, values)
                if line.kind is Kind.ENVIRONMENT:
                    if values["digest"] in environments:
                        raise UsageError(f"environment (digest {shown(values['digest'])}) is there twice")
                    environments.add(values["digest"])
                    if values["digest"] in self._environment_ids:
                        continue  # that of an earlier study of the same source
                self._place(line.kind, values, batch)
                if line.kind is Kind.STUDY:
                    check_study(values)
                    name = values["name"]
            except SpecError as error:
                raise SpecError(f"{line.place}: {error.message}", hint=error.hint) from None
            except UsageError as error:
                raise UsageError(f"{line.place}: {error.message}", hint=error.hint) from None
            batch.add(line, values)
        batch.flush()
        if name is None:
            raise UsageError(f"{source} has no row of a study")
        return Staged(self._studies, name, source)

    def _place(self, kind: Kind, values: dict[str, Any], batch: _Batch) -> None:
        """Make a row's values columns of the temporary tables, where ids say what belongs to what."""
        columns = LAYOUTS[kind].table.c
        if "environment_id" in columns:
            values["environment_id"] = self._environment_id(values.pop("environment", None), batch)
        if "trial_id" in columns:
            values["trial_id"] = self._trial_id(values.pop("trial"))
        if kind is Kind.TRIAL:
            values["id"] = self._trial_id(values["number"])
        if "study_id" in columns:
            values["study_id"] = self._studies
        if kind is Kind.STUDY:
            values["id"] = self._studies
        if kind is Kind.FINDING:
            values["stamp"] = ""

    def _environment_id(self, digest: str | None, batch: _Batch) -> int | None:
        if digest is None:
            return None
        if digest not in self._environment_ids:
            batch.flush()
            table = LAYOUTS[Kind.ENVIRONMENT].table
            found = self.connection.execute(table.select().where(table.c.digest == digest)).first()
            if found is None:
                raise UsageError(f"environment = {shown(digest)} is not there")
            self._environment_ids[digest] = found.id
        return self._environment_ids[digest]

    def _trial_id(self, number: int) -> int:
        if not 1 <= number < MOST_TRIALS:
            raise UsageError(f"trial {number} must have a number from 1 to {MOST_TRIALS - 1:,}")
        return self._studies * MOST_TRIALS + number


@dataclass(slots=True)
class _Batch:
    """Rows of one kind with the same columns, stored together."""

    connection: Connection
    lines: list[Line] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: Line, values: dict[str, Any]) -> None:
        """Add a row; store those before it where it is of another form."""
        if self.rows and (self.lines[0].kind is not line.kind or self.rows[0].keys() != values.keys()):
            self.flush()
        self.lines.append(line)
        self.rows.append(values)
        if len(self.rows) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Store the rows; raise `UsageError` naming the first that a table does not take."""
        if not self.rows:
            return
        lines, rows = self.lines, self.rows
        self.lines, self.rows = [], []
        try:
            with self.connection.begin_nested():
                self._insert(lines[0].kind, rows)
        except (SQLAlchemyError, OverflowError):
            for line, row in zip(lines, rows, strict=True):
                try:
                    self._insert(line.kind, [row])
                except (SQLAlchemyError, OverflowError) as error:
                    raise UsageError(f"{line.place}: {_refused(line, error)}") from None

    def _insert(self, kind: Kind, rows: list[dict[str, Any]]) -> None:
        self.connection.execute(insert(LAYOUTS[kind].table), rows)


def _refused(line: Line, error: Exception) -> str:
    words = LAYOUTS[line.kind].words(line.row if isinstance(line.row, dict) else {})
    said = str(getattr(error, "orig", error))
    if isinstance(error, IntegrityError):
        if said.startswith("UNIQUE"):
            return f"{words} is there twice"
        if said.startswith("FOREIGN KEY"):
            return f"{words}: what it refers to is not there before it"
        if rule := re.fullmatch(r"CHECK constraint failed: (?:ck_bss_[a-z]+_)?(\w+)", said):
            return f"{words} breaks the rule {rule.group(1)!r} of its table"
    return f"{words} cannot be stored: {said}"


def check_digest(kind: Kind, values: Mapping[str, Any]) -> None:
    """Raise `UsageError` where the digest of an environment or a spec is not that of its row."""
    if kind is Kind.ENVIRONMENT:
        columns: dict[str, Any] = {**dict.fromkeys(column_names(Environment)), "libraries": (), **values}
        is_right = environment_digest(from_columns(Environment, columns)) == values["digest"]
    elif kind is Kind.SPEC:
        is_right = values["digest"] == spec_digest(values["spec"])
    else:
        return
    if not is_right:
        raise UsageError(f"{kind}: digest = {shown(values['digest'])} is not that of its row")


def check_study(values: dict[str, Any]) -> None:
    """Raise `UsageError` or `SpecError` where a study's row has no name, no spec, or is not of its spec's question."""
    check_name(values["name"])
    try:
        spec = StudySpec.model_validate(values["spec"])
    except (ValidationError, RecursionError) as error:
        place, problem = "spec", "it is nested too deeply"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            place, problem = ".".join(map(str, first["loc"])) or "spec", first["msg"].removeprefix("Value error, ")
        raise SpecError(
            f"the spec of study {values['name']!r} cannot be read: {place}: {problem}",
            hint="a newer bssearch may have written it: upgrade this one",
        ) from None
    if spec.name != values["name"]:
        raise UsageError(f"the spec of study {values['name']!r} is that of {spec.name!r}")
    told = to_columns(spec.new_study(values["created_by"]))
    for name in QUESTION:
        if name in told and told[name] != values[name]:
            raise UsageError(
                f"study {values['name']!r}: {name} = {shown(values[name])} is not its spec's, {shown(told[name])}"
            )


@cache
def _engine() -> Engine:
    """Return an engine of which each connection has a temporary database of its own."""
    engine = create_engine("sqlite://", creator=_temporary, poolclass=NullPool, json_deserializer=from_json)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _temporary() -> sqlite3.Connection:
    """Open a private database that SQLite keeps in memory, writes to disk where it grows, and deletes when closed."""
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = OFF")
    connection.executescript(_tables())
    return connection


@cache
def _tables() -> str:
    """Return the statements that make the tables."""
    tables = Base.metadata.sorted_tables
    made = [CreateTable(table) for table in tables], [CreateIndex(one) for table in tables for one in table.indexes]
    return ";\n".join(str(one.compile(dialect=sqlite.dialect())) for group in made for one in group)
