"""A slot's Ray actor, which owns its worker."""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bssearch.executors.base import Reply, decode_command, encode
from bssearch.executors.failures import Death
from bssearch.executors.process import Inbox, WorkerProcess
from bssearch.executors.slots import LogFolder
from bssearch.records import TrialEnded, TrialObserved

MOST_LOG_BYTES = 1 << 16  # per reply; Ray sends less than 100 KiB without its object store

# Maximum delay of an evaluation: an answer takes 3 ms of CPU time on both sides. Beside one-second trials, 20 answers
# per second made steps 7 to 10 % slower, 5 per second hardly.
GATHER_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """An actor's Ray node, machine and bssearch version."""

    node: str
    machine: str
    version: str
    has_folder: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker's output, then its replies and death."""

    log: bytes
    replies: tuple[bytes, ...]
    death: Death | None = None


class SlotActor:
    """Owns a slot's successive workers; thread-safe."""

    def __init__(self) -> None:
        # On Linux the kernel kills a worker with the thread that started it; this thread lives as long as the actor.
        self._home = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bssearch worker")
        self._logs = LogFolder(None)
        self._log = self._logs.file_of(0)
        self._worker: WorkerProcess | None = None
        self._inbox: Inbox = queue.SimpleQueue()
        self._waiting: list[Reply | None] = []
        self._death: Death | None = None
        self._burial = threading.Lock()
        self._log_passed = self._log_due = 0

    def place(self, current: str, folder: str) -> Place:
        """The place; enters the driver's ``current`` folder if present."""
        import ray

        with suppress(OSError):
            os.chdir(current)
        node = ray.get_runtime_context().get_node_id()
        return Place(node, platform.node(), version("bssearch"), Path(folder).is_dir())

    def start(self, slot: int, threads: int, environment: Mapping[str, str]) -> int:
        """Start a worker after the last has died; return its pid. Raises `OSError`."""
        self._log.write_bytes(b"")
        self._log_passed = self._log_due = 0
        self._death = None
        self._worker = self._home.submit(
            WorkerProcess, slot=slot, threads=threads, log=self._log, inbox=self._inbox, environment=environment
        ).result()
        return self._worker.pid

    def tell(self, line: bytes) -> None:
        """Send the worker a command."""
        if self._worker is not None:
            self._worker.send(decode_command(line))

    def hear(self, seconds: float) -> Heard:
        """New output and replies, after at most ``seconds``.

        Output precedes the replies that followed, which may wait for the next call.
        """
        if not self._waiting:
            self._listen(seconds)
        log = self._next_of_log()
        if self._log_passed < self._log_due:
            return Heard(log, ())
        replies, self._waiting = [one for one in self._waiting if one is not None], []
        if any(isinstance(one, TrialEnded) for one in replies):
            self._empty_log()
        return Heard(log, tuple(encode(one) for one in replies), self._death)

    def write_stack(self) -> None:
        """Log the main thread's stack."""
        if self._worker is not None:
            self._worker.write_stack()

    def kill(self) -> None:
        """Kill the worker and its descendants."""
        if self._worker is not None and self._death is None:
            self._worker.kill()

    def leave(self) -> None:
        """End the worker and remove its log."""
        self._bury()
        self._home.shutdown()
        self._logs.close()

    def _listen(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._waiting.append(self._inbox.get(timeout=seconds)[1])
            gathered = time.monotonic() + GATHER_SECONDS
            while self._waiting[-1] == "heartbeat" or isinstance(self._waiting[-1], TrialObserved):
                self._waiting.append(self._inbox.get(timeout=max(0.0, gathered - time.monotonic()))[1])
        if None in self._waiting:
            self._bury()
        self._log_due = self._log.stat().st_size

    def _bury(self) -> None:
        with self._burial:
            if self._worker is not None and self._death is None:
                self._death = self._worker.bury()

    def _next_of_log(self) -> bytes:
        with self._log.open("rb") as file:
            file.seek(self._log_passed)
            found = file.read(MOST_LOG_BYTES)
        self._log_passed += len(found)
        return found

    def _empty_log(self) -> None:
        """The worker appends at the new end."""
        os.truncate(self._log, 0)
        self._log_passed = self._log_due = 0
