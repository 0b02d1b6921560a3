"""What a board is, whatever its library."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from bssearch.boards.events import Answered, StudyOpened, TrialEnded, TrialObserved, TrialStarted


class Board(Protocol):
    """Shows a study's trials; it lives in a process of its own, and is made once its library is imported.

    A method may take its time, and may raise: the same report is then tried again, so that nothing is written twice
    that was written before. A trial may be told of that was never told to have started here: another driver's.
    """

    def opened(self, study: StudyOpened) -> None:
        """Take in which study it is, before anything else."""
        ...

    def started(self, trial: TrialStarted) -> None:
        """Show a trial that begins, or goes on."""
        ...

    def observed(self, number: int, points: Sequence[TrialObserved]) -> None:
        """Add evaluations to a trial's curve, in the order of its steps."""
        ...

    def ended(self, trial: TrialEnded) -> None:
        """Show how a trial ended, or that it is paused."""
        ...

    def answered(self, answer: Answered) -> None:
        """Show the answer in the place of an earlier one."""
        ...

    def close(self) -> None:
        """Write what is not yet written; nothing more is told."""
        ...


def load_board(target: str) -> Board:
    """Return a new board of the class that a target names, ``module:attribute``; imports its library."""
    module, _, attribute = target.partition(":")
    board: Board = getattr(importlib.import_module(module), attribute)()
    return board
