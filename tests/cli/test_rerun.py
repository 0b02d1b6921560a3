"""``bssearch trial rerun``: real trials trained again, and what is told of what differs."""

import csv
import io
import json
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.task import INLINE, UNCONFIRMED, bssearch, printed, ran, read, refused, space_of, write_task
from tests.schema import execute

RUNS = "batch_size,seed,reached,steps,train_seconds\n16,0,true,100,2.0\n64,0,true,90,3.0\n"
PRINTED = "a new model"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of a few real trials: one that reached the target, others that were stopped."""
    place = tmp_path_factory.mktemp("stored")
    budget = {"trials": 4, "trial_train_seconds": 2.0}
    spec = write_task(place, space=space_of(16, 64), confirm=UNCONFIRMED, budget=budget, executor=INLINE)
    printed(place, "run", spec)
    return place


def change(folder: Path, statement: str) -> None:
    execute(folder / "bssearch.db", statement)


def rows_of(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "bssearch.db")) as connection:
        return list(connection.iterdump())


def rerun(folder: Path, number: int, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = read(folder, "trial", "rerun", "task", str(number), *options)
    return found


@pytest.mark.slow
def test_every_trial_comes_out_the_same_again_and_nothing_is_stored(folder: Path) -> None:
    before = rows_of(folder)
    trials = read(folder, "trial", "list", "task")
    assert "reached" in {trial["state"] for trial in trials}
    for trial in trials:
        found = rerun(folder, trial["number"], "--runs", "2")
        assert found["identical"] is True
        assert (found["schema_version"], found["study"], found["trial"]) == (1, "task", trial["number"])
        assert len(found["runs"]) == 2
        for run in found["runs"]:
            assert (run["state"], run["steps_to_target"]) == (trial["state"], trial["steps_to_target"])
            assert len(run["evaluations"]) >= 2
            assert all(one["then"] == one["now"] for one in run["evaluations"])
        if trial["state"] == "reached":
            assert found["steps_ratio"] == 1.0
            assert (found["runs"][0]["steps"], found["runs"][0]["final_metric"]) == (
                trial["steps"],
                trial["final_metric"],
            )
        assert found["time_ratio"] > 0
        assert {one["name"] for one in found["differences"]} <= {"contended"}
    assert rows_of(folder) == before


@pytest.mark.slow
def test_what_came_out_otherwise_is_told_with_what_differs(folder: Path) -> None:
    change(folder, "UPDATE bss_observation SET metric = metric + 0.25 WHERE trial_id = 1 AND step > 0")
    change(folder, "UPDATE bss_trial SET steps_to_target = 2 * steps_to_target WHERE number = 1")
    change(folder, "UPDATE bss_environment SET torch_version = '1.0', libraries = 'numpy 1.0\nabsent 0.9'")
    found = rerun(folder, 1)
    assert (found["identical"], found["steps_ratio"]) == (False, 0.5)
    [run] = found["runs"]
    assert run["first_difference_step"] == run["evaluations"][1]["step"]
    assert run["largest_difference"] == pytest.approx(0.25)
    differing = {one["name"]: (one["then"], one["now"]) for one in found["differences"]}
    assert differing["torch_version"][0] == "1.0"
    assert differing["numpy"][0] == "1.0" and differing["absent"] == ("0.9", None)
    assert differing["optuna"][0] is None
    told = bssearch("trial", "rerun", "task", "1", cwd=folder).stdout
    assert "the rerun differs: the rerun took 0.5 times the steps to the target" in told
    assert "torch_version" in told


def test_what_an_older_version_did_not_keep_is_no_difference(folder: Path) -> None:
    change(folder, "UPDATE bss_environment SET libraries = '', git_dirty = NULL")
    change(folder, "UPDATE bss_trial SET spec_digest = NULL, started_by = NULL, device = NULL")
    found = rerun(folder, 1)
    assert found["identical"] is True
    assert {one["name"] for one in found["differences"]} <= {"contended"}


def test_another_kind_of_device_is_told_and_the_trial_runs_all_the_same(folder: Path) -> None:
    change(folder, "UPDATE bss_environment SET device_name = 'Some GPU', device_type = 'cuda'")
    done = ran(folder, "trial", "rerun", "task", "1")
    assert "trial 1 ran on Some GPU · fp32 · compile none, but this" in done.stderr
    assert "the same metrics, bit for bit" in done.stdout and "Some GPU" in done.stdout


def test_code_that_has_changed_is_run_only_where_the_user_names_it_and_that_is_told(folder: Path) -> None:
    (folder / "task.py").write_text((folder / "task.py").read_text() + "# changed\n")
    said = refused(folder, "trial", "rerun", "task", "1", code=2)
    assert PRINTED not in said
    assert "no record that you ran this version" in said
    assert "add --workload task.py:Task" in said
    done = ran(folder, "trial", "rerun", "task", "1", "--workload", "task.py:Task", "--format", "json")
    assert "the workload's file has changed since trial 1 ran" in done.stderr
    found = json.loads(done.stdout)
    assert found["identical"] is True
    assert next(one["name"] for one in found["differences"]) == "workload_revision"


def test_the_command_that_runs_a_trial_again_is_printed_and_does(folder: Path) -> None:
    url = f"sqlite:///{folder / 'bssearch.db'}"
    printed = ran(folder, "trial", "show", "task", "1", "--repro", "--db", url)
    program, *words = shlex.split(printed.stdout)
    assert (program, words[:4]) == ("bssearch", ["trial", "rerun", "task", "1"]) and url in words
    notes = printed.stderr.splitlines()
    assert all(line.startswith("# ") for line in notes)
    trial = read(folder, "trial", "show", "task", "1")
    assert "compile none, threads 1" in printed.stderr
    assert [
        fact
        for fact in (trial["seed"], trial["started_by"], trial["environment"]["workload_revision"], "task.py:Task")
        if str(fact) not in printed.stderr
    ] == []
    assert [one for one in trial["environment"]["libraries"].items() if " ".join(one) not in notes[-1]] == []
    rows = list(csv.DictReader(io.StringIO(bssearch(*words, "--format", "csv", cwd=folder).stdout)))
    assert [row["identical"] for row in rows] == ["True"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["task", "5"], 2, "cannot rerun trial 5 of 'task': the trial has not started yet"),
        (["task", "99"], 3, "has no trial 99: the trials are 1 to 5"),
        (["task", str(2**70)], 3, f"has no trial {2**70}"),
        (["tusk", "1"], 3, "no study 'tusk' in this database"),
        (["task", "1", "--runs", "0"], 2, "--runs"),
        (["runs", "1"], 2, "the trial was imported and has no workload"),
    ],
)
def test_what_cannot_be_run_again_is_refused(folder: Path, arguments: list[str], code: int, words: str) -> None:
    assert bssearch("trial", "add", "task", "batch_size=16", cwd=folder).returncode == 0
    (folder / "runs.csv").write_text(RUNS)
    assert bssearch("import", "runs", "runs.csv", "--target", "0.9", cwd=folder).returncode == 0
    assert words in refused(folder, "trial", "rerun", *arguments, code=code)
    if "--runs" not in arguments:
        assert bssearch("trial", "show", *arguments, "--repro", cwd=folder).returncode == code
