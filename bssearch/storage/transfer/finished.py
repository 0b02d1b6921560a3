"""Imported studies with finished trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, insert, select

from bssearch.errors import UsageError
from bssearch.records import (
    Configuration,
    Environment,
    NewStudy,
    Phase,
    StudyRecord,
    TrialOutcome,
    TrialRecord,
)
from bssearch.spec.reader import check_study_name
from bssearch.storage.columns import to_columns
from bssearch.storage.database import Database
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.revisions import raise_revision
from bssearch.storage.statements import STUDY, study_record
from bssearch.storage.studies import bind_study, create_study


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A finished trial."""

    configuration: Configuration
    phase: Phase
    seed: int
    train_seconds_limit: float
    outcome: TrialOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStudy:
    """A study; its trials get the numbers 1, 2, …"""

    study: NewStudy
    environment: Environment
    trials: Sequence[FinishedTrial]


def add_study(database: Database, connection: Connection, finished: FinishedStudy, time: datetime) -> None:
    """Store a study as created at a time; raise `UsageError`."""
    study = StudyRecord.created(finished.study, time)
    check_study_name(study.name)
    _create(connection, study)
    study_id = connection.execute(select(StudyRow.id).where(StudyRow.name == study.name)).scalar_one()
    place = {"study_id": study_id, "environment_id": database.environment_id(connection, finished.environment)}
    bind_study(connection, study_id, finished.environment, place["environment_id"], again=False)
    place["revision"] = raise_revision(connection, study_id)
    rows = [
        {**place, **to_columns(_record(trial, number, time))} for number, trial in enumerate(finished.trials, start=1)
    ]
    if rows:
        connection.execute(insert(TrialRow), rows)


def is_stored(connection: Connection, finished: FinishedStudy, time: datetime) -> bool:
    """Return whether `add_study` stored this study."""
    study = StudyRecord.created(finished.study, time, finished.environment)
    row = connection.execute(STUDY.where(StudyRow.name == study.name)).mappings().first()
    return row is not None and study_record(row) == study


def _create(connection: Connection, study: StudyRecord) -> None:
    try:
        create_study(connection, study, again=False)
    except UsageError as error:
        raise UsageError(
            error.message,
            hint=f"replace it after `bssearch study delete {study.name}`, or keep both with another --name",
        ) from None


def _record(trial: FinishedTrial, number: int, time: datetime) -> TrialRecord:
    if not trial.outcome.state.is_finished:
        raise ValueError(f"{trial.outcome.state} is not a final state")
    return TrialRecord(
        number=number,
        state=trial.outcome.state,
        phase=trial.phase,
        uncapped=True,  # no other trial limited its time
        configuration=trial.configuration,
        sampled=None,
        seed=trial.seed,
        train_seconds_limit=trial.train_seconds_limit,
        eval_every_steps=1,
        threads=1,
        retry_of=None,
        lease_owner=None,
        lease_expires_at=None,
        created_at=time,
        ended_at=time,
        steps_x_step_time_s=None,
        outcome=trial.outcome,
    )
