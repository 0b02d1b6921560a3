"""Boards that stand in for a library; tests install them by entry points (`tests.exchange.boards.conftest`).

They run in the boards' process and read their settings from the environment.
"""

import atexit
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bssearch.exchange.boards.base import Figures, Parameters, Point, Words

FOLDER = "FAKE_BOARD_FOLDER"
"""Variable with the folder in which boards note their calls and wait at gates."""


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)


def wait_at(gate: str) -> None:
    """Wait until the test opens a gate, a named pipe."""
    (Path(os.environ[FOLDER]) / gate).read_bytes()


class Keeping:
    """Notes each call as a line in a file named after the class."""

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        self.keep("opened", name=name, mark=mark, metric=metric, about=dict(about))

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        self.keep("started", number=number, at=at, parameters=dict(parameters))

    def observed(self, number: int, points: Sequence[Point]) -> None:
        self.keep("observed", number=number, points=list(points))

    def ended(self, number: int, state: str, reason: str, at: float, figures: Figures, is_elsewhere: bool) -> None:
        self.keep("ended", number=number, state=state, reason=reason, figures=figures, is_elsewhere=is_elsewhere)

    def answered(self, trials: int, words: Words, parameters: Parameters, figures: Figures) -> None:
        self.keep("answered", trials=trials, words=words, parameters=parameters, figures=figures)

    def close(self) -> None:
        self.keep("close")

    def keep(self, call: str, **what: Any) -> None:
        with (Path(os.environ[FOLDER]) / type(self).__name__).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, **what}) + "\n")


class Sleeping(Keeping):
    """Never returns from the report of a study."""

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        super().opened(name, mark, metric, about)
        wait_at("never")


class Holding(Keeping):
    """Never returns from the report of a study, and stops all threads."""

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        super().opened(name, mark, metric, about)
        hold_the_interpreter()


class HoldingAtExit(Keeping):
    def close(self) -> None:
        super().close()
        atexit.register(hold_the_interpreter)
        atexit.register(self.keep, "exit")


class Gated(Keeping):
    """Waits at the gate before it takes a study."""

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        wait_at("gate")
        super().opened(name, mark, metric, about)


class Unmade(Keeping):
    """Its construction never ends."""

    def __init__(self) -> None:
        wait_at("never")


class Absent(Keeping):
    def __init__(self) -> None:
        self.keep("made")
        raise ImportError("libboard.so: cannot open shared object file")


class Leaving(Keeping):
    def __init__(self) -> None:
        sys.exit("no licence")


class Crashing(Keeping):
    """Dies at its third trial."""

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        super().started(number, at, parameters)
        if number == 3:
            print("the board's library has a fault", file=sys.stderr, flush=True)
            os.abort()


class Away(Keeping):
    """Cannot reach its server when a trial starts."""

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        super().started(number, at, parameters)
        raise ConnectionError("postgresql://ada:secret@board/runs refused the connection")


class Printing(Keeping):
    """Prints to every stream, and reads its input."""

    def started(self, number: int, at: float, parameters: Parameters) -> None:
        print('["Printing", 1000, ""]', flush=True)
        os.write(1, b"what is not even text: \xff\n")
        os.write(2, b"x" * 200_000 + b"\n")
        self.keep("read", text=sys.stdin.read())
        super().started(number, at, parameters)


class Environment(Keeping):
    """Notes its environment."""

    def opened(self, name: str, mark: str, metric: str, about: Words) -> None:
        process = Path("/proc/self/comm").read_text().strip()
        self.keep("environment", variables=dict(os.environ), name=process, nice=os.nice(0))
