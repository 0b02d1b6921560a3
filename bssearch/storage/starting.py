"""How trials come to run: started by a driver, queued by a person and started later, or resumed after a pause."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from bssearch.errors import UsageError
from bssearch.records import PLANNED, Lease, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.storage.columns import database_now, now
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.revisions import mark_changed, raise_revision
from bssearch.storage.rows import to_columns
from bssearch.storage.statements import TRIALS, is_running, trial_record

JUST_BEFORE = timedelta(microseconds=1)
"""By how much a trial begins before the time of the database's clock. SQLite's counts milliseconds: else a trial that
ends in the one in which it began would have begun as it ended, as imported ones do (`TrialRecord.is_imported`)."""

_NEWEST = select(func.max(TrialRow.number), database_now()).where(TrialRow.study_id == bindparam("study_id"))
_ARCHIVED_AT = select(StudyRow.archived_at).where(StudyRow.id == bindparam("study_id"))
_ADDED = insert(TrialRow.__table__)


def newest(connection: Connection, study_id: int) -> tuple[int, datetime]:
    """Return the number of a study's newest trial, 0 where it has none, and the database's time."""
    number, time = connection.execute(_NEWEST, {"study_id": study_id}).one()
    return number or 0, time


def refuse_archived(connection: Connection, study_id: int, name: str) -> None:
    """Raise `UsageError` where a study is archived."""
    if connection.scalar(_ARCHIVED_AT, {"study_id": study_id}) is not None:
        raise archived(name)


def archived(name: str) -> UsageError:
    """Return the error for a trial that an archived study would have to take."""
    return UsageError(
        f"the study {name!r} is archived and takes no more trials", hint=f"bssearch study archive {name} --undo"
    )


@dataclass(slots=True)
class Start:
    """The start of a planned trial under a lease, or without one its queueing: done once, however often it is tried."""

    plan: TrialPlan
    lease: Lease | None
    newest_at_first_try: int | None = None

    def run(self, connection: Connection, study_id: int, environment_id: int, lease: Lease) -> int | None:
        """Store that the trial runs; return its number, None where another driver was faster."""
        plan = self.plan
        if plan.resumed is not None:
            return _resume(connection, study_id, plan.resumed, plan, lease)
        if plan.queued is not None:
            return _start_queued(connection, study_id, environment_id, plan.queued, plan, lease)
        if plan.after is not None:
            return self._add_after(connection, study_id, environment_id, plan.after, lease)
        return self.add(connection, study_id, environment_id)

    def add(self, connection: Connection, study_id: int, environment_id: int | None) -> int:
        """Store the trial as the study's next, unless an earlier try did; return its number."""
        if self.newest_at_first_try is None:
            self.newest_at_first_try, _ = newest(connection, study_id)
        else:
            query = TRIALS.where(TrialRow.study_id == study_id, TrialRow.number > self.newest_at_first_try)
            for trial in map(trial_record, connection.execute(query).mappings()):
                if self._is_of_an_earlier_try(trial):
                    return trial.number
        number, time = newest(connection, study_id)
        return self._insert(connection, study_id, environment_id, number + 1, time)

    def _is_of_an_earlier_try(self, trial: TrialRecord) -> bool:
        owner = None if self.lease is None else self.lease.owner
        return trial.lease_owner == owner and all(getattr(trial, name) == getattr(self.plan, name) for name in PLANNED)

    def _add_after(
        self, connection: Connection, study_id: int, environment_id: int, after: int, lease: Lease
    ) -> int | None:
        """Store the trial unless there is one newer than ``after``: then None, unless an earlier try has stored it."""
        number, time = newest(connection, study_id)
        if number == after:
            return self._insert(connection, study_id, environment_id, after + 1, time)
        return after + 1 if _runs_for(connection, study_id, after + 1, lease.owner) else None

    def _insert(
        self, connection: Connection, study_id: int, environment_id: int | None, number: int, time: datetime
    ) -> int:
        trial = TrialRecord.planned(self.plan, number=number, lease=self.lease, created_at=time - JUST_BEFORE)
        trial = replace(trial, outcome=TrialOutcome(state=trial.state, reason=""))
        place = {"study_id": study_id, "environment_id": environment_id}
        revision = raise_revision(connection, study_id)
        connection.execute(_ADDED, {**place, "revision": revision, **to_columns(trial)})
        return trial.number


def _start_queued(
    connection: Connection, study_id: int, environment_id: int, number: int, plan: TrialPlan, lease: Lease
) -> int | None:
    """Start a queued trial, whose time counts from now. Of its configuration only the micro-batches may be others."""
    as_run = {
        "environment_id": environment_id,
        "micro_batch_size": plan.configuration.micro_batch_size,
        "accumulation_steps": plan.configuration.accumulation_steps,
        "eval_every_steps": plan.eval_every_steps,
        "threads": plan.threads,
        "started_by": lease.user,
        "spec_digest": lease.spec,
        "state": TrialState.RUNNING,
    }
    return _let_run(connection, study_id, number, TrialState.QUEUED, plan, lease, as_run)


def _resume(connection: Connection, study_id: int, number: int, plan: TrialPlan, lease: Lease) -> int | None:
    """Let a paused trial run again, without an outcome; it keeps its number and its observations.

    Whether it was contended stays in its row: that taints the whole trial, and its next worker need not know of it. It
    counts as created now: the time in which it waited is no time in which it ran.
    """
    blank = to_columns(TrialOutcome(state=TrialState.RUNNING, reason=""))
    del blank["contended"]
    blank |= {"ended_at": None, "steps_x_step_time_s": None}
    return _let_run(connection, study_id, number, TrialState.PAUSED, plan, lease, blank)


def _let_run(
    connection: Connection,
    study_id: int,
    number: int,
    state: TrialState,
    plan: TrialPlan,
    lease: Lease,
    columns: dict[str, Any],
) -> int | None:
    """Let a trial that is in a state run from now on under a new limit; return its number where the owner runs it."""
    time = now(connection)
    started = connection.execute(
        update(TrialRow)
        .where(TrialRow.study_id == study_id, TrialRow.number == number, TrialRow.state == state)
        .values(
            **columns,
            created_at=time - JUST_BEFORE,
            train_seconds_limit=plan.train_seconds_limit,
            expected_improvement=plan.expected_improvement,
            lease_owner=lease.owner,
            lease_expires_at=time + timedelta(seconds=lease.seconds),
        )
    )
    if started.rowcount == 1:
        mark_changed(connection, study_id, [number])
        return number
    return number if _runs_for(connection, study_id, number, lease.owner) else None


def _runs_for(connection: Connection, study_id: int, number: int, owner: str) -> bool:
    """Return whether a trial runs under a lease of the owner."""
    query = select(TrialRow.id).where(*is_running(study_id), TrialRow.number == number, TrialRow.lease_owner == owner)
    return connection.scalar(query) is not None


def settle_paused(
    connection: Connection, study_id: int, *, numbers: Collection[int] | None, state: TrialState
) -> list[int]:
    """End a study's paused trials, all or those given, in a state; return their numbers."""
    settled = update(TrialRow).where(TrialRow.study_id == study_id, TrialRow.state == TrialState.PAUSED)
    if numbers is not None:
        settled = settled.where(TrialRow.number.in_(numbers))
    ended = sorted(connection.scalars(settled.values(state=state).returning(TrialRow.number)))
    mark_changed(connection, study_id, ended)
    return ended
