"""The process of a board as a driver sees it: a queue that never makes anybody wait, and what became of its events.

A board's library may hang, crash, print or keep threads: it does so elsewhere. What it cannot take is dropped, and the
driver is told so in a line.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bssearch.boards.events import Event, decode_reply, encode
from bssearch.executors.messages import Lines
from bssearch.executors.process import THREAD_VARIABLES, has_exited, hide_secrets, is_secret, kill_descendants
from bssearch.pages.words import plural, visible, without_passwords
from bssearch.process_times import children_of

CAPACITY = 10_000
"""Events that wait for a board at most: a choice, some megabytes, and the evaluations of minutes."""

READY_SECONDS = 30.0
"""How long the first trial waits for a board's library to be imported: a choice; MLflow takes seconds."""

SILENT_SECONDS = 10.0
"""How long a board that has events left may say nothing at the end of a run before it is killed: a choice."""

LAST_SECONDS = 60.0
"""How long the end of a run waits for a board in all, which does answer: a choice."""

_LOOK_SECONDS = 0.1
"""How soon the end of a process shows whose pipe is held open: a choice."""

_TAIL_BYTES = 4096
"""Of what a board prints as much is kept, the last: a choice; the line of an error lies in it."""

_CHUNK_BYTES = 1 << 16  # the capacity of a pipe on Linux (pipe(7))


def board_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a board: its own settings, one thread, no GPU, and none of the database's secrets."""
    kept = {name: value for name, value in environment.items() if not is_secret(name, value)}
    return kept | dict.fromkeys(THREAD_VARIABLES, "1") | {"CUDA_VISIBLE_DEVICES": ""}


