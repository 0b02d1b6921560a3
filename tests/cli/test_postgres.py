"""A team's study: several drivers, each a process of its own, on a real PostgreSQL server."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bssearch.records import TrialState
from bssearch.settings import DATABASE_URL_VARIABLE
from bssearch.storage.repository import open_store
from tests.cli.task import bssearch, command, environment, space_of, write_task
from tests.postgres import Postgres

SHORT = {
    "workload_settings": {"step_seconds": 0.01},
    "space": space_of(32, 64),
    "confirm": {"top": 1, "runs": 2},
}
SEARCHED = 18


@contextmanager
def driver(folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run that writes what it says to a file; leave no process of it."""
    with log.open("wb") as errors:
        process = subprocess.Popen(command("run", "task.yaml"), cwd=folder, env=environment(), stderr=errors)
    try:
        yield process
    finally:
        if process.poll() is None:
            for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                member.kill()
        process.wait()


def trials(folder: Path) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(bssearch("trials", "--format", "json", cwd=folder).stdout)
    return listed


def wait_for(url: str, searched: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 90
    with open_store(url, write=False) as store:
        while store.find_study("task") is None or len(store.trials("task")) < searched:
            assert time.monotonic() < deadline, "the study does not go on"
            assert any(process.poll() is None for process in processes), "every driver has ended"
            time.sleep(0.1)


def kill_in_mid_trial(processes: Sequence[subprocess.Popen[bytes]], url: str) -> subprocess.Popen[bytes]:
    """Kill a driver that has a trial running, and return it."""
    deadline = time.monotonic() + 30
    with open_store(url, write=False) as store:
        while True:
            assert time.monotonic() < deadline, "no driver runs a trial"
            for process in processes:
                process.send_signal(signal.SIGSTOP)
                running = store.trials("task", states=[TrialState.RUNNING])
                if any(f"/{process.pid}/" in str(trial.lease_owner) for trial in running):
                    process.send_signal(signal.SIGKILL)
                    return process
                process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_drivers_outlive_a_killed_one_and_a_restart_of_the_server(
    tmp_path: Path, own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.create_database()
    monkeypatch.setenv(DATABASE_URL_VARIABLE, url)
    write_task(tmp_path, **SHORT, budget={"trials": SEARCHED, "trial_train_seconds": 2.0})
    logs = [tmp_path / f"driver-{index}.log" for index in range(3)]
    with ExitStack() as stack:
        processes = [stack.enter_context(driver(tmp_path, log)) for log in logs]
        wait_for(url, 4, processes)
        victim = kill_in_mid_trial(processes, url)
        wait_for(url, 7, processes)
        own_postgres.stop()
        time.sleep(3)  # in which trials go on and end
        own_postgres.start()
        rest = [process for process in processes if process is not victim]
        assert [process.wait(timeout=120) for process in rest] == [0, 0], [log.read_text() for log in logs]
    told = [log.read_text() for log, process in zip(logs, processes, strict=True) if process is not victim]
    assert all("trying again" in text and "is back" in text for text in told), told
    found = trials(tmp_path)
    assert [trial["number"] for trial in found] == list(range(1, len(found) + 1))
    searched = Counter(trial["state"] for trial in found if trial["phase"] == "search")
    assert searched.total() - searched["lost"] == SEARCHED, searched
    assert searched["lost"] == 1, searched
    assert not {"running", "failed", "cancelled"} & set(searched)
    retried = [trial["retry_of"] for trial in found if trial["retry_of"] is not None]
    assert sorted(retried) == [trial["number"] for trial in found if trial["state"] == "lost"]
    confirmed = [
        (trial["batch_size"], trial["learning_rate"], trial["seed"]) for trial in found if trial["phase"] == "confirm"
    ]
    assert len(confirmed) == len(set(confirmed)) >= 2
    for trial in found:
        if trial["state"] == "reached":
            shown = json.loads(bssearch("trial", str(trial["number"]), "--format", "json", cwd=tmp_path).stdout)
            steps = [one["step"] for one in shown["observations"]]
            assert steps == list(range(0, trial["steps"] + 1, trial["eval_every_steps"])), "an observation was lost"
            break
    assert bssearch("best", cwd=tmp_path).returncode == 0
