"""For how long the trials of a search were running."""

from __future__ import annotations

import math
from collections.abc import Collection

from bssearch.records import TrialRecord


class BusyTime:
    """For how long at least one of a study's search trials was running, overlaps counted once.

    A trial that waited counts from its last start; once it has ended, what it ran before that adds, spread over the
    slots: it may have run beside others. When a trial began and ended says the database's clock, which may jump; for
    how long it ran, its worker's, which does not: a trial that has ended counts for no longer.
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[float, float]] = {}
        self._earlier: dict[int, float] = {}
        self._union: tuple[float, float] | None = (0.0, -math.inf)
        """Of the spans of what has ended: their seconds, and the last end; None where it must be computed anew."""

    def count(self, trial: TrialRecord, by: int) -> None:
        """Count a trial that has ended, or take it out."""
        if trial.state.is_missing or trial.ended_at is None:
            return
        if by < 0:
            del self._spans[trial.number], self._earlier[trial.number]
            self._union = None
            return
        start, ended = trial.created_at.timestamp(), trial.ended_at.timestamp()
        wall = trial.outcome.wall_seconds if trial.outcome is not None else 0.0
        end = start + max(0.0, min(ended - start, wall or math.inf))
        self._spans[trial.number] = start, end
        self._earlier[trial.number] = max(0.0, wall - (end - start))
        if self._union is not None and start >= self._union[1]:
            self._union = self._union[0] + end - start, end
        else:
            self._union = None

    def seconds(self, running: Collection[TrialRecord], now: float, slots: int) -> float:
        """Return the seconds until now; what is ``running`` adds from its start."""
        if self._union is None:
            self._union = _union(self._spans.values(), (0.0, -math.inf))
        spans = [(trial.created_at.timestamp(), now) for trial in running]
        if any(start < self._union[1] for start, _ in spans):
            total = _union([*self._spans.values(), *spans], (0.0, -math.inf))[0]
        else:
            total = _union(spans, self._union)[0]
        return math.fsum(self._earlier.values()) / slots + total


def _union(spans: Collection[tuple[float, float]], begun: tuple[float, float]) -> tuple[float, float]:
    """Return the length of a union of spans, added to that of what ended before, and its last end."""
    total, until = begun
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total, until
