"""What hosts an engine: it tells the engine what happens where trials run, and does what the engine asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bssearch.search.engine import Engine
from bssearch.search.events import Action, Event


class Host(ABC):
    """The driver of a study, or a simulation; a list as ``journal`` keeps every event that the engine is told."""

    def __init__(self, engine: Engine, journal: list[Event] | None) -> None:
        self.engine = engine
        self.journal = journal

    def _feed(self, event: Event) -> None:
        """Tell the engine of an event, and do what it asks for."""
        if self.journal is not None:
            self.journal.append(event)
        for action in self.engine.handle(event):
            self._carry_out(action)

    @abstractmethod
    def _carry_out(self, action: Action) -> None:
        """Do what the engine asks for; what comes of it is the next event."""
