"""The line of a command to its worker: a socket by its path, which any program of Python's may ask its trial at.

A launcher such as torchrun closes the descriptors that its programs would inherit; a path reaches them all the same.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.errors import WorkloadError
from bssearch.executors.conversation import Conversation, answer_in, converse, stopped, with_end
from bssearch.executors.failures import judge_command
from bssearch.executors.messages import Assign, Described, Measured, Reply, TrialEnded
from bssearch.records import TrialOutcome, TrialRequest, TrialState

if TYPE_CHECKING:
    from bssearch.executors.programs.command_process import CommandProcess

THE_COMMAND = "the command"
"""What a command is called in what is said of it."""


class TrialSocket:
    """A socket at a path, for one program to connect to, once; the folder of the path is the worker's alone.

    Where the path is longer than a socket's may be (108 bytes on Linux, unix(7)) nothing listens there: a program that
    connects says so, and one that reports needs no socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line: socket.socket | None = None
        self._door: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._door.bind(str(path))
            self._door.listen(1)
        except OSError:
            self.shut()

    @property
    def listening(self) -> list[socket.socket]:
        """Return what is readable once a program connects; nothing where none may any more."""
        return [] if self._door is None else [self._door]

    def accept(self) -> None:
        """Take in the program that connects; no other may."""
        assert self._door is not None, "it listens"
        self.line, _ = self._door.accept()
        self.shut()

    def shut(self) -> None:
        """Let no program connect any more."""
        if self._door is not None:
            self._door.close()
            self._door = None
            with suppress(FileNotFoundError):
                self.path.unlink()

    def close(self) -> None:
        """Hang up, and let no program connect any more."""
        self.shut()
        if self.line is not None:
            self.line.close()


class ConnectedCommand:
    """A command that asks for its trial over its line; see `bssearch.executors.conversation.ProgramProcess`."""

    def __init__(self, process: CommandProcess, line: socket.socket) -> None:
        self.line = line
        self.process = process

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended; what it prints meanwhile is logged."""
        if self.process.has_been_ended:
            return self.process.end()
        self.process.log()
        return None if self.process.goes_on() else self.process.end()

    def kill(self) -> None:
        """End the command and all that it started."""
        self.process.end()


class Patience:
    """How long a program may say nothing, from a moment on; each reply begins it anew.

    It is asked as a `Stop` is, and raises `WorkloadError` once it is over.
    """

    def __init__(self, seconds: float, began: float) -> None:
        self._seconds = seconds
        self._last = began

    def is_over(self) -> bool:
        """Return whether the program has said nothing for too long."""
        return time.monotonic() - self._last > self._seconds

    def take(self, reply: Reply) -> None:
        """Take note of a reply."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """Raise `WorkloadError` where it is over."""
        if self.is_over():
            raise WorkloadError(
                f"the command said nothing for {self._seconds:g} s after it had asked for its trial",
                hint="executor.hang_seconds is how long it may take",
            )


def answer_of(connected: ConnectedCommand, assign: Assign, patience: Patience) -> Described | Measured:
    """Return a connected command's answer; raise `WorkloadError`, or `MemoryError`, where it fails."""
    found = converse(connected, assign, patience.stop, patience.take, connected.process.kernel_kills)
    answer = answer_in(found)
    if answer is None:
        raise failure_of(found.exit_code, connected.process)
    return answer


def failure_of(code: int, process: CommandProcess) -> Exception:
    """Return the `WorkloadError`, or the `MemoryError`, of a command that ended with an exit code."""
    state, reason = judge_command(code, process.kernel_kills, process.last_lines)
    return MemoryError(reason) if state is TrialState.OOM else WorkloadError(f"{reason}{process.shown_lines}")


def outcome_of(
    found: Conversation, request: TrialRequest, asked: tuple[TrialState, str] | None, printed: str
) -> TrialOutcome:
    """Return how a connected command's trial ended, by what it said, what it was ``asked``, or its exit code.

    One that leaves with an error before its trial was over has failed, although its line says that its loop ended.
    """
    state, reason = judge_command(found.exit_code, found.kernel_kills, printed)
    if not isinstance(found.reply, TrialEnded):
        if asked is not None:
            return stopped(asked)
        return TrialOutcome(state=state, reason=reason, traceback=printed or None)
    outcome = found.reply.outcome
    left_early = outcome.state is TrialState.EXHAUSTED and outcome.train_seconds <= request.train_seconds_limit
    if left_early and found.exit_code != 0 and asked is None and not found.overstayed:
        return replace(outcome, state=state, reason=f"{reason} after {outcome.steps} steps", traceback=printed or None)
    return with_end(outcome, found, THE_COMMAND)
