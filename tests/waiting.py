"""Helpers for processes and threads: a listener of notes, and waiting for a condition."""

import subprocess
import time
from collections.abc import Callable

import psutil

from bssearch.search.driver import Listener

PATIENCE_S = 300.0
"""Longest wait for a condition, for slow machines; no test relies on it."""


class Ear(Listener):
    """Keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold"
        assert process is None or process.poll() is None, "the process has ended"
        time.sleep(0.02)


def wait_until_gone(pid: int) -> None:
    """Wait until a process ended, even if its parent has not reaped the process."""
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
