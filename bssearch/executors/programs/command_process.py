"""A command of the user's own while it runs: what it prints is read and logged, what it started ends with it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bssearch.errors import LaunchError, WorkloadError
from bssearch.executors.conversation import TICK_SECONDS, Conversation, stopped, with_end
from bssearch.executors.failures import judge_command, kernel_memory_kills
from bssearch.executors.lifeline import DieWithParent, Watcher, become_subreaper
from bssearch.executors.messages import CHUNK_BYTES, TRIAL_VARIABLE, Reply
from bssearch.executors.process import has_exited, report_folder_prefix
from bssearch.executors.programs.reports import Report, ReportReader
from bssearch.records import TrialEnded, TrialOutcome, TrialRequest, TrialState

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


class Patience:
    """How long a program may say nothing, from a moment on; each reply begins it anew.

    It is asked as a `TrialStop` is, and raises `WorkloadError` once it is over.
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
    left_early = outcome.state is TrialState.EXHAUSTED and outcome.train_seconds <= request.plan.train_seconds_limit
    if left_early and found.exit_code != 0 and asked is None and not found.overstayed:
        return replace(outcome, state=state, reason=f"{reason} after {outcome.steps} steps", traceback=printed or None)
    return with_end(outcome, found, THE_COMMAND)


REPORT_VARIABLE = "BSSEARCH_REPORT"
"""Names the pipe to which a program may write its JSON lines, in its environment."""

TERMINATE_SECONDS = 5.0
"""How long a program may take to end after SIGTERM, before it is killed: a choice."""

KILL_SECONDS = 10.0
"""How long what it left may take to end after SIGKILL: a choice; one that waits for a disk takes seconds."""

MOST_LOGGED_BYTES = 2**24
"""Of what a program prints so much goes to the log: a choice."""

LAST_LINES = 10
"""Lines of what a program printed last that an error shows: a choice."""

_TAIL_BYTES = 1 << 14
"""Of what a program printed last so much is kept to say why it failed: a choice."""

_MOST_CHUNKS_LEFT = 16
"""Far more than a pipe holds: 64 KiB, where the user does not change that (pipe(7))."""


