"""What a run tells whoever watches it."""

from __future__ import annotations

from bssearch.history import History
from bssearch.records import StudyRecord, TrialObserved, TrialRecord


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


class Listeners(Listener):
    """Tells several, one after the other."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """Pass it on."""
        for one in self._listeners:
            one.opened(study, database, continued)

    def note(self, message: str) -> None:
        """Pass it on."""
        for one in self._listeners:
            one.note(message)

    def started(self, trial: TrialRecord, history: History) -> None:
        """Pass it on."""
        for one in self._listeners:
            one.started(trial, history)

    def observed(self, observed: TrialObserved) -> None:
        """Pass it on."""
        for one in self._listeners:
            one.observed(observed)

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Pass it on."""
        for one in self._listeners:
            one.ended(trial, history)

    def search_ended(self, reason: str, history: History) -> None:
        """Pass it on."""
        for one in self._listeners:
            one.search_ended(reason, history)
