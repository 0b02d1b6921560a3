"""Leases of running trials and claims, by the database's clock.

An owner with an expired lease counts as gone, unless its process is known to live.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection, and_, delete, insert, or_, select, update

from bssearch.errors import UsageError
from bssearch.records import TrialOutcome, TrialState
from bssearch.storage.columns import database_now, database_started, now, to_columns
from bssearch.storage.database import StorePart, patiently
from bssearch.storage.models import ClaimRow, ObservationRow, TrialRow
from bssearch.storage.statements import end_trial, holds_claim, is_running, mark_changed

# Seconds without expiries after a server's start: longer than a driver's pause between tries.
RESTART_GRACE_S = 60.0

# Returns None if unknown.
IsAlive = Callable[[str], bool | None]


def ended_by(connection: Connection) -> datetime:
    """Return the time up to which leases have expired; never soon after a server's start."""
    time, started = connection.execute(select(database_now(), database_started())).one()
    if started is not None and time < started + timedelta(seconds=RESTART_GRACE_S):
        return datetime.min.replace(tzinfo=UTC)
    return time


def _mark_lost(connection: Connection, study_id: int, *, is_alive: IsAlive) -> list[int]:
    owners = connection.scalars(select(TrialRow.lease_owner).where(*is_running(study_id)).distinct()).all()
    known = {owner: is_alive(owner) for owner in owners if owner is not None}
    dead = {owner for owner, alive in known.items() if alive is False}
    alive = {owner for owner, alive in known.items() if alive}
    rows = connection.execute(
        select(TrialRow.id, TrialRow.number, TrialRow.lease_owner, TrialRow.lease_expires_at).where(
            *is_running(study_id),
            or_(
                TrialRow.lease_owner.in_(dead),
                TrialRow.lease_owner.is_(None),
                TrialRow.lease_expires_at.is_(None),
                and_(TrialRow.lease_expires_at <= ended_by(connection), TrialRow.lease_owner.not_in(alive)),
            ),
        )
    ).all()
    lost = []
    # Sort here: with ORDER BY number SQLite would scan all trials of the study.
    for trial_id, number, owner, expired_at in sorted(rows, key=lambda row: row.number):
        gone = f"its driver {owner} is gone"
        late = f"its lease ended at {expired_at:%Y-%m-%d %H:%M:%S} UTC, not renewed by {owner}" if expired_at else gone
        outcome = TrialOutcome(state=TrialState.LOST, reason=gone if owner in dead else late)
        columns = {**to_columns(outcome), **_last_seen(connection, trial_id)}
        if end_trial(connection, trial_id, columns):  # False if its driver has just ended it
            lost.append(number)
    mark_changed(connection, study_id, lost)
    return lost


def _last_seen(connection: Connection, trial_id: int) -> dict[str, Any]:
    last = connection.execute(
        select(
            ObservationRow.step.label("steps"),
            ObservationRow.samples,
            ObservationRow.train_seconds,
            ObservationRow.metric.label("final_metric"),
        )
        .where(ObservationRow.trial_id == trial_id)
        .order_by(ObservationRow.step.desc())
        .limit(1)
    )
    return dict(last.mappings().first() or {})


def check_idle(connection: Connection, study_id: int, name: str, doing: str) -> None:
    """Raise `UsageError` if a live lease holds a trial or claim."""
    ended = ended_by(connection)
    running = connection.execute(
        select(TrialRow.number, TrialRow.lease_owner, TrialRow.lease_expires_at)
        .where(*is_running(study_id), TrialRow.lease_expires_at > ended)
        .order_by(TrialRow.number)
    ).first()
    claimed = connection.execute(
        select(ClaimRow.name, ClaimRow.owner, ClaimRow.expires_at).where(
            ClaimRow.study_id == study_id, ClaimRow.expires_at > ended
        )
    ).first()
    if running is not None:
        busy, until = f"{running.lease_owner} runs trial {running.number}", running.lease_expires_at
    elif claimed is not None:
        busy, until = f"{claimed.owner} holds its claim {claimed.name}", claimed.expires_at
    else:
        return
    raise UsageError(
        f"the study {name!r} cannot be {doing}: {busy}",
        hint=f"stop that driver first; if it is dead, its lease ends at {until:%Y-%m-%d %H:%M:%S} UTC",
    )


class LeaseStore(StorePart):
    """Leases of running trials and claims."""

    def heartbeat(self, study: str, owner: str, lease_seconds: float) -> None:
        """Extend an owner's leases to ``lease_seconds`` from now."""

        def extend(connection: Connection, study_id: int) -> None:
            expires_at = now(connection) + timedelta(seconds=lease_seconds)
            own_trials = update(TrialRow).where(*is_running(study_id), TrialRow.lease_owner == owner)
            connection.execute(own_trials.values(lease_expires_at=expires_at))
            own_claims = update(ClaimRow).where(ClaimRow.study_id == study_id, ClaimRow.owner == owner)
            connection.execute(own_claims.values(expires_at=expires_at))

        self._database.on_study(study, extend)

    @patiently
    def ends(self, study: str) -> dict[str, datetime]:
        """Return each owner's latest lease end."""
        found: dict[str, datetime] = {}
        with self._database.reading_study(study) as (connection, study_id):
            rows = [
                *connection.execute(
                    select(TrialRow.lease_owner, TrialRow.lease_expires_at).where(*is_running(study_id))
                ),
                *connection.execute(select(ClaimRow.owner, ClaimRow.expires_at).where(ClaimRow.study_id == study_id)),
            ]
        for owner, expires_at in rows:
            if owner is not None:
                found[owner] = max(expires_at, found.get(owner, expires_at))
        return found

    def mark_lost(self, study: str, *, is_alive: IsAlive) -> list[int]:
        """End trials of dead owners; return their numbers. The lease decides if ``is_alive`` returns None."""
        return self._database.on_study(study, partial(_mark_lost, is_alive=is_alive))

    def claim(self, study: str, name: str, *, owner: str, lease_seconds: float, is_alive: IsAlive) -> bool:
        """Claim a task for one driver, until its lease ends or it dies; return whether it succeeded."""

        def take(connection: Connection, study_id: int) -> bool:
            place = ClaimRow.study_id == study_id, ClaimRow.name == name
            held = connection.execute(select(ClaimRow.owner, ClaimRow.expires_at).where(*place)).first()
            values = {"owner": owner, "expires_at": now(connection) + timedelta(seconds=lease_seconds)}
            if held is None:
                connection.execute(insert(ClaimRow).values(study_id=study_id, name=name, **values))
                return True
            if held.owner != owner:
                alive = is_alive(held.owner)
                if alive or (alive is None and held.expires_at > ended_by(connection)):
                    return False
            connection.execute(update(ClaimRow).where(*place).values(values))
            return True

        return self._database.on_study(study, take)

    @patiently
    def holds(self, study: str, name: str, *, owner: str) -> bool:
        """True if an owner holds a claim, even if its lease has ended."""
        with self._database.reading_study(study) as (connection, study_id):
            return holds_claim(connection, study_id, name, owner)

    def release(self, study: str, name: str, *, owner: str) -> None:
        """Release an owner's claim."""

        def delete_own(connection: Connection, study_id: int) -> None:
            connection.execute(
                delete(ClaimRow).where(ClaimRow.study_id == study_id, ClaimRow.name == name, ClaimRow.owner == owner)
            )

        self._database.on_study(study, delete_own)
