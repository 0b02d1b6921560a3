"""The queue: submitted studies and the workers that run them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    Integer,
    RowMapping,
    Table,
    Text,
    UniqueConstraint,
    and_,
    cast,
    delete,
    or_,
    select,
    update,
)

from bssearch.errors import NotFoundError, UsageError, require
from bssearch.records import TrialState, grouped
from bssearch.records.text import shortened
from bssearch.spec import check_study_name
from bssearch.spec.templates import EARLIEST, LATEST, NewSubmission, Submission, SubmissionState, WorkerRecord
from bssearch.storage.connection.engine import from_json, lock_tables
from bssearch.storage.database import Database, StorePart, inside, limit_silence
from bssearch.storage.models import (
    STUDY_ROWS,
    TRIAL_ROWS,
    are_finite,
    column,
    enum,
    json_fault,
    not_negative,
    now,
    positive,
    table,
)
from bssearch.storage.statements import insert_if_absent

# Submitted studies. ``served_seconds`` counts slot seconds.
SUBMISSION_ROWS = table(
    "bss_submission",
    Column("id", Integer, primary_key=True),
    column("values", Mapping[str, object]),
    column("owner", str, index=True),
    column("state", enum(SubmissionState, "state"), index=True),
    UniqueConstraint("name"),
    CheckConstraint("name <> ''", name="name_not_empty"),
    *positive("priority"),
    *not_negative("served_seconds"),
    holds=[Submission],
)

# Workers, each with the submission that it serves.
WORKER_ROWS = table(
    "bss_worker",
    column("name", str, primary_key=True),
    column("templates", Mapping[str, object]),
    holds=[WorkerRecord],
    without="is_here",
)


# Other programs may write rows; an invalid row must not hide other rows.


def _columns(rows: Table, names: Iterable[str], json: str) -> list[ColumnElement[Any]]:
    # Read JSON as text, so that each row is parsed separately.
    return [cast(rows.c[name], Text).label(name) if name == json else rows.c[name] for name in names]


def _are_moments(
    *columns: ColumnElement[datetime],
) -> ColumnElement[bool]:
    # PostgreSQL has infinities and later years than Python.
    return and_(*(or_(column.is_(None), column.between(EARLIEST, LATEST)) for column in columns))


# Submissions in order of arrival, without rows of invalid numbers or times.
SUBMISSIONS = (
    select(*_columns(SUBMISSION_ROWS, (one.name for one in fields(Submission)), json="values"))
    .where(
        are_finite(SUBMISSION_ROWS.c.priority, SUBMISSION_ROWS.c.served_seconds),
        _are_moments(SUBMISSION_ROWS.c.submitted_at, SUBMISSION_ROWS.c.not_before),
    )
    .order_by(SUBMISSION_ROWS.c.id)
)

# Workers, most recently seen first, without rows of invalid times.
WORKERS = (
    select(
        *_columns(WORKER_ROWS, (one.name for one in fields(WorkerRecord) if one.name != "is_here"), json="templates")
    )
    .where(_are_moments(WORKER_ROWS.c.seen_at, WORKER_ROWS.c.left_at, WORKER_ROWS.c.serving_since))
    .order_by(WORKER_ROWS.c.seen_at.desc())
)


def submission_record(row: RowMapping) -> Submission:
    return Submission(**{**row, "values": _value(row["values"])})


def worker_record(row: RowMapping, time: datetime) -> WorkerRecord:
    """Build a worker from a row, as of ``time``. Unreadable templates become empty."""
    templates = _value(row["templates"])
    offered = templates if isinstance(templates, Mapping) else {}
    is_here = row["left_at"] is None and time - row["seen_at"] <= timedelta(seconds=SEEN_WITHIN_S)
    return WorkerRecord(**{**row, "templates": offered}, is_here=is_here)


def _value(stored: str) -> Any:
    try:
        value = from_json(stored)
    except ValueError:
        return shortened(stored)
    is_within_bounds = isinstance(value, dict) and json_fault(value, of_scalars=False) is None
    return value if is_within_bounds else shortened(stored)


# A worker counts as gone after four missed heartbeats.
SEEN_WITHIN_S = 60.0

# Absent workers' rows stay, because `submit` needs their templates.
FORGOTTEN_AFTER = timedelta(days=7)

_MAY_BECOME = {
    SubmissionState.PAUSED: (SubmissionState.WAITING,),
    SubmissionState.CANCELLED: (SubmissionState.WAITING, SubmissionState.PAUSED, SubmissionState.FAILED),
    SubmissionState.WAITING: (SubmissionState.PAUSED, SubmissionState.FAILED, SubmissionState.CANCELLED),
}


class QueueStore(StorePart):
    """The submissions and workers of the queue.

    In a shift, a worker serves one submission.
    """

    def submit(self, new: NewSubmission) -> Submission:
        """Queue a study, or requeue the owner's finished submission.

        Raises `UsageError` if ``new`` is invalid or the name is taken.
        """
        check_study_name(new.name)
        new.check()
        tried_at: datetime | None = None

        def add() -> Submission:
            nonlocal tried_at
            with self._database.writing() as connection:
                _lock(connection)
                earlier = _found(connection, new.name)
                if earlier is not None and earlier.submitted_at == tried_at and earlier.owner == new.owner:
                    return earlier  # an earlier try committed, and the connection broke afterwards
                if earlier is not None and (
                    earlier.state.is_over and (new.owner, new.template) == (earlier.owner, earlier.template)
                ):
                    # Delete and insert, because the writer role may delete its own submissions, but not update them.
                    connection.execute(delete(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == new.name))
                elif earlier is not None:
                    raise _taken(earlier, new.name)
                elif connection.scalar(select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == new.name)) is not None:
                    raise UsageError(f"study {new.name!r} already exists", hint="choose another name with --name")
                tried_at = now(connection)
                row = {one.name: getattr(new, one.name) for one in fields(NewSubmission)}
                row |= {"values": dict(new.values), "submitted_at": tried_at, "reason": ""}
                row |= {"state": SubmissionState.WAITING, "served_seconds": earlier.served_seconds if earlier else 0.0}
                if not insert_if_absent(connection, SUBMISSION_ROWS, row):
                    raise _taken(_found(connection, new.name), new.name)
                return _submission(connection, new.name)

        return self.patience.run(add)

    @inside(Database.reading)
    def submissions(self, connection: Connection) -> list[Submission]:
        return [submission_record(row) for row in connection.execute(SUBMISSIONS).mappings()]

    @inside(Database.reading)
    def submission(self, connection: Connection, name: str) -> Submission:
        return _submission(connection, name)

    @inside(Database.reading)
    def unsettled(self, connection: Connection) -> dict[str, list[int]]:
        """The running and paused trials that queue workers left in cancelled studies, by study."""
        left = connection.execute(
            select(SUBMISSION_ROWS.c.name, TRIAL_ROWS.c.number, TRIAL_ROWS.c.lease_owner)
            .join(STUDY_ROWS, STUDY_ROWS.c.name == SUBMISSION_ROWS.c.name)
            .join(TRIAL_ROWS, TRIAL_ROWS.c.study_id == STUDY_ROWS.c.id)
            .where(
                SUBMISSION_ROWS.c.state == SubmissionState.CANCELLED,
                TRIAL_ROWS.c.state.in_([TrialState.RUNNING, TrialState.PAUSED]),
            )
        ).all()
        processes = {_process(name) for name in connection.scalars(select(WORKER_ROWS.c.name))} if left else set()
        served = (one for one in left if one.lease_owner is not None and _process(one.lease_owner) in processes)
        return grouped((one.name, one.number) for one in served)

    @inside(Database.writing)
    def set_state(self, connection: Connection, name: str, state: SubmissionState, reason: str) -> Submission:
        """Pause, cancel or requeue a submission. Raises `UsageError` if the current state forbids the change."""
        _lock(connection)
        found = _submission(connection, name)
        if found.state is state:
            return found
        require(
            found.state in _MAY_BECOME[state],
            f"the submission {name!r} is {found.state} and cannot become {state}",
            hint=f"choose a submission that is {' or '.join(_MAY_BECOME[state])}, or submit a finished study again "
            "with `bssearch queue submit`",
        )
        values = {"state": state, "reason": reason}
        connection.execute(update(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == name).values(values))
        return _submission(connection, name)

    @inside(Database.reading)
    def waiting(self, connection: Connection) -> list[str]:
        """The names of submissions to serve, highest priority first, then in order of arrival."""
        return [one.name for one in _waiting(connection)]

    @inside(Database.writing)
    def keep_worker(self, connection: Connection, worker: WorkerRecord) -> None:
        """Store a worker, and delete workers that were absent for `FORGOTTEN_AFTER`."""
        row = {one.name: getattr(worker, one.name) for one in fields(WorkerRecord) if one.name not in _OF_SHIFTS}
        row["templates"] = {name: dict(types) for name, types in worker.templates.items()}
        row["seen_at"] = now(connection)
        if not insert_if_absent(connection, WORKER_ROWS, row):
            connection.execute(update(WORKER_ROWS).where(WORKER_ROWS.c.name == worker.name).values(row))
        connection.execute(delete(WORKER_ROWS).where(WORKER_ROWS.c.seen_at < row["seen_at"] - FORGOTTEN_AFTER))

    @inside(Database.reading)
    def workers(self, connection: Connection) -> list[WorkerRecord]:
        time = now(connection)
        return [worker_record(row, time) for row in connection.execute(WORKERS).mappings()]

    @inside(Database.writing)
    def beat(self, connection: Connection, worker: str, *, left: bool = False) -> None:
        time = now(connection)
        values = {"seen_at": time, **({"left_at": time} if left else {})}
        connection.execute(update(WORKER_ROWS).where(WORKER_ROWS.c.name == worker).values(values))

    @inside(Database.writing)
    def begin_shift(self, connection: Connection, worker: str, eligible: Collection[str]) -> Submission | None:
        """Start a worker's shift. Return the submission, or None if no eligible submission waits."""
        _lock(connection)
        serving = connection.scalar(select(WORKER_ROWS.c.serving).where(WORKER_ROWS.c.name == worker))
        waiting = {one.name: one for one in _waiting(connection)}
        # A submission that the worker already serves comes first, because a lost connection may have hidden the start
        # or the end of the shift.
        chosen = waiting.get(serving or "") or _first(waiting.values(), eligible)
        if chosen is None and serving is None:
            return None
        if chosen is not None and chosen.name != serving and chosen.reason:
            connection.execute(update(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == chosen.name).values(reason=""))
        # If a study was resubmitted in the meantime, the worker serves the new values.
        values = {"serving": chosen and chosen.name, "serving_since": chosen and now(connection)}
        connection.execute(update(WORKER_ROWS).where(WORKER_ROWS.c.name == worker).values(values))
        return chosen

    @inside(Database.writing)
    def renew_shift(self, connection: Connection, worker: str, eligible: Collection[str], used: float) -> bool:
        """Add ``used`` slot seconds to a worker's submission.

        Returns False if the submission was resubmitted, or is no longer the first eligible waiting submission.
        """
        name = _add_served(connection, worker, used)
        first = _first(_waiting(connection), eligible)
        return name is not None and first is not None and first.name == name

    @inside(Database.writing)
    def end_shift(
        self,
        connection: Connection,
        worker: str,
        used: float,
        state: SubmissionState = SubmissionState.WAITING,
        reason: str = "",
    ) -> None:
        """End a shift of ``used`` slot seconds. If the submission still waits, set the submission's state."""
        name = _add_served(connection, worker, used)
        values = {"serving": None, "serving_since": None, "seen_at": now(connection)}
        connection.execute(update(WORKER_ROWS).where(WORKER_ROWS.c.name == worker).values(values))
        if name is not None and (state is not SubmissionState.WAITING or reason):
            of_it = SUBMISSION_ROWS.c.name == name, SUBMISSION_ROWS.c.state == SubmissionState.WAITING
            connection.execute(update(SUBMISSION_ROWS).where(*of_it).values(state=state, reason=reason))


