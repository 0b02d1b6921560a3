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
from typing import Any

from bssearch.errors import LaunchError

HOST = "bssearch.integrations.script_host"
"""The module that runs a script; it stands above this room, so it is started by its name."""


class ScriptProcess:
    """A script at one piece of work; ``line`` is our end of its line. The server tells its end."""

    def __init__(self, line: socket.socket, server: ScriptServer, pid: int) -> None:
        self.line = line
        self._server = server
        self._pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal; raise `LaunchError` without a server."""
        if self._code is None:
            self._code = self._server.exit_told()
        return self._code

    def kill(self) -> None:
        """Kill the script and all of its group; the server ends what it has started elsewhere."""
        if self._code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


class ScriptServer:
    """Starts a script for each piece of work, one at a time, in the process of a server that ends what it leaves.

    ``notice`` says why the script is not forked, None where it is. Raises `LaunchError` where the server does not come
    up.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        self._script = script
        self._arguments = arguments
        self._begin()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        self._said = b""
        with theirs:
            # A group of its own: what ends the worker's group leaves it to clean up.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", HOST, "--parent", str(os.getpid())),
                    *("--serve", str(theirs.fileno()), self._script, "--", *self._arguments),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        reason = self._told()["anew"]
        self.notice = None if reason is None else f"each trial imports anew what the script imports: {reason}"

    def start(self) -> ScriptProcess:
        """Start the script; raise `LaunchError` where that cannot be."""
        if self._process.poll() is not None:
            self._control.close()
            self._begin()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"x"], [theirs.fileno()])
            return ScriptProcess(ours, self, self._told()["pid"])
        except OSError as error:
            ours.close()
            raise LaunchError(f"the script cannot be started: {error}") from error

    def exit_told(self) -> int | None:
        """Return the exit code of the script that was started last, once it has ended."""
        self._control.setblocking(False)
        try:
            code: int = self._told()["exit"]
        except BlockingIOError:
            return None
        finally:
            self._control.setblocking(True)
        return code

    def close(self) -> None:
        """End the server, and with it what still runs."""
        self._control.close()
        self._process.wait()

    def _told(self) -> dict[str, Any]:
        """Return the next that the server says; raise `LaunchError` where it has ended."""
        while b"\n" not in self._said:
            try:
                chunk = self._control.recv(4096)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise LaunchError("the process that starts the script has ended, see what it printed")
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        told: dict[str, Any] = json.loads(line)
        return told
