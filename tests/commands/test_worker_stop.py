"""How a worker is told to stop, in processes of their own: by a signal, and where nothing else helps."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.cli.task import environment

PROGRAM = """
import sys, threading, time
from bssearch.commands.queue.worker import Stop

obeyed = threading.Event()
stop = Stop(lambda: (print("obeys", flush=True), obeyed.set()), lambda: print("kills", flush=True), within=0.5)
with stop:
    print("ready", flush=True)
    {body}
print("stopped", flush=True)
"""


def said_after(number: int, body: str) -> tuple[int, list[str]]:
    """Send a signal to a program once it is ready; return its exit code, and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=120)
    return process.returncode, rest.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_obeyed_and_what_obeys_ends_in_good_order(number: int) -> None:
    assert said_after(number, "obeyed.wait(); time.sleep(0)") == (0, ["obeys", "stopped"])


def test_a_wait_ends_when_somebody_asks() -> None:
    assert said_after(signal.SIGTERM, "stop.wait(1e6); obeyed.wait()") == (0, ["obeys", "stopped"])


@pytest.mark.slow
def test_what_does_not_end_by_itself_is_killed_and_then_the_process_is_ended() -> None:
    assert said_after(signal.SIGTERM, "time.sleep(1e6)") == (1, ["obeys", "kills"])
