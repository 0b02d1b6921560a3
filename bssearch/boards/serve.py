"""The process of one board: ``python -m bssearch.boards.serve TARGET``, started by a driver.

Events come as JSON lines on stdin, replies go as JSON lines to what was stdout at the start. Both are moved to private
descriptors before any library is imported: what that prints goes to stderr, and it has nothing to read.

The process ends with its driver: the stream of events ends then. Where its library hangs, a tiny shell in its process
group ends it some seconds after the driver's end of a pipe is closed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from bssearch.boards.base import load_board
from bssearch.boards.delivery import Delivery, in_words
from bssearch.boards.events import Reply, decode, encode_reply
from bssearch.executors.messages import Lines
from bssearch.settings import BOARD_PROCESS

ORPHAN_SECONDS = 5
"""How long a board may go on writing after its driver has died: a choice."""

STARTING_NICENESS = 10
"""How far a board stands back while it imports its library, before the first trial: a choice."""

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


def serve(line: Line, delivery: Delivery) -> None:
    """Deliver events until their stream ends."""
    lines = Lines()
    while True:
        ready, _, _ = select.select([line.events], [], [], delivery.seconds_left)
        if ready:
            chunk = os.read(line.events, _CHUNK_BYTES)
            if not chunk:
                return
            for one in lines.feed(chunk):
                delivery.take(decode(one))
        delivery.flush_if_due()


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
    serve(line, delivery)
    delivery.flush()
    board.close()


if __name__ == "__main__":
    main()
