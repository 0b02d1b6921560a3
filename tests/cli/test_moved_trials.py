"""A real trial that SIGTERM stops in one place and that goes on in another: the same steps as without the stop."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.task import DEFAULT, UNCONFIRMED, command, environment, space_of, write_task

SLOW = {
    "workload_settings": {"step_seconds": 0.05},
    "space": space_of(32),
    "default": {**DEFAULT, "learning_rate": 0.01},  # the first trial, which is stopped, takes many seconds
    "budget": {"trials": 2, "trial_train_seconds": 60.0},
    "confirm": UNCONFIRMED,
    "pruner": {"name": "none"},
}


def host(folder: Path, name: str, place: str) -> dict[str, str]:
    """Return the environment of a host of this name: nothing but the place where checkpoints are kept is shared."""
    own = {"XDG_CACHE_HOME": f"{folder}/{name}/cache", "BSSEARCH_STATE_DIR": f"{folder}/{name}/state"}
    return {**environment(), **own, "BSSEARCH_CHECKPOINT_DIR": place}


def wait_for_an_evaluation(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a trial runs that has been evaluated in its middle."""
    query = """SELECT COUNT(*) FROM bss_observation JOIN bss_trial ON bss_trial.id = trial_id
        WHERE step > 0 AND state = 'running'"""
    while process.poll() is None:
        with closing(sqlite3.connect(folder / "bssearch.db")) as connection:
            tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'bss_observation'")
            if tables.fetchone()[0] and connection.execute(query).fetchone()[0]:
                return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


def steps_seen(folder: Path) -> list[int]:
    query = "SELECT step FROM bss_observation JOIN bss_trial ON bss_trial.id = trial_id WHERE number = 1 ORDER BY step"
    with closing(sqlite3.connect(folder / "bssearch.db")) as connection:
        return [step for (step,) in connection.execute(query)]


@pytest.mark.slow
def test_a_trial_stopped_by_sigterm_goes_on_in_another_place_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "bssearch.db").touch()
    place = f"file://{tmp_path / 'shared'}"
    write_task(tmp_path, **SLOW)
    first, second = host(tmp_path, "first", place), host(tmp_path, "second", place)
    process = subprocess.Popen(
        command("run", "task.yaml"),
        cwd=tmp_path,
        env=first,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_an_evaluation(tmp_path, process)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        print(f"given back after {time.monotonic() - sent:.2f} s")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    before = steps_seen(tmp_path)
    assert [path.name for path in (tmp_path / "shared").rglob("trial-*")] == ["trial-1.pt"]
    assert not list((tmp_path / "first").rglob("trial-*"))

    done = subprocess.run(
        command("run", "task.yaml"), cwd=tmp_path, env=second, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    again = subprocess.run(
        command("rerun", "task", "1", "--format", "json"),
        cwd=tmp_path,
        env=second,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert again.returncode == 0, again.stderr
    after = steps_seen(tmp_path)
    assert after[: len(before)] == before and len(after) > len(before)
    found = json.loads(again.stdout)
    assert found["identical"] is True, again.stdout
    assert found["steps_ratio"] == 1.0
    assert not list((tmp_path / "shared").rglob("trial-*"))
