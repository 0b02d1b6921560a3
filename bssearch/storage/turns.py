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

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from bssearch.storage.clock import database_now, now
from bssearch.storage.database import Database, patiently
from bssearch.storage.models import ClaimRow, StudyRow

PLACE = "turn "
"""How the names of claims begin that are places in the queue; their number follows, in as many digits each."""

_DIGITS = 12

LONGEST_LEASE = timedelta(seconds=60)
"""A place that is said to last longer was given before the database's clock was set back: it counts no more."""

RENEWED_BELOW = 0.5
"""A place is renewed when less than this share of its lease is left. A choice."""

IS_PLACE: ColumnElement[bool] = ClaimRow.name.startswith(PLACE)

_PLACES = (
    select(ClaimRow.name, ClaimRow.owner, ClaimRow.expires_at, database_now().label("time"))
    .where(IS_PLACE)
    .order_by(ClaimRow.name)
)
_OF_STUDY = _PLACES.where(ClaimRow.study_id == bindparam("study_id"))


def _look() -> Select[datetime, datetime | None, datetime | None, int, int]:
    """Return the query for who stands before and behind an owner, counted by the database: each asks often."""
    of_study = StudyRow.name == bindparam("study"), IS_PLACE
    is_own = ClaimRow.owner == bindparam("owner")
    own = select(func.max(ClaimRow.name)).join(StudyRow).where(*of_study, is_own).scalar_subquery()
    counts = ClaimRow.expires_at > database_now()
    return (
        select(
            database_now().label("time"),
            func.max(case((is_own, ClaimRow.expires_at))).label("expires_at"),
            func.max(ClaimRow.expires_at).label("last_expires_at"),
            func.count(case((counts & (ClaimRow.name < own), 1))).label("ahead"),
            func.count(case((counts & (ClaimRow.name > own), 1))).label("behind"),
        )
        .join(StudyRow)
        .where(*of_study)
    )


_LOOK = _look()


@dataclass(frozen=True, slots=True)
class Standing:
    """How many drivers stand before one in the queue of a study, and how many behind it."""

    ahead: int
    behind: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a queue, as it was at a ``time`` of the database's clock."""

    name: str
    owner: str
    expires_at: datetime
    time: datetime

    @property
    def counts(self) -> bool:
        """Return whether something of its lease was left."""
        return timedelta() < self.expires_at - self.time <= LONGEST_LEASE


class Turns(Database):
    """The part of the store that has drivers start trials one after the other."""

    @patiently
    def queue_up(self, study: str, owner: str, lease_seconds: float) -> Standing:
        """Stand in a study's queue, last or where the owner stands already; return who else stands there.

        The place counts for ``lease_seconds``, at most `LONGEST_LEASE`; asking again renews it.
        """
        with self._looking() as connection:
            found = connection.execute(_LOOK, {"study": study, "owner": owner}).one()
        stands = found.expires_at is not None and found.last_expires_at - found.time <= LONGEST_LEASE
        if stands and found.expires_at - found.time > RENEWED_BELOW * timedelta(seconds=lease_seconds):
            return Standing(ahead=found.ahead, behind=found.behind)
        with self._writing() as connection:
            study_id = self._lock_study(connection, study)
            return _take_place(connection, study_id, owner, lease_seconds)

    def leave_queue(self, study: str, owner: str) -> int:
        """Give the owner's place up, if it has one; return how many others stand in the queue."""

        def leave(connection: Connection, study_id: int) -> int:
            give_place_up(connection, study_id, owner)
            return sum(place.counts for place in _places(connection, study_id))

        return self._on_study(study, leave)


def give_place_up(connection: Connection, study_id: int, owner: str) -> None:
    """Take an owner out of the queue of a study, if it stands there."""
    connection.execute(delete(ClaimRow).where(ClaimRow.study_id == study_id, IS_PLACE, ClaimRow.owner == owner))


def has_turn(connection: Connection, study_id: int, owner: str) -> bool:
    """Return whether an owner may start a trial: it is the first in the queue, or nobody stands there."""
    return next((place.owner == owner for place in _places(connection, study_id) if place.counts), True)


def _places(connection: Connection, study_id: int) -> list[_Place]:
    """Return the places of a study's queue in their order, those that have lapsed too."""
    return [_Place(*row) for row in connection.execute(_OF_STUDY, {"study_id": study_id})]


def _standing(places: list[_Place], own: str) -> Standing:
    others = [place.name < own for place in places if place.name != own and place.counts]
    return Standing(ahead=sum(others), behind=len(others) - sum(others))


def _take_place(connection: Connection, study_id: int, owner: str, lease_seconds: float) -> Standing:
    """Renew an owner's place, or give it the last; return who else stands in the queue."""
    time = now(connection)
    expires_at = time + min(timedelta(seconds=lease_seconds), LONGEST_LEASE)
    _forget_lapsed(connection, study_id, time)
    places = _places(connection, study_id)
    own = next((place.name for place in places if place.owner == owner), None)
    if own is None:
        number = int(places[-1].name.removeprefix(PLACE)) + 1 if places else 1
        own = f"{PLACE}{number:0{_DIGITS}}"
        row = {"study_id": study_id, "name": own, "owner": owner, "expires_at": expires_at}
        connection.execute(insert(ClaimRow), row)
    else:
        place = ClaimRow.study_id == study_id, ClaimRow.name == own
        connection.execute(update(ClaimRow).where(*place).values(expires_at=expires_at))
    return _standing(places, own)


def _forget_lapsed(connection: Connection, study_id: int, time: datetime) -> None:
    """Delete the places that nobody has come back to."""
    is_over = or_(ClaimRow.expires_at < time - LONGEST_LEASE, ClaimRow.expires_at > time + LONGEST_LEASE)
    connection.execute(delete(ClaimRow).where(ClaimRow.study_id == study_id, IS_PLACE, is_over))
