"""Which drivers of a study are there, and what one of them may do at a time: it holds a claim, and the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from bssearch.errors import DatabaseError
from bssearch.search.leases.heartbeat import HEARTBEAT_SECONDS, LEASE_SECONDS
from bssearch.search.leases.owner import is_alive
from bssearch.storage.repository import Store

LONGEST_LOOK = 2 * HEARTBEAT_SECONDS
"""Seconds between two looks count as this at most: in longer ones the database was away, and could renew nothing."""

GONE_AFTER = 2 * LEASE_SECONDS
"""A driver whose lease was seen unrenewed for so many seconds is gone, whatever its process does."""


@dataclass(slots=True)
class _Seen:
    """The end of an owner's lease as it was last seen, and for how many seconds it has been the same."""

    expires_at: datetime
    unrenewed_seconds: float = 0.0


class LeaseWatch:
    """Watches the leases of a study's drivers; ask it with `is_alive` after a `look`.

    A lease is a moment of the database's clock, which may jump. So it counts as ended only once it has been watched
    here for as long as a lease lasts without having been renewed.
    """

    def __init__(self, store: Store, study: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._study, self._clock = store, study, clock
        self._seen: dict[str, _Seen] = {}
        self._looked_at = clock()

    def look(self) -> None:
        """See which leases have been renewed since the last look."""
        leases, now = self._store.leases(self._study), self._clock()
        passed, self._looked_at = min(LONGEST_LOOK, now - self._looked_at), now
        for owner in {*self._seen} - {*leases}:
            del self._seen[owner]
        for owner, expires_at in leases.items():
            seen = self._seen.get(owner)
            if seen is None or seen.expires_at != expires_at:
                self._seen[owner] = _Seen(expires_at)
            else:
                seen.unrenewed_seconds += passed

    def is_alive(self, owner: str) -> bool | None:
        """Return whether a driver is there; None where its lease decides, which has been watched for long enough."""
        alive, seen = is_alive(owner), self._seen.get(owner)
        unrenewed = 0.0 if seen is None else seen.unrenewed_seconds
        if alive is False or unrenewed >= GONE_AFTER:
            return False
        return None if alive is None and unrenewed >= LEASE_SECONDS else True

    def has_lease(self, owner: str) -> bool:
        """Return whether a driver holds a lease, which it has renewed for as long as that was watched here."""
        seen = self._seen.get(owner)
        return seen is not None and seen.unrenewed_seconds < LEASE_SECONDS


class Claims:
    """A driver's claims on a study; its heartbeat extends them, and others take those that a dead one left."""

    def __init__(self, store: Store, study: str, owner: str) -> None:
        self._store, self._study, self.owner = store, study, owner
        self.watch = LeaseWatch(store, study)
        self._held: set[str] = set()

    def take(self, name: str) -> bool:
        """Return whether this driver has the claim now."""
        self.watch.look()
        found = self._store.claim(
            self._study, name, owner=self.owner, lease_seconds=LEASE_SECONDS, is_alive=self.watch.is_alive
        )
        if found:
            self._held.add(name)
        return found

    def give_back(self, name: str) -> None:
        """Give a claim back, if this driver has it."""
        if name in self._held:
            self._held.discard(name)
            self._store.release(self._study, name, owner=self.owner)

    @contextmanager
    def held(self, name: str, wait: Callable[[], None]) -> Iterator[None]:
        """Hold a claim inside; call ``wait`` as long as another driver has it."""
        while not self.take(name):
            wait()
        try:
            yield
        except BaseException:
            with suppress(DatabaseError):
                self.give_back(name)
            raise
        self.give_back(name)
