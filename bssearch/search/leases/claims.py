"""What one driver of a study may do at a time: it holds a claim, and the others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from bssearch.errors import DatabaseError
from bssearch.search.leases.heartbeat import LEASE_SECONDS
from bssearch.search.leases.lease_watch import LeaseWatch
from bssearch.storage.repository import Store


class Claims:
    """A driver's claims on a study; its heartbeat extends them, and others take those that a dead one left."""

    def __init__(self, store: Store, study: str, owner: str, watch: LeaseWatch) -> None:
        self._store, self._study, self._owner, self._watch = store, study, owner, watch
        self._held: set[str] = set()

    def take(self, name: str) -> bool:
        """Return whether this driver has the claim now."""
        self._watch.look()
        found = self._store.claim(
            self._study, name, owner=self._owner, lease_seconds=LEASE_SECONDS, is_alive=self._watch.is_alive
        )
        if found:
            self._held.add(name)
        return found

    def give_back(self, name: str) -> None:
        """Give a claim back, if this driver has it."""
        if name in self._held:
            self._held.discard(name)
            self._store.release(self._study, name, owner=self._owner)

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
