"""The store. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from bssearch.records import BranchMeasurement, Environment, spec_digest
from bssearch.storage.columns import column_types, from_columns, now, to_columns
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import BranchRow, SpecRow, StudyRow, TrialRow
from bssearch.storage.statements import insert_if_absent

if TYPE_CHECKING:
    from bssearch.storage.transfer.joining import Joined
    from bssearch.storage.transfer.study_copy import Copy

import hashlib
import json
import math
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import URL, bindparam, func, insert, update
from sqlalchemy.exc import IntegrityError

from bssearch.errors import DatabaseError
from bssearch.records import (
    Lease,
    NewStudy,
    Observation,
    Phase,
    StudyRecord,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
)
from bssearch.settings import database_url
from bssearch.storage import keeping, leases, migrate, starting
from bssearch.storage.connection.engine import create_engine_for
from bssearch.storage.connection.urls import sqlite_file
from bssearch.storage.database import Notify
from bssearch.storage.leases import IsAlive
from bssearch.storage.measurements import Measurements
from bssearch.storage.models import FindingRow, LogRow, ObservationRow, ProbeRow, VisitRow
from bssearch.storage.queue import Queue, forget_submission, refuse_queued, rename_submission
from bssearch.storage.revisions import Changes, changes, mark_changed, mark_observed, mark_probed
from bssearch.storage.statements import (
    EVALUATIONS,
    OBSERVATIONS,
    STUDIES,
    STUDY,
    TRIALS,
    StudySummary,
    end_trial,
    no_study,
    stored_trial,
    study_record,
    study_summary,
    trial_id_of,
    trial_ids_of,
    trial_record,
)
from bssearch.storage.transfer.finished import FinishedStudy, Import


class Specs(Database):
    """Specs at the start of trials: budget, slots, pruner and executor may change between trials."""

    def keep_spec(self, study: str, spec: Mapping[str, object]) -> str:
        """Store a spec once; return its digest for `Lease.spec`."""
        digest = spec_digest(spec)

        def keep(connection: Connection, study_id: int) -> None:
            insert_if_absent(connection, SpecRow, {"study_id": study_id, "digest": digest, "spec": dict(spec)})

        self._on_study(study, keep)
        return digest

    @patiently
    def spec_at(self, study: str, number: int) -> Mapping[str, object] | None:
        """Return the spec that started a trial; None if not stored."""
        with self._reading() as connection:
            query = (
                select(SpecRow.spec)
                .join(TrialRow, (TrialRow.study_id == SpecRow.study_id) & (TrialRow.spec_digest == SpecRow.digest))
                .where(SpecRow.study_id == self._study_id(connection, study), TrialRow.number == number)
            )
            found: Mapping[str, object] | None = connection.scalar(query)
            return found


class Branches(Database):
    """Branches, trained by `bssearch probe branch`."""

    def save_branch(self, study: str, environment: Environment, branch: BranchMeasurement) -> None:
        """Store a branch unless its digest exists in this environment."""

        def save(connection: Connection, study_id: int) -> None:
            place = {"study_id": study_id, "environment_id": self._environment_id(connection, environment)}
            insert_if_absent(connection, BranchRow, {**to_columns(branch), **place, "measured_at": now(connection)})

        self._on_study(study, save)

    @patiently
    def branches(
        self, study: str, environment: Environment, digests: Collection[str] | None = None
    ) -> list[BranchMeasurement]:
        """Return branches in an environment, oldest first; ``digests`` limits them."""
        columns = [BranchRow.__table__.c[name] for name in column_types(BranchMeasurement)]
        with self._reading() as connection:
            query = (
                select(*columns).where(BranchRow.study_id == self._study_id(connection, study)).order_by(BranchRow.id)
            )
            if digests is not None:
                query = query.where(BranchRow.digest.in_(digests))
            return [from_columns(BranchMeasurement, row) for row in connection.execute(query).mappings()]


class Transfers(Database):
    """Copies of whole studies. Modules are imported on use: most commands need none."""

    def write_study(self, study: str, path: Path) -> Sequence[int]:
        """Write a study to a file, whole or not at all; return its running trials, which are left out.

        Raises:
            NotFoundError: if the study does not exist.
            UsageError: if the file cannot be written.
            DatabaseError: if a row is invalid.
        """
        from bssearch.storage.transfer.study_file import write_study

        (copy,) = self.copy_studies([study], self.masked_url)
        write_study(path, copy)
        return copy.running

    def copy_studies(self, names: Collection[str] | None, source: str) -> list[Copy]:
        """Read named studies, or all not archived, in one state of the database, without running trials.

        ``source`` names the database in messages. Raises `NotFoundError`, or `DatabaseError` for an invalid row.
        """
        from bssearch.storage.transfer.study_copy import read_copy

        with self._reading() as connection:
            shown = select(StudyRow.name).where(StudyRow.archived_at.is_(None)).order_by(StudyRow.id)
            found = connection.scalars(shown).all() if names is None else names
            return [read_copy(connection, self._study_id(connection, name), source) for name in found]

    def join_studies(self, copies: Sequence[Copy], *, name: str | None = None, dry_run: bool = False) -> list[Joined]:
        """Insert missing rows in one transaction; return their counts.

        The first study is called ``name`` if new. Raises `UsageError` for a contradiction
        (`bssearch.storage.transfer.joining`) or a taken name.
        """
        from bssearch.storage.transfer.joining import join, wait_for_others

        def once() -> list[Joined]:
            with self._writing() as connection:
                wait_for_others(connection)
                joined = [join(connection, copy, None if index else name) for index, copy in enumerate(copies)]
                if dry_run:
                    connection.rollback()
            return joined

        return self._patience.run(once)


class Findings(Database):
    """Answers of studies, valid while their stamp equals the study's."""

    @patiently
    def stamp(self, study: str) -> str:
        """Return a digest of trials, probes and spec."""
        with self._reading() as connection:
            return _stamp(connection, self._study_id(connection, study))

    def save_finding(self, study: str, stamp: str, answer: Mapping[str, object], *, is_news: bool = False) -> None:
        """Replace the stored answer; take ``stamp`` before making the answer.

        ``is_news``: drivers see it like a new measurement.
        """

        def save(connection: Connection, study_id: int) -> None:
            fields = {"stamp": stamp, "found_at": now(connection), "answer": answer}
            if not insert_if_absent(connection, FindingRow, {"study_id": study_id, **fields}):
                connection.execute(update(FindingRow).where(FindingRow.study_id == study_id).values(**fields))
            if is_news:
                mark_probed(connection, study_id)

        self._on_study(study, save)

    @patiently
    def seconds_since_finding(self, study: str) -> float:
        """Return the age of the answer, or infinity."""
        with self._looking() as connection:
            query = select(FindingRow.found_at).where(FindingRow.study_id == self._study_id(connection, study))
            found_at = connection.scalar(query)
            return math.inf if found_at is None else (now(connection) - found_at).total_seconds()

    @patiently
    def last_finding(self, study: str) -> Mapping[str, Any] | None:
        """Return the answer, even if outdated, or None."""
        with self._looking() as connection:
            query = select(FindingRow.answer).where(FindingRow.study_id == self._study_id(connection, study))
            last: Mapping[str, Any] | None = connection.scalar(query)
            return last

    @patiently
    def finding(self, study: str) -> Mapping[str, Any] | None:
        """Return the answer; None if missing or outdated."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            stored = connection.execute(
                select(FindingRow.stamp, FindingRow.answer).where(FindingRow.study_id == study_id)
            ).first()
            if stored is None or stored.stamp != _stamp(connection, study_id):
                return None
            answer: Mapping[str, Any] = stored.answer
            return answer


def _stamp(connection: Connection, study_id: int) -> str:
    study = connection.execute(
        select(StudyRow.name, StudyRow.spec, StudyRow.environment_id).where(StudyRow.id == study_id)
    ).one()
    trials = connection.execute(
        select(TrialRow.state, func.count(), func.max(TrialRow.id), func.max(TrialRow.ended_at))
        .where(TrialRow.study_id == study_id)
        .group_by(TrialRow.state)
        .order_by(TrialRow.state)
    ).all()
    probes = connection.execute(
        select(func.count(), func.max(ProbeRow.id), func.max(ProbeRow.measured_at)).where(ProbeRow.study_id == study_id)
    ).all()
    visits = connection.execute(select(func.count(), func.max(VisitRow.id)).where(VisitRow.study_id == study_id)).all()
    parts = [tuple(study), *([tuple(row) for row in rows] for rows in (trials, probes, visits))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


_OBSERVED = insert(ObservationRow.__table__)
_EVALUATIONS = EVALUATIONS.where(
    TrialRow.study_id == bindparam("study_id"), TrialRow.number.in_(bindparam("numbers", expanding=True))
)


class Observations(Database):
    """Observations, and the last lines that trials printed."""

    @patiently
    def append_observations(self, study: str, rows: Sequence[tuple[int, Observation]]) -> None:
        """Store observations, all or none; no change of a running trial.

        Raises `DatabaseError` if a step exists, unless an earlier try stored the same rows.
        """
        if not rows:
            return
        numbers = list(dict(rows))
        try:
            with self._writing() as connection:
                study_id = self._lock_study(connection, study)
                ids = trial_ids_of(connection, study, study_id, numbers)
                connection.execute(_OBSERVED, [{"trial_id": ids[number], **to_columns(one)} for number, one in rows])
                mark_observed(connection, study_id, numbers)
        except DatabaseError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            curves = self.curves(study, numbers)
            stored = {(number, one.step): one for number, curve in curves.items() for one in curve}
            if all(stored.get((number, one.step)) == one for number, one in rows):
                return  # an earlier try was committed although its connection broke
            keys = [(number, one.step) for number, one in rows]
            twice = [key for key in keys if key in stored or keys.count(key) > 1]
            if not twice:
                raise
            number, step = twice[0]
            raise DatabaseError(f"trial {number} of {study!r} already has an observation at step {step}") from error

    @patiently
    def observations(self, study: str, number: int) -> list[Observation]:
        """Return a trial's observations by step."""
        with self._reading() as connection:
            trial_id_of(connection, study, self._study_id(connection, study), number)
        return self.curves(study, [number])[number]

    @patiently
    def curves(self, study: str, numbers: Collection[int]) -> dict[int, list[Observation]]:
        """Return trials' observations by step; may be empty."""
        found: dict[int, list[Observation]] = {number: [] for number in numbers}
        with self._reading() as connection:
            query = OBSERVATIONS.where(
                TrialRow.study_id == self._study_id(connection, study), TrialRow.number.in_(found)
            )
            for row in connection.execute(query).mappings():
                found[row["number"]].append(from_columns(Observation, row))
        return found

    @patiently
    def evaluations(self, study: str, numbers: Collection[int]) -> dict[int, list[tuple[float, float]]]:
        """Return trials' (train seconds, metric) pairs by step, for pruning."""
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
        with self._looking() as connection:
            of = {"study_id": self._study_id(connection, study), "numbers": list(found)}
            for number, train_seconds, metric in connection.execute(_EVALUATIONS, of):
                found[number].append((train_seconds, metric))
        return found

    @patiently
    def observation_count(self, study: str) -> int:
        """Return the number of observations."""
        with self._reading() as connection:
            query = select(func.count()).select_from(ObservationRow).join(TrialRow)
            study_id = self._study_id(connection, study)
            return connection.execute(query.where(TrialRow.study_id == study_id)).scalar_one()

    @patiently
    def save_log(self, study: str, number: int, text: str) -> None:
        """Replace a trial's last lines."""
        with self._writing() as connection:
            trial_id = trial_id_of(connection, study, self._study_id(connection, study), number)
            if not insert_if_absent(connection, LogRow, {"trial_id": trial_id, "text": text}):
                connection.execute(update(LogRow).where(LogRow.trial_id == trial_id).values(text=text))

    @patiently
    def log(self, study: str, number: int) -> str | None:
        """Return a trial's last lines, or None."""
        with self._reading() as connection:
            trial_id = trial_id_of(connection, study, self._study_id(connection, study), number)
            return connection.scalar(select(LogRow.text).where(LogRow.trial_id == trial_id))


