"""Imported studies with finished trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, insert, literal, literal_column, select

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
from bssearch.storage.columns import paths, to_columns
from bssearch.storage.database import Database
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.statements import STUDY, raise_revision, study_record
from bssearch.storage.studies import bind_study, create_study

_FIXED = (int, datetime, StrEnum)  # no float: SQLite does not read every literal exactly
CHUNK = 1_000  # trials; what all of them share is a part of the statement, which saves two thirds of the time


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
    """Store a study as created at a time."""
    study = StudyRecord.created(finished.study, time)
    check_study_name(study.name)
    _create(connection, study)
    study_id = connection.execute(select(StudyRow.id).where(StudyRow.name == study.name)).scalar_one()
    place = {"study_id": study_id, "environment_id": database.environment_id(connection, finished.environment)}
    bind_study(connection, study_id, finished.environment, place["environment_id"], again=False)
    place["revision"] = raise_revision(connection, study_id)
    attributes = _attributes()
    read = attrgetter(*attributes.values())
    for start in range(0, len(finished.trials), CHUNK):
        trials = finished.trials[start : start + CHUNK]
        row = {**place, **to_columns(_record(trials[0], start + 1, time))}
        columns = dict(zip(attributes, zip(*map(read, trials), strict=True), strict=True))
        for state in {*columns["state"]}:
            if not state.is_finished:
                raise ValueError(f"{state} is not a final state")
        columns["number"] = tuple(range(start + 1, start + 1 + len(trials)))
        columns["parameters"] = tuple(map(dict, columns["parameters"]))
        shared = {
            name: one for name, one in row.items() if name not in columns or columns[name].count(one) == len(trials)
        }
        fixed = {name: _literal(connection, name, one) for name, one in shared.items() if isinstance(one, _FIXED)}
        varying = [name for name in columns if name not in fixed and shared.get(name, "") is not None]
        statement = insert(TrialRow).values(fixed).inline()
        compiled: Any = statement.compile(dialect=connection.dialect, column_keys=varying)
        rows = zip(*(_stored(connection, name, columns[name]) for name in compiled.positiontup or varying), strict=True)
        connection.exec_driver_sql(
            str(compiled),
            [*rows] if compiled.positional else [dict(zip(varying, values, strict=True)) for values in rows],
        )


def _stored(connection: Connection, name: str, values: Sequence[Any]) -> Iterable[Any]:
    """Values as the driver takes them; SQLAlchemy takes three times as long to convert each row."""
    convert = TrialRow.__table__.c[name].type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
    return values if convert is None else map(convert, values)


@cache
def _attributes() -> dict[str, str]:
    """Columns of a `FinishedTrial` and its attributes."""
    own = {"phase": "phase", "seed": "seed", "train_seconds_limit": "train_seconds_limit", "state": "outcome.state"}
    return own | paths(Configuration, "configuration.") | paths(TrialOutcome, "outcome.")


def _literal(connection: Connection, name: str, value: object) -> ColumnElement[Any]:
    """Value as SQL."""
    bound = literal(value, TrialRow.__table__.c[name].type)
    return literal_column(str(bound.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})))


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
