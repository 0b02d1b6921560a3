"""The queue by its commands: submitted here, served by workers elsewhere, told to stop, killed, refused."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from bssearch import open_store, submit_study
from bssearch.commands.queue.worker import STOPS_WITHIN_S
from bssearch.records import TrialState
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_VARIABLE
from bssearch.spec.templates import SubmissionState
from tests.cli.task import UNCONFIRMED, WORKLOAD, printed, read, space_of
from tests.cli.worker_process import PATIENCE_S, make_node, worker
from tests.postgres import Postgres
from tests.waiting import wait_for

QUICK = {"confirm": UNCONFIRMED, "budget": {"trials": 3, "trial_train_seconds": 2.0}, "space": space_of(32, 64)}
LONG = {
    "confirm": UNCONFIRMED,
    "budget": {"trials": 2, "trial_train_seconds": 60.0},
    "pruner": {"name": "none"},
    "space": {"batch_size": [64], "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 0.2}},
    "default": {"batch_size": 64, "learning_rate": 0.02},
    "workload_settings": {"step_seconds": 0.05},
}
"""Trials of some seconds."""

on_sqlite, on_postgresql = (pytest.mark.parametrize("url", [kind], indirect=True) for kind in ("sqlite", "postgresql"))
"""tests/storage/test_queue.py has the queue on both: here each command is served from one."""


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    monkeypatch.setenv(CHECKPOINT_DIR_VARIABLE, str(folder))
    return folder


@pytest.fixture
def here(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who submits: nothing lies there, and nothing is to."""
    monkeypatch.setenv(DATABASE_URL_VARIABLE, url)
    folder = tmp_path / "here"
    folder.mkdir()
    open_store(url).close()
    return folder


def queue(here: Path) -> dict[str, Any]:
    found: dict[str, Any] = read(here, "queue", "list", "--all")
    return found


def states(here: Path) -> dict[str, str]:
    return {row["study"]: row["state"] for row in queue(here)["submissions"]}


@pytest.mark.slow
@on_sqlite
def test_a_worker_told_to_stop_gives_its_trial_back_and_another_goes_on_to_the_same_steps(
    tmp_path: Path, url: str, here: Path, checkpoints: Path
) -> None:
    slow = {**LONG, "workload_settings": {"step_seconds": 0.06}}
    first_node, second_node = (make_node(tmp_path / name, **slow) for name in "ab")
    printed(here, "queue", "submit", "task", "target.value=0.95", "--name", "long")
    with worker(first_node, url, checkpoints) as first, open_store(url, write=False) as store:
        first.wait_for("trial 1 runs")
        wait_for(lambda: store.trials.observations("long", 1)[1:], first.process)  # now it is in its middle
        assert store.trials.get("long", 1).state is TrialState.RUNNING
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0, first.said
        stopped = store.trials.get("long", 1)
        assert (stopped.state, first.lines[-1][9:]) == (TrialState.PAUSED, "the worker has stopped"), first.said
        assert store.queue.submission("long").state is SubmissionState.WAITING
        assert [one.is_here for one in store.queue.workers()] == [False]
        with worker(second_node, url, checkpoints, "--until-empty") as second:
            assert second.wait() == 0, second.said
        trials = store.trials.of("long")
        assert len(trials) == 2, "the trial that was stopped is not tried again, it goes on"
        went_on, outcome = trials[0], trials[0].outcome
        assert went_on.state is TrialState.REACHED and outcome is not None and outcome.steps_to_target is not None
        assert stopped.outcome is not None and outcome.steps > stopped.outcome.steps > 0
    words = ("trial", "rerun", "long", "1", "--workload", "task.py:Task", "--format", "json")
    again = json.loads(printed(first_node, *words))
    assert (again["identical"], again["steps_ratio"]) == (True, 1.0), again


