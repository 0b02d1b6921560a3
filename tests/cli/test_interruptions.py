"""Drivers that are stopped or killed in mid-study, and what the same command then makes of it."""

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.task import (
    DEFAULT,
    UNCONFIRMED,
    command,
    environment,
    printed,
    read,
    space_of,
    write_task,
)
from tests.factories import not_none
from tests.schema import execute
from tests.waiting import wait_for

SLOW = {
    "workload_settings": {"step_seconds": 0.03},
    "executor": {"device": "cpu", "slots": 2},
    "space": space_of(32, 64),
    "budget": {"trials": 14, "trial_train_seconds": 2.0},
    "confirm": UNCONFIRMED,
}


@contextmanager
def driver(folder: Path, *, until: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run, yield it in mid-study, once it says where it is, and leave nothing of it."""
    process = subprocess.Popen(
        command("run", "task.yaml", "--verbose"), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    family = [psutil.Process(process.pid)]
    try:
        for line in not_none(process.stderr):
            if line.startswith(until):
                break
        family += psutil.Process(process.pid).children(recursive=True)
        yield process
    finally:
        for member in family:
            if member.is_running():
                member.kill()
        process.wait()
        not_none(process.stderr).close()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def trials(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = read(folder, "trial", "list")
    return found


def wait_for_start(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a trial starts, so that one is in its middle: between two trials nothing may run."""

    def running() -> set[Any]:
        return set(execute(folder / "bssearch.db", "SELECT number FROM bss_trial WHERE state = 'running'"))

    before = running()
    wait_for(lambda: running() - before, process)


def check_complete(folder: Path, searched: int) -> list[dict[str, object]]:
    """Run the study to its end; every number stands once, the counts add up, nothing that finished is repeated."""
    before = {trial["number"]: trial for trial in trials(folder) if trial["state"] not in {"running", "paused"}}
    printed(folder, "run", "task.yaml", *("--set", "executor.name=inline", "--set", "executor.slots=1"))
    found = trials(folder)
    assert [trial["number"] for trial in found] == list(range(1, len(found) + 1))
    states = Counter(trial["state"] for trial in found if trial["phase"] == "search")
    assert states.total() - states["lost"] - states["cancelled"] - states["failed"] == searched
    assert not states["running"] + states["paused"]
    kept = [found[int(str(number)) - 1] for number in before]
    assert [{**one, "answer": None} for one in kept] == [{**one, "answer": None} for one in before.values()]
    return found


@pytest.mark.slow
def test_after_sigkill_and_sigterm_no_process_is_left_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_task(tmp_path, **SLOW)
    with driver(tmp_path, until="search 4/") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        wait_for_start(tmp_path, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not alive(workers))
    killed = [trial["number"] for trial in trials(tmp_path) if trial["state"] == "running"]
    assert killed
    with driver(tmp_path, until="search 8/") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        wait_for_start(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130, errors
        assert "stopped; all trials are stored" in errors
        assert not alive(workers)
    states = Counter(trial["state"] for trial in trials(tmp_path))
    assert states["paused"] >= 1, f"it goes on with the next run: {states}"
    assert not states["running"]
    found = check_complete(tmp_path, 14)
    assert [found[int(str(number)) - 1]["state"] for number in killed] == ["lost"] * len(killed)
    retried = {trial["retry_of"]: trial for trial in found if trial["retry_of"] is not None}
    assert set(retried) == set(killed)
    for number, again in retried.items():
        same = ("batch_size", "learning_rate", "seed", "warmup_epochs", "phase")
        assert [again[key] for key in same] == [found[int(str(number)) - 1][key] for key in same]


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    write_task(
        tmp_path,
        workload_settings={"fault": "hang"},
        target={"metric": "accuracy", "value": 1.0},
        space=space_of(16),
        default={**DEFAULT, "batch_size": 16},
        budget={"trials": 4, "trial_train_seconds": 0.5},
        pruner={"name": "none"},
    )
    with driver(tmp_path, until="timing steps") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        while not any(trial["state"] == "running" for trial in trials(tmp_path)):
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(2)  # in which the trial comes to the step that hangs
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "it waits for the step"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 130, errors
        assert not alive(workers)


@pytest.mark.slow
def test_who_stops_reading_the_progress_does_not_stop_the_study(tmp_path: Path) -> None:
    write_task(tmp_path, space=space_of(32), budget={"trials": 3, "trial_train_seconds": 2.0}, confirm=UNCONFIRMED)
    run = command("run", "task.yaml")
    process = subprocess.Popen(run, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert sum(trial["phase"] == "search" for trial in trials(tmp_path)) == 3


INTERRUPTED_IMPORT = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = {argv!r}
from bssearch.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "bssearch.cli.app", "bssearch.commands.run", "torch"])
def test_ctrl_c_while_libraries_are_loading_ends_with_one_line(tmp_path: Path, module: str) -> None:
    argv = ["bssearch", "run", "digits", "--set", "executor.name=inline", "--set", "executor.device=cpu"]
    code = INTERRUPTED_IMPORT.format(module=module, argv=argv)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# On Ray ---------------------------------------------------------------------------------------------------------------


SECRETS = {"BSSEARCH_DB_URL": "sqlite:///bssearch.db", "PGPASSWORD": "a-secret-word"}
WORKER = "bssearch.executors.worker"


def states(folder: Path) -> list[str]:
    """Return the states of the trials so far, none before there are tables."""
    with closing(sqlite3.connect(folder / "bssearch.db")) as connection, suppress(sqlite3.OperationalError):
        return [state for (state,) in connection.execute("SELECT state FROM bss_trial ORDER BY number")]
    return []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None and "CI" not in os.environ, reason="Ray is not installed")
