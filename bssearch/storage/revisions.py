"""The revision of a study: a counter that every change of its trials and its probes raises.

It is raised in the transaction of the change, under the lock of the study's row, which is held until the commit. So
changes are committed in the order of their revisions, and a reader that has seen one has seen all with a smaller one.
A heartbeat is no change: the end of a running trial's lease is as old as the trial's last change. Nor are observations
of a running trial: many drivers that write some each second would have all others read all running trials again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, select, update

from bssearch.records import TrialRecord, TrialState
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.statements import TRIALS, no_study, trial_record

# Made once: SQLAlchemy looks through the many columns of a statement that it has not seen.
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
    """The trials of a study that have changed since a revision, by number, and the ``revision`` that they lead to.

    A trial has changed where it was stored, started, resumed or ended, or where observations came to it after its end:
    those of one that runs concern nobody but its driver. With ``is_rewritten`` rows have been deleted or rewritten
    since: ``trials`` are all there are, and the reader forgets those it had. ``has_new_probes``: step times, memory or
    noise scales have been measured since, or a trial ran out of memory, so that the step times in force are others.
    """

    revision: int
    is_rewritten: bool
    has_new_probes: bool
    trials: list[TrialRecord]


def raise_revision(connection: Connection, study_id: int) -> int:
    """Raise the revision of a study and return it."""
    return connection.execute(_RAISED, {"of_study": study_id}).scalar_one()


def mark_changed(connection: Connection, study_id: int, numbers: Collection[int]) -> None:
    """Raise the revision of a study where some of its trials have changed, and give it to them."""
    if numbers:
        changed = {"of_study": study_id, "numbers": list(numbers)}
        connection.execute(_CHANGED, {**changed, "revision": raise_revision(connection, study_id)})


def mark_observed(connection: Connection, study_id: int, numbers: Collection[int]) -> None:
    """Mark as changed those of some trials, to which observations were appended, that do not run any more."""
    ended = connection.scalars(_ENDED, {"of_study": study_id, "numbers": list(numbers)})
    mark_changed(connection, study_id, ended.all())


def mark_probed(connection: Connection, study_id: int) -> None:
    """Raise the revision of a study of which a probe was stored."""
    revision = raise_revision(connection, study_id)
    connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(probed_at_revision=revision))


def mark_rewritten(connection: Connection, study_id: int) -> None:
    """Raise the revision of a study of which trials or observations were deleted or rewritten: readers read all anew.

    Every deletion of such rows of a study that stays has to call it.
    """
    revision = raise_revision(connection, study_id)
    connection.execute(update(StudyRow).where(StudyRow.id == study_id).values(rewritten_at_revision=revision))


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a study's changes as they are now."""

    study_id: int
    created_at: datetime
    revision: int
    rewritten_at_revision: int
    probed_at_revision: int

    @property
    def measured_as_of(self) -> tuple[datetime, int, int]:
        """Return what changes with every measurement of the study, and is another for the next study of its id."""
        return self.created_at, self.probed_at_revision, self.rewritten_at_revision


def counters(connection: Connection, study: str | int) -> Counters:
    """Return the counters of a study of a name or an id; raise `NotFoundError` where there is none."""
    query, value = (_OF_ID, study) if isinstance(study, int) else (_OF_NAME, study)
    row = connection.execute(query, {"study": value}).first()
    if row is None:
        raise no_study(connection, str(study))
    return Counters(*row)


def changes(connection: Connection, study: str, since: int) -> tuple[Changes, Counters]:
    """Return what has changed in a study since a revision, 0 for all there is, and its counters.

    A revision above the study's own comes from another study of its name, deleted since: all trials are returned.
    Raises `NotFoundError` without a study.
    """
    row = counters(connection, study)
    is_rewritten = since < row.rewritten_at_revision or since > row.revision
    trials: list[TrialRecord] = []
    if row.revision != since:
        query, values = (_ALL, {}) if since <= 0 or is_rewritten else (_NEWER, {"since": since})
        rows = connection.execute(query, {"study_id": row.study_id, **values}).mappings()
        # Sorted here: for rows in the order of their numbers SQLite would walk through all trials of the study.
        trials = sorted(map(trial_record, rows), key=lambda trial: trial.number)
    has_new_probes = (
        is_rewritten or since < row.probed_at_revision or any(trial.state is TrialState.OOM for trial in trials)
    )
    found = Changes(revision=row.revision, is_rewritten=is_rewritten, has_new_probes=has_new_probes, trials=trials)
    return found, row
