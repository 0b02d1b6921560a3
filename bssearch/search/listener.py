"""What a run tells whoever watches it."""

from __future__ import annotations

from typing import Protocol

from bssearch.records import StudyRecord, TrialRecord
from bssearch.search.history import History


class Listener(Protocol):
    """Watches a run; every method may be left as it is."""

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """The study is open in a database (password masked)."""

    def note(self, message: str) -> None:
        """Something worth a line happened."""

    def started(self, trial: TrialRecord, history: History) -> None:
        """A trial has started."""

    def ended(self, trial: TrialRecord, history: History) -> None:
        """A trial has ended; the history includes it."""

    def tick(self) -> None:
        """Called a few times a second while trials run."""


class Silent(Listener):
    """Watches nothing."""
