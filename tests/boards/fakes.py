"""Boards that stand in for a library: one keeps what it is told in a file, others do not do as they should.

They live in a process of their own, as a real one does; what they need to know is in their environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bssearch.boards.events import Answered, StudyOpened, TrialEnded, TrialObserved, TrialStarted

FILE = "FAKE_BOARD_FILE"
"""The variable that names the file of what a board was told."""


class Keeping:
    """Writes each call into a file, a line each."""

    def opened(self, study: StudyOpened) -> None:
        self.keep("opened", asdict(study))

    def started(self, trial: TrialStarted) -> None:
        self.keep("started", asdict(trial))

    def observed(self, number: int, points: Sequence[TrialObserved]) -> None:
        self.keep("observed", {"number": number, "steps": [point.step for point in points]})

    def ended(self, trial: TrialEnded) -> None:
        self.keep("ended", asdict(trial))

    def answered(self, answer: Answered) -> None:
        self.keep("answered", asdict(answer))

    def close(self) -> None:
        self.keep("close", {})

    def keep(self, call: str, what: dict[str, Any]) -> None:
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, "pid": os.getpid(), **what}) + "\n")


class Hanging(Keeping):
    """Takes in a study, and nothing after that, with the interpreter's lock held."""

    def opened(self, study: StudyOpened) -> None:
        super().opened(study)
        ctypes.PyDLL(None).sleep(1000)


class Absent:
    def __init__(self) -> None:
        raise ImportError("libboard.so: cannot open shared object file")


class Crashing(Keeping):
    """Dies of its third trial."""

    def started(self, trial: TrialStarted) -> None:
        super().started(trial)
        if trial.number == 3:
            print("the board's library has a fault", file=sys.stderr, flush=True)
            os.abort()


class Away(Keeping):
    """Cannot reach its server."""

    def started(self, trial: TrialStarted) -> None:
        raise ConnectionError("postgresql://ada:secret@board/runs refused the connection")


class Slow(Keeping):
    def started(self, trial: TrialStarted) -> None:
        time.sleep(0.05)
        super().started(trial)


class Printing(Keeping):
    """Prints to all that it can, and reads what it can."""

    def started(self, trial: TrialStarted) -> None:
        print('{"handled": 1000}', flush=True)
        os.write(1, b"what is not even text: \xff\n")
        os.write(2, b"x" * 200_000 + b"\n")
        self.keep("read", {"text": sys.stdin.read()})
        super().started(trial)


class Environment(Keeping):
    """Tells how it was started."""

    def opened(self, study: StudyOpened) -> None:
        time.sleep(0.2)  # it stands back right after it has said that it is ready
        about = {"name": Path("/proc/self/comm").read_text().strip(), "policy": os.sched_getscheduler(0)}
        self.keep("environment", {"variables": dict(os.environ), **about})

    def close(self) -> None:
        self.keep("close", {"policy": os.sched_getscheduler(0)})
