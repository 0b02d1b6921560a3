"""The queue of drivers that want to start trials of a study: first come, first served.

A place in it is a claim with a number, under a lease of a few seconds that its owner renews while it waits. While
anybody stands in the queue the store lets only the first of it start a trial (`bssearch.storage.starting`): it then
chooses on all that is stored, and nobody is faster. Where nobody does, whoever comes may start. A place that was not
renewed counts no more, so a driver that died or hangs is waited for no longer than its lease; one that comes back finds
its place again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, bindparam, delete, insert, or_, select, update

from bssearch.storage.clock import database_now, now
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import ClaimRow, StudyRow

PLACE = "turn "
"""How the names of claims begin that are places in the queue; their number follows, in as many digits each."""

_DIGITS = 12

LONGEST_LEASE_S = 60.0
"""A place that is said to last longer was given before the database's clock was set back: it counts no more."""

RENEWED_BELOW = 0.5
"""A place is renewed when less than this share of its lease is left. A choice."""

IS_PLACE: ColumnElement[bool] = ClaimRow.name.startswith(PLACE)

_COLUMNS = ClaimRow.name, ClaimRow.owner, ClaimRow.expires_at
_PLACES = select(*_COLUMNS).where(ClaimRow.study_id == bindparam("study_id"), IS_PLACE).order_by(ClaimRow.name)
_PLACES_NOW = (
    select(*_COLUMNS, database_now().label("time"))
    .join(StudyRow)
    .where(StudyRow.name == bindparam("study"), IS_PLACE)
    .order_by(ClaimRow.name)
)


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    owner: str
    expires_at: datetime

    def counts(self, time: datetime, seconds_left: float = 0.0) -> bool:
        """Return whether more than so many seconds of its lease are left at a moment of the database's clock."""
        return seconds_left < (self.expires_at - time).total_seconds() <= LONGEST_LEASE_S


class Turns(Database):
    """The part of the store that has drivers start trials one after the other."""

    @patiently
    def queue_up(self, study: str, owner: str, lease_seconds: float) -> int:
        """Stand in a study's queue, last or where the owner stands already; return how many stand before it.

        The place counts for ``lease_seconds``, at most `LONGEST_LEASE_S`; asking again renews it.
        """
        with self._looking() as connection:
            rows = connection.execute(_PLACES_NOW, {"study": study}).all()
        places = [_Place(*row[:3]) for row in rows]
        own = next((place for place in places if place.owner == owner), None)
        if own is not None and own.counts(time := rows[0].time, RENEWED_BELOW * lease_seconds):
            return _before(places, own, time)
        with self._writing() as connection:
            study_id = self._lock_study(connection, study)
            return _take_place(connection, study_id, owner, lease_seconds)

    def leave_queue(self, study: str, owner: str) -> int:
        """Give the owner's place up, if it has one; return how many others stand in the queue."""

        def leave(connection: Connection, study_id: int) -> int:
            connection.execute(delete(ClaimRow).where(ClaimRow.study_id == study_id, IS_PLACE, ClaimRow.owner == owner))
            time = now(connection)
            return sum(place.counts(time) for place in _places(connection, study_id))

        return self._on_study(study, leave)


def has_turn(connection: Connection, study_id: int, owner: str) -> bool:
    """Return whether an owner may start a trial: it is the first in the queue, or nobody stands there."""
    places = _places(connection, study_id)
    if not places:
        return True
    time = now(connection)
    return next((place.owner == owner for place in places if place.counts(time)), True)


def _places(connection: Connection, study_id: int) -> list[_Place]:
    """Return the places of a study's queue in their order, those that have lapsed too."""
    return [_Place(*row) for row in connection.execute(_PLACES, {"study_id": study_id})]


def _before(places: list[_Place], own: _Place, time: datetime) -> int:
    return sum(place.name < own.name and place.counts(time) for place in places)


def _take_place(connection: Connection, study_id: int, owner: str, lease_seconds: float) -> int:
    """Renew an owner's place, or give it the last; return how many stand before it."""
    time = now(connection)
    expires_at = time + timedelta(seconds=min(lease_seconds, LONGEST_LEASE_S))
    _forget_lapsed(connection, study_id, time)
    places = _places(connection, study_id)
    own = next((place for place in places if place.owner == owner), None)
    if own is None:
        number = int(places[-1].name.removeprefix(PLACE)) + 1 if places else 1
        own = _Place(f"{PLACE}{number:0{_DIGITS}}", owner, expires_at)
        row = {"study_id": study_id, "name": own.name, "owner": owner, "expires_at": expires_at}
        connection.execute(insert(ClaimRow), row)
    else:
        place = ClaimRow.study_id == study_id, ClaimRow.name == own.name
        connection.execute(update(ClaimRow).where(*place).values(expires_at=expires_at))
    return _before(places, own, time)


def _forget_lapsed(connection: Connection, study_id: int, time: datetime) -> None:
    """Delete the places that nobody has come back to."""
    long = timedelta(seconds=LONGEST_LEASE_S)
    is_over = or_(ClaimRow.expires_at < time - long, ClaimRow.expires_at > time + long)
    connection.execute(delete(ClaimRow).where(ClaimRow.study_id == study_id, IS_PLACE, is_over))
