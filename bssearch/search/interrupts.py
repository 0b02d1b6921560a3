"""Ctrl-C: once to stop in good order, twice to stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts SIGINT and SIGTERM while it is entered; on the second, calls ``on_second`` and raises KeyboardInterrupt.

    Where ``at_once`` says so, because nobody would look at the count for long, the first one raises too. Outside the
    main thread, where Python allows no handlers, it leaves signals as they are.
    """

    def __init__(self, on_second: Callable[[], None], at_once: Callable[[], bool] = lambda: False) -> None:
        self.count = 0
        self._on_second = on_second
        self._at_once = at_once
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self) -> None:
        """Count one that came elsewhere: from a handler of another object of these, in any thread."""
        self.count += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._on_second()
            raise KeyboardInterrupt
        if self._at_once():
            raise KeyboardInterrupt
