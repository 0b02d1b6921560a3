"""Whether and how a run that was started from Python is shown: in a notebook by itself, elsewhere where asked for."""

from __future__ import annotations

import html
import io
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType

from bssearch.commands.display.live import Display, on_screen
from bssearch.search.listener import Listener

MOST_NOTES = 8
"""Notes that stand above the table of a notebook, the latest: a choice, so that a long study stays on the screen."""

WIDTH = 120
"""Characters of a line in a notebook: a choice, as many as a cell shows without a scroll bar."""


@contextmanager
def watched(listener: Listener | None, progress: bool | None) -> Iterator[Listener]:
    """Yield who watches a run: the listener that is given, else the display that there is to be.

    Without ``progress`` a run is shown in a notebook and nowhere else; False shows nothing there either.
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
    """Return whether this process is the kernel of a notebook: its shell is IPython's for Jupyter, or made of it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookDisplay(Display):
    """The table of a terminal in the output of a cell, under the latest notes; ``show`` gets it whole, as HTML."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(Console(file=io.StringIO()), self)
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
    """Return what shows HTML in the output of this cell, in the place of what it showed before."""
    from importlib import import_module

    display: Any = import_module("IPython.display").display
    handle = display({"text/html": "", "text/plain": ""}, raw=True, display_id=True)

    def show(page: str) -> None:
        handle.update({"text/html": page, "text/plain": html.unescape(page[5:-6])}, raw=True)

    return show
