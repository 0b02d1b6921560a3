"""Work with a store that may be slow or away, in a thread of its own, and given up where nothing of it happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from bssearch.errors import CheckpointError

PATIENCE_SECONDS = 60.0
"""A store with which nothing happened for so long is taken to be away: a choice; libraries try again for a while."""

Result = TypeVar("Result")


def ignoring_progress(work: Callable[[], Result]) -> Callable[[Callable[[], None]], Result]:
    """Return work as a `Transfer` calls it, of which nothing is heard before its end."""
    return lambda _: work()


class Transfer(Generic[Result]):
    """Calls ``work`` in a thread, with what it is to call after each bit of progress; the process may end before it."""

    def __init__(self, what: str, work: Callable[[Callable[[], None]], Result]) -> None:
        self._what = what
        self._work = work
        self._last = time.monotonic()
        self._results: list[Result] = []
        self._error: CheckpointError | None = None
        self._ended = threading.Event()
        self._is_abandoned = False
        threading.Thread(target=self._run, name=f"bssearch {what}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, or is given up."""
        return self._ended.is_set() or self._patience_left <= 0

    def wait(self, seconds: float = float("inf")) -> None:
        """Wait until it is over, for so long at most."""
        until = time.monotonic() + seconds
        while not self.is_over and (left := min(self._patience_left, until - time.monotonic())) > 0:
            self._ended.wait(left)

    def abandon(self) -> None:
        """Have it end, without a result, at its next bit of progress."""
        self._is_abandoned = True

    def result(self) -> Result:
        """Return the result of one that is over; raise `CheckpointError` where there is none."""
        if self._error is not None:
            raise self._error
        if not self._results:
            raise CheckpointError(f"{self._what}: nothing happened for {PATIENCE_SECONDS:g} s, so it was given up")
        return self._results[0]

    @property
    def _patience_left(self) -> float:
        return self._last + PATIENCE_SECONDS - time.monotonic()

    def _progress(self) -> None:
        if self._is_abandoned:
            raise CheckpointError(f"{self._what}: not wanted any more")
        self._last = time.monotonic()

    def _run(self) -> None:
        try:
            self._results.append(self._work(self._progress))
        except CheckpointError as error:
            self._error = error
        finally:
            self._ended.set()
