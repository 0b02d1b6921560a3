"""Trials of user scripts, in processes that a worker starts."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from bssearch.errors import LaunchError, WorkloadError, require
from bssearch.executors.base import Answer, AskStop, Load, Program, Reply, Work
from bssearch.executors.process import check_unchanged, judge_exit, kernel_memory_kills
from bssearch.executors.programs.command_process import (
    Conversation,
    LoadedProgram,
    answer_in,
    failure_of,
    outcome_of,
    relaying,
)
from bssearch.records import (
    MAKE_TRAINER,
    Observation,
    TrialOutcome,
    TrialRequest,
    WorkloadDescription,
)

HOST = "bssearch.executors.loops.script_host"  # a name instead of an import, because the module is in a higher layer

SEE_OUTPUT = "to see the output, run the training without a search"


@dataclass(slots=True)
class ScriptProcess:
    """A script's process and connection."""

    line: socket.socket
    server: ScriptServer
    pid: int
    code: int | None = None

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the script runs. Raises `LaunchError` if the `ScriptServer` has died."""
        if self.code is None:
            self.code = self.server.exit_told()
        return self.code

    def kill(self) -> None:
        """Kill the script's process group."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class ScriptServer:
    """Starts a script's processes for one piece of work at a time, and ends all descendants.

    ``notice`` says why trials repeat the script's imports, or is None.
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
            # In its own process group the server can clean up after the end of the worker's group.
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
        words = (
            f"each trial repeats the script's imports: {reason}; if possible, use CUDA and threads only after imports"
        )
        self.notice = None if reason is None else words

    def start(self, ranks: int = 1) -> ScriptProcess:
        """Start ``ranks`` processes with a connection to rank 0. Raises `LaunchError` if the script cannot start."""
        if self._process.poll() is not None:
            self._control.close()
            self._begin()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [str(ranks).encode()], [theirs.fileno()])
            return ScriptProcess(ours, self, self._told()["pid"])
        except OSError as error:
            ours.close()
            raise LaunchError(f"the script does not start: {error}") from error

    def exit_told(self) -> int | None:
        """Return the exit code of the last script, or None while the script runs."""
        is_told = self._said or select.select([self._control], [], [], 0.0)[0]
        return cast(int, self._told()["exit"]) if is_told else None

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def _told(self) -> dict[str, Any]:
        while b"\n" not in self._said:
            try:
                chunk = self._control.recv(4096)
            except ConnectionResetError:
                chunk = b""
            require(chunk, "the process that starts the script has ended", hint=SEE_OUTPUT, error=LaunchError)
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        return cast("dict[str, Any]", json.loads(line))


THE_SCRIPT = "the script"


class LoadedScript(LoadedProgram):
    """A user's script."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        named = str(self._folder / str(self._program.script))
        self._script = Path(named.removesuffix(MAKE_TRAINER))
        self.revision = load.revision or self._revision_now()
        self._refuse_changed()
        self._server = ScriptServer(named, self._program.arguments)

    def close(self) -> None:
        self._server.close()

    def describe(self) -> WorkloadDescription:
        from bssearch.training.environment import git_state

        found = super().describe()
        revision, is_dirty = git_state(self._script.resolve())
        return replace(
            found,
            environment=replace(found.environment, git_revision=revision, git_dirty=is_dirty),
            notice="; ".join(filter(None, (self._server.notice, found.notice))) or None,
        )

    def run(
        self,
        request: TrialRequest,
        on_observation: Callable[[Observation], None],
        *,
        stop: AskStop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> TrialOutcome:
        found = self._converse(request, stop, relaying(on_progress, on_observation))
        state, reason = judge_exit(found.exit_code, found.kernel_kills, who=THE_SCRIPT)
        return outcome_of(found, request, stop(), TrialOutcome(state=state, reason=reason), THE_SCRIPT)

    def _converse(
        self, work: Work, stop: AskStop = lambda: None, take: Callable[[Reply], None] = lambda reply: None
    ) -> Conversation:
        self._refuse_changed()  # each process reads the script again
        kills = kernel_memory_kills()
        assign = self.assigned(work)
        process = self._server.start(assign.configuration.world_size)
        with closing(process.line):
            return Conversation(process, stop, take, kills).hold(assign)

    def _revision_now(self) -> str:
        try:
            return revision_of(self._script, self._program)
        except OSError as error:
            raise WorkloadError(
                f"cannot read the script {self._script}: {error.strerror}", hint="correct `workload:` in the spec"
            ) from error

    def _refuse_changed(self) -> None:
        check_unchanged(f"the script {self._script}", self.revision, self._revision_now())

    def _answer(self, work: Work) -> Answer:
        found = self._converse(work)
        if (answer := answer_in(found)) is not None:
            return answer
        state, reason = judge_exit(found.exit_code, found.kernel_kills, who=THE_SCRIPT)
        raise failure_of(state, f"{reason} before the end of the description or measurement; {SEE_OUTPUT}")


def revision_of(script: Path, program: Program) -> str:
    """Hash a script and the script's arguments to 12 hex digits of SHA-256."""
    return hashlib.sha256(script.read_bytes() + "\0".join(program.arguments).encode()).hexdigest()[:12]
