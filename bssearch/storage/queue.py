"""The queue of studies that nodes serve: submissions, the accounts of their owners, and the workers.

A worker is chosen a submission in one transaction, which charges what its turn is expected to take, so that the next
worker chooses otherwise; what it took in fact is settled afterwards (`bssearch.queue.fairness`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, case, delete, func, select, text, update

from bssearch.errors import NotFoundError, UsageError
from bssearch.queue.fairness import Account, Ledger, Waiting
from bssearch.queue.submission import NewSubmission, Submission, SubmissionState, WorkerRecord
from bssearch.records import TrialState
from bssearch.storage.clock import now
from bssearch.storage.columns import are_finite
from bssearch.storage.database import Database, patiently
from bssearch.storage.keeping import check_name
from bssearch.storage.models import StudyRow, TrialRow
from bssearch.storage.queue_rows import SUBMISSIONS, WORKERS, submission_record, worker_record
from bssearch.storage.queue_tables import ShareRow, SubmissionRow, WorkerRow
from bssearch.storage.statements import insert_if_absent

SEEN_WITHIN_S = 60.0
"""Seconds after which a worker that was not seen counts as gone: four of its heartbeats."""

FORGOTTEN_AFTER = timedelta(days=7)
"""How long the rows of workers that are gone are kept, so that `submit` knows what they offer: a choice."""


_SHARES = select(ShareRow.owner, ShareRow.virtual_time, ShareRow.started_at).where(
    are_finite(ShareRow.virtual_time, ShareRow.started_at)
)
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
                if earlier is not None and _may_follow(new, earlier):
                    # Who may run studies may delete and add submissions of their own, and change nothing of one.
                    connection.execute(delete(SubmissionRow).where(SubmissionRow.name == new.name))
                elif earlier is not None:
                    raise _taken(earlier, new.name)
                elif connection.scalar(select(StudyRow.id).where(StudyRow.name == new.name)) is not None:
                    raise UsageError(f"there is a study {new.name!r} already", hint="--name gives it another name")
                tried_at = now(connection)
                row = {one.name: getattr(new, one.name) for one in fields(NewSubmission)}
                row |= {"values": dict(new.values), "submitted_at": tried_at, "reason": ""}
                row |= {"state": SubmissionState.WAITING, "has_joined": False}
                row |= {name: getattr(earlier, name, 0.0) for name in ("served_seconds", "virtual_time", "started_at")}
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
            values = {"state": state, "reason": reason, "has_joined": False}
            connection.execute(update(SubmissionRow).where(SubmissionRow.name == name).values(values))
            return _submission(connection, name)

    @patiently
    def ledger(self) -> Ledger:
        """Return the accounts of what waits now, as the next choice would find them."""
        with self._reading() as connection:
            return _ledger(connection, [one for one in _waiting(connection) if _has_begun(one, now(connection))])

    @patiently
    def keep_worker(self, worker: WorkerRecord) -> None:
        """Store a worker as it is, seen now; forget those that have long been gone."""
        row = {one.name: getattr(worker, one.name) for one in fields(WorkerRecord) if one.name not in _OF_SHIFTS}
        row["templates"] = {name: dict(types) for name, types in worker.templates.items()}
        with self._writing() as connection:
            row["seen_at"] = now(connection)
            if not insert_if_absent(connection, WorkerRow, {**row, "charged_seconds": 0.0}):
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
    def begin_shift(self, worker: str, eligible: Collection[str], seconds: float) -> Submission | None:
        """Choose which of the ``eligible`` a worker serves next; None where none of them waits.

        It is charged so many slot seconds, until `renew_shift` or `end_shift`. A worker that serves one already, which
        still waits, is given that: an earlier try was committed, or the end of its shift was lost.
        """
        with self._writing() as connection:
            _lock(connection)
            serving = connection.scalar(select(WorkerRow.serving).where(WorkerRow.name == worker))
            time = now(connection)
            waiting = [one for one in _waiting(connection) if _has_begun(one, time)]
            if serving in {one.name for one in waiting}:
                # What was submitted again since is served as it is now.
                connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(serving_since=time))
                return next(one for one in waiting if one.name == serving)
            ledger = _ledger(connection, waiting)
            name = ledger.next(eligible)
            values = {"serving": name, "serving_since": None if name is None else time, "charged_seconds": 0.0}
            if name is not None:
                ledger.charge(name, seconds)
                values["charged_seconds"] = seconds
                has_reason = SubmissionRow.name == name, SubmissionRow.reason != ""
                connection.execute(update(SubmissionRow).where(*has_reason).values(reason=""))
            if name is not None or serving is not None:
                connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(values))
            _keep(connection, ledger)
            return next((one for one in waiting if one.name == name), None)

    @patiently
    def renew_shift(self, worker: str, eligible: Collection[str], used: float, seconds: float) -> bool:
        """Settle what a worker's shift has used, and return whether it goes on: nobody else comes first.

        It is then charged ``seconds`` more.
        """
        with self._writing() as connection:
            _lock(connection)
            name = _settle(connection, worker, used)
            ledger = _ledger(connection, [one for one in _waiting(connection) if _has_begun(one, now(connection))])
            goes_on = name is not None and ledger.next(eligible) == name
            if name is not None and goes_on:
                ledger.charge(name, seconds)
                connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(charged_seconds=seconds))
            _keep(connection, ledger)
            return goes_on

    @patiently
    def end_shift(
        self, worker: str, used: float, state: SubmissionState = SubmissionState.WAITING, reason: str = ""
    ) -> None:
        """Settle a worker's shift and give its submission back, or say how it ended; of one that waits no more, not.

        The ``reason`` of one that goes on waiting is why this worker has not served it to its end.
        """
        with self._writing() as connection:
            _lock(connection)
            name = _settle(connection, worker, used)
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
            f"the study {name!r} cannot be {doing}: it is in the queue, and {state}", hint=f"bssearch cancel {name}"
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
    """Return the process of a driver or a worker: its name but for its own mark (`bssearch.search.leases.owner`)."""
    return owner.rpartition("/")[0]


def _lock(connection: Connection) -> None:
    """Let one choose at a time; on SQLite the transaction itself does."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('bss_submission'))"))