def open_store(url: str | URL | None = None, *, write: bool = True, notify: Notify | None = None) -> Store:
    """Open the database at ``url``, else at ``BSSEARCH_DB_URL``, else the file in the current folder.

    ``write`` creates or upgrades a SQLite file; otherwise it must exist and stays untouched. ``notify`` receives
    one-line messages: schema upgraded, connection lost, connection back.

    Raises:
        UsageError: if the URL is malformed.
        DatabaseError: if the database cannot be opened.
        SchemaError: if its schema is not this version's.
    """
    return Store(url if isinstance(url, URL) else database_url(url), write=write, notify=notify)


def check_writable(url: str | None = None) -> None:
    """Raise the error of `open_store` if nothing could be stored. Opens and creates no file."""
    engine = create_engine_for(database_url(url))
    try:
        if sqlite_file(engine.url) is None:
            migrate.prepare(engine, lambda message: None)
    finally:
        engine.dispose()


class Store(Observations, Findings, Measurements, Branches, Specs, Transfers, Queue):
    """An open database; threads may share it. For writing, it waits for an unreachable server (`Patience`).

    Any method may raise `DatabaseError`; with a study's name, `NotFoundError`.
    """

    def create_study(self, new: NewStudy) -> StudyRecord:
        """Store a study; raise `UsageError` if the name is taken."""
        study: StudyRecord | None = None

        def create() -> StudyRecord:
            nonlocal study
            with self._writing() as connection:
                again = study is not None
                study = study or StudyRecord.created(new, now(connection))
                keeping.create(connection, study, again=again)
            return study

        return self._patience.run(create)

    def import_studies(self, studies: Sequence[FinishedStudy]) -> None:
        """Store studies with finished trials, all or none; raise `UsageError` if a name is taken."""
        batch = Import(studies)

        def add() -> None:
            with self._writing() as connection:
                batch.add(connection, self._environment_id)

        self._patience.run(add)

    def rename_study(self, old: str, new: str) -> None:
        """Raise `UsageError` if the name is taken or invalid, or the study is running or queued."""

        def rename(connection: Connection, study_id: int) -> None:
            refuse_queued(connection, old, "renamed")
            keeping.rename(connection, study_id, old=old, new=new)
            if old != new:
                rename_submission(connection, old, new)

        self._on_study(old, rename)

    def archive_study(self, name: str, archived: bool = True) -> None:
        """Archive a study, or undo it; raise `UsageError` if it is running or queued."""

        def archive(connection: Connection, study_id: int) -> None:
            if archived:
                refuse_queued(connection, name, "archived")
            keeping.archive(connection, study_id, name=name, archived=archived)

        self._on_study(name, archive)

    def delete_study(self, name: str) -> None:
        """Delete a study; raise `UsageError` if it is running or queued."""

        def delete_all(connection: Connection, study_id: int) -> None:
            refuse_queued(connection, name, "deleted")
            keeping.delete_all(connection, study_id, name=name)
            forget_submission(connection, name)

        self._on_study(name, delete_all)

    @patiently
    def study(self, name: str) -> StudyRecord:
        """Return a study; raise `NotFoundError` with similar names."""
        found = self.find_study(name)
        if found is None:
            with self._reading() as connection:
                raise no_study(connection, name)
        return found

    @patiently
    def find_study(self, name: str) -> StudyRecord | None:
        """Return a study, or None."""
        with self._reading() as connection:
            self._asked.update(
                connection.execute(select(StudyRow.name, StudyRow.id).where(StudyRow.name == name)).all()
            )
            row = connection.execute(STUDY.where(StudyRow.name == name)).mappings().first()
        return None if row is None else study_record(row)

    @patiently
    def studies(self) -> list[StudySummary]:
        """Return all studies with counts, oldest first."""
        with self._reading() as connection:
            return [study_summary(row) for row in connection.execute(STUDIES).mappings()]

    @patiently
    def study_records(self) -> list[StudyRecord]:
        """Return all studies with spec and device, oldest first."""
        with self._reading() as connection:
            return [study_record(row) for row in connection.execute(STUDY.order_by(StudyRow.id)).mappings()]

    def update_spec(self, name: str, spec: Mapping[str, object]) -> None:
        """Replace the spec with one that asks the same question."""
        self._on_study(name, partial(keeping.update_spec, spec=spec))

    def bind_environment(self, name: str, environment: Environment, *, again: bool = False) -> None:
        """Bind a study to its first kind of device; raise `OtherDeviceError` for another.

        ``again`` replaces the environment with this one of the same kind.
        """

        def bind(connection: Connection, study_id: int) -> None:
            keeping.bind(connection, study_id, environment, self._environment_id(connection, environment), again=again)

        self._on_study(name, bind)

    def start(self, study: str, plan: TrialPlan, *, environment: Environment, lease: Lease) -> TrialRecord | None:
        """Start a planned trial under a lease; None if another driver was faster.

        A new trial gets the next number only if no trial is newer than ``plan.after``: each driver knows all earlier
        trials. A queued or paused trial starts once, its time counts from now, and only its micro-batches may change.

        Raises `UsageError` if the study is archived.
        """
        work = partial(starting.start, self, study, plan, uuid4().hex, lease=lease, environment=environment)
        return self._patience.run(work)

    def enqueue(self, study: str, plan: TrialPlan) -> int:
        """Queue a trial for any driver; return its number."""
        trial = self._patience.run(partial(starting.start, self, study, plan, uuid4().hex))
        assert trial is not None, "nobody else queues the same plan"
        return trial.number

    def settle_paused(
        self, study: str, numbers: Collection[int] | None = None, state: TrialState = TrialState.PRUNED
    ) -> list[int]:
        """End paused trials, all or the given ones; return their numbers."""
        return self._on_study(study, partial(starting.settle_paused, numbers=numbers, state=state))

    def finish_trial(
        self, study: str, number: int, outcome: TrialOutcome, *, steps_x_step_time_s: float | None
    ) -> TrialRecord:
        """Store how a trial ended. A resumed trial is contended if any part was.

        Raises `DatabaseError` if it ended differently.
        """
        if not outcome.state.is_finished:
            raise ValueError(f"{outcome.state} is not a final state")
        columns = {**to_columns(outcome), "steps_x_step_time_s": steps_x_step_time_s}
        if not outcome.contended:
            del columns["contended"]  # keeps the row's value, from the part before a pause

        def finish(connection: Connection, study_id: int) -> TrialRecord:
            ended = end_trial(connection, trial_id_of(connection, study, study_id, number), columns)
            if ended:
                mark_changed(connection, study_id, [number])
            [stored] = self._timed(connection, study_id, [stored_trial(connection, study, study_id, number)])
            # If it did not end just now, an earlier try may have ended it.
            if not ended and stored.outcome not in (outcome, replace(outcome, contended=True)):
                raise DatabaseError(
                    f"trial {number} of {study!r} cannot end as {outcome.state}: it is not running but {stored.state}"
                )
            return stored

        return self._on_study(study, finish)

    def heartbeat(self, study: str, owner: str, lease_seconds: float) -> None:
        """Extend the owner's leases to ``lease_seconds`` from now."""
        self._on_study(study, partial(leases.heartbeat, owner=owner, lease_seconds=lease_seconds))

    @patiently
    def time(self) -> datetime:
        """Return the database's time."""
        with self._reading() as connection:
            return now(connection)

    @patiently
    def leases(self, study: str) -> dict[str, datetime]:
        """Return each owner's latest lease end."""
        with self._reading() as connection:
            return leases.last_renewed(connection, self._study_id(connection, study))

    def mark_lost(self, study: str, *, is_alive: IsAlive) -> list[int]:
        """End dead owners' trials as lost; return their numbers.

        If ``is_alive`` returns None (unknown), the lease decides.
        """
        return self._on_study(study, partial(leases.mark_lost, is_alive=is_alive))

    def claim(self, study: str, name: str, *, owner: str, lease_seconds: float, is_alive: IsAlive) -> bool:
        """Claim a task that one driver does at a time; return whether the owner has it.

        A claim lasts until its lease ends or its owner dies.
        """
        return self._on_study(
            study, partial(leases.claim, name=name, owner=owner, lease_seconds=lease_seconds, is_alive=is_alive)
        )

    def release(self, study: str, name: str, *, owner: str) -> None:
        """Release a claim of this owner."""
        self._on_study(study, partial(leases.release, name=name, owner=owner))

    @patiently
    def trials(
        self, study: str, *, phase: Phase | None = None, states: Collection[TrialState] | None = None
    ) -> list[TrialRecord]:
        """Return trials by number, of one phase or some states."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            query = TRIALS.where(TrialRow.study_id == study_id)
            if phase is not None:
                query = query.where(TrialRow.phase == phase)
            if states is not None:
                query = query.where(TrialRow.state.in_(states))
            found = [trial_record(row) for row in connection.execute(query).mappings()]
            return self._timed(connection, study_id, found)

    @patiently
    def seconds_at_rest(self, study: str) -> float:
        """Return the seconds since a trial started or ended, else since the study began."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            trials = select(func.max(TrialRow.created_at), func.max(TrialRow.ended_at))
            last = connection.execute(trials.where(TrialRow.study_id == study_id)).one()
            made = connection.scalars(select(StudyRow.created_at).where(StudyRow.id == study_id)).one()
            return (now(connection) - max(one for one in (made, *last) if one is not None)).total_seconds()

    @patiently
    def changes(self, study: str, since: int) -> Changes:
        """Return the trials that changed after a revision (0: all)."""
        with self._reading() as connection:
            found, now = changes(connection, study, since)
            return replace(found, trials=self._timed(connection, now.study_id, found.trials, now))

    @patiently
    def trial(self, study: str, number: int) -> TrialRecord:
        """Return a trial; raise `NotFoundError` with the valid numbers."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            [found] = self._timed(connection, study_id, [stored_trial(connection, study, study_id, number)])
            return found
