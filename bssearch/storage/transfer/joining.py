"""A staged study joined with what a database has of it, row by row, by the rules of `bssearch.storage.transfer.rules`.

All in one transaction of the database: what cannot be joined leaves it as it was. Trials, and what is new of them, get
a new revision of the study, so that its drivers see them. A trial that runs in the database goes on: what is known of
it from before waits until it has ended. One whose lease is over has no driver any more, and is joined as if it were
not there: where it has ended elsewhere, what it left behind here is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, or_, select, text, update

from bssearch.errors import UsageError
from bssearch.records import TrialState
from bssearch.spec.model import IMPORTED
from bssearch.storage.keeping import check_name
from bssearch.storage.leases import ended_by
from bssearch.storage.models import EnvironmentRow, FindingRow, LogRow, ObservationRow, StudyRow, TrialRow
from bssearch.storage.revisions import raise_revision
from bssearch.storage.statements import insert_if_absent
from bssearch.storage.transfer.layout import LAYOUTS, Kind, Layout, Row, shown
from bssearch.storage.transfer.rows import AT_ONCE, encoded, query
from bssearch.storage.transfer.rules import ASKED, Contradiction, check_equal, joined
from bssearch.storage.transfer.staging import Staged, Staging

FINGERPRINT = ("device_name", "precision", "compile_mode")
"""The fields of an environment that must be equal for seconds to compare (`Environment.fingerprint`)."""

NO_STAMP = ""
"""The stamp of a finding that counts for no state of a study: its answer is made anew."""


@dataclass(slots=True)
class Count:
    """How many rows of a kind were new, changed, or known already."""

    new: int = 0
    changed: int = 0
    known: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """What became of a study: its name in the database, whether it is new there, and its rows by kind."""

    study: str
    source: str
    is_new: bool
    counts: Mapping[Kind, Count]

    @property
    def is_changed(self) -> bool:
        """Return whether anything was stored."""
        return self.is_new or any(one.new or one.changed for one in self.counts.values())


def wait_for_others(connection: Connection) -> None:
    """Let one transaction join studies at a time; on SQLite the write transaction itself does."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('bss_study joined'))"))


def join(connection: Connection, staging: Staging, staged: Staged, name: str | None = None) -> Joined:
    """Join a staged study with a database's, as ``name`` where it is new there; return what became of it.

    Raises `UsageError` where the two contradict each other, another study has the name, or a trial that ended
    elsewhere runs here.
    """
    return _Join(connection, staging, staged).run(name)


@dataclass(slots=True)
class _Found:
    """A row that the database has, with the condition that it is this one."""

    row: Row
    key: Mapping[str, Any]


