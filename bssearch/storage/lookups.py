"""Rows as records, and the errors for a study or a trial that is not stored."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, RowMapping, bindparam, func, select

from bssearch.errors import NotFoundError
from bssearch.records import StudyRecord, TrialRecord
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.rows import from_columns
from bssearch.storage.statements import TRIALS

# Made once: SQLAlchemy looks through all columns of a statement that it has not seen.
_TRIAL = TRIALS.where(TrialRow.study_id == bindparam("study_id"), TrialRow.number == bindparam("number"))
_TRIAL_IDS = select(TrialRow.number, TrialRow.id).where(
    TrialRow.study_id == bindparam("study_id"), TrialRow.number.in_(bindparam("numbers", expanding=True))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """A study as a list shows it; ``target`` is text; ``trials``, ``reached`` and ``running`` count trials."""

    name: str
    workload: str
    target: str
    objective: str
    trials: int
    reached: int
    running: int
    created_by: str
    created_at: datetime
    archived_at: datetime | None = None


def study_record(row: RowMapping) -> StudyRecord:
    """Return the study of a row of `STUDY`."""
    return from_columns(StudyRecord, row, absent="environment" if row["environment_id"] is None else None)


def study_summary(row: RowMapping) -> StudySummary:
    """Return the summary of a row of `STUDIES`."""
    return StudySummary(
        name=row["name"],
        workload=str(row["spec"].get("workload", "")),
        target=f"{row['target_metric']} {row['target_goal'].sign} {row['target_value']:g}",
        objective=row["objective"],
        trials=row["trials"],
        reached=row["reached"],
        running=row["running"],
        created_by=row["created_by"],
        created_at=row["created_at"],
        archived_at=row["archived_at"],
    )


def trial_record(row: RowMapping) -> TrialRecord:
    """Return the trial of a row of `TRIALS`; one that has not finished has no outcome."""
    return from_columns(TrialRecord, row, absent=None if row["state"].is_finished else "outcome")


def stored_trial(connection: Connection, study: str, study_id: int, number: int) -> TrialRecord:
    """Return a trial of a study; raise `NotFoundError` naming the numbers there are."""
    row = connection.execute(_TRIAL, {"study_id": study_id, "number": number}).mappings().first()
    if row is None:
        raise no_trial(connection, study, study_id, number)
    return trial_record(row)


def trial_ids_of(connection: Connection, study: str, study_id: int, numbers: Collection[int]) -> dict[int, int]:
    """Return the ids of trials by their numbers; raise `NotFoundError` where one is missing."""
    rows = connection.execute(_TRIAL_IDS, {"study_id": study_id, "numbers": list(numbers)})
    found = {number: trial_id for number, trial_id in rows}
    for number in numbers:
        if number not in found:
            raise no_trial(connection, study, study_id, number)
    return found


def trial_id_of(connection: Connection, study: str, study_id: int, number: int) -> int:
    """Return the id of a trial; raise `NotFoundError` naming the numbers there are."""
    return trial_ids_of(connection, study, study_id, [number])[number]


def no_trial(connection: Connection, study: str, study_id: int, number: int) -> NotFoundError:
    """Return the error for a trial that is not stored, naming the numbers there are."""
    low, high = connection.execute(
        select(func.min(TrialRow.number), func.max(TrialRow.number)).where(TrialRow.study_id == study_id)
    ).one()
    there_are = "it has none yet" if low is None else f"its trials are {low} to {high}"
    return NotFoundError(f"the study {study!r} has no trial {number}: {there_are}")


def no_study(connection: Connection, name: str) -> NotFoundError:
    """Return the error for a study that is not stored, naming those with a name like it."""
    names = connection.scalars(select(StudyRow.name).order_by(StudyRow.name)).all()
    near = difflib.get_close_matches(name, names, n=3)
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return NotFoundError(f"no study {name!r} in this database", hint=f"{guess}`bssearch studies` lists them")