class BoardProcess:
    """One board's process, begun by being made. Raises `OSError` where it cannot be started.

    ``target`` is the board's class, ``module:attribute``. `report` and `take_notes` never wait. Use it from one thread.
    """

    def __init__(self, name: str, target: str, *, capacity: int = CAPACITY) -> None:
        self.name = name
        self._capacity = capacity
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._is_gone = False
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked = self._handled = self._failed = self._dropped = 0
        self._has_failed = self._has_dropped = False
        self._heard = time.monotonic()
        self._ready = threading.Event()
        self._tail = b""
        self._process, self._lifeline = _spawned(target)
        threads = {"writer": self._write, "listener": self._listen}
        self._threads = [
            threading.Thread(target=run, name=f"bssearch {name} {what}", daemon=True) for what, run in threads.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Return whether the board has taken or lost all that it was told so far."""
        return self._is_gone or self._handled + self._failed + self._dropped == self._asked

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until the board's library is imported, to a moment of `time.monotonic` at most; then note that."""
        began = time.monotonic()
        self._ready.wait(max(0.0, deadline - began))
        if not self._ready.is_set():
            self._note(f"not ready after {time.monotonic() - began:.0f} s; the study goes on, and its reports wait")

    def report(self, event: Event) -> None:
        """Put an event into the queue; drop it where that is full, or the process gone."""
        with self._changed:
            self._asked += 1
            if self._is_closed or self._is_gone or len(self._waiting) >= self._capacity:
                self._dropped += 1
                self._note_dropping()
                return
            self._waiting.append(event)
            self._changed.notify()

    def take_notes(self) -> list[str]:
        """Return what there is to be told, each once."""
        notes = []
        with suppress(queue.Empty):
            while True:
                notes.append(self._notes.get_nowait())
        return notes

    def begin_to_close(self) -> None:
        """Have the board write what it was told, and end; nothing more is reported to it."""
        _come_forward(self.pid)
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def close(self) -> None:
        """Wait for a bounded time until all is written; then end the board's process, and note what was lost."""
        self.begin_to_close()
        was_killed = bool(self._asked)
        try:
            was_killed = was_killed and not self._ends_by_itself()
        finally:
            self._bury()
        lost = self._asked - self._handled
        if lost:
            why = f"; it did not answer for {SILENT_SECONDS:.0f} s, and was killed" if was_killed else ""
            self._note(f"{lost} of {plural(self._asked, 'report')} {'was' if lost == 1 else 'were'} dropped{why}")

    def _ends_by_itself(self) -> bool:
        """Wait for the end of a process that has been asked for it; return whether it came."""
        closed = self._heard = time.monotonic()
        while not has_exited(self._process):
            now = time.monotonic()
            if now > closed + LAST_SECONDS or now > self._heard + SILENT_SECONDS:
                return False
            time.sleep(_LOOK_SECONDS / 2)
        return True

    def _bury(self) -> None:
        """Kill what is left of the board, reap it, and close its pipes.

        Only now: until it is reaped, trials count the seconds of CPU that it had (`bssearch.training.contention`).
        """
        if not has_exited(self._process):
            kill_descendants(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        os.close(self._lifeline)

    def _write(self) -> None:
        """Write each event as a line; the stream ends when there are no more to come."""
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stream:
            while (event := self._next()) is not None:
                line = memoryview(encode(event, without_passwords))
                while line:
                    line = line[stream.write(line) :]

    def _next(self) -> Event | None:
        with self._changed:
            while not self._waiting and not self._is_closed and not self._is_gone:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting and not self._is_gone else None

    def _listen(self) -> None:
        """Take in replies and what the board prints, until it has ended; something of its own may hold its pipes."""
        lines = Lines()
        out, errors = self._process.stdout, self._process.stderr
        assert out is not None and errors is not None
        with selectors.DefaultSelector() as selector:
            for stream in (out, errors):
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                is_over = has_exited(self._process)
                ready = selector.select(0 if is_over else _LOOK_SECONDS)
                for key, _ in ready:
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is out:
                        for line in lines.feed(chunk):
                            self._hear(line)
                    else:
                        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
                if is_over and not ready:
                    break
        self._has_ended()

    def _hear(self, line: bytes) -> None:
        try:
            reply = decode_reply(line)
        except (ValueError, TypeError, json.JSONDecodeError):
            return  # no reply: something in the board writes where it should not
        self._heard = time.monotonic()
        self._handled += reply.handled
        self._failed += reply.failed
        if reply.is_ready:
            self._ready.set()
        if reply.why and not self._has_failed:
            self._has_failed = True
            self._note(f"a report failed; it is tried again, then dropped: {reply.why}")

    def _has_ended(self) -> None:
        """Note an end that nobody asked for."""
        while not has_exited(self._process):  # its streams are closed: its end follows
            time.sleep(_LOOK_SECONDS)
        with self._changed:
            self._is_gone = True
            self._changed.notify()
            if not self._is_closed or not self._ready.is_set():
                said = self._tail.decode(errors="replace").strip().rpartition("\n")[2]
                self._note(f"the board has ended; nothing more is reported to it{f': {said}' if said else ''}")
        self._ready.set()

    def _note_dropping(self) -> None:
        """Say once that reports are dropped, and why; that the process has ended was said."""
        if self._has_dropped or self._is_gone:
            return
        self._has_dropped = True
        silent = time.monotonic() - self._heard
        self._note(f"reports are dropped: {self._capacity:,} wait, and the board has not answered for {silent:.0f} s")

    def _note(self, message: str) -> None:
        self._notes.put(visible(without_passwords(f"{self.name}: {message}")))


def _come_forward(pid: int) -> None:
    """Give a board and what it has started a share of the CPUs again, now that no trial waits for one.

    Where others take all CPUs, one that stands back would write nothing in time. Without the right to change that
    (Linux: CAP_SYS_NICE), it stays as it is.
    """
    if not hasattr(os, "SCHED_IDLE"):
        return
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
    for child in children_of(pid):
        _come_forward(child)


def _spawned(target: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process of a board, in a session of its own; return it and our end of its lifeline."""
    hide_secrets()
    lifeline, ours = os.pipe()
    try:
        process = subprocess.Popen(
            # -P: nothing in this folder stands for an installed package.
            [sys.executable, "-P", "-m", "bssearch.boards.serve", target, "--lifeline", str(lifeline)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(lifeline,),
            start_new_session=True,
            env=board_environment(os.environ),
        )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(lifeline)
    return process, ours
