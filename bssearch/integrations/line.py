"""The line from a loop to its search; of one in a process of its own messages over a socket to its worker."""

from __future__ import annotations

import os
import socket
import time
from typing import Protocol, Self

from bssearch.errors import LaunchError
from bssearch.executors.messages import (
    Assign,
    Heartbeat,
    Lines,
    Reply,
    Stop,
    TrialEnded,
    TrialObserved,
    decode_command,
    encode,
)
from bssearch.records import Observation, TrialOutcome, TrialState

HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats at least: a choice, small beside any time after which a trial counts as hung."""

LOOK_SECONDS = 0.02
"""How often a loop looks whether it is to stop, at most: a choice; a look takes a microsecond."""

_CHUNK_BYTES = 1 << 16


class Line(Protocol):
    """The line from a trial to its search."""

    def observed(self, number: int, observation: Observation) -> None:
        """Tell of an evaluation."""
        ...

    def ended(self, number: int, outcome: TrialOutcome) -> None:
        """Tell how the trial ended; the last that is said of it."""
        ...

    def progressed(self) -> None:
        """Take note of progress, which keeps the trial from passing for hung."""
        ...

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        """Return how the trial is to end, and why; None while it is to go on."""
        ...


class SocketLine:
    """The program's end of the line; no thread, so that the program may fork. See `Line`."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        self._lines = Lines()
        self._waiting: list[bytes] = []
        self._stop: tuple[TrialState, str] | None = None
        self._sent = self._looked = time.monotonic()

    @classmethod
    def at(cls, path: str) -> Self:
        """Connect to the search that listens at a path; raise `LaunchError` where none does any more."""
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(path)
        except OSError as error:
            line.close()
            raise LaunchError(
                f"no search listens at {path}: {error}",
                hint="one program of a command asks for its trial, once, and before it reports any progress; "
                "where the path is too long, set TMPDIR to a shorter one",
            ) from error
        return cls(line.detach())

    def assignment(self) -> Assign:
        """Wait for what is asked of the program; raise `ValueError` where the line says something else."""
        while not self._waiting:
            chunk = self._socket.recv(_CHUNK_BYTES)
            if not chunk:
                raise ValueError("the search has hung up")
            self._waiting += self._lines.feed(chunk)
        found = decode_command(self._waiting.pop(0))
        if not isinstance(found, Assign):
            raise ValueError(f"a {found.kind} where an assignment must stand")
        return found

    def send(self, reply: Reply) -> None:
        """Send a reply; raise `ValueError` where it holds NaN. Where nobody listens any more, end."""
        try:
            self._socket.sendall(encode(reply))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)
        self._sent = time.monotonic()

    def observed(self, number: int, observation: Observation) -> None:
        """Tell of an evaluation."""
        self.send(TrialObserved(number=number, observation=observation))

    def ended(self, number: int, outcome: TrialOutcome) -> None:
        """Tell how the trial ended."""
        self.send(TrialEnded(number=number, outcome=outcome))

    def progressed(self) -> None:
        """Send a heartbeat where the last message is a while ago."""
        if time.monotonic() - self._sent >= HEARTBEAT_SECONDS:
            self.send(Heartbeat())

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        """Return how the trial is to end, where the search has said so."""
        now = time.monotonic()
        if self._stop is None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._stop

    def _look(self) -> None:
        try:
            chunk = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            os._exit(1)
        if not chunk:
            os._exit(1)
        for line in self._lines.feed(chunk):
            command = decode_command(line)
            if isinstance(command, Stop):
                self._stop = command.state, command.reason
