"""What tests of processes and threads share: an ear for notes, and waiting for a condition."""

import subprocess
import time
from collections.abc import Callable

import psutil

from bssearch.search.driver import Listener

PATIENCE_S = 300.0
"""How long something is waited for: what a slow machine may take, and no test relies on."""


class Ear(Listener):
    """Keeps the notes that it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        assert process is None or process.poll() is None, "the process has ended"
        time.sleep(0.02)


def wait_until_gone(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has taken note."""
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
