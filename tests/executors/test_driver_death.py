"""A driver that is killed outright takes its workers with it, and what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

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


def lifeline(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run some lines with the module `bssearch.executors.lifeline` in a process of its own."""
    text = "import ctypes, os\nfrom bssearch.executors.lifeline import *\n" + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_the_kernel_is_asked_to_kill_a_worker_with_its_driver() -> None:
    asked = "die_with_parent(os.getppid())\nfound = ctypes.c_int()\n"
    get_pdeathsig = "assert ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0) == 0\nprint(found.value)"
    ended = lifeline(asked + get_pdeathsig)
    assert (ended.returncode, ended.stdout) == (0, f"{int(signal.SIGKILL)}\n"), ended.stderr


def test_a_worker_whose_driver_died_before_it_could_ask_ends_at_once_with_its_group() -> None:
    alone = "die_with_parent(os.getppid() + 1)\nprint('lives on')"
    led = lifeline(alone, start_new_session=True)
    assert (led.returncode, led.stdout) == (-signal.SIGKILL, "")
    among_others = lifeline(alone)
    assert (among_others.returncode, among_others.stdout) == (1, ""), "the others of the group are not its own"


def test_the_watcher_kills_the_group_when_the_drivers_end_of_the_pipe_closes_and_not_before() -> None:
    watched = "read, write = os.pipe()\nwatcher = Watcher(read)\n"
    closed = lifeline(f"{watched}os.close(write)\nimport time\ntime.sleep(60)", start_new_session=True)
    assert closed.returncode == -signal.SIGKILL
    dismissed = lifeline(f"{watched}watcher.dismiss()\nos.close(write)\nprint('lives on')", start_new_session=True)
    assert (dismissed.returncode, dismissed.stdout) == (0, "lives on\n"), dismissed.stderr
