"""Lets a driver run until it is asked to finish or to stop at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from bssearch.errors import InterruptedRunError
from bssearch.records import StudyRecord, TrialObserved, TrialRecord
from bssearch.search.engine import CONTINUE
from bssearch.search.history import History


class Listener:
    """Base class; every method does nothing."""

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """The study was opened (database password masked)."""

    def note(self, message: str) -> None:
        """A notice."""

    def started(self, trial: TrialRecord, history: History) -> None:
        """A trial started."""

    def observed(self, observed: TrialObserved) -> None:
        """A trial was evaluated."""

    def ended(self, trial: TrialRecord, history: History) -> None:
        """A trial ended; the history includes it."""

    def search_ended(self, reason: str, history: History) -> None:
        """The search ended."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts SIGINT and SIGTERM; on the second, or the first if ``at_once``, raises KeyboardInterrupt.

    The second also calls ``on_second``. Does nothing outside the main thread, which alone can set handlers.
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
        """Count an interrupt from another source; thread-safe."""
        self.count += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._on_second()
            raise KeyboardInterrupt
        if self._at_once():
            raise KeyboardInterrupt


class Shift:
    """Connects a driver to a supervisor in another thread.

    A driver whose shift is ending starts no trial and ends when none runs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_ending = False
        self._is_interrupted = False
        self._drivers: list[tuple[Interrupts, Callable[[], None]]] = []
        self._end_loading: Callable[[], None] | None = None
        self._waiting_since: float | None = None

    @property
    def is_ending(self) -> bool:
        """Whether no more trials start."""
        return self._is_ending

    @property
    def seconds_waited(self) -> float:
        """Seconds during which the driver only waited for other drivers."""
        since = self._waiting_since
        return 0.0 if since is None else self._clock() - since

    def end(self) -> None:
        """End the driver once its running trials have ended."""
        self._is_ending = True

    def interrupt(self) -> None:
        """Pause the running trials and end the driver, as after Ctrl-C; stop loading the workload.

        Repeat calls matter: an executor ended before its process exists starts that process anyway.
        """
        with self._lock:
            self._is_ending = True
            if not self._is_interrupted:
                self._is_interrupted = True
                for interrupts, _ in self._drivers:
                    interrupts.ask()
            if self._end_loading is not None:
                self._end_loading()

    def kill(self) -> None:
        """Kill all running trials."""
        with self._lock:
            for _, kill in self._drivers:
                kill()

    def raise_if_over(self, running: Collection[int] = ()) -> None:
        """Raise `InterruptedRunError` if the shift is ending and no trial is ``running``."""
        if self._is_ending and not running:
            raise InterruptedRunError("made room for other studies; every trial is stored", hint=CONTINUE)

    @contextmanager
    def loading(self, end: Callable[[], None]) -> Iterator[None]:
        """Load a workload; ``end`` may stop the load from another thread, which raises `InterruptedRunError`.

        Exits only after ``end`` returned, so that the executor is free.
        """
        with self._lock:
            self._end_loading = end
        try:
            self.raise_if_over()
            yield
        except Exception:  # the executor's process may have been ended
            self.raise_if_over()
            raise
        finally:
            with self._lock:
                self._end_loading = None

    def join(self, interrupts: Interrupts, kill: Callable[[], None]) -> None:
        """Add a driver; interrupt it if the shift was interrupted."""
        with self._lock:
            self._drivers.append((interrupts, kill))
            if self._is_interrupted:
                interrupts.ask()

    def wait(self) -> None:
        """The driver waits."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def work(self) -> None:
        """The driver works."""
        self._waiting_since = None
