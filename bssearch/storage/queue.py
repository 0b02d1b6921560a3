"""The queue of studies that workers serve: submissions and workers. The highest priority is served first, then age."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    CheckConstraint,
    ColumnElement,
    Connection,
    RowMapping,
    Text,
    UniqueConstraint,
    and_,
    cast,
    delete,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, Mapped, mapped_column

from bssearch.errors import NotFoundError, UsageError
from bssearch.records import TrialState
from bssearch.spec.submission import EARLIEST, LATEST, NewSubmission, Submission, SubmissionState, WorkerRecord
from bssearch.storage.columns import Sentences, are_finite, enum, not_negative, now, positive
from bssearch.storage.connection.engine import from_json
from bssearch.storage.database import Database, patiently
from bssearch.storage.keeping import check_name
from bssearch.storage.models import Base, Id, StudyRow, TrialRow
from bssearch.storage.statements import insert_if_absent

# The tables of the queue: submissions and workers.


class SubmissionRow(Base, holds=(Submission,)):
    """A study that somebody wants to be run; ``served_seconds`` are the slot seconds that workers have served it."""

    __tablename__ = "bss_submission"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint("name <> ''", name="name_not_empty"),
        *positive("priority"),
        *not_negative("served_seconds"),
    )

    id: Mapped[Id]
    name: Mapped[str]
    values: Mapped[Mapping[str, object]] = mapped_column(JSON)
    owner: Mapped[str] = mapped_column(index=True)
    priority: Mapped[float]
    not_before: Mapped[datetime | None]
    submitted_at: Mapped[datetime]
    state: Mapped[SubmissionState] = mapped_column(enum(SubmissionState, "state"), index=True)
    served_seconds: Mapped[float]


class WorkerRow(Base):
    """A worker, and the submission that it serves."""

    __tablename__ = "bss_worker"

    name: Mapped[str] = mapped_column(primary_key=True)
    user: Mapped[str]
    host: Mapped[str]
    tags: Mapped[tuple[str, ...]] = mapped_column(Sentences)
    slots: Mapped[str]
    device_name: Mapped[str | None]
    templates: Mapped[Mapping[str, Mapping[str, object]]] = mapped_column(JSON)
    seen_at: Mapped[datetime]
    left_at: Mapped[datetime | None]
    serving: Mapped[str | None]
    serving_since: Mapped[datetime | None]


# Rows of the queue read, though something else may have written them: what is wrong with one hides no other.


def _columns(row: type[Base], names: Iterable[str], json: str) -> list[ColumnElement[Any]]:
    """Return columns, that of JSON as its text: it is read row by row."""
    table = row.__table__
    return [cast(table.c[name], Text).label(name) if name == json else table.c[name] for name in names]


def _are_moments(
    *columns: InstrumentedAttribute[datetime] | InstrumentedAttribute[datetime | None],
) -> ColumnElement[bool]:
    """Return the condition that columns hold moments, or nothing: PostgreSQL has infinities and years beyond ours."""
    return and_(*(or_(column.is_(None), column.between(EARLIEST, LATEST)) for column in columns))


SUBMISSIONS = (
    select(*_columns(SubmissionRow, (one.name for one in fields(Submission)), json="values"))
    .where(
        are_finite(SubmissionRow.priority, SubmissionRow.served_seconds),
        _are_moments(SubmissionRow.submitted_at, SubmissionRow.not_before),
    )
    .order_by(SubmissionRow.id)
)
"""The submissions in the order in which they came, but for rows whose numbers are none, or moments."""

WORKERS = (
    select(*_columns(WorkerRow, (one.name for one in fields(WorkerRecord) if one.name != "is_here"), json="templates"))
    .where(_are_moments(WorkerRow.seen_at, WorkerRow.left_at, WorkerRow.serving_since))
    .order_by(WorkerRow.seen_at.desc())
)
"""The workers, the newest sign of life first, but for rows whose moments are none."""


def submission_record(row: RowMapping) -> Submission:
    """Return a submission; values that cannot be read are the text that they are, which is no mapping."""
    return Submission(**{**row, "values": _value(row["values"])})


def worker_record(row: RowMapping, time: datetime, seen_within_s: float) -> WorkerRecord:
    """Return a worker as it is at a ``time``; one whose templates cannot be read offers none."""
    templates = _value(row["templates"])
    offered = templates if isinstance(templates, Mapping) else {}
    is_here = row["left_at"] is None and time - row["seen_at"] <= timedelta(seconds=seen_within_s)
    return WorkerRecord(**{**row, "templates": offered}, is_here=is_here)


def _value(stored: str) -> Any:
    try:
        return from_json(stored)
    except ValueError:
        return stored


SEEN_WITHIN_S = 60.0
"""Seconds after which a worker that was not seen counts as gone: four of its heartbeats."""

FORGOTTEN_AFTER = timedelta(days=7)
"""How long the rows of workers that are gone are kept, so that `submit` knows what they offer: a choice."""

_MAY_BECOME = {
    SubmissionState.PAUSED: (SubmissionState.WAITING,),
    SubmissionState.CANCELLED: (SubmissionState.WAITING, SubmissionState.PAUSED, SubmissionState.FAILED),
    SubmissionState.WAITING: (SubmissionState.PAUSED, SubmissionState.FAILED, SubmissionState.CANCELLED),
}
"""What a person may make of a submission, and out of which states."""


class Queue(Database):
    """The part of the store that keeps the queue."""

    def submit(self, new: NewSubmission) -> Submission:
        """Queue a study, or again one that is over: its owner's, of the same template, now with these values.

        Raises `UsageError` where another submission or a study has its name, or no study could.
        """
        check_name(new.name)
        new.check()
        tried_at: datetime | None = None

        def add() -> Submission:
            nonlocal tried_at
            with self._writing() as connection:
                _lock(connection)
                earlier = _found(connection, new.name)
                if earlier is not None and earlier.submitted_at == tried_at and earlier.owner == new.owner:
                    return earlier  # an earlier try was committed although its connection broke
                if earlier is not None and (
                    earlier.state.is_over and (new.owner, new.template) == (earlier.owner, earlier.template)
                ):
                    # Who may run studies may delete and add submissions of their own, and change nothing of one.
                    connection.execute(delete(SubmissionRow).where(SubmissionRow.name == new.name))
                elif earlier is not None:
                    raise _taken(earlier, new.name)
                elif connection.scalar(select(StudyRow.id).where(StudyRow.name == new.name)) is not None:
                    raise UsageError(f"there is a study {new.name!r} already", hint="--name gives it another name")
                tried_at = now(connection)
                row = {one.name: getattr(new, one.name) for one in fields(NewSubmission)}
                row |= {"values": dict(new.values), "submitted_at": tried_at, "reason": ""}
                row |= {"state": SubmissionState.WAITING, "served_seconds": earlier.served_seconds if earlier else 0.0}
                if not insert_if_absent(connection, SubmissionRow, row):
                    raise _taken(_found(connection, new.name), new.name)
                return _submission(connection, new.name)

        return self._patience.run(add)

    @patiently
    def submissions(self) -> list[Submission]:
        """Return all submissions in the order in which they came."""
        with self._reading() as connection:
            return [submission_record(row) for row in connection.execute(SUBMISSIONS).mappings()]

    @patiently
    def submission(self, name: str) -> Submission:
        """Return one; raise `NotFoundError` where there is none of that name."""
        with self._reading() as connection:
            return _submission(connection, name)

    @patiently
    def unsettled(self) -> dict[str, list[int]]:
        """Return of the studies of cancelled submissions which trials of workers run or wait to go on.

        Trials that somebody runs beside the queue, or has paused, are nothing that a worker left.
        """
        of_cancelled = (
            select(SubmissionRow.name, TrialRow.number, TrialRow.lease_owner)
            .join(StudyRow, StudyRow.name == SubmissionRow.name)
            .join(TrialRow, TrialRow.study_id == StudyRow.id)
            .where(
                SubmissionRow.state == SubmissionState.CANCELLED,
                TrialRow.state.in_([TrialState.RUNNING, TrialState.PAUSED]),
            )
        )
        found: dict[str, list[int]] = {}
        with self._reading() as connection:
            left = connection.execute(of_cancelled).all()
            processes = {_process(name) for name in connection.scalars(select(WorkerRow.name))} if left else set()
        for name, number, owner in left:
            if owner is not None and _process(owner) in processes:
                found.setdefault(name, []).append(number)
        return found

    @patiently
    def set_submission(self, name: str, state: SubmissionState, reason: str) -> Submission:
        """Pause a submission, cancel it, or have it wait again, and return it as it is then.

        One that is in the state already stays as it is. Raises `NotFoundError`, and `UsageError` where it is in a state
        out of which it does not get there.
        """
        with self._writing() as connection:
            _lock(connection)
            found = _submission(connection, name)
            if found.state is state:
                return found
            if found.state not in _MAY_BECOME[state]:
                raise UsageError(f"the submission {name!r} is {found.state}: it cannot be made {state} any more")
            values = {"state": state, "reason": reason}
            connection.execute(update(SubmissionRow).where(SubmissionRow.name == name).values(values))
            return _submission(connection, name)

    @patiently
    def waiting(self) -> list[str]:
        """Return the names of those that may be served now, in the order in which they are."""
        with self._reading() as connection:
            return [one.name for one in _waiting(connection)]

    @patiently
    def keep_worker(self, worker: WorkerRecord) -> None:
        """Store a worker as it is, seen now; forget those that have long been gone."""
        row = {one.name: getattr(worker, one.name) for one in fields(WorkerRecord) if one.name not in _OF_SHIFTS}
        row["templates"] = {name: dict(types) for name, types in worker.templates.items()}
        with self._writing() as connection:
            row["seen_at"] = now(connection)
            if not insert_if_absent(connection, WorkerRow, row):
                connection.execute(update(WorkerRow).where(WorkerRow.name == worker.name).values(row))
            connection.execute(delete(WorkerRow).where(WorkerRow.seen_at < row["seen_at"] - FORGOTTEN_AFTER))

    @patiently
    def workers(self) -> list[WorkerRecord]:
        """Return the workers that were seen in the last days, the newest sign of life first."""
        with self._reading() as connection:
            time = now(connection)
            return [worker_record(row, time, SEEN_WITHIN_S) for row in connection.execute(WORKERS).mappings()]

    @patiently
    def beat(self, worker: str, *, left: bool = False) -> None:
        """Say that a worker is there, or that it leaves in good order."""
        with self._writing() as connection:
            values: dict[str, Any] = {"seen_at": now(connection)}
            if left:
                values["left_at"] = values["seen_at"]
            connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(values))

    @patiently
    def begin_shift(self, worker: str, eligible: Collection[str]) -> Submission | None:
        """Choose which of the ``eligible`` a worker serves next; None where none of them waits.

        A worker that serves one already, which still waits, is given that: an earlier try was committed, or the end of
        its shift was lost.
        """
        with self._writing() as connection:
            _lock(connection)
            serving = connection.scalar(select(WorkerRow.serving).where(WorkerRow.name == worker))
            waiting = {one.name: one for one in _waiting(connection)}
            chosen = waiting.get(serving or "") or _first(waiting.values(), eligible)
            if chosen is None and serving is None:
                return None
            if chosen is not None and chosen.name != serving and chosen.reason:
                connection.execute(update(SubmissionRow).where(SubmissionRow.name == chosen.name).values(reason=""))
            # What was submitted again since is served as it is now.
            values = {"serving": chosen and chosen.name, "serving_since": chosen and now(connection)}
            connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(values))
            return chosen

    @patiently
    def renew_shift(self, worker: str, eligible: Collection[str], used: float) -> bool:
        """Add the slot seconds that a worker's shift has used; return whether it goes on: nothing comes before it."""
        with self._writing() as connection:
            name = _add_served(connection, worker, used)
            first = _first(_waiting(connection), eligible)
            return name is not None and first is not None and first.name == name

    @patiently
    def end_shift(
        self, worker: str, used: float, state: SubmissionState = SubmissionState.WAITING, reason: str = ""
    ) -> None:
        """End a worker's shift of so many slot seconds, and say how its submission ended if that still waits.

        The ``reason`` of one that goes on waiting is why this worker has not served it to its end.
        """
        with self._writing() as connection:
            name = _add_served(connection, worker, used)
            values = {"serving": None, "serving_since": None, "seen_at": now(connection)}
            connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(values))
            if name is not None and (state is not SubmissionState.WAITING or reason):
                of_it = SubmissionRow.name == name, SubmissionRow.state == SubmissionState.WAITING
                connection.execute(update(SubmissionRow).where(*of_it).values(state=state, reason=reason))


