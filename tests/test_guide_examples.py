"""The guide's examples of one of each kind work, installed as a package of their own beside bssearch."""

from __future__ import annotations

import json
import os
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from bssearch import registry
from bssearch.commands.opening import program_of
from bssearch.executors.command import LoadedCommand
from bssearch.executors.messages import Load
from bssearch.records import SecondsBasis, TrialState
from bssearch.settings import STATE_DIR_VARIABLE
from bssearch.spec import load_spec
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch, write_task
from tests.documents import DOCUMENTS, blocks, spans
from tests.executors.own_command import request
from tests.executors.own_command import run as run_command
from tests.packages import installed

SECTION = DOCUMENTS["changing-the-code"].split("## To add one of a kind")[1].split("\n## ")[0]
(LINES,) = blocks(SECTION, "toml")
ADDED = {
    group.removeprefix("bssearch."): points for group, points in tomllib.loads(LINES)["project"]["entry-points"].items()
}
PACKAGE = "my_package"
SPACE = {
    "batch_size": [16, 32],
    "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 1.0, "rule": "sqrt"},
    "warmup_epochs": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a task and the examples installed: a file for each."""
    write_task(tmp_path, space=SPACE)
    assert all(len(points) == 1 for points in ADDED.values())
    modules = {kind.removesuffix("s"): example(kind) for kind in ADDED}
    groups = [
        f"[bssearch.{kind}]\n{name} = {value}" for kind, points in ADDED.items() for name, value in points.items()
    ]
    with installed(tmp_path / "site", PACKAGE, modules, "\n".join(groups)):
        yield tmp_path


def example(kind: str) -> str:
    """Return the code of the example of a kind."""
    (part,) = (one for one in SECTION.split("\n### ")[1:] if one.split("\n")[0].endswith(f" {kind.removesuffix('s')}"))
    (block,) = blocks(part, "python")
    return block


def rows(folder: Path, *words: str) -> Any:
    """Return what a command prints as JSON."""
    done = bssearch(*words, "--format", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_is_an_example_of_every_kind() -> None:
    assert set(ADDED) == set(typing.get_args(registry.Kind))
    assert len(blocks(SECTION, "python")) == len(ADDED)


@pytest.mark.slow
def test_a_study_runs_with_those_that_a_spec_names_and_is_exported(folder: Path) -> None:
    named = ["pruner.name=patient", "sampler.name=uniform", "executor.name=noted", "objective=epochs_to_target"]
    changes = [word for one in [*named, "budget.trials=4", "confirm.runs=0"] for word in ("--set", one)]
    done = bssearch("run", "task.yaml", *changes, cwd=folder)
    assert done.returncode == 0, done.stderr
    trials = rows(folder, "trials", "task")
    assert len(trials) == 4
    assert {f"{trial['number']}" for trial in trials} == set((folder / "trials.txt").read_text().split())
    answer = rows(folder, "best", "task")
    best = next(row for row in answer["batches"] if row["batch_size"] == answer["optimal"]["batch_size"])
    assert answer["objective"] == "epochs_to_target"
    assert best["objective_value"]["median"] == pytest.approx(best["steps_to_target"] * best["batch_size"] / 500)
    exported = bssearch("export", "task", "--to", "counts", cwd=folder)
    assert exported.stdout == "task.txt\n" and (folder / "task.txt").read_text() == "4\n"


def test_the_pruner_of_the_guide_stops_what_is_far_behind(folder: Path) -> None:
    from bssearch.curves import Progress
    from bssearch.pruners.base import Action, Standings, make_pruner
    from bssearch.spec.parts import PrunerSpec

    def line(slope: float, until: float) -> Progress:
        curve = Progress()
        for tenth in range(int(10 * until) + 1):
            curve.add(tenth / 10, slope * tenth / 10)
        return curve

    pruner = make_pruner(PrunerSpec(name="patient"))
    standings = Standings(limit=10.0, slack=1.3, curves={1: line(0.3, 0.6), 2: line(0.6, 0.6), 3: line(0.3, 0.4)})
    standings.winners = [(line(1.0, 1.0), 1.0)]
    assert [pruner.judge(number, standings) for number in (1, 2, 3)] == [Action.STOP, Action.GO_ON, Action.GO_ON]


def test_the_importer_and_the_probe_of_the_guide_are_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_by_law(monkeypatch)
    (folder / "lines.txt").write_text("8 2.5\n16 1.5\n")
    assert rows(folder, "import", "lines", "lines.txt", "--steps", "7") == [{"study": "lines", "runs": 2, "reached": 2}]
    assert rows(folder, "probe", "samples", "task.yaml", "--times", "3") == {"samples": 3000}


def test_the_loop_around_the_sampler_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (one for one in blocks(DOCUMENTS["team"], "python") if "TimeToTargetSampler" in one)
    values: dict[str, Any] = {}
    exec(compile(block, "team.md", "exec"), values)
    study = values["study"]
    assert len(study.trials) == 20
    done = [one for one in study.trials if one.state is optuna.trial.TrialState.COMPLETE]
    assert study.best_trial in done and study.best_value < done[0].value


ANY_PROGRAM = DOCUMENTS["own-training"].split("## Any program")[1].split("\n## ")[0]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the guide's two programs, and a spec of each."""
    (shell,), (script,), (spec,) = (blocks(ANY_PROGRAM, one) for one in ("bash", "python", "yaml"))
    (other_command,) = (one for one in spans(ANY_PROGRAM) if one.startswith("command: [python"))
    (tmp_path / "train.sh").write_text(shell)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "toy.yaml").write_text(spec)
    values = {key: value for key, value in yaml.safe_load(spec).items() if key != "report"}
    (tmp_path / "lines.yaml").write_text(yaml.safe_dump({**values, **yaml.safe_load(other_command), "name": "lines"}))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize(("spec", "basis"), [("toy.yaml", SecondsBasis.WALL), ("lines.yaml", SecondsBasis.REPORTED)])
