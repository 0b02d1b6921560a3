"""Ends a worker and its children when the driver dies, even by SIGKILL.

Three mechanisms cover each other's gaps:

* ``PR_SET_PDEATHSIG`` (Linux) works even while the interpreter's lock is held.
* A thread kills the process group at the end of the command stream (all systems).
* A shell in the group reads the driver's pipe and kills the group, with data loaders, when it closes.

A user's command has its own group, `Watcher` and subreaper. Only processes that leave it survive a killed driver.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal this process gets when the thread that started it ends."""

_PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphaned descendants become this process's children."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its starting thread ends (Linux only).

    Exits if ``parent``, the driver's pid, died before the request.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_group()


def outlive_parent() -> None:
    """Undo `die_with_parent` (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that they can be killed (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class DieWithParent:
    """A ``preexec_fn`` with which the kernel kills the process when ``parent`` ends.

    Resolves the system call before the fork, because few operations are safe afterwards.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        """Ask the kernel; exit if the parent has already ended."""
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


def end_group() -> NoReturn:
    """Kill this process, and its group if it leads one."""
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