def refuse_queued(connection: Connection, name: str, doing: str) -> None:
    """Raise `UsageError` where a study is still to be served: a worker would make it anew under its old name."""
    state = connection.scalar(select(SubmissionRow.state).where(SubmissionRow.name == name))
    if state is not None and not state.is_over:
        raise UsageError(
            f"the study {name!r} cannot be {doing}: it is in the queue, and {state}",
            hint=f"bssearch queue cancel {name}",
        )


def rename_submission(connection: Connection, old: str, new: str) -> None:
    """Have a submission that is over follow its study; raise `UsageError` where another one has the new name."""
    if connection.scalar(select(SubmissionRow.id).where(SubmissionRow.name == new)) is not None:
        raise UsageError(f"{new!r} is the name of a study in the queue", hint="choose another name")
    connection.execute(update(SubmissionRow).where(SubmissionRow.name == old).values(name=new))


def forget_submission(connection: Connection, name: str) -> None:
    """Delete a submission with its study, so that the name is free."""
    connection.execute(delete(SubmissionRow).where(SubmissionRow.name == name))


_OF_SHIFTS = frozenset({"seen_at", "serving", "serving_since", "is_here"})
"""What of a worker its shifts and heartbeats change."""


def _process(owner: str) -> str:
    """Return the process of a driver or a worker: its name but for its own mark (`bssearch.search.leases`)."""
    return owner.rpartition("/")[0]


