"""What a person sees on this terminal while a study runs."""

from __future__ import annotations

from contextlib import AbstractContextManager

from bssearch.cli.output import console
from bssearch.commands.display.live import on_screen
from bssearch.search.listener import Listener


def watch() -> AbstractContextManager[Listener]:
    """Yield the listener for this terminal; the display ends with the context."""
    return on_screen(console(stderr=True))