@on_postgresql
def test_a_person_pauses_resumes_and_cancels_what_runs(tmp_path: Path, url: str, here: Path, checkpoints: Path) -> None:
    node = make_node(tmp_path / "a", **{**LONG, "workload_settings": {"step_seconds": 0.15}})  # outlasts slow commands
    printed(here, "queue", "submit", "task", "target.value=0.99", "budget.trials=40", "--name", "one")
    with worker(node, url, checkpoints) as served, open_store(url, write=False) as store:
        served.wait_for("trial 1 runs")
        printed(here, "queue", "pause", "one")
        served.wait_for("one: paused: paused by")
        assert {trial.state for trial in store.trials.of("one")} <= {TrialState.PAUSED, TrialState.CAPPED}
        assert states(here) == {"one": "paused"}
        served.lines.clear()
        printed(here, "queue", "resume", "one")
        served.wait_for("runs: batch 64")
        assert [row["serving"] for row in queue(here)["workers"]] == ["one"]
        printed(here, "queue", "cancel", "one")
        served.wait_for("one: cancelled: cancelled by")
        assert {trial.state for trial in store.trials.of("one")} <= {TrialState.CANCELLED, TrialState.CAPPED}
        assert store.queue.submission("one").served_seconds > 0
        served.stop()


@pytest.mark.slow
def test_a_worker_outlasts_a_server_that_is_away_and_stops_meanwhile_if_told_to(
    tmp_path: Path, own_postgres: Postgres, checkpoints: Path
) -> None:
    url = own_postgres.create_database()
    node = make_node(tmp_path / "a", **QUICK)
    with worker(node, url, checkpoints) as served:
        served.wait_for("templates task")
        own_postgres.stop()
        served.wait_for("retrying for up to 15 minutes")
        own_postgres.start()
        served.wait_for("is back")
        with open_store(url) as store:
            submit_study(store, "task", {"budget.trials": 3}, name="one")
            served.wait_for("one: done")
            assert len(store.trials.of("one")) == 3
        served.lines.clear()
        own_postgres.stop()
        served.wait_for("retrying for up to 15 minutes")
        served.stop(30)
        assert "has stopped" in served.lines[-1]


@pytest.mark.slow
@on_sqlite
def test_a_worker_told_to_stop_while_a_workload_is_loaded_waits_for_it_no_longer(
    tmp_path: Path, url: str, here: Path, checkpoints: Path
) -> None:
    node = make_node(tmp_path / "a", **QUICK)
    (node / "task.py").write_text("import time\nopen('loads', 'w').close()\ntime.sleep(1000)\n")
    printed(here, "queue", "submit", "task", "--name", "mine")
    with worker(node, url, checkpoints) as served:
        wait_for((node / "loads").exists, served.process)
        served.stop()
        assert "has stopped" in served.lines[-1] and "killing the running trials" not in served.said
    assert states(here) == {"mine": "waiting"}


@pytest.mark.slow
@on_sqlite
def test_a_worker_told_to_stop_kills_what_does_not_stop_in_time(
    tmp_path: Path, url: str, here: Path, checkpoints: Path
) -> None:
    default = {"batch_size": 16, "learning_rate": 0.1, "warmup_epochs": 0}
    node = make_node(
        tmp_path / "a",
        **{**QUICK, "space": space_of(16, 64), "default": default, "workload_settings": {"fault": "hang"}},
    )
    hangs = WORKLOAD.replace("time.sleep(1000)", "open('hangs', 'w').close(); time.sleep(1000)")
    (node / "task.py").write_text(hangs)
    printed(here, "queue", "submit", "task", "--name", "mine")
    with worker(node, url, checkpoints, stops_within=2.0) as served:
        wait_for((node / "hangs").exists, served.process)
        family = psutil.Process(served.process.pid).children(recursive=True)
        served.process.send_signal(signal.SIGTERM)
        served.wait()
        assert STOPS_WITHIN_S < 30, "schedulers wait for 30 s at least"
        assert "did not stop within 2 s; killing the running trials" in served.said
        psutil.wait_procs(family, PATIENCE_S)
        assert not [one for one in family if one.is_running()]
    assert states(here) == {"mine": "waiting"}
