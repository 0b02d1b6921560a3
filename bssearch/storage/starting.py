"""How trials come to run: started by a driver, queued by a person and started later, or resumed after a pause."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from bssearch.errors import UsageError
from bssearch.records import TrialOutcome, TrialRecord, TrialState
from bssearch.storage.leases import now
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.rows import to_columns
from bssearch.storage.statements import TRIALS, is_running, trial_record


def newest(connection: Connection, study_id: int) -> int:
    """Return the number of a study's newest trial, 0 where it has none."""
    return connection.scalar(select(func.max(TrialRow.number)).where(TrialRow.study_id == study_id)) or 0


def refuse_archived(connection: Connection, study_id: int, name: str) -> None:
    """Raise `UsageError` where a study is archived."""
    if connection.scalar(select(StudyRow.archived_at).where(StudyRow.id == study_id)) is not None:
        raise archived(name)


def archived(name: str) -> UsageError:
    """Return the error for a trial that an archived study would have to take."""
    return UsageError(
        f"the study {name!r} is archived and takes no more trials", hint=f"bssearch archive {name} --undo"
    )


@dataclass(slots=True)
class NewTrial:
    """A trial that is stored once, however often that is tried; queued where it has no lease, else running."""

    fields: Mapping[str, Any]
    lease_seconds: float | None
    newest_at_first_try: int | None = None

    def add(self, connection: Connection, study_id: int, environment_id: int | None) -> int:
        """Store the trial as the study's next, unless an earlier try did; return its number."""
        if self.newest_at_first_try is None:
            self.newest_at_first_try = newest(connection, study_id)
        else:
            query = TRIALS.where(TrialRow.study_id == study_id, TrialRow.number > self.newest_at_first_try)
            for trial in map(trial_record, connection.execute(query).mappings()):
                if all(getattr(trial, name) == value for name, value in self.fields.items()):
                    return trial.number
        return self._insert(connection, study_id, environment_id)

    def add_after(self, connection: Connection, study_id: int, environment_id: int, after: int) -> int | None:
        """Store the trial unless there is one newer than ``after``: then None, but for one that the owner runs."""
        if newest(connection, study_id) == after:
            return self._insert(connection, study_id, environment_id)
        # An earlier try may have been committed although its connection broke, and others have come after it.
        ours = runs_for(connection, study_id, after + 1, self.fields["lease_owner"])
        return after + 1 if ours else None

    def _insert(self, connection: Connection, study_id: int, environment_id: int | None) -> int:
        time = now(connection)
        state = TrialState.QUEUED if self.lease_seconds is None else TrialState.RUNNING
        trial = TrialRecord(
            number=newest(connection, study_id) + 1,
            state=state,
            lease_expires_at=None if self.lease_seconds is None else time + timedelta(seconds=self.lease_seconds),
            created_at=time,
            ended_at=None,
            steps_x_step_time_s=None,
            outcome=TrialOutcome(state=state, reason=""),
            **self.fields,
        )
        connection.execute(
            insert(TrialRow).values(study_id=study_id, environment_id=environment_id, **to_columns(trial))
        )
        return trial.number


def runs_for(connection: Connection, study_id: int, number: int, owner: str) -> bool:
    """Return whether a trial runs under a lease of the owner."""
    query = select(TrialRow.id).where(*is_running(study_id), TrialRow.number == number, TrialRow.lease_owner == owner)
    return connection.scalar(query) is not None


def resume(
    connection: Connection,
    study_id: int,
    *,
    number: int,
    train_seconds_limit: float,
    lease_owner: str,
    lease_seconds: float,
) -> bool:
    """Let a paused trial run again, without an outcome; return whether it now runs for this owner.

    Whether it was contended stays in its row: that taints the whole trial, and its next worker need not know of it. It
    counts as created now: the time in which it waited is no time in which it ran.
    """
    time = now(connection)
    blank = to_columns(TrialOutcome(state=TrialState.RUNNING, reason=""))
    del blank["contended"]
    resumed = connection.execute(
        update(TrialRow)
        .where(TrialRow.study_id == study_id, TrialRow.number == number, TrialRow.state == TrialState.PAUSED)
        .values(
            **blank,
            created_at=time,
            ended_at=None,
            steps_x_step_time_s=None,
            train_seconds_limit=train_seconds_limit,
            lease_owner=lease_owner,
            lease_expires_at=time + timedelta(seconds=lease_seconds),
        )
    )
    return resumed.rowcount == 1 or runs_for(connection, study_id, number, lease_owner)


def settle_paused(
    connection: Connection, study_id: int, *, numbers: Collection[int] | None, state: TrialState
) -> list[int]:
    """End a study's paused trials, all or those given, in a state; return their numbers."""
    settled = update(TrialRow).where(TrialRow.study_id == study_id, TrialRow.state == TrialState.PAUSED)
    if numbers is not None:
        settled = settled.where(TrialRow.number.in_(numbers))
    return sorted(connection.scalars(settled.values(state=state).returning(TrialRow.number)))


def start_queued(
    connection: Connection,
    study_id: int,
    number: int,
    environment_id: int,
    *,
    lease_owner: str,
    lease_seconds: float,
    **as_run: Any,
) -> bool:
    """Start a queued trial, whose time counts from now; return whether it now runs for this owner.

    ``as_run`` are the columns in which it may differ from what was queued.
    """
    time = now(connection)
    started = connection.execute(
        update(TrialRow)
        .where(TrialRow.study_id == study_id, TrialRow.number == number, TrialRow.state == TrialState.QUEUED)
        .values(
            state=TrialState.RUNNING,
            environment_id=environment_id,
            lease_owner=lease_owner,
            lease_expires_at=time + timedelta(seconds=lease_seconds),
            created_at=time,
            **as_run,
        )
    )
    return started.rowcount == 1 or runs_for(connection, study_id, number, lease_owner)
