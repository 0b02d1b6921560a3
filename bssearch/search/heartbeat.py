"""The heartbeat of a driver: its leases are renewed from a thread, whatever its main loop waits for."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from bssearch.errors import BSSearchError
from bssearch.storage.repository import Store

LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = 15.0


class Heartbeat:
    """Renews all leases of one owner in one study every `HEARTBEAT_SECONDS` while it is entered.

    A beat that fails is left out: the main loop meets the same database and says what is wrong with it, and a lease
    outlasts three beats.
    """

    def __init__(self, store: Store, study: str, owner: str) -> None:
        self._store = store
        self._study = study
        self._owner = owner
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="bssearch heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(timeout=HEARTBEAT_SECONDS)

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            with suppress(BSSearchError):
                self._store.heartbeat(self._study, self._owner, LEASE_SECONDS)