def test_a_killed_actor_is_a_trial_to_be_tried_again_and_ctrl_c_ends_ray_too(tmp_path: Path) -> None:
    write_task(tmp_path, **{**SLOW, "executor": {"name": "ray", "device": "cpu"}})
    with (tmp_path / "errors").open("w") as errors_file:
        process = subprocess.Popen(
            command("run", "task.yaml"),
            cwd=tmp_path,
            env=environment() | SECRETS,
            stdout=subprocess.PIPE,
            stderr=errors_file,
            text=True,
            start_new_session=True,
        )
    driver = psutil.Process(process.pid)
    family: list[psutil.Process] = []
    try:
        wait_for(lambda: "reached" in states(tmp_path), process)
        wait_for_start(tmp_path, process)
        family = driver.children(recursive=True)
        (worker,) = [one for one in family if WORKER in one.cmdline()]
        for one in family:
            names = {name for name, value in one.environ().items() if name in SECRETS or "a-secret-word" in value}
            assert names == set(), f"{one.cmdline()} knows {names}"
        assert worker.nice() == driver.nice(), "what is timed waits for other programs no longer than elsewhere"
        worker.parent().kill()  # type: ignore[union-attr]
        wait_for(lambda: "lost" in states(tmp_path), process)
        wait_for(lambda: not alive([worker]), process)  # its parent is gone: it ends by itself, not at once
        ended = len(states(tmp_path))
        wait_for(lambda: len(states(tmp_path)) > ended + 1, process)
        wait_for_start(tmp_path, process)
        family += driver.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        wait_for(lambda: not alive(family))
    finally:
        for one in [*family, driver]:
            if one.is_running():
                one.kill()
        process.wait()
    errors = (tmp_path / "errors").read_text()
    assert process.returncode == 130, errors
    assert "stopped; all trials are stored" in errors
    assert out == "", "stdout is for the answer, and Ray's processes have been heard of"

    found = check_complete(tmp_path, 14)
    (lost,) = [one for one in found if one["state"] == "lost"]
    assert "Ray lost the actor" in json.dumps(read(tmp_path, "trial", "show", "task", str(lost["number"])))
    assert [one["retry_of"] for one in found].count(lost["number"]) == 1
