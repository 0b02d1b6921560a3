"""A driver that is killed outright takes its workers with it, and what they started."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest


def lifeline(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run some lines with the module `bssearch.executors.process` in a process of its own."""
    text = "import ctypes, os\nfrom bssearch.executors.process import *\n" + code
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
