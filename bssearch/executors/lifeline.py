"""Ends a worker and its children when the driver dies, even by SIGKILL.

Three mechanisms cover each other's gaps:

* ``PR_SET_PDEATHSIG`` (Linux) works while the interpreter's lock is held.
* A thread kills the process group when the commands end.
* A shell in the group kills the group, with data loaders, when the driver's pipe closes.

A user's command has its own group, `Watcher` and subreaper. Only processes that leave it survive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal when the thread that started this process ends

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): orphaned descendants become children


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its starting thread ends (Linux).

    Exits if the ``parent`` has already died.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_group()


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Adopt orphaned descendants, to kill them (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class DieWithParent:
    """A ``preexec_fn``: the kernel kills the process when ``parent`` ends.

    Finds the system call before the fork; few operations are safe afterwards.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        """Ask the kernel; exit if the parent has ended."""
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


def end_group() -> NoReturn:
    """Kill this process, and its own group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


class Watcher:
    """A shell that kills a process group when ``lifeline`` closes.

    Group 0 is its own; other groups need a new session. ``pid`` is the shell's.
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
        """End only the shell."""
        self._shell.kill()
        self._shell.wait()