def test_the_programs_of_the_guide_train_and_report(spec: str, basis: SecondsBasis, programs: Path) -> None:
    read = load_spec(programs / spec)
    command = LoadedCommand(
        Load(
            workload="command",
            workload_settings={},
            folder=str(programs),
            device="cpu",
            slot=0,
            threads=1,
            program=program_of(read),
        )
    )
    assert command.describe().model.initial_metrics == {"accuracy": pytest.approx(0.1)}
    outcome, observed = run_command(
        command, request(target=read.record_target, configuration=read.default_configuration, seconds=20.0)
    )
    assert (outcome.state, outcome.seconds_basis, outcome.warnings) == (TrialState.REACHED, basis, ())
    assert len(observed) > 10 and observed[0].step == 0


@pytest.mark.slow
def test_a_study_of_a_program_runs_answers_and_is_confirmed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = bssearch("run", "toy.yaml", "--set", "confirm.runs=2", "--set", "confirm.top=1", cwd=programs)
    assert done.returncode == 0, done.stderr
    answer = rows(programs, "best", "toy")
    assert answer["optimal"]["batch_size"] in (32, 128)
    trials = rows(programs, "trials", "toy")
    assert {trial["state"] for trial in trials} <= {"reached", "capped", "pruned", "exhausted"}
    more = bssearch("confirm", "toy", "--runs", "3", "--format", "json", cwd=programs)
    assert more.returncode == 0, more.stderr
    assert len(rows(programs, "trials", "toy")) > len(trials)
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(programs / "of another user"))
    refused = bssearch("confirm", "toy", "--runs", "3", cwd=programs)
    assert refused.returncode == 2 and "add --workload command" in refused.stderr
    again = bssearch("confirm", "toy", "--runs", "3", "--workload", "command", cwd=programs)
    assert again.returncode == 0, again.stderr
