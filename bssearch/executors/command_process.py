"""A command of the user's own while it runs: what it prints is read and logged, what it started ends with it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bssearch.errors import LaunchError, WorkloadError
from bssearch.executors.reports import Report, ReportReader

REPORT_VARIABLE = "BSSEARCH_REPORT"
"""Names the pipe to which a program may write its JSON lines, in its environment."""

TERMINATE_SECONDS = 5.0
"""How long a program may take to end after SIGTERM, before it is killed: a choice."""

MOST_LOGGED_BYTES = 2**24
"""Of what a program prints so much goes to the log: a choice."""

_TICK_SECONDS = 0.05
_CHUNK_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


class CommandProcess:
    """A started program; leave its ``with`` block to end it, and whatever it has started.

    Raises `WorkloadError` where there is no such command, and `LaunchError` where it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, expressions: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        _become_subreaper()
        self._before = {one.pid for one in psutil.Process().children(recursive=True)}
        self._place = tempfile.TemporaryDirectory(prefix="bssearch-report-")
        pipe = Path(self._place.name) / "report"
        os.mkfifo(pipe, 0o600)
        # Also open to write: it is never at its end, however often the program opens and closes it.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._readers = {self._pipe: ReportReader({})}
        self._logged = 0
        try:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env={**os.environ, **environment, REPORT_VARIABLE: str(pipe)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                process_group=0,
                preexec_fn=_DieWithParent(os.getpid()),
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            self._close()
            raise WorkloadError(f"command: {command[0]!r} cannot be run: {error.strerror}") from error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._close()
            raise LaunchError(f"command: {command[0]!r} cannot be started: {error}") from error
        assert self._process.stdout is not None, "it was asked for"
        self._stdout = self._process.stdout.fileno()
        self._readers[self._stdout] = ReportReader(expressions)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal."""
        return self._process.poll()

    def reports(self, seconds: float) -> Iterator[Report]:
        """Yield what the program reports, waiting up to so many seconds for the first."""
        for descriptor in select.select(list(self._readers), [], [], seconds)[0]:
            chunk = os.read(descriptor, _CHUNK_BYTES)
            if not chunk:
                del self._readers[descriptor]
                continue
            if descriptor == self._stdout:
                self._log(chunk)
            yield from self._readers[descriptor].feed(chunk)

    def has_said_all(self) -> bool:
        """Return whether nothing more is to be read of a program that has ended."""
        return not select.select(list(self._readers), [], [], 0.0)[0]

    def end(self) -> int:
        """End the program: SIGTERM to its group, then SIGKILL to that and to all that it left; return its exit code."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + TERMINATE_SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                for _ in self.reports(_TICK_SECONDS):
                    pass
        self._signal(signal.SIGKILL)
        code = self._process.wait()
        self._end_descendants()
        self._close()
        return code

    def _log(self, chunk: bytes) -> None:
        left = MOST_LOGGED_BYTES - self._logged
        self._logged += len(chunk)
        if left > 0:
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), chunk[:left])
            if len(chunk) > left:
                os.write(sys.stdout.fileno(), b"\n(the rest of what it prints is left out)\n")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _end_descendants(self) -> None:
        """Kill what the program started and left, in sessions of its own too: as orphans they are this process's."""
        while left := [one for one in psutil.Process().children(recursive=True) if one.pid not in self._before]:
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(left, timeout=1.0)

    def _close(self) -> None:
        with suppress(OSError):
            os.close(self._pipe)
        self._place.cleanup()
        process = getattr(self, "_process", None)
        if process is not None and process.stdout is not None:
            process.stdout.close()


class _DieWithParent:
    """Runs in the new process before the program: the kernel kills it when its parent ends."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


def _become_subreaper() -> None:
    """Have orphans of this process's descendants become its children, so that they can be ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
