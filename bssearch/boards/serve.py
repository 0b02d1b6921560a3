"""The process of one board: ``python -m bssearch.boards.serve TARGET``, started by a driver.

Events come as JSON lines on stdin, replies go as JSON lines to what was stdout at the start. Both are moved to private
descriptors before any library is imported: what that prints goes to stderr, and it has nothing to read.

The process ends with its driver: the stream of events ends then. Where its library hangs, a tiny shell in its process
group ends it some seconds after the driver's end of a pipe is closed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bssearch.boards.base import load_board
from bssearch.boards.delivery import Delivery, in_words
from bssearch.boards.events import Event, Reply, decode, encode_reply
from bssearch.executors.messages import Lines
from bssearch.process_times import descendants_seconds
from bssearch.settings import BOARD_PROCESS

ORPHAN_SECONDS = 5
"""How long a board may go on writing after its driver has died: a choice."""

STARTING_NICENESS = 10
"""How far a board stands back while it imports its library, before the first trial: a choice."""

CPU_SHARE = 0.01
"""The share of a CPU that a board takes at most while trials run: a choice, below what step times are resolved to."""

LONGEST_REST_SECONDS = 30.0
"""How long a board rests at most: a choice. Who opens a study's page sees its trials within this time, though opening
the study took a library a second of CPU, which it does once."""

LOOK_SECONDS = 1.0
"""How often a board looks at what the processes of its library have used: a choice, a look takes some 0.1 ms."""

READ_AHEAD = 10_000
"""Events that are read before they can be delivered, at most: a choice, as many as wait with the driver, so that a
driver that closes has soon written all it had, and what is left is hurried."""

_CHUNK_BYTES = 1 << 16  # the capacity of a pipe on Linux (pipe(7))
_PR_SET_NAME = 15  # prctl(2)


class Line:
    """The line to the driver, on private copies of the descriptors 0 and 1."""

    def __init__(self) -> None:
        self.events, self._replies = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def reply(self, reply: Reply) -> None:
        """Tell the driver what was done; a driver that has died is told nothing."""
        with suppress(BrokenPipeError):
            os.write(self._replies, encode_reply(reply))


def be_known() -> None:
    """Take the name by which a trial of the same driver knows this process (`bssearch.training.contention`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, BOARD_PROCESS.encode(), 0, 0, 0)


def stand_back() -> None:
    """Leave every CPU to whoever else can use it, from now on: trials come first."""
    if not hasattr(os, "SCHED_IDLE"):
        os.nice(19)
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or this is forbidden here
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def watch(lifeline: int) -> None:
    """Have a shell kill this process group some seconds after the driver's end of a pipe has closed."""
    command = ["/bin/sh", "-c", f"read line; sleep {ORPHAN_SECONDS}; kill -9 0"]
    subprocess.Popen(command, stdin=lifeline, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(lifeline)


class Usage:
    """The CPU seconds of this process, and of those that its library has started, as they were when last looked at."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._children, self._looked_at = 0.0, -math.inf

    def __call__(self) -> float:
        """Return the seconds so far; less than before where a process has ended that nobody waited for."""
        if self._now() >= self._looked_at + LOOK_SECONDS:
            self._children, self._looked_at = descendants_seconds(os.getpid()), self._now()
        return time.process_time() + self._children


class Pace:
    """Rests between deliveries, so that they take a small share of a CPU until the driver has no more to say.

    ``cpu`` returns the seconds of a CPU that were used so far, ``now`` those of the world.
    """

    def __init__(self, cpu: Callable[[], float], now: Callable[[], float] = time.monotonic) -> None:
        self._cpu, self._now = cpu, now
        self._used = cpu()
        self._until = -math.inf

    @property
    def seconds_left(self) -> float:
        """Return how long the rest goes on, 0 where it is over."""
        return max(0.0, self._until - self._now())

    def worked(self) -> None:
        """Rest for as long as the CPU seconds since the last time ask for."""
        used = max(0.0, (total := self._cpu()) - self._used)
        self._used = total
        now = self._now()
        self._until = min(max(self._until, now) + used * (1 / CPU_SHARE - 1), now + LONGEST_REST_SECONDS)


class Stream:
    """The events that a driver writes to a descriptor, read ahead of their delivery so that its end is seen."""

    def __init__(self, descriptor: int) -> None:
        self.waiting: deque[Event] = deque()
        self.has_ended = self.is_closed = False
        self._descriptor, self._lines, self._poll = descriptor, Lines(), select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def read(self, seconds: float | None) -> None:
        """Take in what has been written, once it is there or so many seconds have passed; None: however long."""
        has_room = len(self.waiting) < READ_AHEAD
        self._poll.modify(self._descriptor, select.POLLIN if has_room else 0)
        for _, what in self._poll.poll(None if seconds is None else math.ceil(1000 * seconds)):
            self.is_closed = bool(what & select.POLLHUP)  # the driver's end; what it wrote may still be in the pipe
            if has_room:
                chunk = os.read(self._descriptor, _CHUNK_BYTES)
                self.has_ended = not chunk
                self.waiting.extend(decode(one) for one in self._lines.feed(chunk))


def serve(stream: Stream, delivery: Delivery, pace: Pace) -> None:
    """Deliver events until their stream has ended: at a pace, and what is left then as fast as the board takes it."""
    while stream.waiting or not stream.has_ended:
        rest = 0.0 if stream.is_closed else pace.seconds_left
        if stream.waiting:
            stream.read(rest)
        else:
            stream.read(None if delivery.seconds_left is None else max(rest, delivery.seconds_left))
        if pace.seconds_left and not stream.is_closed:
            continue
        if stream.waiting:
            delivery.take(stream.waiting.popleft())
        delivery.flush_if_due()
        pace.worked()


def main() -> None:
    """Import a board's library, say so, and deliver what comes."""
    parser = argparse.ArgumentParser(description="Report the trials of a driver to a board.")
    parser.add_argument("target", help="module:attribute of the board's class")
    parser.add_argument("--lifeline", type=int, required=True)
    arguments = parser.parse_args()
    be_known()
    line = Line()
    watch(arguments.lifeline)
    os.nice(STARTING_NICENESS)
    try:
        board = load_board(arguments.target)
    except Exception as error:
        raise SystemExit(in_words(error)) from None  # the driver tells its last line
    line.reply(Reply(is_ready=True))
    stand_back()
    delivery = Delivery(board, line.reply)
    serve(Stream(line.events), delivery, Pace(Usage()))
    delivery.flush()
    board.close()


if __name__ == "__main__":
    main()