def _lock(connection: Connection) -> None:
    """Let one choose at a time; on SQLite the transaction itself does."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('bss_submission'))"))


def _taken(by: Submission | None, name: str) -> UsageError:
    how = (
        f"submitted by {by.owner} already, from the template {by.template}; it is {by.state}" if by else "taken already"
    )
    return UsageError(f"{name!r} was {how}", hint="--name gives it another name")


def _found(connection: Connection, name: str) -> Submission | None:
    row = connection.execute(SUBMISSIONS.where(SubmissionRow.name == name)).mappings().first()
    return None if row is None else submission_record(row)


def _submission(connection: Connection, name: str) -> Submission:
    found = _found(connection, name)
    if found is None:
        names = connection.scalars(select(SubmissionRow.name).order_by(SubmissionRow.id.desc()).limit(5)).all()
        raise NotFoundError(
            f"nobody has submitted {name!r}",
            hint=f"the last ones are {', '.join(names)}" if names else "the queue is empty: bssearch queue submit",
        )
    return found


def _waiting(connection: Connection) -> list[Submission]:
    """Return what may be served now, the highest priority first, then the oldest."""
    rows = connection.execute(SUBMISSIONS.where(SubmissionRow.state == SubmissionState.WAITING)).mappings()
    time = now(connection)
    begun = [one for one in map(submission_record, rows) if one.not_before is None or one.not_before <= time]
    return sorted(begun, key=lambda one: -one.priority)


def _first(waiting: Iterable[Submission], eligible: Collection[str]) -> Submission | None:
    return next((one for one in waiting if one.name in eligible), None)


def _add_served(connection: Connection, worker: str, used: float) -> str | None:
    """Add the slot seconds of a worker's shift to what it serves, and return its name.

    None for one that was submitted again since the shift began: what the shift finds is not of its values.
    """
    _lock(connection)
    row = connection.execute(select(WorkerRow.serving, WorkerRow.serving_since).where(WorkerRow.name == worker)).first()
    one = None if row is None or row.serving is None else _found(connection, row.serving)
    if row is None or one is None:  # deleted meanwhile
        return None
    of_it = update(SubmissionRow).where(SubmissionRow.name == one.name)
    connection.execute(of_it.values(served_seconds=one.served_seconds + used))
    is_another = row.serving_since is not None and one.submitted_at > row.serving_since
    return None if is_another else one.name
