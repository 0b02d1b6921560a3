"""The interface of boards, the masking of secrets, and the process that sends a driver's reports to boards."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any, Protocol

from bssearch import registry
from bssearch.errors import UsageError, require
from bssearch.executors.process import has_exited, hide_secrets, kill_descendants, worker_environment
from bssearch.records import ParameterValue
from bssearch.records.text import visible, without_passwords
from bssearch.settings import LOG_VARIABLE
from bssearch.spec import StudySpec

Words = Mapping[str, str]
Parameters = Mapping[str, ParameterValue]
Figures = Mapping[str, float]
# An evaluation: step, seconds since 1970 (first start plus train seconds), figures.
Point = tuple[int, float, Figures]

_SECRET = re.compile(r"passw|passphrase|secret|credential|api[_-]?key|token$", re.IGNORECASE)


class Board(Protocol):
    """Shows the trials of one driver.

    One thread makes all calls. The board process retries a failed call up to twice.
    """

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        """Show a study. ``mark`` distinguishes studies of the same name."""

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        """Show a trial that starts or resumes. ``at`` is the first start in seconds since 1970."""

    def observed(self, number: int, points: Sequence[Point]) -> None:
        """Add evaluations, whose figures include the metric and ``train_seconds``."""

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        """Show that a trial ended or paused.

        ``is_elsewhere`` means that another driver started the trial. If so, skip a trial that the board does not show.
        """

    def answered(self, trials: int, words: Words, parameters: Parameters, figures: Figures) -> None:
        """Show the answer. ``words`` has the keys headline, verdict and document, which is JSON."""

    def close(self) -> None:
        """Flush all reports. No other call follows."""


def masked(value: Any) -> Any:
    """Replace passwords of URLs in strings and mappings by ``***``."""
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, Mapping):
        return {masked(key): masked(one) for key, one in value.items()}
    return value


def without_secrets(value: Any, name: str = "") -> Any:
    """Replace a string by ``***`` if a mapping's key, ``KEY=`` or an option before the string names a secret."""
    if isinstance(value, Mapping):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        names = ["", *(one if isinstance(one, str) and one.startswith("-") else "" for one in value)]
        return [without_secrets(one, before or name) for one, before in zip(value, names, strict=False)]
    if not isinstance(value, str):
        return value
    key, equals, _ = value.partition("=")
    if equals and _SECRET.search(key):
        return f"{key}=***"
    return "***" if _SECRET.search(name) and not value.startswith("-") else value


# Distribution of each built-in board, with its minimum version.
LIBRARIES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "tensorboard": ("tensorboard", (2, 12)),
    "mlflow": ("mlflow-skinny", (3,)),
    "wandb": ("wandb", (0, 19, 10)),
}


def boards_of(spec: StudySpec) -> tuple[str, ...]:
    """Return the boards of the spec and of ``BSSEARCH_LOG``, without duplicates."""
    names = [name.strip() for name in os.environ.get(LOG_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        require(
            registry.is_known("boards", name),
            f"{LOG_VARIABLE} names the unknown board {name!r}; choose from {', '.join(registry.names('boards'))}",
        )
    return tuple(dict.fromkeys([*spec.log, *names]))


def check_boards(names: Iterable[str]) -> None:
    """Raise `UsageError` if the library of a built-in board is missing or too old. The check imports no library."""
    for name in LIBRARIES.keys() & set(names):
        distribution, oldest = LIBRARIES[name]
        version = next((one.version for one in importlib.metadata.distributions(name=distribution)), "")
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < oldest:
            needed = f"board {name} needs {distribution} >= {'.'.join(map(str, oldest))}"
            raise UsageError(f"{needed}; installed: {version or 'no version'}", hint=f"pip install 'bssearch[{name}]'")


# Reports that may wait for a board, here or in its process: some megabytes.
CAPACITY = 10_000
# When a run ends, the process is killed after this time without a delivery …
SILENT_SECONDS = 5.0
# … and after this time even if it still delivers.
LAST_SECONDS = 60.0

Message = tuple[list[str], str, dict[str, Any]]  # the boards to call, the method, its arguments


class BoardProcess:
    """Sends reports to boards in another process.

    ``asked`` counts all reports, and ``delivered`` counts the reports that each board took.
    """

    def __init__(self, names: Sequence[str], *, capacity: int = CAPACITY) -> None:
        self.asked = 0
        self.delivered = dict.fromkeys(names, 0)
        self._capacity, self._is_closing = capacity, False
        self._queued, self._handled = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._failures: dict[str, str] = {}  # the first failure of each board
        self.notes: deque[str] = deque()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        hide_secrets()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P: no file in this folder hides an installed package.
                [sys.executable, "-P", "-m", "bssearch.exchange.boards.serve", str(theirs.fileno()), *names],
                stdin=subprocess.PIPE,  # carries no data, and closes when the driver dies
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=worker_environment(os.environ, threads=1) | {"CUDA_VISIBLE_DEVICES": ""},
            )
        self.pid = self._process.pid
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._listen)]
        for thread in self._threads:
            thread.start()

    def report(self, method: str, **arguments: Any) -> None:
        """Queue a call, without blocking, for each board whose queue has space."""
        self.asked += 1
        names = [name for name in self.delivered if self._queued[name] - self._handled[name] < self._capacity]
        for name in self.delivered.keys() - names:
            self._failed(name, f"the queue is full ({self._capacity:,} reports)")
        for name in names:
            self._queued[name] += 1
        if names:
            self._messages.put((names, method, arguments))

    def close(self) -> None:
        """Deliver reports for at most `LAST_SECONDS`, end the process, and note lost reports."""
        self._is_closing = True
        self._messages.put(None)
        self._heard = began = time.monotonic()
        while self.asked and not has_exited(self._process):
            if time.monotonic() >= min(began + LAST_SECONDS, self._heard + SILENT_SECONDS):
                break
            time.sleep(0.05)
        with (
            self._process,
            self._connection,
            self._output,
        ):  # the process ends last: until then the driver has its CPU seconds
            if not has_exited(self._process):
                kill_descendants(self.pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            for thread in self._threads:
                thread.join()
        for name, delivered in self.delivered.items():
            if lost := self.asked - delivered:
                why = "" if name in self._failures else " before the board process ended"
                self._note(name, f"{lost} of {self.asked} reports were not delivered{why}")

    def _write(self) -> None:
        with suppress(OSError):
            for names, method, arguments in iter(self._messages.get, None):
                self._connection.send((names, method, masked(arguments)))
            self._connection.send(None)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                name, reports, failure = json.loads(self._connection.recv_bytes())
                self._heard = time.monotonic()
                self._handled[name] += reports
                if failure:
                    self._failed(name, failure)
                else:
                    self.delivered[name] += reports
        if not self._is_closing:
            self._output.seek(0)
            said = self._output.read().decode(errors="replace").strip().rpartition("\n")[2]
            for name in self.delivered:
                self._failed(name, f"the board process ended: {said}")

    def _failed(self, name: str, why: str) -> None:
        if name not in self._failures:
            self._failures[name] = why
            self._note(name, f"reports are lost: {why}")

    def _note(self, name: str, message: str) -> None:
        self.notes.append(visible(without_passwords(f"{name}: {message}")))
