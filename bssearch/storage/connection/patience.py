"""Patience with a server that is away for a while: work is tried again until the connection is back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from bssearch.errors import BSSearchError, DatabaseError
from bssearch.storage.connection.faults import ConnectionLostError

RETRY_FOR_S = 900.0
"""Seconds for which work is tried again: longer than a server takes to be restarted or replaced. A choice."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
"""Seconds before the second try, and between later ones at most: choices."""

Result = TypeVar("Result")


class Patience:
    """Repeats work that lost its connection, with growing random pauses, for `RETRY_FOR_S`.

    Threads may share one: each waits for itself, and ``notify`` is told once of the loss and once of the return.
    """

    def __init__(self, where: str, notify: Callable[[str], None]) -> None:
        self._where = where
        self._notify = notify
        self.is_waiting = False
        self._lock = threading.Lock()
        self._over = threading.Event()

    def end(self) -> None:
        """Have no more patience: who waits fails now, who comes later at once."""
        self._over.set()

    def run(self, work: Callable[[], Result]) -> Result:
        """Return what the work returns; raise `DatabaseError` where the connection stays lost.

        The work must bear to be done twice: the connection may have broken after its commit.
        """
        try:
            return work()
        except ConnectionLostError as error:
            if self._over.is_set():
                raise
            self._tell(f"{error.message}; trying again for {RETRY_FOR_S / 60:.0f} minutes", waiting=True)
        try:
            result = self._repeat(work)
        except ConnectionLostError as error:
            # Who gives up is not made to wait again while it clears up.
            self.end()
            self.is_waiting = False
            raise DatabaseError(
                f"{error.message} (tried again for up to {RETRY_FOR_S / 60:.0f} minutes)",
                hint="what had been stored is safe; the same command goes on",
            ) from error
        except BSSearchError:  # the database's own answer: it is there
            self._tell_back()
            raise
        except KeyboardInterrupt:
            # Nor is who stops the program.
            self.end()
            self.is_waiting = False
            raise
        self._tell_back()
        return result

    def _repeat(self, work: Callable[[], Result]) -> Result:
        # Imported only where a connection was lost: it takes a while.
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            sleep_using_event,
            stop_after_delay,
            stop_when_event_set,
            wait_random_exponential,
        )

        retrying = Retrying(
            retry=retry_if_exception_type(ConnectionLostError),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=stop_after_delay(RETRY_FOR_S) | stop_when_event_set(self._over),
            sleep=sleep_using_event(self._over),
            reraise=True,
        )
        return retrying(work)

    def _tell_back(self) -> None:
        self._tell(f"the connection to {self._where} is back", waiting=False)

    def _tell(self, message: str, *, waiting: bool) -> None:
        with self._lock:
            if self.is_waiting is waiting:
                return
            self.is_waiting = waiting
        self._notify(message)
