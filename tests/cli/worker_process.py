"""Workers of the queue as processes with their own folders, as on nodes of their own."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from bssearch.commands.queue.worker import STOPS_WITHIN_S
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_VARIABLE, STATE_DIR_VARIABLE
from tests.cli.task import environment, write_task
from tests.factories import not_none

VALUES = {
    "budget.trials": {"type": "integer", "low": 1, "high": 40},
    "target.value": {"type": "number", "low": 0.5, "high": 0.99},
    "workload_settings.step_seconds": {"type": "number", "low": 0, "high": 1},
    "space.batch_size": {"type": "integers", "low": 4, "high": 128},
    "seed": {"choices": [0, 1]},
}

MAIN = """
from bssearch.commands.queue import worker
worker.Stop.__init__.__defaults__ = ({},)
from bssearch.cli import main
main()
"""

PATIENCE_S = 120.0
"""How long a line of a worker is waited for: what a slow machine may take, and no test relies on."""


class WorkerProcess:
    """A worker that runs; its lines come as it prints them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str) -> str:
        """Wait until a line holds a text, and return it."""
        until = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                for line in self.lines:
                    if text in line:
                        return line
                assert self.process.poll() is None or self._reader.is_alive(), self.said
                assert time.monotonic() < until, f"{text!r} was not said:\n{self.said}"
                self._news.wait(0.2)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Wait until it has ended, and all its lines are there; return its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def stop(self, seconds: float = PATIENCE_S) -> None:
        """Tell it to stop, and see that it ends in good order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.wait(seconds) == 0, self.said

    def _read(self) -> None:
        for line in not_none(self.process.stdout):
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()


def make_node(folder: Path, values: object = VALUES, **changes: object) -> Path:
    """Make the folder of a node, with a workload, its spec and a file of templates; return it."""
    folder.mkdir()
    write_task(folder, **changes)
    templates = {"templates": {"task": {"spec": "task.yaml", "values": values}}}
    (folder / "templates.yaml").write_text(yaml.safe_dump(templates))
    return folder


@contextmanager
def worker(
    node: Path, url: str, checkpoints: Path, *options: str, stops_within: float = STOPS_WITHIN_S
) -> Iterator[WorkerProcess]:
    """Have a worker serve a database from a node's folder, and leave nothing of it."""
    own = {
        DATABASE_URL_VARIABLE: url,
        CHECKPOINT_DIR_VARIABLE: str(checkpoints),
        STATE_DIR_VARIABLE: str(node / "state"),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN.format(stops_within), "queue", "worker", "--templates", "templates.yaml", *options],
        cwd=node,
        env={**environment(), **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    found = WorkerProcess(process)
    try:
        yield found
    finally:
        family = (
            [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            if process.poll() is None
            else []
        )
        for member in family:
            if member.is_running():
                member.kill()
        found.wait()
        not_none(process.stdout).close()
