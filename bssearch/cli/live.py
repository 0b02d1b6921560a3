"""What a person sees while a study runs: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bssearch.analysis.objectives.seconds import seconds_to_target
from bssearch.cli.output import cell, console
from bssearch.history import History
from bssearch.records import Phase, StudyRecord, TrialRecord, TrialState
from bssearch.search.listener import Listener
from bssearch.spec import StudySpec


@contextmanager
def watch(spec: StudySpec) -> Iterator[Listener]:
    """Yield the listener for this terminal; the display ends with the context."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield Lines(screen, spec)
        return
    with Live(console=screen, refresh_per_second=4, transient=True) as live:
        yield Display(screen, spec, live)


class Lines(Listener):
    """One line an event."""

    def __init__(self, screen: Console, spec: StudySpec) -> None:
        self._screen = screen
        self._spec = spec

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """Say which study, where."""
        verb = "going on with" if continued else "new"
        self.note(f"{verb} study {study.name} in {database}")

    def note(self, message: str) -> None:
        """Print a line."""
        self._screen.print(message, markup=False)

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Print how a trial ended."""
        self.note(ended_line(trial, history))


class Display(Lines):
    """Notes above, and below them a table that follows the study: batch sizes, incumbent, what runs, time left."""

    def __init__(self, screen: Console, spec: StudySpec, live: Live) -> None:
        super().__init__(screen, spec)
        self._live = live
        self._started = time.monotonic()
        self._running: dict[int, TrialRecord] = {}
        self._first_count: int | None = None

    def started(self, trial: TrialRecord, history: History) -> None:
        """Show a trial as running."""
        self._running[trial.number] = trial
        self._show(history)

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Count a trial."""
        self._running.pop(trial.number, None)
        if trial.phase is Phase.CONFIRM or trial.state.is_missing:
            super().ended(trial, history)
        self._show(history)

    def _show(self, history: History) -> None:
        self._live.update(Group(batch_table(history), Text(self._footer(history))))

    def _footer(self, history: History) -> str:
        budget = self._spec.budget.trials
        if self._first_count is None:
            self._first_count = history.spent
        done = history.spent - self._first_count
        left = ""
        if done and history.spent < budget:
            rate = (time.monotonic() - self._started) / done
            left = f" · about {rate * (budget - history.spent):.0f} s of search left"
        best = history.incumbent
        incumbent = "no trial has reached the target yet"
        if best is not None:
            incumbent = f"incumbent: batch {best.configuration.batch_size}, {history.figure_text(best)}"
        running = ", ".join(f"{number} (batch {one.configuration.batch_size})" for number, one in self._running.items())
        return f"{history.spent} of {budget} search trials · {incumbent}{left}\nrunning: {running or 'nothing'}"


def batch_table(history: History) -> Table:
    """Return the batch sizes with their trials and best times so far."""
    table = Table("batch size", "trials", "reached", "best", box=None, padding=(0, 2))
    for size in history.feasible:
        here = history.at(size)
        best = history.best_at(size)
        mark = "←" if best is not None and best is history.incumbent else ""
        reached = sum(trial.state is TrialState.REACHED for trial in here)
        value = history.figure_text(best) if best else "–"
        table.add_row(str(size), str(len(here)), str(reached), f"{value} {mark}")
    return table


def ended_line(trial: TrialRecord, history: History) -> str:
    """Return one line on how a trial ended."""
    configuration, outcome = trial.configuration, trial.outcome
    what = f"batch {configuration.batch_size}, lr {configuration.learning_rate:.3g}"
    how = trial.state.value
    if trial.state is TrialState.REACHED:
        seconds = seconds_to_target(trial)
        how += f" in {cell(seconds)} s" if seconds is not None else ""
    elif outcome is not None:
        how += f" ({outcome.reason})"
    count = f" {history.spent}/{history.spec.budget.trials}" if trial.phase is Phase.SEARCH else ""
    return f"{trial.phase.value.replace('_', ' ')}{count}, trial {trial.number}: {what}: {how}"