class CommandProcess:
    """A started program; leave its ``with`` block to end it, and whatever it has started.

    ``began`` is when, ``kernel_kills`` what `kernel_memory_kills` was then. ``log_reader`` reads what it prints
    (``metric`` is the target's).

    Raises `WorkloadError` where there is no such command, and `LaunchError` where it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, expressions: Mapping[str, str], metric: str | None = None
    ) -> None:
        become_subreaper()
        self._before = set(psutil.Process().children(recursive=True))
        self._logged = 0
        self._tail = b""
        self._has_left = False
        self._code: int | None = None
        self._first_reports: Iterator[Report] | None = None
        self.began, self.kernel_kills = time.monotonic(), kernel_memory_kills()
        with ExitStack() as kept:
            try:
                self._process = _started(command, folder, self._open_pipe(kept), self._socket.path)
                assert self._process.stdout is not None, "it was asked for"
                kept.callback(self._process.stdout.close)
                kept.callback(self._process.kill)
                read, write = os.pipe()
                kept.callback(os.close, write)
                self._watcher = Watcher(read, self._process.pid)
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
                raise WorkloadError(f"command: {command[0]!r} cannot be run: {error.strerror}") from error
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise LaunchError(f"command: {command[0]!r} cannot be started: {error}") from error
            self._kept = kept.pop_all()
        self._stdout = self._process.stdout.fileno()
        self.log_reader, self._pipe_reader = ReportReader(expressions, metric), ReportReader({}, metric)
        self._readers = {self._pipe: self._pipe_reader, self._stdout: self.log_reader}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    @property
    def last_lines(self) -> str:
        """Return the end of what the program has printed."""
        return self._tail.decode(errors="replace")

    @property
    def has_reported(self) -> bool:
        """Return whether the first sign, for which `connects` has waited, is a report."""
        return self._first_reports is not None

    @property
    def shown_lines(self) -> str:
        """Return the last lines of what the program printed, to stand under an error."""
        lines = [line[:500] for line in self.last_lines.splitlines() if line.strip()][-LAST_LINES:]
        return "; it printed:\n" + "\n".join(lines) if lines else "; it printed nothing"

    @property
    def line(self) -> socket.socket:
        """Return our end of the line of a program that has connected."""
        assert self._socket.line is not None, "the program has connected"
        return self._socket.line

    def connects(self, is_over: Callable[[], bool]) -> bool:
        """Wait for the program's first sign; return whether the program connects.

        It does not if it reports first, if it ends, and if ``is_over`` says that nobody waits any more; it can no more
        thereafter. Raises as `ReportReader.feed`.
        """
        while self._socket.line is None and self._first_reports is None and self.goes_on() and not is_over():
            reports = self.reports(TICK_SECONDS)
            if (first := next(reports, None)) is not None:
                self._first_reports = chain([first], reports)
        self._socket.shut()
        return self._socket.line is not None

    def exit_code(self) -> int | None:
        """Return the exit code of a program that has connected, None while it runs; what it prints is logged."""
        if self._code is not None:
            return self._code
        self.log()
        return None if self.goes_on() else self.end()

    def goes_on(self) -> bool:
        """Return whether the program runs, or has said something that is yet to be read.

        What it has started ends with it: something that prints on would keep the program's end from being told.
        """
        self._reap_orphans()
        if not has_exited(self._process):
            return True
        self._end_what_is_left()
        return self._first_reports is not None or bool(select.select(self._sources, [], [], 0.0)[0])

    def reports(self, seconds: float) -> Iterator[Report]:
        """Yield what the program reports, waiting up to so many seconds for the first; raise as `ReportReader.feed`."""
        first, self._first_reports = self._first_reports, None
        if first is not None:
            yield from first
            return
        for descriptor, chunk in self._chunks(seconds):
            yield from self._readers[descriptor].feed(chunk)

    def last_reports(self) -> Iterator[Report]:
        """Yield the reports of last lines without a line end, of a program that has ended well; raise as `reports`."""
        yield from self._pipe_reader.end()
        yield from self.log_reader.end()

    def kill(self) -> None:
        """End the program and all that it started."""
        self.end()

    def end(self) -> int:
        """End the program: SIGTERM to its group, then SIGKILL to that and to all that it left; return its exit code.

        A second time does nothing.
        """
        if self._code is None:
            try:
                self._terminate()
            finally:
                self._end_what_is_left()
                self._code = self._process.wait()
                self.log()
                self._kept.close()
        return self._code

    def _open_pipe(self, kept: ExitStack) -> Path:
        """Make the pipe for reports, and the socket for those that ask for their trial; return the pipe's path."""
        prefix = report_folder_prefix(os.getpid())
        folder = kept.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
        pipe = Path(folder) / "report"
        os.mkfifo(pipe, 0o600)
        # Also open to write: it is never at its end, however often the program opens and closes it.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        kept.callback(os.close, self._pipe)
        self._socket = TrialSocket(Path(folder) / "trial")
        kept.callback(self._socket.close)
        return pipe

    def _chunks(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """Yield what the program says, by descriptor; what it prints is logged."""
        for descriptor in select.select(self._sources, [], [], seconds)[0]:
            if not isinstance(descriptor, int):
                self._socket.accept()
                continue
            chunk = os.read(descriptor, CHUNK_BYTES)
            if not chunk:
                del self._readers[descriptor]
                continue
            if descriptor == self._stdout:
                self._log(chunk)
            yield descriptor, chunk

    @property
    def _sources(self) -> list[int | socket.socket]:
        return [*self._readers, *self._socket.listening]

    def _log(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        left = MOST_LOGGED_BYTES - self._logged
        self._logged += len(chunk)
        if left > 0:
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), chunk[:left])
            if len(chunk) > left:
                os.write(sys.stdout.fileno(), b"\n(the rest of what it prints is left out)\n")

    def log(self) -> None:
        """Log what the program has printed and nobody reads; a pipe holds little, unless it is filled meanwhile."""
        for _ in range(_MOST_CHUNKS_LEFT):
            if not list(self._chunks(0.0)):
                return

    def _terminate(self) -> None:
        """Ask the program to end, and give it some time; what it still prints is logged."""
        if has_exited(self._process):
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_SECONDS
        while not has_exited(self._process) and time.monotonic() < deadline:
            for _ in self._chunks(TICK_SECONDS):
                pass

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _end_what_is_left(self) -> None:
        """Kill the group and all else that the program started; until it is reaped the group's id is its own."""
        if self._has_left:
            return
        self._has_left = True
        self._signal(signal.SIGKILL)
        self._watcher.dismiss()
        deadline = time.monotonic() + KILL_SECONDS
        while (left := self._descendants()) and time.monotonic() < deadline:
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(left, timeout=1.0)

    def _descendants(self) -> list[psutil.Process]:
        """Return what the program started and left, in sessions of its own too: as orphans they are this process's."""
        found = set(psutil.Process().children(recursive=True)) - self._before
        return [one for one in found if one.pid != self._process.pid]

    def _reap_orphans(self) -> None:
        """Reap what the program left and has ended since: else a long trial would fill the table of processes."""
        own = {self._process.pid, self._watcher.pid, *(one.pid for one in self._before)}
        with suppress(ChildProcessError):
            while hasattr(os, "waitid"):
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)


def _started(command: Sequence[str], folder: Path, pipe: Path, line: Path) -> subprocess.Popen[bytes]:
    """Start a program; a Python one sends each line as it prints it."""
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env={"PYTHONUNBUFFERED": "1", **os.environ, REPORT_VARIABLE: str(pipe), TRIAL_VARIABLE: str(line)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        process_group=0,
        preexec_fn=DieWithParent(os.getpid()),
    )
