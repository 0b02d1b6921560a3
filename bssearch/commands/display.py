"""Progress on stderr: a live table on terminals, else lines."""

from __future__ import annotations

import html
import io
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bssearch.analysis.objectives import seconds_to_target, trial_basis
from bssearch.analysis.optimum import decide
from bssearch.records import Configuration, Phase, StudyRecord, TrialRecord, TrialState
from bssearch.records.batch_schedule import sizes_in_words
from bssearch.records.text import visible
from bssearch.search.confirmation import confirmation_trials, in_force, most_left
from bssearch.search.driver import Listener
from bssearch.search.history import History

# Remaining runs and wall time of a study, estimated from its stored trials, whichever driver ran them.


@dataclass(frozen=True, slots=True)
class Left:
    """The most ``runs`` left and their wall ``seconds`` (None: unknown)."""

    runs: int
    seconds: float | None


def search_left(history: History) -> Left:
    """Rest of a search by the mean wall seconds per ended trial."""
    budget = history.spec.budget
    open_ones = len(history.in_state(TrialState.RUNNING, TrialState.PAUSED, TrialState.QUEUED))
    done = history.spent - open_ones
    left = max(0, budget.trials - done)
    seconds = history.busy_seconds / done * left if done > 0 else None
    if budget.wall_seconds is not None:
        seconds = min(math.inf if seconds is None else seconds, max(0.0, budget.wall_seconds - history.busy_seconds))
    return Left(left, seconds)


def confirmation_left(history: History) -> Left:
    """Most confirmation left, from medians per configuration."""
    runs = most_left(history)
    return Left(len(runs), math.fsum(_expected_seconds(history, one) for one in runs))


def _expected_seconds(history: History, configuration: Configuration) -> float:
    """A run's wall seconds: from its like, its batch size's best, or the limit."""
    full = {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.DIVERGED}
    own = [
        trial.outcome.wall_seconds
        for trial in history.all_trials
        if trial.configuration.key == configuration.key
        and trial.phase in {Phase.SEARCH, Phase.CONFIRM}
        and trial.state in full
        and trial.outcome is not None
    ]
    if own:
        return statistics.median(own)
    best = history.best_at(configuration.batch_size)
    if best is not None and best.outcome is not None:
        return best.outcome.wall_seconds
    return history.spec.budget.trial_train_seconds


@contextmanager
def on_screen(screen: Console) -> Iterator[Listener]:
    """Yield a listener that shows a run on a screen."""
    if not screen.is_terminal:
        yield Lines(screen)
        return
    with Live(console=screen, refresh_per_second=4, transient=True) as live:
        yield Display(screen, live.update)


class Lines(Listener):
    """Prints one line per event."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        """Print the study and its database."""
        self.note(f"{'going on with' if continued else 'new'} study {study.name} in {database}")

    def note(self, message: str) -> None:
        """Print a line."""
        self._screen.print(visible(message), markup=False)

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Print how a trial ended."""
        self.note(ended_line(trial, history))

    def search_ended(self, reason: str, history: History) -> None:
        """Print the answer so far."""
        if history.incumbent is not None:
            self.note(f"so far: {so_far(history)}")


