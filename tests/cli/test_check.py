"""``bssearch check``, and its proposal of a target."""

import json
from pathlib import Path

import pytest

from tests.cli.task import INLINE, bssearch, printed, ran, refused, write_task
from tests.search.law import LawExecutor


@pytest.mark.usefixtures("task")
@pytest.mark.slow
def test_check_tries_the_workload_and_stores_nothing(tmp_path: Path) -> None:
    done = bssearch("check", "task.yaml", "--format", "json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert [one["batch_size"] for one in found["batches"]] == [8, 32, 128]
    assert all(one["step_seconds"] > 0 for one in found["batches"])
    assert found["batches"][2]["dropped_share"] == (500 % 128) / 500
    # A busy machine is a finding too, about the measurement.
    assert {finding["code"] for finding in found["findings"]} - {"training"} == {"incomplete_batch_dropped"}
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.usefixtures("task")
def test_check_says_what_was_tried_in_words(tmp_path: Path, by_law: LawExecutor) -> None:
    shown = printed(tmp_path, "check", "task.yaml")
    assert "10 parameters; 1,000 training, 100 validation, 100 test samples" in shown
    assert "the default (batch 32), tried for up to 2 train seconds:" in shown
    assert len(by_law.requests) == 1


def test_check_and_run_refuse_a_target_that_takes_no_training(tmp_path: Path, by_law: LawExecutor) -> None:
    write_task(tmp_path, target={"metric": "accuracy", "value": 0.1})
    for command in ("check", "run"):
        assert (
            "target.value = 0.1 (goal: maximize) is met before the first step: an untrained model has accuracy ="
            in refused(tmp_path, command, "task.yaml", code=2)
        )
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.slow
@pytest.mark.parametrize("own", [0.1, 97])
def test_target_proposes_what_every_run_of_the_default_reaches_whatever_the_specs_own(
    tmp_path: Path, own: float
) -> None:
    budget = {"trials": 12, "trial_train_seconds": 0.3}
    write_task(tmp_path, target={"metric": "accuracy", "value": own}, budget=budget, executor=INLINE)
    shown = ran(tmp_path, "check", "--suggest-target", "task.yaml", "--runs", "2", "--format", "json")
    assert "run 2 of 2: best accuracy" in shown.stderr
    advice = json.loads(shown.stdout)
    row = next(row for row in advice["targets"] if row["target"] == advice["proposed"])
    assert row["reached"] == 2
    assert 0.8 < advice["proposed"] < advice["median_best"] <= 1.0
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.usefixtures("task")
def test_target_says_in_words_what_it_proposes(tmp_path: Path, by_law: LawExecutor) -> None:
    shown = ran(tmp_path, "check", "--suggest-target", "task.yaml", "--runs", "3")
    assert "run 3 of 3: best accuracy" in shown.stderr
    assert "← proposed" in shown.stdout
    assert "on the easier side" in shown.stdout
    assert len(by_law.requests) == 3


@pytest.mark.usefixtures("task")
def test_wrong_options_are_refused(tmp_path: Path) -> None:
    assert bssearch("check", "--suggest-target", "task.yaml", "--runs", "0", cwd=tmp_path).returncode == 2
    refused(tmp_path, "check", "nowhere.yaml", code=3)
