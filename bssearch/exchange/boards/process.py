"""The driver's side of the boards: reports never block, lost ones are counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any

from bssearch.exchange.boards.base import masked
from bssearch.executors.process import has_exited, hide_secrets, kill_descendants, worker_environment
from bssearch.records.text import visible, without_passwords

# Reports that may wait for a board, here or in its process: some megabytes.
CAPACITY = 10_000
# When a run ends, the process is killed once it has delivered nothing for this long …
SILENT_SECONDS = 5.0
# … and after this time even if it still delivers.
LAST_SECONDS = 60.0

Message = tuple[list[str], str, dict[str, Any]]  # the boards to call, the method, its arguments


class BoardProcess:
    """Reports to boards in another process. Raises `OSError` if it cannot start.

    ``asked`` counts reports, ``delivered`` those taken by each board.
    """

    def __init__(self, names: Sequence[str], *, capacity: int = CAPACITY) -> None:
        self.asked = 0
        self.delivered = dict.fromkeys(names, 0)
        self._capacity, self._is_closing = capacity, False
        self._queued, self._handled = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._failures: dict[str, str] = {}  # the first of each board
        self.notes: deque[str] = deque()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        hide_secrets()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P: nothing in this folder hides an installed package.
                [sys.executable, "-P", "-m", "bssearch.exchange.boards.serve", str(theirs.fileno()), *names],
                stdin=subprocess.PIPE,  # never written to: it closes when the driver dies
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
        """Queue a call for each board with space; never block."""
        self.asked += 1
        names = [name for name in self.delivered if self._queued[name] - self._handled[name] < self._capacity]
        for name in self.delivered.keys() - names:
            self._failed(name, f"queue full ({self._capacity:,} reports); dropping further reports")
        for name in names:
            self._queued[name] += 1
        if names:
            self._messages.put((names, method, arguments))

    def close(self) -> None:
        """Deliver until the deadline, end the process, note lost reports."""
        self._is_closing = True
        self._messages.put(None)
        self._heard = began = time.monotonic()
        while self.asked and not has_exited(self._process):
            if time.monotonic() >= min(began + LAST_SECONDS, self._heard + SILENT_SECONDS):
                break
            time.sleep(0.05)
        with self._process, self._connection, self._output:  # reaped last: till then its CPU seconds are the driver's
            if not has_exited(self._process):
                kill_descendants(self.pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            for thread in self._threads:
                thread.join()
        for name, delivered in self.delivered.items():
            if lost := self.asked - delivered:
                why = "" if name in self._failures else "; they were not taken until the deadline"
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
                self._failed(name, f"the process has ended: {said}")

    def _failed(self, name: str, why: str) -> None:
        if name not in self._failures:
            self._failures[name] = why
            self._note(name, f"reports are lost: {why}")

    def _note(self, name: str, message: str) -> None:
        self.notes.append(visible(without_passwords(f"{name}: {message}")))
