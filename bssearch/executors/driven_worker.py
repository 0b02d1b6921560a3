"""A worker as the driver sees it, wherever its process runs."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Protocol

from bssearch.executors.failures import Death
from bssearch.executors.messages import Command, Reply


class Worker(Protocol):
    """A process that is told commands; its replies arrive in an `Inbox`, a None last, once it has ended.

    What it prints goes to ``log``, from ``log_start`` on, and is there before the reply that follows it.
    ``last_heard`` is when it last said something, by the monotonic clock. ``place`` tells the machines apart that
    workers run on.
    """

    slot: int
    log: Path
    log_start: int
    last_heard: float

    @property
    def pid(self) -> int:
        """The process id on its machine."""
        ...

    @property
    def place(self) -> str:
        """Which machine the worker is on; empty for this one."""
        ...

    def send(self, command: Command) -> None:
        """Send a command; one to a dead worker is lost, its death is told through the inbox."""
        ...

    def has_exited(self) -> bool:
        """Return whether the process is known to have ended."""
        ...

    def write_stack(self) -> None:
        """Have the worker write to its log where its main thread stands."""
        ...

    def kill(self) -> None:
        """Kill the worker and all that it started; its end is told through the inbox. A signal handler may call it."""
        ...

    def bury(self) -> Death:
        """Let go of a worker whose end was told; return how it died."""
        ...


Inbox = queue.SimpleQueue[tuple[Worker, Reply | None]]
