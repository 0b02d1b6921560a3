"""The store: studies, trials, observations and probes as records. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from sqlalchemy import URL, Connection, func, select

from bssearch.errors import DatabaseError
from bssearch.records import (
    Environment,
    Lease,
    NewStudy,
    Phase,
    StudyRecord,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
)
from bssearch.settings import database_url
from bssearch.storage import keeping, leases, migrate, starting
from bssearch.storage.branches import Branches
from bssearch.storage.clock import now
from bssearch.storage.connection.engine import create_engine_for
from bssearch.storage.connection.urls import sqlite_file
from bssearch.storage.database import Notify, patiently
from bssearch.storage.findings import Findings
from bssearch.storage.leases import IsAlive
from bssearch.storage.lookups import (
    StudySummary,
    no_study,
    stored_trial,
    study_record,
    study_summary,
    trial_id_of,
    trial_record,
)
from bssearch.storage.measurements import Measurements
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.observations import Observations
from bssearch.storage.queue import Queue, forget_submission, refuse_queued, rename_submission
from bssearch.storage.revisions import Changes, changes, mark_changed
from bssearch.storage.rows import to_columns
from bssearch.storage.specs import Specs
from bssearch.storage.statements import STUDIES, STUDY, TRIALS, end_trial
from bssearch.storage.transfer.finished import FinishedStudy, Import
from bssearch.storage.transfer.transfers import Transfers


def open_store(url: str | URL | None = None, *, write: bool = True, notify: Notify | None = None) -> Store:
    """Open the database of the URL, of ``BSSEARCH_DB_URL``, or the file in this folder.

    For writing a SQLite file is made or upgraded; for reading it must exist and is not touched. ``notify`` gets
    one-line messages for people: schema upgraded, connection lost, connection back. Raises `UsageError` for a text that
    is no URL, `DatabaseError` where it cannot be opened, `SchemaError` where its schema is not ours.
    """
    return Store(url if isinstance(url, URL) else database_url(url), write=write, notify=notify)


def check_writable(url: str | None = None) -> None:
    """Raise what `open_store` raises where a study could not be stored; nothing is made, and a file not opened."""
    engine = create_engine_for(database_url(url))
    try:
        if sqlite_file(engine.url) is None:
            migrate.prepare(engine, lambda message: None)
    finally:
        engine.dispose()


class Store(Observations, Findings, Measurements, Branches, Specs, Transfers, Queue):
    """An open database. Every method may raise `DatabaseError`; those that take a study's name `NotFoundError`.

    Threads may share one. One that is open for writing waits for a server that is away (`Patience`).
    """

    def create_study(self, new: NewStudy) -> StudyRecord:
        """Store a new study; raise `UsageError` where the name is taken. Of two that create it at once one does."""
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
        """Store new studies with their finished trials, all or none; raise `UsageError` where a name is taken."""
        batch = Import(studies)

        def add() -> None:
            with self._writing() as connection:
                batch.add(connection, self._environment_id)

        self._patience.run(add)

    def rename_study(self, old: str, new: str) -> None:
        """Rename a study; raise `UsageError` for a name that is taken or ill-formed, or where a trial of it runs.

        Or where it waits in the queue: that holds for archiving and deleting it, too.
        """

        def rename(connection: Connection, study_id: int) -> None:
            refuse_queued(connection, old, "renamed")
            keeping.rename(connection, study_id, old=old, new=new)
            if old != new:
                rename_submission(connection, old, new)

        self._on_study(old, rename)

    def archive_study(self, name: str, archived: bool = True) -> None:
        """Archive a study, or bring it back; raise `UsageError` where it is to be archived while a driver runs it."""

        def archive(connection: Connection, study_id: int) -> None:
            if archived:
                refuse_queued(connection, name, "archived")
            keeping.archive(connection, study_id, name=name, archived=archived)

        self._on_study(name, archive)

    def delete_study(self, name: str) -> None:
        """Delete a study with all its trials; raise `UsageError` where one of them runs."""

        def delete_all(connection: Connection, study_id: int) -> None:
            refuse_queued(connection, name, "deleted")
            keeping.delete_all(connection, study_id, name=name)
            forget_submission(connection, name)

        self._on_study(name, delete_all)

    @patiently
    def study(self, name: str) -> StudyRecord:
        """Return a study; raise `NotFoundError` naming those with a name like it."""
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
        """Return all studies, the oldest first, with the counts of their trials."""
        with self._reading() as connection:
            return [study_summary(row) for row in connection.execute(STUDIES).mappings()]

    @patiently
    def study_records(self) -> list[StudyRecord]:
        """Return all studies, the oldest first, each with its spec and the device it is bound to."""
        with self._reading() as connection:
            return [study_record(row) for row in connection.execute(STUDY.order_by(StudyRow.id)).mappings()]

    def update_spec(self, name: str, spec: Mapping[str, object]) -> None:
        """Replace the spec of a study, of which the question is the same."""
        self._on_study(name, partial(keeping.update_spec, spec=spec))

    def bind_environment(self, name: str, environment: Environment, *, again: bool = False) -> None:
        """Bind a study to the kind of device of its first run; raise `OtherDeviceError` on any other kind.

        ``again``: from now on it is this environment, of the same kind, that counts as its first.
        """

        def bind(connection: Connection, study_id: int) -> None:
            keeping.bind(connection, study_id, environment, self._environment_id(connection, environment), again=again)

        self._on_study(name, bind)

    def start(self, study: str, plan: TrialPlan, *, environment: Environment, lease: Lease) -> TrialRecord | None:
        """Start a planned trial under a lease and return it as stored; None where another driver was faster.

        A new trial becomes the study's next, counted from 1, only where there is none newer than ``plan.after``: so
        drivers decide one after the other, each knowing what the others started. A ``queued`` or ``resumed`` one runs
        where it still waits; its time counts from now, and of its configuration only the micro-batches may differ from
        those it was queued with.
        Raises `UsageError` where the study is archived.
        """
        trial = starting.Start(plan, lease)

        def start(connection: Connection, study_id: int) -> TrialRecord | None:
            if plan.known_number is None:
                starting.refuse_archived(connection, study_id, study)
            number = trial.run(connection, study_id, self._environment_id(connection, environment), lease)
            return None if number is None else stored_trial(connection, study, study_id, number)

        return self._on_study(study, start)

    def enqueue(self, study: str, plan: TrialPlan) -> int:
        """Store a planned trial that some driver shall start, and return its number."""
        trial = starting.Start(plan, lease=None)

        def queue(connection: Connection, study_id: int) -> int:
            starting.refuse_archived(connection, study_id, study)
            return trial.add(connection, study_id, environment_id=None)

        return self._on_study(study, queue)

    def settle_paused(
        self, study: str, numbers: Collection[int] | None = None, state: TrialState = TrialState.PRUNED
    ) -> list[int]:
        """End paused trials that will not go on, all or those given; return which were paused."""
        return self._on_study(study, partial(starting.settle_paused, numbers=numbers, state=state))

    def finish_trial(
        self, study: str, number: int, outcome: TrialOutcome, *, steps_x_step_time_s: float | None
    ) -> TrialRecord:
        """Store how a running trial ended and return it; raise `DatabaseError` where it has ended in another way.

        One that was resumed after a pause was contended where any of its parts was.
        """
        if not outcome.state.is_finished:
            raise ValueError(f"{outcome.state} is not how a trial ends")
        columns = {**to_columns(outcome), "steps_x_step_time_s": steps_x_step_time_s}
        if not outcome.contended:
            del columns["contended"]  # the row says it of the part before a pause

        def finish(connection: Connection, study_id: int) -> TrialRecord:
            ended = end_trial(connection, trial_id_of(connection, study, study_id, number), columns)
            if ended:
                mark_changed(connection, study_id, [number])
            [stored] = self._timed(connection, study_id, [stored_trial(connection, study, study_id, number)])
            # Where it has not ended just now, an earlier try may have ended it.
            if not ended and stored.outcome not in (outcome, replace(outcome, contended=True)):
                raise DatabaseError(
                    f"trial {number} of {study!r} cannot end as {outcome.state}: it is not running but {stored.state}"
                )
            return stored

        return self._on_study(study, finish)

    def heartbeat(self, study: str, owner: str, lease_seconds: float) -> None:
        """Extend the leases of the owner's running trials and its claims to ``lease_seconds`` from now."""
        self._on_study(study, partial(leases.heartbeat, owner=owner, lease_seconds=lease_seconds))

    @patiently
    def time(self) -> datetime:
        """Return the time of the database's clock."""
        with self._reading() as connection:
            return now(connection)

    @patiently
    def leases(self, study: str) -> dict[str, datetime]:
        """Return until when each owner has trials that run or claims, by the last of its leases."""
        with self._reading() as connection:
            return leases.last_renewed(connection, self._study_id(connection, study))

    def mark_lost(self, study: str, *, is_alive: IsAlive) -> list[int]:
        """End the running trials of dead owners as lost; return their numbers.

        ``is_alive`` says True or False of an owner, or None where it cannot know: then the lease decides.
        """
        return self._on_study(study, partial(leases.mark_lost, is_alive=is_alive))

    def claim(self, study: str, name: str, *, owner: str, lease_seconds: float, is_alive: IsAlive) -> bool:
        """Claim what one driver of a study does at a time; return whether the owner has it now.

        A claim is free, held by its owner until the lease ends (`heartbeat` extends it), or left by one that is dead.
        """
        return self._on_study(
            study, partial(leases.claim, name=name, owner=owner, lease_seconds=lease_seconds, is_alive=is_alive)
        )

    def release(self, study: str, name: str, *, owner: str) -> None:
        """Give a claim back; one that another holds is left alone."""
        self._on_study(study, partial(leases.release, name=name, owner=owner))

    @patiently
    def trials(
        self, study: str, *, phase: Phase | None = None, states: Collection[TrialState] | None = None
    ) -> list[TrialRecord]:
        """Return a study's trials by number; only those of a phase or of some states where asked."""
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
        """Return how long ago a trial of a study began or ended, or the study began, by the database's clock."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            trials = select(func.max(TrialRow.created_at), func.max(TrialRow.ended_at))
            last = connection.execute(trials.where(TrialRow.study_id == study_id)).one()
            made = connection.scalars(select(StudyRow.created_at).where(StudyRow.id == study_id)).one()
            return (now(connection) - max(one for one in (made, *last) if one is not None)).total_seconds()

    @patiently
    def changes(self, study: str, since: int) -> Changes:
        """Return which trials of a study have changed since a revision (0: all), as one transaction sees it."""
        with self._reading() as connection:
            found, now = changes(connection, study, since)
            return replace(found, trials=self._timed(connection, now.study_id, found.trials, now))

    @patiently
    def trial(self, study: str, number: int) -> TrialRecord:
        """Return one trial; raise `NotFoundError` naming the numbers there are."""
        with self._reading() as connection:
            study_id = self._study_id(connection, study)
            [found] = self._timed(connection, study_id, [stored_trial(connection, study, study_id, number)])
            return found
