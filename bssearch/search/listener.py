"""Callbacks of a run."""

from __future__ import annotations

from bssearch.records import StudyRecord, TrialObserved, TrialRecord
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
