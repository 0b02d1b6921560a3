"""A worker process does not outlive its driver, and nothing that the worker started does either.

Three strings, each for a case that the others miss when the driver is killed outright:

* the kernel kills the worker (``PR_SET_PDEATHSIG``, Linux), even one stuck with the interpreter's lock held;
* a thread sees the end of the command stream and kills the worker's process group (everywhere);
* a tiny shell in that process group holds the read end of a pipe whose only writer is the driver, and kills
  the group when it closes: the processes that the user's code started (data loaders, say) go too.

A command of the user's own leads a group of its own: it has a shell that kills that one (`Watcher`). What runs
commands or scripts becomes the parent of the orphans that they leave (`become_subreaper`), and ends those too.

A process that leaves the group, for a session of its own say, is out of reach where the driver is killed. Where it
lives it finds those too, before it kills a worker (`bssearch.executors.process`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends to this process when the thread that started it ends."""

_PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphans of this process's descendants become its own children."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Does nothing outside Linux.

    ``parent`` is the process id of the driver: where it is no longer our parent, it died before we could ask.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_group()


def outlive_parent() -> None:
    """Take back what `die_with_parent` has asked: this process goes on after its parent's end (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Have orphans of this process's descendants become its children, so that they can be ended (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class DieWithParent:
    """What a new process of ``parent`` runs before its program, so that the kernel kills it when its parent ends.

    The system call is found before the fork, after which little is safe.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        """Ask the kernel; end where the parent has ended before."""
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


def end_group() -> NoReturn:
    """Kill this process and all others of its group; only this process where it does not lead its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


class Watcher:
    """A shell that kills a process group when the other end of a pipe closes; ``pid`` is the shell's.

    The group is the shell's own (0), or another one: the shell is then in a session of its own. The shell takes the
    read end of the pipe, ``lifeline``.
    """

    def __init__(self, lifeline: int, group: int = 0) -> None:
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", f"read line; kill -9 {-group}"],
                stdin=lifeline,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=group != 0,
            )
        finally:
            os.close(lifeline)
        self.pid = self._shell.pid

    def dismiss(self) -> None:
        """End the shell alone."""
        self._shell.kill()
        self._shell.wait()
