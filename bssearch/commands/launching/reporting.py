"""The boards of a run: what the driver says of its trials goes to each, what they say of it to who watches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from bssearch.boards.events import Event
from bssearch.boards.named import TARGETS, boards_of, check_boards
from bssearch.boards.process import READY_SECONDS, BoardProcess
from bssearch.boards.reports import answered, study_opened, trial_ended, trial_observed, trial_started
from bssearch.errors import BSSearchError, TargetNotReachedError
from bssearch.history import History
from bssearch.records import Observation, TrialRecord, TrialState
from bssearch.search.finding import answer
from bssearch.search.listener import Listener, Listeners
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

UNFINISHED = frozenset({TrialState.RUNNING, TrialState.PAUSED})
"""The states of trials whose end may come from another driver."""


class Reporter(Listener):
    """Reports the trials of one driver to boards, and tells ``watcher`` what becomes of the reports."""

    def __init__(self, boards: Sequence[BoardProcess], watcher: Listener) -> None:
        self._boards, self._watcher = boards, watcher
        self._store: Store | None = None
        self._name = ""
        self._train_samples: int | None = None
        self._ours: set[int] = set()
        self._unfinished: set[int] = set()

    @contextmanager
    def reporting(self, store: Store, spec: StudySpec, train_samples: int | None) -> Iterator[None]:
        """Report what happens inside to the boards, of a study in an open store; begin once they are ready."""
        if not self._boards:
            yield
            return
        self._store, self._name, self._train_samples = store, spec.name, train_samples
        deadline = time.monotonic() + READY_SECONDS
        for board in self._boards:
            board.wait_until_ready(deadline)
        self._tell(study_opened(store.study(spec.name), spec))
        self._unfinished = {trial.number for trial in store.trials(spec.name) if trial.state in UNFINISHED}
        try:
            yield
        finally:
            with suppress(BSSearchError):  # a database that is lost ends no run twice
                self._tell_the_rest(store)

    def started(self, trial: TrialRecord, history: History) -> None:
        """Report a trial that begins or goes on."""
        self._ours.add(trial.number)
        self._unfinished.add(trial.number)
        self._tell(trial_started(trial))

    def observed(self, number: int, observation: Observation) -> None:
        """Report an evaluation."""
        self._tell(trial_observed(number, observation, self._train_samples))

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Report the end of a trial, or that it is paused."""
        if trial.state is not TrialState.PAUSED:
            self._unfinished.discard(trial.number)
        self._tell(trial_ended(trial))

    def search_ended(self, reason: str, history: History) -> None:
        """Report the answer of the search, before its confirmation."""
        if self._store is not None:
            with suppress(BSSearchError):
                self._tell_answer(self._store)

    def _tell_the_rest(self, store: Store) -> None:
        """Report how trials ended of which this driver saw no end, and the answer as it is now."""
        for trial in store.trials(self._name) if self._unfinished else []:
            if trial.number in self._unfinished and trial.state not in UNFINISHED and trial.outcome is not None:
                self._tell(trial_ended(trial, is_elsewhere=trial.number not in self._ours))
        if self._ours:
            self._tell_answer(store)

    def _tell_answer(self, store: Store) -> None:
        with suppress(TargetNotReachedError):
            self._tell(answered(answer(store, self._name), len(store.trials(self._name))))

    def _tell(self, event: Event) -> None:
        for board in self._boards:
            board.report(event)
            self._pass_on_notes(board)

    def close(self) -> None:
        """Have the boards write what they were told, and end them."""
        for board in self._boards:
            board.begin_to_close()
        for board in self._boards:
            board.close()
            self._pass_on_notes(board)

    def _pass_on_notes(self, board: BoardProcess) -> None:
        for note in board.take_notes():
            self._watcher.note(note)


@contextmanager
def reported(spec: StudySpec, watcher: Listener, *, reports: bool) -> Iterator[tuple[Listener, Reporter]]:
    """Give who is to be told of a run, and what reports it to the boards of its spec; they are ended at the end.

    Without ``reports`` there are none. Raises `UsageError` for a board that is not known or not installed.
    """
    names = boards_of(spec) if reports else ()
    check_boards(names)
    boards: list[BoardProcess] = []
    reporter = Reporter(boards, watcher)
    try:
        for name in names:
            try:
                boards.append(BoardProcess(name, TARGETS[name]))
            except OSError as error:
                watcher.note(f"{name}: its process cannot be started ({error}); nothing is reported to it")
        yield (Listeners(watcher, reporter) if boards else watcher), reporter
    finally:
        reporter.close()
