"""Commands that an answer proposes: each runs as printed, and changes the answer or says why it cannot."""

import itertools
import json
import math
import random
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bssearch.cli.answer import print_found
from bssearch.cli.output import Format
from bssearch.errors import InterruptedRunError
from bssearch.records import TrialRequest
from tests.analysis.test_report import answer, confirmed
from tests.cli.task import bssearch, ran, read, refused, write_task
from tests.search.law import LawExecutor, interrupt

NOISES = (0.02, 0.1, 0.3)
EDGE_NOISE = 0.1
TRIALS = (5, 12, 30)
CONFIRM: dict[str, dict[str, int]] = {
    "unconfirmed": {"runs": 0},
    "few": {"top": 3, "runs": 2, "max_runs": 2},
    "until-settled": {"top": 3, "runs": 3, "max_runs": 12},
}
SIZES = {"inside": [8, 16, 32, 64, 128], "edge": [8, 16]}
PAIRWISE = [
    (noise, trials, confirm)
    for (row, noise), (column, trials), (cell, confirm) in itertools.product(*map(enumerate, (NOISES, TRIALS, CONFIRM)))
    if (row + column + cell) % 3 == 0
]
"""A Latin square: 9 studies that have each pair of noise, trials and confirmation."""
STATES = [(*state, sizes) for state in PAIRWISE for sizes in (SIZES if state[0] == EDGE_NOISE else ["inside"])]


@dataclass
class NoisyExecutor(LawExecutor):
    """Adds run-to-run variation to the law, by the seed."""

    noise: float = 0.1

    def seconds_of(self, request: TrialRequest) -> float:
        draw = random.Random(f"{request.plan.seed} {request.plan.configuration}").gauss(0.0, self.noise)
        return super().seconds_of(request) * math.exp(draw)


@pytest.fixture(autouse=True)
def executor(monkeypatch: pytest.MonkeyPatch) -> NoisyExecutor:
    made = NoisyExecutor()
    monkeypatch.setattr("bssearch.executors.slots.LocalExecutor", lambda *_, **__: made)
    return made


def write_spec(folder: Path, sizes: str = "inside", **changes: Any) -> str:
    """Write a spec of the shipped workload under a name of its own; return the file's name."""
    spec: dict[str, Any] = {
        "name": "mine",
        "workload": "digits",
        "target": {"metric": "accuracy", "value": 0.9, "goal": "maximize"},
        "space": {
            "batch_size": SIZES[sizes],
            "learning_rate": {"reference_batch": 32, "low": 0.01, "high": 1.0, "rule": "sqrt"},
        },
        "default": {"batch_size": 16, "learning_rate": 0.05},
        "executor": {"device": "cpu"},
    }
    folder.joinpath("spec.yaml").write_text(yaml.safe_dump({**spec, **changes}))
    return "spec.yaml"


def follow(folder: Path, answer: dict[str, Any]) -> None:
    """Run each proposed command on a copy of the folder."""
    before = {**answer, "next": []}
    for number, step in enumerate(answer["next"]):
        place = folder.parent / f"{folder.name}-{number}"
        shutil.copytree(folder, place)
        program, *words = shlex.split(step["command"])
        assert program == "bssearch"
        done = bssearch(*words, cwd=place)
        assert done.returncode == 0, (step["command"], done.stderr)
        if words[0] == "best":
            assert f"batch_size: {answer['optimal']['batch_size']}" in done.stdout
        elif words[0] == "report":
            assert (place / "mine.html").exists()
        elif "name=mine-wider" in words:
            assert {row["name"] for row in read(place, "study", "list")} == {"mine", "mine-wider"}
        else:
            after = read(place, "best", "mine")
            assert {**after, "next": []} != before, step["command"]
            if after["next"][0]["command"] == step["command"]:
                assert after["within_5_percent"] > answer["within_5_percent"]
                assert "runs cannot settle the answer" in step["why"]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "trials", "confirm", "sizes"), STATES)
def test_each_proposed_command_runs_and_changes_the_answer(
    noise: float, trials: int, confirm: str, sizes: str, executor: NoisyExecutor, tmp_path: Path
) -> None:
    executor.noise = noise
    folder = tmp_path / "study"
    folder.mkdir()
    ran(
        folder,
        "run",
        write_spec(
            folder,
            sizes,
            confirm=CONFIRM[confirm],
            budget={"trials": trials, "trial_train_seconds": 10.0},
        ),
    )
    follow(folder, read(folder, "best", "mine"))


@pytest.mark.slow
@pytest.mark.parametrize("trials", [2, 6, 14])
def test_an_interrupted_study_proposes_commands_that_change_the_answer(
    trials: int, executor: NoisyExecutor, tmp_path: Path
) -> None:
    executor.on_submit = lambda one: interrupt() if len(one.requests) > trials else None
    folder = tmp_path / "study"
    folder.mkdir()
    given = write_spec(folder, confirm=CONFIRM["until-settled"], budget={"trials": 12, "trial_train_seconds": 10.0})
    assert bssearch("run", given, cwd=folder).returncode == InterruptedRunError.exit_code
    executor.on_submit = lambda one: None
    answer = read(folder, "best", "mine")
    assert answer["next"]
    follow(folder, answer)


def test_an_imported_study_proposes_no_training(tmp_path: Path) -> None:
    rows = [f"{size},0.1,{seconds},{steps},true" for size, seconds, steps in ((16, 9, 90), (32, 6, 60), (64, 7, 50))]
    (tmp_path / "runs.csv").write_text("\n".join(["batch_size,learning_rate,train_seconds,steps,reached", *rows]))
    ran(tmp_path, "import", "runs", "runs.csv", "--name", "mine", "--metric", "accuracy", "--target", "0.9")
    answer = json.loads(bssearch("best", "mine", "--format", "json", cwd=tmp_path).stdout)
    assert {step["command"].split()[1] for step in answer["next"]} == {"export", "best"}


def test_a_command_from_another_folder_names_the_database_and_finds_the_code(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    write_task(tmp_path / "studies", confirm={"runs": 0})
    database = f"sqlite:///{tmp_path / 'team.db'}"
    ran(tmp_path, "run", "studies/task.yaml", "--db", database)
    answer = read(tmp_path, "best", "--db", database)
    assert answer["next"][0]["command"] == f"bssearch study confirm task --db {database}"
    ran(tmp_path, *shlex.split(answer["next"][0]["command"])[1:])
    ran(tmp_path, "run", "task", "--set", "budget.trials=13", "--db", database)
    assert read(tmp_path, "study", "show", "task", "--db", database)["budget_trials"] == 13
    (tmp_path / "task.py").write_text("another's code")
    assert "no record that you ran this version" in refused(tmp_path, "run", "task", "--db", database, code=2)


@pytest.mark.parametrize("url", ["postgresql://me:secret@host/team", "postgresql://host/team?user=me&password=secret"])
def test_a_password_is_not_printed_in_a_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_found(answer([*confirmed(16, 2.0, 2.1, 1.9), *confirmed(64, 1.0, 1.1, 0.9)]), Format.JSON, db=url)
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert json.loads(printed)["next"][0]["command"].endswith("--db URL")
