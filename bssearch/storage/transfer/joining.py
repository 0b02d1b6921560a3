"""Insert a copy of a study into a database.

A study is the same if the same person created it at the same moment with the same question; if imported, on the same
kind of device too. Another study is inserted whole. Of the same study,

* missing trials, specs, probes, visits, branches and findings are added;
* a trial that ended in the copy replaces one that is queued, paused, lost or without a live lease here;
* a trial running here under a live lease is skipped;
* a trial that was planned or ended differently is refused, and nothing is stored;
* spec, name and an existing finding stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, delete, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError

from bssearch.errors import OtherDeviceError, UsageError
from bssearch.records import TrialState
from bssearch.spec.model import IMPORTED
from bssearch.spec.reader import check_study_name
from bssearch.storage.connection.locks import lock_tables
from bssearch.storage.integrity import shown
from bssearch.storage.leases import ended_by
from bssearch.storage.models import EnvironmentRow, FindingRow, LogRow, ObservationRow, StudyRow, TrialRow
from bssearch.storage.statements import insert_if_absent, is_running, of_its_kind, raise_revision
from bssearch.storage.transfer.study_copy import AT_ONCE, LAYOUTS, Copy, Kind, Row, check_study, read_copy, words

# Trial fields that never change after planning.
ASKED = frozenset(
    {
        *("number", "phase", "uncapped", "batch_size", "learning_rate", "warmup_epochs", "weight_decay", "dropout"),
        *("label_smoothing", "optimizer", "parameters", "sampled", "seed", "retry_of"),
    }
)

# States that give way to an end in the copy.
_OPEN = {TrialState.QUEUED, TrialState.RUNNING, TrialState.PAUSED, TrialState.LOST}

_COUNTED = {
    "trials": (Kind.TRIAL,),
    "observations": (Kind.OBSERVATION,),
    "measurements": (Kind.PROBE, Kind.VISIT, Kind.BRANCH),
}

_DIVERGED = "the study continued in both places, or rows were changed; keep one copy, or separate databases"


@dataclass(frozen=True, slots=True)
class Joined:
    """Result of `join`, with counts by kind of row."""

    study: str
    source: str
    is_new: bool
    is_changed: bool
    skipped: Sequence[int]
    counts: Mapping[str, int]

    @property
    def document(self) -> dict[str, Any]:
        """Return JSON values."""
        told = {"study": self.study, "source": self.source, "is_new": self.is_new, "is_changed": self.is_changed}
        return {**told, "trials_skipped": list(self.skipped), **self.counts}

    @property
    def sentence(self) -> str:
        """Return a sentence."""
        new, changed = self.counts["trials_new"], self.counts["trials_changed"]
        done = f"{new} trials added, {changed} replaced" if self.is_changed else "nothing new"
        running = ", ".join(map(str, self.skipped))
        skipped = f"; skipped, since a driver runs it here: trial {running}" if running else ""
        return f"study {self.study} {'is new' if self.is_new else 'already existed'}: {done}{skipped}"


def wait_for_others(connection: Connection) -> None:
    """Serialize imports."""
    lock_tables(connection, [StudyRow.__tablename__])


def join(connection: Connection, copy: Copy, name: str | None = None) -> Joined:
    """Insert missing rows; return the counts.

    Raises `UsageError` for a contradiction, a taken name, or an invalid row.
    """
    check_study(copy)
    study_id = _known(connection, copy)
    is_new = study_id is None
    if study_id is None:
        study_id = _create(connection, copy, name or copy.name)
    here = read_copy(connection, study_id, "this database", with_running=True)
    return _Join(connection, copy, here, study_id, is_new).run()


def _known(connection: Connection, copy: Copy) -> int | None:
    study = copy.study
    same: list[ColumnElement[bool]] = [
        StudyRow.created_at == study["created_at"],
        StudyRow.created_by == study["created_by"],
        StudyRow.spec_hash == study["spec_hash"],
    ]
    if study["spec"]["workload"] == IMPORTED and copy.environment is not None:
        devices = select(EnvironmentRow.id).where(*of_its_kind(copy.environment))
        same.append(StudyRow.environment_id.in_(devices))
    found: int | None = connection.scalar(select(StudyRow.id).where(*same).order_by(StudyRow.id).with_for_update())
    return found


def _create(connection: Connection, copy: Copy, name: str) -> int:
    check_study_name(name)
    study = copy.study
    columns = {**study, "name": name, "spec": {**study["spec"], "name": name}}
    del columns["environment"]
    if not insert_if_absent(connection, StudyRow, columns):
        taken = select(StudyRow.created_by, StudyRow.created_at).where(StudyRow.name == name)
        by, at = connection.execute(taken).one()
        raise UsageError(
            f"another study {name!r} exists, created by {by} at {at:%Y-%m-%d %H:%M:%S} UTC; that of {copy.source} "
            f"was created by {study['created_by']} at {study['created_at']:%Y-%m-%d %H:%M:%S} UTC",
            hint="rename one with `bssearch study rename OLD NEW`, or import with --as NAME",
        )
    return connection.execute(select(StudyRow.id).where(StudyRow.name == name)).scalar_one()


@dataclass(slots=True)
class _Join:
    connection: Connection
    copy: Copy
    here: Copy
    study_id: int
    is_new: bool
    added: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
    skipped: list[int] = field(default_factory=list)
    environment_ids: dict[str, int] = field(default_factory=dict)
    trial_ids: dict[int, int] = field(default_factory=dict)
    revision: int = 0

    def run(self) -> Joined:
        self._sort_trials()
        new = {kind: self._new_rows(kind) for kind in Kind}
        binds = self._binds()
        is_changed = self.is_new or binds or bool(self.replaced) or any(new.values())
        if is_changed:
            self.revision = raise_revision(self.connection, self.study_id)
            self._store(new, binds)
        return Joined(
            study=self.here.name,
            source=self.copy.source,
            is_new=self.is_new,
            is_changed=is_changed,
            skipped=self.skipped,
            counts=self._counts(new),
        )

    # Which rows are taken

    def _sort_trials(self) -> None:
        live = select(TrialRow.number).where(
            *is_running(self.study_id), TrialRow.lease_expires_at > ended_by(self.connection)
        )
        held = set(self.connection.scalars(live))
        curves, curves_here = self.copy.curves(), self.here.curves()
        for key, there in self.copy.rows[Kind.TRIAL].items():
            number, here = key[0], self.here.rows[Kind.TRIAL].get(key)
            if here is None:
                self.added.add(number)
                continue
            self._refuse_different(number, here, there, ASKED)
            if there["state"] in _OPEN:
                continue
            if here["state"] not in _OPEN:
                here, there = here | curves_here[number], there | curves[number]
                self._refuse_different(number, here, there, here.keys() | there.keys())
            elif number in held:
                self.skipped.append(number)
            else:
                self.replaced.add(number)

    def _refuse_different(self, number: int, here: Row, there: Row, names: Collection[str]) -> None:
        for name in sorted(names):
            if here.get(name) != there.get(name):
                raise UsageError(
                    f"study {self.here.name!r}, trial {number}: {name} = {shown(here.get(name))} here, and "
                    f"{shown(there.get(name))} in {self.copy.source}",
                    hint=_DIVERGED,
                )

    def _new_rows(self, kind: Kind) -> list[Row]:
        rows = self.copy.rows[kind]
        if kind is Kind.TRIAL:
            return [row for row in rows.values() if row["number"] in self.added]
        if "trial_id" in LAYOUTS[kind].table.c:
            taken = self.added | self.replaced
            return [row for row in rows.values() if row["trial"] in taken]
        if kind is Kind.ENVIRONMENT:
            return []  # inserted with the first row that names it
        return [row for key, row in rows.items() if key not in self.here.rows[kind]]

    def _binds(self) -> bool:
        here, there = self.here.environment, self.copy.environment
        if here is not None and there is not None and here.fingerprint != there.fingerprint:
            raise OtherDeviceError(
                f"study {self.here.name!r} was measured on {here.fingerprint} here, and on {there.fingerprint} in "
                f"{self.copy.source}; different devices are never pooled",
                hint=_DIVERGED,
            )
        return here is None and there is not None

    def _counts(self, new: Mapping[Kind, list[Row]]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for name, kinds in _COUNTED.items():
            inserted = [row for kind in kinds for row in new[kind]]
            counts[f"{name}_changed"] = sum(row.get("trial") in self.replaced for row in inserted)
            counts[f"{name}_new"] = len(inserted) - counts[f"{name}_changed"]
            counts[f"{name}_known"] = sum(len(self.copy.rows[kind]) for kind in kinds) - len(inserted)
        counts["trials_changed"] = len(self.replaced)
        counts["trials_known"] -= len(self.replaced)
        return dict(counts)

    # How they are stored

    def _store(self, new: Mapping[Kind, list[Row]], binds: bool) -> None:
        columns: dict[str, Any] = {"revision": self.revision}
        if binds:
            columns["environment_id"] = self._environment_id(self.copy.study["environment"])
        if self.replaced:
            columns["rewritten_at_revision"] = self.revision
        if new[Kind.PROBE] or new[Kind.VISIT]:
            columns["probed_at_revision"] = self.revision
        self.connection.execute(update(StudyRow).where(StudyRow.id == self.study_id).values(columns))
        self._insert(Kind.SPEC, new[Kind.SPEC])
        self._insert(Kind.TRIAL, new[Kind.TRIAL])
        query = select(TrialRow.number, TrialRow.id).where(TrialRow.study_id == self.study_id)
        self.trial_ids = {number: trial_id for number, trial_id in self.connection.execute(query)}
        for number in self.replaced:
            self._replace(number)
        for kind in (Kind.OBSERVATION, Kind.LOG, Kind.PROBE, Kind.VISIT, Kind.BRANCH):
            self._insert(kind, new[kind])
        finding: dict[str, Any] = {"stamp": ""}  # marks the stored answer as outdated
        for row in new[Kind.FINDING]:
            finding = self._columns(Kind.FINDING, row)
            insert_if_absent(self.connection, FindingRow, finding)
        self.connection.execute(update(FindingRow).where(FindingRow.study_id == self.study_id).values(finding))

    def _replace(self, number: int) -> None:
        row, trial_id = self.copy.rows[Kind.TRIAL][(number,)], self.trial_ids[number]
        for table in (ObservationRow, LogRow):
            self.connection.execute(delete(table).where(table.trial_id == trial_id))
        columns = {**self._columns(Kind.TRIAL, row), "lease_owner": None, "lease_expires_at": None}
        self._execute(Kind.TRIAL, row, update(TrialRow).where(TrialRow.id == trial_id).values(columns))

    def _insert(self, kind: Kind, rows: Sequence[Row]) -> None:
        statement = insert(LAYOUTS[kind].table)
        for start in range(0, len(rows), AT_ONCE):
            chunk = rows[start : start + AT_ONCE]
            try:
                with self.connection.begin_nested():
                    self.connection.execute(statement, [self._columns(kind, row) for row in chunk])
            except (IntegrityError, DataError):
                for row in chunk:  # retry one by one, to name the refused row
                    self._execute(kind, row, statement.values(self._columns(kind, row)))

    def _execute(self, kind: Kind, row: Row, statement: Executable) -> None:
        try:
            with self.connection.begin_nested():
                self.connection.execute(statement)
        except (IntegrityError, DataError) as error:
            problem = str(error.orig).partition("\n")[0]
            raise UsageError(f"{self.copy.source}: {words(kind, row)} cannot be stored: {problem}") from None

    def _columns(self, kind: Kind, row: Row) -> dict[str, Any]:
        values, table = dict(row), LAYOUTS[kind].table
        if "environment" in values:
            values["environment_id"] = self._environment_id(values.pop("environment"))
        if "trial" in values:
            values["trial_id"] = self.trial_ids[values.pop("trial")]
        if "study_id" in table.c:
            values["study_id"] = self.study_id
        if kind is Kind.TRIAL:
            values["revision"] = self.revision
        if kind is Kind.FINDING:
            values |= {"stamp": "", "answer": {"made_by": 0, "answer": None, **values["answer"]}}
        return values

    def _environment_id(self, digest: str | None) -> int | None:
        if digest is None:
            return None
        if digest not in self.environment_ids:
            insert_if_absent(self.connection, EnvironmentRow, self.copy.rows[Kind.ENVIRONMENT][(digest,)])
            query = select(EnvironmentRow.id).where(EnvironmentRow.digest == digest)
            self.environment_ids[digest] = self.connection.execute(query).scalar_one()
        return self.environment_ids[digest]