def _may_follow(new: NewSubmission, earlier: Submission) -> bool:
    """Return whether a submission asks for more of one that is over."""
    return earlier.state.is_over and (new.owner, new.template) == (earlier.owner, earlier.template)


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
            hint=f"the last ones are {', '.join(names)}" if names else "the queue is empty: bssearch submit",
        )
    return found


def _waiting(connection: Connection) -> list[Submission]:
    query = SUBMISSIONS.where(SubmissionRow.state == SubmissionState.WAITING)
    return [submission_record(row) for row in connection.execute(query).mappings()]


def _has_begun(one: Submission, time: datetime) -> bool:
    return one.not_before is None or one.not_before <= time


def _ledger(connection: Connection, waiting: list[Submission]) -> Ledger:
    owners = {
        owner: Account(virtual_time, started_at) for owner, virtual_time, started_at in connection.execute(_SHARES)
    }
    asked = {one.owner for one in waiting}
    floors = connection.execute(
        select(SubmissionRow.owner, func.max(SubmissionRow.virtual_time))
        .where(SubmissionRow.owner.in_(asked), are_finite(SubmissionRow.virtual_time))
        .group_by(SubmissionRow.owner)
    )
    return Ledger(
        (
            Waiting(one.name, one.owner, one.weight, Account(one.virtual_time, one.started_at), one.has_joined)
            for one in waiting
        ),
        owners,
        {owner: floor for owner, floor in floors},
    )


def _keep(connection: Connection, ledger: Ledger) -> None:
    """Store the accounts of those that wait, and of their owners."""
    owners = {one.owner for one in ledger.waiting.values()}
    for owner in sorted(owners):
        account: dict[str, Any] = _columns(ledger.owners[owner])
        if not insert_if_absent(connection, ShareRow, {"owner": owner, **account}):
            connection.execute(update(ShareRow).where(ShareRow.owner == owner).values(account))
    for one in ledger.waiting.values():
        of_it = update(SubmissionRow).where(SubmissionRow.name == one.name)
        connection.execute(of_it.values(**_columns(one.account), has_joined=one.has_joined))


def _columns(account: Account) -> dict[str, float]:
    return {"virtual_time": account.virtual_time, "started_at": account.started_at}


def _settle(connection: Connection, worker: str, used: float) -> str | None:
    """Put the accounts right by what a shift used beside what it was charged; return what the worker serves.

    Of one that was submitted again since the shift began that is nothing: what the shift finds is not of its values.
    """
    charged = case((are_finite(WorkerRow.charged_seconds), WorkerRow.charged_seconds), else_=0.0)
    row = connection.execute(
        select(WorkerRow.serving, WorkerRow.serving_since, charged.label("charged_seconds")).where(
            WorkerRow.name == worker
        )
    ).first()
    if row is None or row.serving is None:
        return None
    one = _found(connection, row.serving)
    if one is None:  # deleted meanwhile
        return None
    more = used - row.charged_seconds
    study = Account(one.virtual_time)
    study.settle(more / one.weight)
    values = {"virtual_time": study.virtual_time, "served_seconds": one.served_seconds + used}
    connection.execute(update(SubmissionRow).where(SubmissionRow.name == one.name).values(values))
    of_owner = select(ShareRow.virtual_time).where(ShareRow.owner == one.owner)
    had = connection.scalar(of_owner.where(are_finite(ShareRow.virtual_time)))
    if had is not None:
        owner = Account(had)
        owner.settle(more)
        connection.execute(update(ShareRow).where(ShareRow.owner == one.owner).values(virtual_time=owner.virtual_time))
    connection.execute(update(WorkerRow).where(WorkerRow.name == worker).values(charged_seconds=0.0))
    is_another = row.serving_since is not None and one.submitted_at > row.serving_since
    return None if is_another else one.name
