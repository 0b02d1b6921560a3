"""A study's revision: a counter of changes of its trials and probes.

Each change locks the study's row, so a reader of a revision has seen all earlier changes. Heartbeats and observations
of running trials do not count: every driver would reread all running trials each second.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, select, update

from bssearch.records import TrialRecord, TrialState
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.statements import TRIALS, no_study, trial_record

# Built once: SQLAlchemy walks all columns of a new statement.
_ALL = TRIALS.where(TrialRow.study_id == bindparam("study_id")).order_by(None)
_NEWER = _ALL.where(TrialRow.revision > bindparam("since"))
_COUNTERS = select(
    StudyRow.id, StudyRow.created_at, StudyRow.revision, StudyRow.rewritten_at_revision, StudyRow.probed_at_revision
)
_OF_ID = _COUNTERS.where(StudyRow.id == bindparam("study"))
_OF_NAME = _COUNTERS.where(StudyRow.name == bindparam("study"))

_RAISED = (
    update(StudyRow.__table__)
    .where(StudyRow.id == bindparam("of_study"))
    .values(revision=StudyRow.revision + 1)
    .returning(StudyRow.revision)
)
_AMONG = TrialRow.study_id == bindparam("of_study"), TrialRow.number.in_(bindparam("numbers", expanding=True))
_CHANGED = update(TrialRow.__table__).where(*_AMONG)
_ENDED = select(TrialRow.number).where(*_AMONG, TrialRow.state != TrialState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Trials that changed since a revision: stored, started, resumed, ended, or observed after the end.

    ``is_rewritten``: rows were deleted or rewritten; ``trials`` holds all. ``has_new_probes``: step times may differ.
    """

    revision: int
    is_rewritten: bool
    has_new_probes: bool
    trials: list[TrialRecord]


def raise_revision(connection: Connection, study_id: int) -> int:
    """Raise and return the revision."""
    return connection.execute(_RAISED, {"of_study": study_id}).scalar_one()


def mark_changed(connection: Connection, study_id: int, numbers: Collection[int]) -> None:
    """Give changed trials a new revision."""
    if numbers:
        changed = {"of_study": study_id, "numbers": list(numbers)}
        connection.execute(_CHANGED, {**changed, "revision": raise_revision(connection, study_id)})


def mark_observed(connection: Connection, study_id: int, numbers: Collection[int]) -> None:
    """Mark finished trials with new observations as changed."""
    ended = connection.scalars(_ENDED, {"of_study": study_id, "numbers": list(numbers)})
    mark_changed(connection, study_id, ended.all())


def mark_probed(connection: Connection, study_id: int) -> None:
    """Raise the revision after a probe."""
    revision = raise_revision(connection, study_id)
    connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(probed_at_revision=revision))


def mark_rewritten(connection: Connection, study_id: int) -> None:
    """Make readers reread everything; required after deleting trials or observations."""
    revision = raise_revision(connection, study_id)
    connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(rewritten_at_revision=revision))


@dataclass(frozen=True, slots=True)
class Counters:
    """A study's counters."""

    study_id: int
    created_at: datetime
    revision: int
    rewritten_at_revision: int
    probed_at_revision: int

    @property
    def measured_as_of(self) -> tuple[datetime, int, int]:
        """Changes with every measurement; differs for a later study with the same id."""
        return self.created_at, self.probed_at_revision, self.rewritten_at_revision


def counters(connection: Connection, study: str | int) -> Counters:
    """Return a study's counters; raise `NotFoundError`."""
    query, value = (_OF_ID, study) if isinstance(study, int) else (_OF_NAME, study)
    row = connection.execute(query, {"study": value}).first()
    if row is None:
        raise no_study(connection, str(study))
    return Counters(*row)


def changes(connection: Connection, study: str, since: int) -> tuple[Changes, Counters]:
    """Return the changes since a revision (0: all) and the counters."""
    row = counters(connection, study)
    # A revision above the study's is from a deleted study of the same name.
    is_rewritten = since < row.rewritten_at_revision or since > row.revision
    trials: list[TrialRecord] = []
    if row.revision != since:
        query, values = (_ALL, {}) if since <= 0 or is_rewritten else (_NEWER, {"since": since})
        rows = connection.execute(query, {"study_id": row.study_id, **values}).mappings()
        # Sort here: with ORDER BY number SQLite would scan all trials of the study.
        trials = sorted(map(trial_record, rows), key=lambda trial: trial.number)
    has_new_probes = (
        is_rewritten or since < row.probed_at_revision or any(trial.state is TrialState.OOM for trial in trials)
    )
    found = Changes(revision=row.revision, is_rewritten=is_rewritten, has_new_probes=has_new_probes, trials=trials)
    return found, row
