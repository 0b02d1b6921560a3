"""How long a driver serves a study where others wait for its place: until it is told to make room, or to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from bssearch.errors import InterruptedRunError
from bssearch.search.engine import CONTINUE

# Ctrl-C: once to stop in good order, twice to stop at once.

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


class Shift:
    """Between a driver and who watches it from another thread.

    A driver at the end of its shift starts no trial and ends once none runs. ``clock`` is in seconds.
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
        """Return whether no trial is to start any more."""
        return self._is_ending

    @property
    def seconds_waited(self) -> float:
        """Return for how long the driver has had nothing to do but to wait for other drivers."""
        since = self._waiting_since
        return 0.0 if since is None else self._clock() - since

    def end(self) -> None:
        """Have the driver end once what runs has ended."""
        self._is_ending = True

    def interrupt(self) -> None:
        """Have the driver end now, with what runs paused, as after Ctrl-C; a workload is loaded no further.

        Asked again it ends again what is loaded: an executor that is told before it has a process goes on to start one.
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
        """End all that runs at once; who watches does this last."""
        with self._lock:
            for _, kill in self._drivers:
                kill()

    def raise_if_over(self, running: Collection[int] = ()) -> None:
        """Raise `InterruptedRunError` where no trial is to start any more and none is ``running``."""
        if self._is_ending and not running:
            raise InterruptedRunError("made room for other studies; every trial is stored", hint=CONTINUE)

    @contextmanager
    def loading(self, end: Callable[[], None]) -> Iterator[None]:
        """Load a workload inside, which ``end`` ends from another thread; raise `InterruptedRunError` after that.

        It is left once ``end`` has returned: what comes next has the executor for itself.
        """
        with self._lock:
            self._end_loading = end
        try:
            self.raise_if_over()
            yield
        except Exception:  # whatever comes of an executor whose process was ended under it
            self.raise_if_over()
            raise
        finally:
            with self._lock:
                self._end_loading = None

    def join(self, interrupts: Interrupts, kill: Callable[[], None]) -> None:
        """Take in a driver; one that comes after the interrupt is interrupted too."""
        with self._lock:
            self._drivers.append((interrupts, kill))
            if self._is_interrupted:
                interrupts.ask()

    def wait(self) -> None:
        """Take note that the driver waits for others."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def work(self) -> None:
        """Take note that the driver has something to do."""
        self._waiting_since = None