def refuse_queued(connection: Connection, name: str, doing: str) -> None:
    # A worker would recreate the study.
    state = connection.scalar(select(SUBMISSION_ROWS.c.state).where(SUBMISSION_ROWS.c.name == name))
    require(
        state is None or state.is_over,
        f"the study {name!r} cannot be {doing}, because the submission is {state}",
        hint=f"run `bssearch queue cancel {name}`",
    )


def rename_submission(connection: Connection, old: str, new: str) -> None:
    """Rename a finished submission. Raises `UsageError` if the name is taken."""
    known = connection.scalar(select(SUBMISSION_ROWS.c.id).where(SUBMISSION_ROWS.c.name == new))
    require(known is None, f"the study {new!r} is already in the queue", hint="choose another name")
    connection.execute(update(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == old).values(name=new))


_OF_SHIFTS = frozenset({"seen_at", "serving", "serving_since", "is_here"})


def _process(owner: str) -> str:
    # `bssearch.search.leases` defines the names of drivers and workers.
    return owner.rpartition("/")[0]


def _lock(connection: Connection) -> None:
    lock_tables(connection, [SUBMISSION_ROWS.name])
    limit_silence(connection)


def _taken(by: Submission | None, name: str) -> UsageError:
    more = f" by {by.owner} from the template {by.template} and is {by.state}" if by else ""
    return UsageError(f"the study {name!r} was already submitted{more}", hint="choose another name with --name")


