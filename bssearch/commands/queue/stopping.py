"""How a worker is told to stop: once, and within so many seconds it has, whatever it waits for."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from bssearch.search.interrupts import SIGNALS

STOPS_WITHIN_S = 25.0
"""Seconds that trials have to be saved and given back, before they are killed: a scheduler gives 30 at least."""

LEAVES_WITHIN_S = 3.0
"""Seconds after that in which the process ends by itself; then it is ended."""

_LOOK_SECONDS = 0.1


class Stop:
    """SIGTERM, and Ctrl-C, while it is entered; ``obey`` is called soon after one, from a thread, then ``kill``.

    Outside the main thread, where Python allows no handlers, only `ask` stops.
    """

    def __init__(self, obey: Callable[[], None], kill: Callable[[], None], within: float = STOPS_WITHIN_S) -> None:
        self._obey, self._kill, self._within = obey, kill, within
        self._asked_at: float | None = None
        self._is_over = threading.Event()
        self._previous: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._guard, name="bssearch worker's stop", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def is_asked(self) -> bool:
        """Return whether somebody wants the worker to stop."""
        return self._asked_at is not None

    def ask(self) -> None:
        """Have the worker stop."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait, at most until somebody asks."""
        until = time.monotonic() + seconds
        while not self.is_asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_SECONDS, left))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.ask()

    def _guard(self) -> None:
        """Have the request obeyed, and end the process where nothing else does."""
        while self._asked_at is None:
            if self._is_over.wait(_LOOK_SECONDS):
                return
        self._obey()
        if self._is_over.wait(self._asked_at + self._within - time.monotonic()):
            return
        sys.stderr.write(f"not stopped within {self._within:g} s: what runs is killed\n")
        threading.Thread(target=self._kill, daemon=True).start()
        if not self._is_over.wait(LEAVES_WITHIN_S):
            os._exit(1)