@dataclass(slots=True)
class _Join:
    """A study's way into a database."""

    connection: Connection
    staging: Staging
    staged: Staged
    study_id: int = 0
    name: str = ""
    is_new: bool = False
    counts: dict[Kind, Count] = field(default_factory=dict)
    environment_ids: dict[str, int] = field(default_factory=dict)
    running: dict[int, _Found] = field(default_factory=dict)
    measured: dict[Kind, dict[tuple[Any, ...], _Found]] = field(default_factory=dict)
    raised: int | None = None

    def run(self, name: str | None) -> Joined:
        """Join all rows."""
        self._join_study(name)
        self.running = {found.row["number"]: found for found in self._find(Kind.TRIAL, of_running=True)}
        for kind in LAYOUTS:
            if kind not in (Kind.ENVIRONMENT, Kind.STUDY):
                self.counts[kind] = Count()
                for rows in _chunks(self._staged_rows(kind)):
                    self._join_rows(LAYOUTS[kind], rows)
        probed = [self.counts[kind] for kind in (Kind.PROBE, Kind.VISIT)]
        if any(one.new or one.changed for one in probed):
            self._update_study({"probed_at_revision": self._revision()})
        found = Joined(self.name, self.staged.source, self.is_new, self.counts)
        if found.is_changed:
            ours = FindingRow.study_id == self.study_id
            self.connection.execute(update(FindingRow).where(ours).values(stamp=NO_STAMP))
        return found

    def _staged_rows(self, kind: Kind) -> Iterator[Row]:
        return encoded(self.staging.connection, kind, query(kind, self.staged.study_id))

    # The study

    def _join_study(self, name: str | None) -> None:
        layout, count = LAYOUTS[Kind.STUDY], self.counts.setdefault(Kind.STUDY, Count())
        (there,) = self._staged_rows(Kind.STUDY)
        values = layout.decoded(there)
        study_id = self._known(values)
        if study_id is None:
            self.is_new, count.new = True, 1
            self.name = name or self.staged.name
            self.study_id = self._create(values)
            return
        self.study_id = study_id
        (here,) = encoded(self.connection, Kind.STUDY, query(Kind.STUDY, study_id))
        self.name = here["name"]
        both = self._joined(layout, here, there)
        if here["environment"] and there["environment"] and here["environment"] != there["environment"]:
            self._check_device(here["environment"], there["environment"])
        changed = {one for one in both if both[one] != here[one]}
        count.changed, count.known = int(bool(changed)), int(not changed)
        if changed:
            columns = self._columns(layout, both)
            columns["environment"] = columns["environment_id"]
            named = {layout.fields[one].column.name: columns[one] for one in changed}
            self._update_study(named)

    def _known(self, there: Mapping[str, Any]) -> int | None:
        """Return the id that a study has here, and lock its row; None where it is new.

        The studies of one import are made at one moment: of them the kind of device says which one it is.
        """
        own = [getattr(StudyRow, one) == there[one] for one in ("created_at", "created_by", "spec_hash")]
        if there["spec"]["workload"] == IMPORTED:
            own.append(self._on_same_device(there["environment"]))
        query = select(StudyRow.id).where(*own).order_by(StudyRow.id).limit(1).with_for_update()
        study_id: int | None = self.connection.scalar(query)
        return study_id

    def _on_same_device(self, digest: str | None) -> ColumnElement[bool]:
        """Return the condition that a study here is bound to the kind of device of an environment of the source's."""
        if digest is None:
            return StudyRow.environment_id.is_(None)
        kind = zip(FINGERPRINT, _device(self.staging.connection, digest), strict=True)
        alike = [EnvironmentRow.__table__.c[name] == value for name, value in kind]
        return StudyRow.environment_id.in_(select(EnvironmentRow.id).where(*alike))

    def _create(self, values: dict[str, Any]) -> int:
        check_name(self.name)
        columns = {**values, "name": self.name, "spec": {**values["spec"], "name": self.name}}
        columns["environment_id"] = self._environment_id(columns.pop("environment"))
        if not insert_if_absent(self.connection, StudyRow, columns):
            taken = select(StudyRow.created_by, StudyRow.created_at).where(StudyRow.name == self.name)
            by, at = self.connection.execute(taken).one()
            raise UsageError(
                f"there is another study {self.name!r}, which {by} made at {at:%Y-%m-%d %H:%M:%S} UTC; that of "
                f"{self.staged.source} was made by {values['created_by']} at {values['created_at']:%Y-%m-%d %H:%M:%S} "
                "UTC",
                hint="rename one of the two first: bssearch rename OLD NEW; a file of `export --to study` is taken in "
                "under another name with `import study FILE --as NAME`",
            )
        return self.connection.execute(select(StudyRow.id).where(StudyRow.name == self.name)).scalar_one()

    def _update_study(self, columns: Mapping[str, Any]) -> None:
        self.connection.execute(update(StudyRow).where(StudyRow.id == self.study_id).values(**columns))

    def _check_device(self, here: str, there: str) -> None:
        """Raise `UsageError` where a study is bound to two kinds of device."""
        kinds = _device(self.connection, here), _device(self.staging.connection, there)
        if kinds[0] != kinds[1]:
            raise self._contradicts("device", Contradiction("kind", ", ".join(kinds[0]), ", ".join(kinds[1])))

    # Rows of the study

    def _join_rows(self, layout: Layout, rows: list[Row]) -> None:
        """Join some rows of a kind, which are in the order of their keys."""
        count, here = self.counts[layout.kind], self._here(layout, rows)
        new, touched = [], set[int]()
        for row in rows:
            runs = self.running.get(row.get("number", row.get("trial", 0)))
            found = here.get(layout.key(row))
            if runs is not None and not self._replaces(layout, runs, row):
                count.known += 1
            elif runs is not None:
                self._forget(runs)
                self._replace(layout, _Found(row, runs.key), count)
                del self.running[row["number"]]
            elif found is None:
                new.append(row)
                touched.add(row.get("trial", 0))
            else:
                both = self._joined(layout, found.row, row)
                if both == found.row:
                    count.known += 1
                else:
                    self._replace(layout, _Found(both, found.key), count)
                    touched.add(row.get("trial", 0))
        self._insert(layout, new)
        count.new += len(new)
        self._touch(touched - {0})

    def _here(self, layout: Layout, rows: list[Row]) -> dict[tuple[Any, ...], _Found]:
        """Return the database's rows of the keys of some rows, and maybe of more."""
        if self.is_new:
            return {}
        if layout.keys[0] not in ("number", "trial"):
            if layout.kind not in self.measured:
                self.measured[layout.kind] = {layout.key(one.row): one for one in self._find(layout.kind)}
            found = self.measured[layout.kind]
            if layout.kind is Kind.FINDING:  # there is one at most, whenever it was found
                return {layout.key(row): one for row in rows for one in found.values()}
            return found
        first, last = (layout.key(row) for row in (rows[0], rows[-1]))
        number = TrialRow.number
        within: list[ColumnElement[bool]] = [number.between(first[0], last[0])]
        if layout.kind is Kind.OBSERVATION:
            step = layout.table.c.step
            within += [or_(number > first[0], step >= first[1]), or_(number < last[0], step <= last[1])]
        return {layout.key(one.row): one for one in self._find(layout.kind, *within)}

    def _find(self, kind: Kind, *conditions: Any, of_running: bool = False) -> list[_Found]:
        layout = LAYOUTS[kind]
        names = [column.name for column in layout.table.primary_key]
        statement = query(kind, self.study_id, *conditions, of_running=of_running)
        return [
            _Found(layout.encoded(row), dict(zip(names, row[-len(names) :], strict=True)))
            for row in self.connection.execute(statement)
        ]

    def _replaces(self, layout: Layout, runs: _Found, row: Row) -> bool:
        """Return whether a row is the end of a trial that ran here until its driver was gone."""
        if layout.kind is not Kind.TRIAL:
            return False
        try:
            check_equal(runs.row, row, ASKED)
        except Contradiction as error:
            raise self._contradicts(layout.words(row), error) from None
        if row["state"] in (TrialState.QUEUED, TrialState.PAUSED):
            return False
        held = select(TrialRow.lease_owner, TrialRow.lease_expires_at).where(TrialRow.id == runs.key["id"])
        owner, until = self.connection.execute(held).one()
        if until is not None and until > ended_by(self.connection):
            raise UsageError(
                f"study {self.name!r}, trial {row['number']}: it is run here by {owner} until "
                f"{until:%Y-%m-%d %H:%M:%S} UTC, and is {row['state']} in {self.staged.source}",
                hint="stop that driver first",
            )
        return True

    def _forget(self, runs: _Found) -> None:
        """Delete what a trial that ran here left behind: how it ended elsewhere is another run of it."""
        for table in (ObservationRow, LogRow):
            self.connection.execute(delete(table).where(table.trial_id == runs.key["id"]))
        self._update_study({"rewritten_at_revision": self._revision()})

    def _replace(self, layout: Layout, row: _Found, count: Count) -> None:
        columns = self._columns(layout, row.row)
        columns |= {"lease_expires_at": None} if layout.kind is Kind.TRIAL else {}
        this = [layout.table.c[name] == value for name, value in row.key.items()]
        self.connection.execute(update(layout.table).where(and_(*this)).values(**columns))
        count.changed += 1

    def _insert(self, layout: Layout, rows: list[Row]) -> None:
        if not rows:
            return
        ids = self._trial_ids({row["trial"] for row in rows}) if "trial_id" in layout.table.c else {}
        self.connection.execute(insert(layout.table), [self._columns(layout, row, ids) for row in rows])

    def _columns(self, layout: Layout, row: Row, trial_ids: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return a row's columns, with the ids that they have in this database."""
        values, columns = layout.decoded(row), layout.table.c
        if "environment_id" in columns:
            values["environment_id"] = self._environment_id(values.pop("environment"))
        if "trial_id" in columns:
            number = values.pop("trial")
            values |= {} if trial_ids is None else {"trial_id": trial_ids[number]}
        if "study_id" in columns:
            values["study_id"] = self.study_id
        if layout.kind is Kind.TRIAL:
            values["revision"] = self._revision()
        if layout.kind is Kind.FINDING:
            values["stamp"] = NO_STAMP
        return values

    def _trial_ids(self, numbers: Iterable[int]) -> dict[int, int]:
        query = select(TrialRow.number, TrialRow.id).where(
            TrialRow.study_id == self.study_id, TrialRow.number.in_(numbers)
        )
        return {number: trial_id for number, trial_id in self.connection.execute(query)}

    def _environment_id(self, digest: str | None) -> int | None:
        """Return the id of an environment of the source's; store it where the database has none of that digest."""
        if digest is None:
            return None
        if digest not in self.environment_ids:
            layout = LAYOUTS[Kind.ENVIRONMENT]
            there = _environment(self.staging.connection, digest)
            if there is not None:
                insert_if_absent(self.connection, EnvironmentRow, layout.decoded(there.row))
            here = _environment(self.connection, digest)
            assert here is not None, "it was there, or has come"
            if there is not None:
                self._joined(layout, here.row, there.row)
            self.environment_ids[digest] = here.key["id"]
        return self.environment_ids[digest]

    def _touch(self, numbers: set[int]) -> None:
        """Give trials of which something is new the revision of this join."""
        if numbers:
            ours = TrialRow.study_id == self.study_id, TrialRow.number.in_(numbers)
            self.connection.execute(update(TrialRow).where(*ours).values(revision=self._revision()))

    def _revision(self) -> int:
        if self.raised is None:
            self.raised = raise_revision(self.connection, self.study_id)
        return self.raised

    def _joined(self, layout: Layout, here: Row, there: Row) -> Row:
        try:
            return joined(layout.kind, here, there)
        except Contradiction as error:
            raise self._contradicts(layout.words(there), error) from None

    def _contradicts(self, words: str, error: Contradiction) -> UsageError:
        return UsageError(
            f"study {self.name!r}, {words}: {error.field} = {shown(error.here)} here, and {shown(error.there)} in "
            f"{self.staged.source}",
            hint="the study went on in both places, or its rows were changed: such copies cannot be joined; keep one, "
            "or the other in a database of its own",
        )


def _device(connection: Connection, digest: str) -> tuple[str, ...]:
    """Return the fingerprint of an environment."""
    columns = [EnvironmentRow.__table__.c[one] for one in FINGERPRINT]
    return tuple(connection.execute(select(*columns).where(EnvironmentRow.digest == digest)).one())


def _environment(connection: Connection, digest: str) -> _Found | None:
    layout = LAYOUTS[Kind.ENVIRONMENT]
    columns = [one.column for one in layout.fields.values()]
    row = connection.execute(select(*columns, EnvironmentRow.id).where(EnvironmentRow.digest == digest)).one_or_none()
    return None if row is None else _Found(layout.encoded(row), {"id": row[-1]})


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, AT_ONCE)):
        yield chunk