def _found(connection: Connection, name: str) -> Submission | None:
    row = connection.execute(SUBMISSIONS.where(SUBMISSION_ROWS.c.name == name)).mappings().first()
    return None if row is None else submission_record(row)


def _submission(connection: Connection, name: str) -> Submission:
    found = _found(connection, name)
    if found is None:
        names = connection.scalars(select(SUBMISSION_ROWS.c.name).order_by(SUBMISSION_ROWS.c.id.desc()).limit(5)).all()
        raise NotFoundError(
            f"no submission {name!r}",
            hint=f"choose from the latest submissions: {', '.join(names)}"
            if names
            else "submit a study with `bssearch queue submit`",
        )
    return found


def _waiting(connection: Connection) -> list[Submission]:
    rows = connection.execute(SUBMISSIONS.where(SUBMISSION_ROWS.c.state == SubmissionState.WAITING)).mappings()
    time = now(connection)
    begun = [one for one in map(submission_record, rows) if one.not_before is None or one.not_before <= time]
    return sorted(begun, key=lambda one: -one.priority)


def _first(waiting: Iterable[Submission], eligible: Collection[str]) -> Submission | None:
    return next((one for one in waiting if one.name in eligible), None)


def _add_served(connection: Connection, worker: str, used: float) -> str | None:
    # Return None if the submission was deleted, or was resubmitted during a shift of the old values.
    _lock(connection)
    row = connection.execute(
        select(WORKER_ROWS.c.serving, WORKER_ROWS.c.serving_since).where(WORKER_ROWS.c.name == worker)
    ).first()
    one = None if row is None or row.serving is None else _found(connection, row.serving)
    if row is None or one is None:  # deleted in the meantime
        return None
    of_it = update(SUBMISSION_ROWS).where(SUBMISSION_ROWS.c.name == one.name)
    connection.execute(of_it.values(served_seconds=one.served_seconds + used))
    is_another = row.serving_since is not None and one.submitted_at > row.serving_since
    return None if is_another else one.name
