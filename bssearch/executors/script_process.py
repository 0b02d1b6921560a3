"""A script of the user's own in processes of its own: forked for each trial where that is safe, else started anew."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from bssearch.errors import LaunchError

HOST = "bssearch.integrations.script_host"
"""The module that runs a script; it stands above this room, so it is started by its name."""


class ProgramProcess(Protocol):
    """A program at one piece of work; ``line`` is our end of its line."""

    line: socket.socket

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal."""
        ...

    def terminate(self) -> None:
        """Ask the program and all of its group to end."""
        ...

    def kill(self) -> None:
        """Kill the program and all of its group."""
        ...


class ForkedScript:
    """A script that the server has forked, which tells its end; see `ProgramProcess`."""

    def __init__(self, line: socket.socket, server: ScriptServer, pid: int) -> None:
        self.line = line
        self._server = server
        self._pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Return its exit code once the server has told it."""
        if self._code is None:
            self._code = self._server.exit_told()
        return self._code

    def terminate(self) -> None:
        """Ask the script and all of its group to end."""
        _signal_group(self._pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the script and all of its group."""
        _signal_group(self._pid, signal.SIGKILL)


class StartedProgram:
    """A program that was started anew; see `ProgramProcess`."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.line = line
        self.process = process

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended."""
        return self.process.poll()

    def terminate(self) -> None:
        """Ask the program and all of its group to end."""
        _signal_group(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the program and all of its group."""
        _signal_group(self.process.pid, signal.SIGKILL)


class ScriptServer:
    """Starts a script for each piece of work. ``notice`` says why it is not forked, None where it is."""

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        self.notice: str | None = None
        self._command = [sys.executable, "-P", "-m", HOST, "--parent", str(os.getpid())]
        self._program = [script, *(["--", *arguments] if arguments else [])]
        self._control: socket.socket | None = None
        self._said = b""
        self._serve()

    def start(self) -> ProgramProcess:
        """Start the script; raise `LaunchError` where that cannot be."""
        ours, theirs = socket.socketpair()
        try:
            if self._control is None:
                return StartedProgram(ours, self._started(["--once", str(theirs.fileno())], theirs))
            socket.send_fds(self._control, [b"x"], [theirs.fileno()])
            return ForkedScript(ours, self, self._told()["pid"])
        except OSError as error:
            ours.close()
            raise LaunchError(f"the script cannot be started: {error}") from error
        finally:
            theirs.close()

    def exit_told(self) -> int | None:
        """Return the exit code of the script that was forked last, once it has ended."""
        assert self._control is not None, "what has been forked has a server"
        self._control.setblocking(False)
        try:
            code: int = self._told()["exit"]
        except BlockingIOError:
            return None
        finally:
            self._control.setblocking(True)
        return code

    def _serve(self) -> None:
        ours, theirs = socket.socketpair()
        self._started(["--serve", str(theirs.fileno())], theirs)
        theirs.close()
        self._control = ours
        said = self._told()
        if not said["forks"]:
            self.notice = f"each trial imports anew what the script imports: {said['reason']}"
            self._control = None
            ours.close()

    def _started(self, options: list[str], keep: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._command, *options, *self._program],
            stdin=subprocess.DEVNULL,
            pass_fds=(keep.fileno(),),
            process_group=0 if "--once" in options else None,
        )

    def _told(self) -> dict[str, Any]:
        """Return the next that the server says; raise `LaunchError` where it has ended."""
        assert self._control is not None, "a server is there"
        while b"\n" not in self._said:
            chunk = self._control.recv(4096)
            if not chunk:
                raise LaunchError("the process that starts the script has ended")
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        told: dict[str, Any] = json.loads(line)
        return told


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
