"""A whole study on a Ray of its own: an actor is killed in its middle, and somebody presses Ctrl-C."""

import json
import os
import signal
import sqlite3
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.task import command, environment, read, write_task
from tests.cli.test_interruptions import SLOW, alive, check_complete, wait_for_start
from tests.waiting import wait_for

SECRETS = {"BSSEARCH_DB_URL": "sqlite:///bssearch.db", "PGPASSWORD": "a-secret-word"}
WORKER = "bssearch.executors.worker"


def states(folder: Path) -> list[str]:
    """Return the states of the trials so far, none before there are tables."""
    with closing(sqlite3.connect(folder / "bssearch.db")) as connection, suppress(sqlite3.OperationalError):
        return [state for (state,) in connection.execute("SELECT state FROM bss_trial ORDER BY number")]
    return []


@pytest.mark.slow
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
    finally:
        for one in [*family, driver]:
            if one.is_running():
                one.kill()
        process.wait()
    errors = (tmp_path / "errors").read_text()
    assert process.returncode == 130, errors
    assert "stopped; every trial is stored" in errors
    assert out == "", "stdout is for the answer, and Ray's processes have been heard of"
    assert not alive(family)

    found = check_complete(tmp_path, 14)
    (lost,) = [one for one in found if one["state"] == "lost"]
    assert "lost with its Ray actor" in json.dumps(read(tmp_path, "trial", "show", "task", str(lost["number"])))
    assert [one["retry_of"] for one in found].count(lost["number"]) == 1
