"""How long a driver serves a study where others wait for its place: until it is told to make room, or to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from bssearch.errors import InterruptedRunError
from bssearch.search.engine import CONTINUE
from bssearch.search.interrupts import Interrupts


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
