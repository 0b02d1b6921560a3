"""Starts, queues and resumes trials."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from bssearch.errors import UsageError
from bssearch.records import Environment, Lease, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.storage.columns import database_now, to_columns
from bssearch.storage.database import Database
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.revisions import mark_changed, raise_revision
from bssearch.storage.statements import stored_trial

JUST_BEFORE = timedelta(microseconds=1)
"""Offset of a start from the database's clock. SQLite counts milliseconds: a trial that ends within one would look
imported (`TrialRecord.is_imported`: start = end).
"""

_STATE = select(
    func.max(TrialRow.number),
    database_now(),
    select(StudyRow.archived_at).where(StudyRow.id == bindparam("study_id")).scalar_subquery(),
    select(TrialRow.number).where(TrialRow.plan_id == bindparam("plan_id")).scalar_subquery(),
).where(TrialRow.study_id == bindparam("study_id"))

_ADDED = insert(TrialRow.__table__)


def archived(name: str) -> UsageError:
    """Return the error for a new trial of an archived study."""
    return UsageError(
        f"the study {name!r} is archived and accepts no trials", hint=f"bssearch study archive {name} --undo"
    )


def start(
    database: Database,
    study: str,
    plan: TrialPlan,
    plan_id: str,
    *,
    lease: Lease | None = None,
    environment: Environment | None = None,
) -> TrialRecord | None:
    """Start a trial, or queue it without ``lease``; idempotent per ``plan_id``.

    Returns None if another driver was faster. Raises `UsageError` if the study is archived.
    """
    with database._writing() as connection:
        study_id = database._lock_study(connection, study)
        environment_id = None if environment is None else database._environment_id(connection, environment)
        place = {"study_id": study_id, "plan_id": plan_id}
        last, time, archived_at, number = connection.execute(_STATE, place).one()
        if number is None and plan.known_number is None:
            if archived_at is not None:
                raise archived(study)
            if plan.after is not None and plan.after != (last or 0):
                return None
            number = (last or 0) + 1
            trial = TrialRecord.planned(plan, number=number, lease=lease, created_at=time - JUST_BEFORE)
            trial = replace(trial, outcome=TrialOutcome(state=trial.state, reason=""))
            place |= {"environment_id": environment_id, "revision": raise_revision(connection, study_id)}
            connection.execute(_ADDED, {**place, **to_columns(trial)})
        elif number is None:
            number = plan.known_number
            assert number is not None and lease is not None, "a stored trial starts under a lease"
            state = TrialState.QUEUED if plan.resumed is None else TrialState.PAUSED
            started = connection.execute(
                update(TrialRow)
                .where(TrialRow.study_id == study_id, TrialRow.number == number, TrialRow.state == state)
                .values(
                    **(_dequeued(plan, lease, environment_id) if plan.resumed is None else _resumed()),
                    plan_id=plan_id,
                    created_at=time - JUST_BEFORE,
                    train_seconds_limit=plan.train_seconds_limit,
                    expected_improvement=plan.expected_improvement,
                    lease_owner=lease.owner,
                    lease_expires_at=time + timedelta(seconds=lease.seconds),
                )
            )
            if started.rowcount != 1:
                return None
            mark_changed(connection, study_id, [number])
        trial = stored_trial(connection, study, study_id, number)
        return trial if trial.outcome is None else None  # else taken over and ended since an earlier call


def _dequeued(plan: TrialPlan, lease: Lease, environment_id: int | None) -> dict[str, Any]:
    """Change only micro-batches of the configuration."""
    return {
        "environment_id": environment_id,
        "micro_batch_size": plan.configuration.micro_batch_size,
        "accumulation_steps": plan.configuration.accumulation_steps,
        "eval_every_steps": plan.eval_every_steps,
        "threads": plan.threads,
        "started_by": lease.user,
        "spec_digest": lease.spec,
        "state": TrialState.RUNNING,
    }


def _resumed() -> dict[str, Any]:
    """Keep ``contended``, which applies to the whole trial."""
    blank = to_columns(TrialOutcome(state=TrialState.RUNNING, reason=""))
    del blank["contended"]
    return blank | {"ended_at": None, "steps_x_step_time_s": None}


def settle_paused(
    connection: Connection, study_id: int, *, numbers: Collection[int] | None, state: TrialState
) -> list[int]:
    """End paused trials in a state; return their numbers."""
    settled = update(TrialRow).where(TrialRow.study_id == study_id, TrialRow.state == TrialState.PAUSED)
    if numbers is not None:
        settled = settled.where(TrialRow.number.in_(numbers))
    ended = sorted(connection.scalars(settled.values(state=state).returning(TrialRow.number)))
    mark_changed(connection, study_id, ended)
    return ended
