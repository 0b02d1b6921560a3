"""A study's curves exported and simulated from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bssearch.recorded import RecordedTable, RecordedTrial, read_table, write_table
from bssearch.records import Target
from tests.cli.task import bssearch, write_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("simulate")
    trials = tuple(
        RecordedTrial(
            number,
            {},
            0,
            tuple(range(1, 11)),
            tuple(0.1 * (number + 1) * step for step in range(1, 11)),
            tuple(step / 10 for step in range(1, 11)),
        )
        for number in range(12)
    )
    write_table(RecordedTable("lines", Target(metric="accuracy", value=0.9), 12.0, trials), place / "lines.csv.gz")
    return place


def test_policies_are_compared_on_the_same_draws(folder: Path) -> None:
    done = bssearch(
        *("simulate", "lines.csv.gz", "--pruner", "none", "--pruner", "safe", "--draws", "20", "--trials", "6"),
        *("--format", "json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["policies"]) == ["none", "safe"]
    assert found["tables"] == {"lines": found["policies"]}
    none, safe = found["policies"].values()
    assert (none["relative_cost"], none["miss_rate"], none["regret"], none["draws"]) == (1.0, 0.0, 1.0, 20)
    assert safe["relative_cost_low"] <= safe["relative_cost"] <= safe["relative_cost_high"] < 1.0
    assert 0 < safe["cost_to_within"] <= safe["relative_cost"]
    told = bssearch("simulate", "lines.csv.gz", "--draws", "5", "--trials", "6", cwd=folder)
    assert all(name in told.stdout for name in ("relative cost", "none", "lag-2", "safe", "balanced", "fast"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("lines.csv.gz", "--pruner", "saf"), 2, "there are none, cap, lag-1.5"),
        (("nothing.csv.gz",), 3, "nothing"),
        (("lines.csv.gz", "--trials", "13"), 2, "trials = 13 must be <= 12"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = bssearch("simulate", *arguments, cwd=folder)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_study_is_exported_and_simulated(tmp_path: Path) -> None:
    write_task(tmp_path, budget={"trials": 5, "trial_train_seconds": 0.5}, confirm={"top": 1, "runs": 0})
    assert bssearch("run", "task.yaml", cwd=tmp_path).returncode == 0
    done = bssearch("export", "task", "--to", "curves", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["task.csv.gz", "task.json"]
    stored = json.loads(bssearch("trials", "task", "--format", "json", cwd=tmp_path).stdout)
    table = read_table(tmp_path / "task.csv.gz")
    assert [trial.number for trial in table.trials] == [trial["number"] for trial in stored]
    assert [trial.parameters["batch_size"] for trial in table.trials] == [trial["batch_size"] for trial in stored]
    assert all(one.steps[-1] <= trial["steps"] for one, trial in zip(table.trials, stored, strict=True))
    assert all(one.train_seconds[-1] <= trial["train_seconds"] for one, trial in zip(table.trials, stored, strict=True))
    simulated = bssearch("simulate", "task.csv.gz", "--draws", "3", "--trials", "4", cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    missing = bssearch("export", "nobody", "--to", "curves", cwd=tmp_path)
    assert missing.returncode == 3
    unwritable = bssearch("export", "task", "--to", "curves", "--file", "no/folder.csv.gz", cwd=tmp_path)
    assert unwritable.returncode == 2
    assert "cannot be written" in unwritable.stderr


def test_a_study_without_curves_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("batch_size,reached,steps\n32,true,100\n")
    assert bssearch("import", "runs", "runs.csv", "--target", "0.9", cwd=tmp_path).returncode == 0
    done = bssearch("export", "runs", "--to", "curves", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no learning curves" in done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".db"]


def test_the_page_draws_every_policy(folder: Path) -> None:
    done = bssearch(
        *("simulate", "lines.csv.gz", "--draws", "5", "--trials", "6", "--pruner", "none", "--pruner", "safe"),
        *("--html", "page.html", "--format", "csv"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("pruner,draws,regret")
    page = (folder / "page.html").read_text(encoding="utf-8")
    figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert figures is not None
    drawn = {trace["name"]: trace["text"] for trace in json.loads(figures[1])["all"]["data"]}
    assert drawn == {"operating points": ["safe"], "simple rules": ["none"]}
    assert "1 table · 5 draws of 6 trials each · 1 worker · seed 0" in page
    assert "Where it ran" not in page
    refused = bssearch("simulate", "lines.csv.gz", "--html", "no/page.html", cwd=folder)
    assert refused.returncode == 2
    assert "there is no folder no" in refused.stderr
