"""A process with one thread per board: ``python -m bssearch.exchange.boards.serve DESCRIPTOR BOARD…``."""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from textwrap import shorten

from tenacity import Retrying, sleep_using_event, stop_after_attempt, wait_chain, wait_fixed

from bssearch import registry
from bssearch.exchange.boards.base import Board, Message, Point
from bssearch.settings import BOARD_PROCESS
from bssearch.training.process_times import descendants_seconds

# Seconds in which boards may finish after their driver died.
ORPHAN_SECONDS = 5
# Share of a CPU that boards may take while trials run; step times are not more precise.
CPU_SHARE = 0.01
# Longest rest between deliveries, even if the library took a second of CPU.
LONGEST_REST_SECONDS = 30.0
_PR_SET_NAME = 15  # prctl(2)
_LOADING = threading.Lock()  # two importing threads can see half a module
_SAYING = threading.Lock()


class Delivery(threading.Thread):
    """Delivers and counts the reports to one board. Pauses between deliveries until ``closing`` is set."""

    def __init__(self, name: str, connection: Connection, closing: threading.Event) -> None:
        super().__init__(name=name)
        self.messages: SimpleQueue[Message | None] = SimpleQueue()
        self._connection, self._closing = connection, closing
        self._board: Board
        # Longer than a server takes to restart a worker.
        waits, pause = wait_chain(wait_fixed(1), wait_fixed(4)), sleep_using_event(closing)
        self._retrying = Retrying(stop=stop_after_attempt(3), wait=waits, sleep=pause, reraise=True)

    def run(self) -> None:
        if not self._tried(0, self._make):
            return
        os.nice(9)  # on Linux only this thread and the threads that it starts
        is_open = True
        while is_open:
            messages = [self.messages.get()]
            used = _cpu_seconds()
            while not self.messages.empty():
                messages.append(self.messages.get())
            is_open = messages[-1] is not None
            self._deliver([one for one in messages if one is not None])
            self._closing.wait(min((_cpu_seconds() - used) * (1 / CPU_SHARE - 1), LONGEST_REST_SECONDS))
        self._tried(0, self._board.close)

    def _make(self) -> None:
        with _LOADING:
            made = registry.load("boards", self.name)
        self._board = made()

    def _deliver(self, messages: list[Message]) -> None:
        points: dict[int, list[Point]] = {}
        for _, method, arguments in [*messages, ([], "", {})]:
            if method == "observed":
                points.setdefault(arguments["number"], []).extend(arguments["points"])
                continue
            for number, own in points.items():
                self._tried(len(own), partial(self._board.observed, number, own))
            points.clear()
            if method:
                self._tried(1, partial(getattr(self._board, method), **arguments))

    def _tried(self, reports: int, call: Callable[[], None]) -> bool:
        try:
            self._retrying(call)
        except BaseException as error:  # a library may call `sys.exit`
            self._say(reports, shorten(f"{type(error).__name__}: {error}", 300, placeholder="…"))
            return False
        self._say(reports, "")
        return True

    def _say(self, reports: int, failure: str) -> None:
        with suppress(OSError), _SAYING:  # the driver may have died
            self._connection.send_bytes(json.dumps((self.name, reports, failure)).encode())


def _cpu_seconds() -> float:
    return time.process_time() + descendants_seconds(os.getpid())


def main() -> None:
    descriptor, *names = sys.argv[1:]
    if sys.platform == "linux":  # trials find this process by its name (`bssearch.training.contention`)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, BOARD_PROCESS.encode(), 0, 0, 0)
    # The shell kills this process group some seconds after the driver's end of stdin closes.
    subprocess.Popen(["/bin/sh", "-c", f"read line; sleep {ORPHAN_SECONDS}; kill -9 0"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.nice(10)
    os.set_inheritable(int(descriptor), False)
    connection, closing = Connection(int(descriptor)), threading.Event()
    deliveries = [Delivery(name, connection, closing) for name in names]
    for one in deliveries:
        one.start()
    with suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            for one in deliveries:
                if one.name in message[0]:
                    one.messages.put(message)
    closing.set()
    for one in deliveries:
        one.messages.put(None)
    for one in deliveries:
        one.join()  # a library can start no thread once this function has returned


if __name__ == "__main__":
    main()
