"""The actor of a slot, called as Ray would call it: its worker process is a real one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bssearch.executors.base import (
    ExecutorSettings,
    Load,
    Loaded,
    Refused,
    Reply,
    decode_reply,
    encode,
)
from bssearch.executors.ray.executor import MOST_LOG_BYTES, Heard, SlotActor
from bssearch.records import TrialEnded, TrialState, TrialStop, WorkloadDescription
from tests.executors.line_workload import request_endless_trial, write_workload

CHATTY = """
    def evaluate(self, model, part):
        print("x" * 300_000 + "!")
"""


@contextmanager
def started(folder: Path, code: str = "") -> Iterator[SlotActor]:
    """Yield an actor whose worker has loaded the line workload."""
    path = write_workload(folder)
    path.write_text(
        path.read_text().replace(
            "\n    def evaluate(self, model, part):\n", code or "\n    def evaluate(self, model, part):\n"
        )
    )
    actor = SlotActor()
    actor.start(0, 1, {})
    try:
        settings = ExecutorSettings(workload="line.py:Line", folder=folder, device="cpu")
        actor.tell(encode(Load(settings=settings, slot=0)))
        assert isinstance(until(actor, Loaded)[-1], Loaded)
        yield actor
    finally:
        actor.leave()


def heard(actor: SlotActor) -> Iterator[Heard]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        yield actor.hear(0.5)


def until(actor: SlotActor, kind: type[object]) -> list[Reply]:
    """Return what the worker says up to a reply of a kind."""
    replies: list[Reply] = []
    for one in heard(actor):
        replies += [decode_reply(line) for line in one.replies]
        if any(isinstance(reply, kind | Refused) for reply in replies):
            return replies
        assert one.death is None, one
    raise AssertionError(f"no {kind.__name__}; so far {replies}")


def test_a_long_log_comes_in_pieces_and_before_the_reply_that_followed_it(tmp_path: Path) -> None:
    with started(tmp_path, CHATTY) as actor:
        actor.tell(encode(request_endless_trial(1, seconds=0.01)))
        log = b""
        for one in heard(actor):
            assert len(one.log) <= MOST_LOG_BYTES
            log += one.log
            replies = [decode_reply(line) for line in one.replies]
            if any(isinstance(reply, TrialEnded) for reply in replies):
                break
        assert log.count(b"!") >= 1 and log.endswith(b"!\n")
        assert actor._log.stat().st_size == 0, "what has been passed on does not fill the node's disk"


def test_a_stop_goes_in_and_a_dead_worker_is_told_once_with_its_signal(tmp_path: Path) -> None:
    with started(tmp_path) as actor:
        actor.tell(encode(request_endless_trial(1)))
        actor.tell(encode(TrialStop(number=1, state=TrialState.PRUNED, reason="as asked")))
        (ended,) = [one for one in until(actor, TrialEnded) if isinstance(one, TrialEnded)]
        assert (ended.outcome.state, ended.outcome.reason) == (TrialState.PRUNED, "as asked")
        assert actor._worker is not None
        os.kill(actor._worker.pid, signal.SIGKILL)
        death = next(one.death for one in heard(actor) if one.death is not None)
        assert death.return_code == -signal.SIGKILL
        actor.kill()
        assert not psutil.pid_exists(actor._worker.pid)


def test_a_worker_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    write_workload(tmp_path)
    actor, has_loaded = SlotActor(), threading.Event()

    def call() -> None:
        actor.start(0, 1, {})
        has_loaded.wait()  # Linux tells a process of the end of a thread only after it has asked for that

    thread = threading.Thread(target=call)
    thread.start()
    try:
        while actor._worker is None:
            time.sleep(0.01)
        settings = ExecutorSettings(workload="line.py:Line", folder=tmp_path, device="cpu")
        actor.tell(encode(Load(settings=settings, slot=0)))
        assert isinstance(until(actor, Loaded)[-1], Loaded)
        has_loaded.set()
        thread.join()
        actor.tell(encode("describe"))
        assert isinstance(until(actor, WorkloadDescription)[-1], WorkloadDescription)
    finally:
        has_loaded.set()
        actor.leave()
