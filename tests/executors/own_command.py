"""Users' commands: shell scripts that report JSON lines, and helpers that load and run them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from bssearch.executors.base import ExecutorSettings, Load, Program
from bssearch.executors.programs.command import LoadedCommand
from bssearch.records import Configuration, Observation, Target, TrialOutcome, TrialRequest, TrialState
from tests.executors.line_workload import request_trial
from tests.factories import changed

DEFAULT = Configuration(batch_size=8, micro_batch_size=8, learning_rate=0.05)
NAP = str(10_000_000 + os.getpid())
"""Seconds for which the processes of these tests sleep; identifies the processes."""

REACHES = """echo '{"step": 0, "accuracy": 0.1}'; echo '{"step": 10, "accuracy": 0.95}'; """
BEGINS = """echo '{"step": 0, "accuracy": 0.1}'; """
LEAVES = "setsid SLEEP & (setsid SLEEP &) ; SLEEP & "
"""Starts processes that outlive their parent: in its group, and in sessions of their own."""


def script(text: str) -> list[str]:
    """Return the command of a bash script; SLEEP becomes a sleep that `napping` finds."""
    return ["bash", "-c", text.replace("SLEEP", f"sleep {NAP}")]


def settings(
    folder: Path, command: Sequence[str], report: Mapping[str, str] | None = None, *, hang_seconds: float = 60.0
) -> ExecutorSettings:
    program = Program(default=DEFAULT, metric="accuracy", command=tuple(command), report=report or {})
    return ExecutorSettings(workload="command", folder=folder, device="cpu", program=program, hang_seconds=hang_seconds)


def loaded(
    folder: Path, command: str | Sequence[str], report: Mapping[str, str] | None = None, *, hang_seconds: float = 60.0
) -> LoadedCommand:
    """Return a command, loaded in this process; a text is a script of bash."""
    words = script(command) if isinstance(command, str) else command
    return LoadedCommand(Load(settings=settings(folder, words, report, hang_seconds=hang_seconds), slot=0))


def request(*, seconds: float = 30.0, **changes: object) -> TrialRequest:
    plain = changed(
        request_trial(1, seconds=seconds), configuration=DEFAULT, target=Target(metric="accuracy", value=0.9)
    )
    return changed(plain, **changes)  # type: ignore[arg-type]


def run(
    command: LoadedCommand,
    asked: TrialRequest | None = None,
    stop: Callable[[], tuple[TrialState, str] | None] = lambda: None,
) -> tuple[TrialOutcome, list[Observation]]:
    """Run a trial to its end; return its outcome and observations."""
    observed: list[Observation] = []
    return command.run(asked or request(), observed.append, stop=stop), observed


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def napping() -> list[int]:
    """Return the processes of these tests that sleep and have not ended."""
    sleeping = (one for one in psutil.process_iter(["cmdline", "status"]) if one.info["cmdline"] == ["sleep", NAP])
    return [one.pid for one in sleeping if one.info["status"] != psutil.STATUS_ZOMBIE]