class Display(Lines):
    """Notes above a live table; ``show`` replaces the table."""

    def __init__(
        self, screen: Console, show: Callable[[RenderableType], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(screen)
        self._show_table = show
        self._clock = clock
        self._running: dict[int, TrialRecord] = {}
        self._phase = Phase.SEARCH
        self._ending: str | None = None
        # The earliest estimate so far of the confirmation's end, so that the time left never grows.
        self._until = math.inf

    def started(self, trial: TrialRecord, history: History) -> None:
        """Show a trial as running."""
        self._running[trial.number] = trial
        is_searching = any(one.phase is Phase.SEARCH for one in self._running.values())
        self._phase = Phase.SEARCH if is_searching else trial.phase
        if trial.phase is Phase.SEARCH:
            self._ending, self._until = None, math.inf
        self._show(history)

    def ended(self, trial: TrialRecord, history: History) -> None:
        """Count an ended trial."""
        self._running.pop(trial.number, None)
        if trial.phase in {Phase.CONFIRM, Phase.GROWTH} or trial.state.is_missing:
            super().ended(trial, history)
        self._show(history)

    def search_ended(self, reason: str, history: History) -> None:
        """Print the answer so far; switch to the remaining confirmation."""
        super().search_ended(reason, history)
        self._ending, self._phase = reason, Phase.CONFIRM
        self._show(history)

    def _show(self, history: History) -> None:
        self._show_table(Group(batch_table(history), Text(self.footer(history))))

    def footer(self, history: History) -> str:
        """Phase, time left and running trials."""
        fastest = so_far(history) if history.incumbent is not None else "no trial has reached the target yet"
        searched = f"{history.spent} of {history.spec.budget.trials} search trials"
        if self._ending is not None:
            searched = f"search ended ({self._ending}): {history.spent} trials"
        parts = [searched, fastest, self._left(history)]
        running = ", ".join(
            f"{number} (batch {sizes_in_words(one.configuration)})" for number, one in self._running.items()
        )
        return f"{' · '.join(part for part in parts if part)}\nrunning: {running or 'nothing'}"

    def _left(self, history: History) -> str:
        if self._phase is Phase.SEARCH:
            left = search_left(history)
            return "" if left.seconds is None or not left.runs else f"at most about {left.seconds:.0f} s of search left"
        if self._phase is not Phase.CONFIRM:
            return ""
        left = confirmation_left(history)
        if not left.runs or left.seconds is None:
            return ""
        now = self._clock()
        self._until = min(self._until, now + left.seconds)
        seconds = f", about {self._until - now:.0f} s" if self._until > now else ""
        return f"confirmation: at most {left.runs} runs left{seconds}"


def confirmed_medians(history: History) -> dict[int, str]:
    """Medians of confirmed batch sizes, the best first."""
    confirmed = in_force(history, confirmation_trials(history))
    verdict = decide(confirmed, history.spec.confirm.runs, history.objective)
    if verdict is None or not verdict.confirmed:
        return {}
    shown, unit = history.objective.shown, history.objective.unit
    return {
        one.configuration.batch_size: f"{shown(one.estimate.median):.3g}{unit} over {one.estimate.runs}"
        for one in (verdict.optimal, *verdict.by_batch.values())
        if one.is_confirmed and one.estimate.median is not None
    }


def so_far(history: History) -> str:
    """Best batch size of confirmation, else of a single run, which is partly luck."""
    if medians := confirmed_medians(history):
        size, median = next(iter(medians.items()))
        return f"batch {size}, median {median} fresh seeds"
    best = history.incumbent
    assert best is not None, "nothing has reached the target"
    return f"best single run: batch {best.configuration.batch_size}, {history.figure_text(best)}"


def batch_table(history: History) -> Table:
    """Batch sizes with trials, the best single one (partly luck), and the median of fresh seeds."""
    medians = confirmed_medians(history)
    columns = ("batch size", "trials", "reached", "best single run", *(["fresh seeds"] if medians else []))
    table = Table(*columns, box=None, padding=(0, 2))
    for size in history.feasible:
        here = history.at(size)
        best = history.best_at(size)
        mark = "←" if best is not None and best is history.incumbent else ""
        reached = sum(trial.state is TrialState.REACHED for trial in here)
        value = history.figure_text(best) if best else "–"
        row = (str(size), str(len(here)), str(reached), f"{value} {mark}")
        table.add_row(*row, *([medians.get(size, "–")] if medians else []))
    return table


def ended_line(trial: TrialRecord, history: History) -> str:
    """One line on how a trial ended."""
    configuration, outcome = trial.configuration, trial.outcome
    what = f"batch {sizes_in_words(configuration)}, lr {configuration.learning_rate:.3g}"
    how = trial.state.value
    if trial.state is TrialState.REACHED:
        how += _after(trial)
    elif outcome is not None:
        how += f" ({outcome.reason})"
    count = f" {history.spent}/{history.spec.budget.trials}" if trial.phase is Phase.SEARCH else ""
    return f"{trial.phase.value.replace('_', ' ')}{count}, trial {trial.number}: {what}: {how}"


def _after(trial: TrialRecord) -> str:
    measured = seconds_to_target(trial, "measured")
    product = seconds_to_target(trial, "steps_x_step_time") if trial_basis(trial) == "steps_x_step_time" else None
    text = "" if measured is None else f" after {measured:.4g} train seconds"
    return text if product is None else f"{text} (contended: steps × step time is {product:.4g} s)"


MOST_NOTES = 8  # the most notes above the table in a notebook

WIDTH = 120  # characters per line in a notebook cell without a scroll bar


@contextmanager
def watched(listener: Listener | None, progress: bool | None) -> Iterator[Listener]:
    """Yield the given listener, else a display.

    ``progress``: None shows only in notebooks, False never.
    """
    if listener is not None:
        yield listener
    elif progress is False or (progress is None and not in_notebook()):
        yield Listener()
    elif in_notebook():
        yield NotebookDisplay(_output())
    else:
        with on_screen(Console(stderr=True, highlight=False, markup=False, emoji=False)) as shown:
            yield shown


def in_notebook() -> bool:
    """True if this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookDisplay(Display):
    """The table in a notebook cell, as HTML."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(Console(file=io.StringIO()), self.update)
        self._show_html = show
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._table = ""

    def note(self, message: str) -> None:
        """Show a line above the table."""
        self._notes.append(message)
        self._draw()

    def update(self, renderable: RenderableType) -> None:
        """Show another table."""
        text = io.StringIO()
        Console(file=text, width=WIDTH, color_system=None, force_jupyter=False).print(renderable)
        self._table = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        self._draw()

    def _draw(self) -> None:
        lines = "\n".join([*self._notes, self._table]).rstrip()
        self._show_html(f"<pre>{html.escape(lines)}</pre>")


def _output() -> Callable[[str], None]:
    from importlib import import_module

    display: Any = import_module("IPython.display").display
    handle = display({"text/html": "", "text/plain": ""}, raw=True, display_id=True)

    def show(page: str) -> None:
        handle.update({"text/html": page, "text/plain": html.unescape(page[5:-6])}, raw=True)

    return show
