"""Progress of a run: a live table in terminals and notebooks, else lines."""

import html
import io
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text

from bssearch.analysis.objectives import seconds_to_target, trial_basis
from bssearch.analysis.optimum import decide
from bssearch.records import Phase, StudyRecord, TrialObserved, TrialRecord, TrialState, sizes_in_words, trainings_of
from bssearch.records.text import plural, visible
from bssearch.search.confirmation import in_force
from bssearch.search.driver import Listener
from bssearch.search.history import History
from bssearch.spec import spec_of

BETWEEN_LINES = 10.0  # seconds between lines of progress without a terminal, and between redraws during a trial

CONFIRMATION_RUNS = 34  # runs until an answer is final: about the median of tests/benchmarks/settling.py

LONGER = 4  # if the answer is still provisional, it needs about a quarter more runs

TUNED = 0.5  # wall seconds of a search trial / wall seconds of the default's first trial, in five studies

LIMIT_SHARE = 1 / 8  # wall seconds of a trial / its limit, about the median of five studies on idle cores

BETWEEN_TRIALS = 10.0  # seconds from a trial to the next; a longer time is a break of the study

BAR = 20  # characters


def seconds_left(history: History) -> float:
    """Return the expected wall seconds until the answer is final.

    Until two search trials have ended, the estimate comes from a trial's time limit.
    """
    ended = sorted(
        (one.ended_at.timestamp(), one.outcome.wall_seconds, one.state)
        for one in history.all_trials
        if one.phase is Phase.SEARCH and not one.state.is_missing and one.outcome and one.ended_at
    )
    budget = history.spec.budget
    if len(ended) < 2:
        turn = run = LIMIT_SHARE * budget.trial_train_seconds / history.spec.executor.least_slots
    else:
        walls = [wall for _, wall, _ in ended]
        reached = [wall for _, wall, state in ended if state is TrialState.REACHED]
        at_once = max(1.0, math.fsum(walls) / max(history.busy_seconds, 1e-9))
        first = TUNED * walls[0]
        # Seconds between the ends of trials, with decisions and process starts, but without long breaks.
        turns = [min(end - before, wall + BETWEEN_TRIALS) for (before, *_), (end, wall, _) in pairwise(ended)]
        turn = statistics.mean([first, *turns])
        between = max(0.0, turn - statistics.mean([first, *walls[1:]]) / at_once)
        # the mean, because finalists include the default and the largest batch size, which are slow
        run = statistics.mean(reached or walls) / at_once + between
    fresh = sum(trial.phase is Phase.CONFIRM for trial in history.all_trials)
    search = 0.0 if fresh else max(0, budget.trials - len(ended)) * turn
    if budget.wall_seconds is not None:
        search = min(search, max(0.0, budget.wall_seconds - history.busy_seconds))
    runs = max(1, CONFIRMATION_RUNS - fresh, fresh // LONGER) if history.spec.confirm.runs else 0
    return search + runs * run


def in_hours(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def on_screen(screen: Console, verbose: bool = False) -> Iterator[Listener]:
    if not screen.is_terminal:
        yield Lines(screen, verbose)
        return
    table = LiveTable(screen)
    with table.live:
        yield Display(screen, table.show, verbose=verbose)


class LiveTable:
    """A table at the bottom of the terminal."""

    def __init__(self, screen: Console) -> None:
        self._screen, self._size = screen, screen.size
        self._table: RenderableType = Text()
        self._lines: list[list[Segment]] = []
        self.live = Live(self, console=screen, auto_refresh=False, transient=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._lines, self._size = console.render_lines(self._table, options, pad=False), console.size
        yield self._table

    def show(self, table: RenderableType) -> None:
        screen, self._table = self._screen, table
        lines = screen.render_lines(table, pad=False)
        if len(lines) != len(self._lines) or len(lines) > screen.height or screen.size != self._size:
            self.live.refresh()
            return
        before, self._lines = self._lines, lines
        screen.pop_render_hook()  # the hook of `live` redraws all lines
        with screen:
            for up, (old, new) in enumerate(zip(reversed(before), reversed(lines), strict=True)):
                if new != old:
                    screen.control(
                        Control.move(0, -up), Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
                    )
                    screen.print(Segments(new), end="")
                    screen.control(Control.move(0, up))
        screen.push_render_hook(self.live)


class Lines(Listener):
    """Prints notes, and a line of progress at most every `BETWEEN_LINES` seconds."""

    def __init__(self, screen: Console, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._verbose = verbose
        self._clock = clock
        self._began = self._shown_at = clock()
        self._is_searching = True
        self._history: History | None = None

    def opened(self, study: StudyRecord, database: str, continued: bool) -> None:
        self.note(f"{'resuming' if continued else 'new'} study {study.name} in {database}")
        if not continued:
            spec = spec_of(study)
            self.note(
                f"expected time: {in_hours(seconds_left(History(spec)))}, guessed from budget.trial_train_seconds = "
                f"{spec.budget.trial_train_seconds:g}; the estimate improves as trials end"
            )

    def note(self, message: str) -> None:
        self._screen.print(visible(message), markup=False)

    def started(self, trial: TrialRecord, history: History) -> None:
        self._is_searching = trial.phase is Phase.SEARCH
        self._history = history

    def observed(self, observed: TrialObserved) -> None:
        if self._history is not None and self._is_due:
            self._show(self._history)

    def ended(self, trial: TrialRecord, history: History) -> None:
        if self._verbose or trial.state.is_missing:
            self.note(ended_line(trial, history))
        self._show(history)

    def search_ended(self, reason: str, history: History) -> None:
        self._is_searching = False
        if history.incumbent is not None:
            self.note(f"so far: {so_far(history)}")

    @property
    def _is_due(self) -> bool:
        return self._clock() >= self._shown_at + BETWEEN_LINES

    def _show(self, history: History) -> None:
        if self._is_due:
            self._shown_at = self._clock()
            self.note(" · ".join(self.progress(history)))

    def progress(self, history: History) -> tuple[str, str]:
        """Return the trials and the time, then the best result and the cost."""
        runs = f"{history.spent} of {history.spec.budget.trials} search trials"
        if not self._is_searching:
            fresh = sum(trial.phase is Phase.CONFIRM for trial in history.all_trials)
            runs = f"{plural(history.spent, 'search trial')}, {plural(fresh, 'confirmation run')}"
        elapsed, left = self._clock() - self._began, seconds_left(history)
        time = f"{in_hours(elapsed)} of about {in_hours(elapsed + left)}"
        best = "no trial has reached the target yet" if history.incumbent is None else so_far(history)
        return f"{runs} · {time}", " · ".join(filter(None, (best, trainings_so_far(history))))


class Display(Lines):
    """Prints notes above a live table, which ``show`` draws."""

    def __init__(
        self,
        screen: Console,
        show: Callable[[RenderableType], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        verbose: bool = False,
    ) -> None:
        super().__init__(screen, verbose, clock)
        self._show_table = show
        self._running: dict[int, TrialRecord] = {}

    def started(self, trial: TrialRecord, history: History) -> None:
        super().started(trial, history)
        self._running[trial.number] = trial
        self._show(history)

    def ended(self, trial: TrialRecord, history: History) -> None:
        self._running.pop(trial.number, None)
        super().ended(trial, history)

    def search_ended(self, reason: str, history: History) -> None:
        super().search_ended(reason, history)
        self._show(history)

    def _show(self, history: History) -> None:
        self._shown_at = self._clock()
        self._show_table(Group(batch_table(history), Text(self.footer(history))))

    def footer(self, history: History) -> str:
        running = ", ".join(
            f"{number} (batch {sizes_in_words(one.configuration)})" for number, one in self._running.items()
        )
        elapsed, left = self._clock() - self._began, seconds_left(history)
        filled = round(BAR * elapsed / (elapsed + left)) if left else BAR
        trials, best = self.progress(history)
        return f"{'█' * filled}{'░' * (BAR - filled)} {trials}\n{best}\nrunning: {running or 'no trial'}"


def confirmed_medians(history: History) -> dict[int, str]:
    """Return each confirmed batch size's median over fresh seeds, the best batch size first."""
    verdict = decide(in_force(history, history.of_phase(Phase.CONFIRM)), history.spec.confirm.runs, history.objective)
    if verdict is None or not verdict.confirmed:
        return {}
    shown, unit = history.objective.shown, history.objective.unit
    return {
        one.configuration.batch_size: f"{shown(one.estimate.median):.3g}{unit} over {one.estimate.runs}"
        for one in (verdict.optimal, *verdict.by_batch.values())
        if one.is_confirmed and one.estimate.median is not None
    }


def so_far(history: History) -> str:
    if medians := confirmed_medians(history):
        size, median = next(iter(medians.items()))
        return f"batch {size}, median {median} fresh seeds"
    best = history.incumbent
    assert best is not None, "a trial has reached the target"
    return f"best single run: batch {best.configuration.batch_size}, {history.figure_text(best)}"


def trainings_so_far(history: History) -> str:
    """Return the cost so far in multiples of the best trial's time to target, or an empty string if unknown."""
    best = history.incumbent
    seconds = None if best is None or best.outcome is None else best.outcome.time_to_target_s
    count = round(trainings_of(history.all_trials, seconds)) if seconds else 0
    return f"cost {count:,} training{'' if count == 1 else 's'}" if seconds else ""


def batch_table(history: History) -> Table:
    medians = confirmed_medians(history)
    columns = ["batch size", "trials", "reached", "best single run", "fresh seeds"]
    table = Table(*columns if medians else columns[:-1], box=None, padding=(0, 2))
    for size in history.feasible:
        here, best = history.at(size), history.best_at(size)
        mark = "←" if best is not None and best is history.incumbent else ""
        reached = sum(trial.state is TrialState.REACHED for trial in here)
        row = [str(size), str(len(here)), str(reached), f"{history.figure_text(best) if best else '–'} {mark}"]
        table.add_row(*row, *([medians.get(size, "–")] if medians else []))
    return table


def ended_line(trial: TrialRecord, history: History) -> str:
    configuration, outcome = trial.configuration, trial.outcome
    what = f"batch {sizes_in_words(configuration)}, lr {configuration.learning_rate:.3g}"
    reason = "" if outcome is None else f" ({outcome.reason})"
    how = f"{trial.state.value}{_after(trial) if trial.state is TrialState.REACHED else reason}"
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
    """Yield ``listener``, else the display that ``progress`` selects."""
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
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookDisplay(Display):
    """Shows notes and the table in a notebook cell, as HTML."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(Console(file=io.StringIO()), self.update)
        self._show_html = show
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._table = ""

    def note(self, message: str) -> None:
        self._notes.append(message)
        self._draw()

    def update(self, renderable: RenderableType) -> None:
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
