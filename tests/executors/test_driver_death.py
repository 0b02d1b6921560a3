"""A driver that is killed outright takes its workers with it, and what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

MARK = "BSSEARCH_TEST_MARK"

DRIVER = """
import sys
import time
from pathlib import Path

from tests.executors.line_workload import opened, request_endless_trial
from bssearch.executors.base import Observed

started = Path(sys.argv[1]) / "started"
with opened(started.parent, report=str(started)) as executor:
    executor.submit(request_endless_trial(1, "start_child_and_hold_lock"))
    while not started.exists():
        events = executor.events(0.05)
        assert all(isinstance(event, Observed) for event in events), events
    print("running", flush=True)
    time.sleep(1000)
"""


def marked(mark: str) -> dict[int, list[str]]:
    """Return the command lines of the living processes that have the mark in their environment."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found[process.pid] = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        env=os.environ | {MARK: mark, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"running\n"
        commands = list(marked(mark).values())
        assert sum("bssearch.executors.worker" in command for command in commands) == 1, commands
        assert sum(command[:2] == ["sleep", "1000"] for command in commands) == 1, commands
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        deadline = time.monotonic() + 5.0
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(mark) == {}
    finally:
        driver.kill()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
