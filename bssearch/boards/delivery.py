"""How events reach a board within its process: evaluations many at a time, and each report up to three times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from bssearch.boards.base import Board
from bssearch.boards.events import Answered, Event, Reply, StudyOpened, TrialEnded, TrialObserved, TrialStarted

BATCH_SECONDS = 1.0
"""How long evaluations wait to be written together: a choice, as often as a person looks."""

BATCH_SIZE = 1000
"""Evaluations that are written together at most: a choice."""

WAITS = (1.0, 4.0)
"""Seconds before a report that failed is tried again: a choice, longer than a server takes to restart a worker."""

WHY_CHARACTERS = 300
"""Of what a library says went wrong, as much is told: a choice."""


class Delivery:
    """Hands events to a board in their order, and replies how many it has taken. ``now`` is in seconds, as `sleep`."""

    def __init__(
        self,
        board: Board,
        reply: Callable[[Reply], None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._board, self._reply, self._now, self._sleep = board, reply, now, sleep
        self._points: list[TrialObserved] = []
        self._since = 0.0

    def take(self, event: Event) -> None:
        """Deliver an event, or keep an evaluation until there are more."""
        if isinstance(event, TrialObserved):
            self._since = self._since if self._points else self._now()
            self._points.append(event)
            if len(self._points) >= BATCH_SIZE:
                self.flush()
            return
        self.flush()
        self._try(lambda: self._tell(event), 1)

    @property
    def seconds_left(self) -> float | None:
        """Return how long the evaluations that are kept may wait; None where there are none."""
        return max(0.0, self._since + BATCH_SECONDS - self._now()) if self._points else None

    def flush_if_due(self) -> None:
        """Deliver the evaluations that have waited for long enough."""
        if self.seconds_left == 0:
            self.flush()

    def flush(self) -> None:
        """Deliver all evaluations, each trial's together."""
        points, self._points = self._points, []
        for number in dict.fromkeys(point.number for point in points):
            own = [point for point in points if point.number == number]
            self._try(lambda number=number, own=own: self._board.observed(number, own), len(own))  # type: ignore[misc]

    def _tell(self, event: StudyOpened | TrialStarted | TrialEnded | Answered) -> None:
        match event:
            case StudyOpened():
                self._board.opened(event)
            case TrialStarted():
                self._board.started(event)
            case TrialEnded():
                self._board.ended(event)
            case Answered():
                self._board.answered(event)
            case _:
                assert_never(event)

    def _try(self, deliver: Callable[[], None], count: int) -> None:
        """Deliver so many reports; where that fails for good they are given up."""
        for wait in (*WAITS, None):
            try:
                deliver()
            except Exception as error:
                if wait is None:
                    self._reply(Reply(failed=count, why=in_words(error)))
                    return
                self._reply(Reply(why=in_words(error)))
                self._sleep(wait)
            else:
                self._reply(Reply(handled=count))
                return


def in_words(error: BaseException) -> str:
    """Return an error on one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= WHY_CHARACTERS else f"{words[: WHY_CHARACTERS - 1]}…"
