"""What a run tells whoever watches it."""

from __future__ import annotations

from bssearch.records import StudyRecord, TrialObserved, TrialRecord
from bssearch.search.history import History


class Listener:
    """Watches a run; as it is, silently. Override what is of interest."""

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """The study is open in a database (password masked)."""

    def note(self, message: str) -> None:
        """Something worth a line happened."""

    def started(self, trial: TrialRecord, history: History) -> None:
        """A trial has started."""

    def observed(self, observed: TrialObserved) -> None:
        """A trial was evaluated."""

    def ended(self, trial: TrialRecord, history: History) -> None:
        """A trial has ended; the history includes it."""

    def search_ended(self, reason: str, history: History) -> None:
        """The search is at its end; confirmation follows, where it is asked for."""
