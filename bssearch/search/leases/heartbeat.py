"""The heartbeat of a driver, and of a queue's worker: from a thread, whatever the main loop waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from bssearch.errors import BSSearchError

LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = 15.0


class Heartbeat:
    """Calls ``beat`` every `HEARTBEAT_SECONDS` while it is entered.

    A beat that fails is left out: the main loop meets the same database and says what is wrong with it, and a lease
    outlasts three beats.
    """

    def __init__(self, beat: Callable[[], object]) -> None:
        self._call = beat
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
                self._call()
