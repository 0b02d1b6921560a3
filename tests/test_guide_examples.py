"""The guide's examples work: plug-ins, a text task, and scripts compared with plain scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from bssearch import registry
from bssearch.commands.opening import program_of
from bssearch.exchange.boards import base
from bssearch.executors.base import ExecutorSettings, Load
from bssearch.executors.programs.command import LoadedCommand
from bssearch.records import SecondsBasis, TrialState
from bssearch.spec import OPTIMIZERS, SCRATCH_RATES, load_spec
from tests.cli.conftest import run_by_law
from tests.cli.task import bssearch, printed, ran, read, write_task
from tests.documents import DOCUMENTS, OWN_TRAINING, ROOT, blocks, spans
from tests.executors.own_command import request, run as run_command
from tests.factories import changed
from tests.packages import installed

SECTION = DOCUMENTS["extending"]
(LINES,) = blocks(SECTION, "toml")
ADDED = {
    group.removeprefix("bssearch."): points for group, points in tomllib.loads(LINES)["project"]["entry-points"].items()
}
PACKAGE = "my_package"
KINDS = ROOT / "tests" / "kinds"
SPACE = {
    "batch_size": [16, 32],
    "learning_rate": {"reference_batch": 32, "low": 0.02, "high": 1.0, "rule": "sqrt"},
    "warmup_epochs": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Folder with a task and the installed examples, one file each."""
    write_task(tmp_path, space=SPACE)
    assert all(len(points) == 1 for points in ADDED.values())
    modules = {kind.removesuffix("s"): example(kind) for kind in ADDED}
    groups = [
        f"[bssearch.{kind}]\n{name} = {value}" for kind, points in ADDED.items() for name, value in points.items()
    ]
    with installed(tmp_path / "site", PACKAGE, modules, "\n".join(groups)):
        yield tmp_path


def example(kind: str) -> str:
    """Code of a kind's example."""
    return (KINDS / f"{kind.removesuffix('s')}.py").read_text(encoding="utf-8")


def test_there_is_an_example_of_every_kind() -> None:
    assert set(ADDED) == set(typing.get_args(registry.Kind))
    singular = {kind.removesuffix("s") for kind in ADDED}
    assert {path.stem for path in KINDS.glob("*.py")} - {"__init__"} == singular
    named = set(re.findall(r"^\| (\w+) \|.*`tests/kinds/\1\.py`", SECTION, flags=re.MULTILINE))
    assert named == singular, "the page names the example of each kind"


@pytest.mark.slow
def test_a_study_runs_with_the_examples_and_is_exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SILENT_SECONDS", 600.0)  # also on a slow machine
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
    named = ["pruner.name=patient", "sampler.name=uniform", "executor.name=noted", "objective=epochs_to_target"]
    changes = [word for one in [*named, "log=[ends]", "budget.trials=4", "confirm.runs=0"] for word in ("--set", one)]
    printed(folder, "run", "task.yaml", *changes)
    trials = read(folder, "trial", "list", "task")
    assert len(trials) == 4
    assert {f"{trial['number']}" for trial in trials} == set((folder / "trials.txt").read_text().split())
    answer = read(folder, "best", "task")
    best = next(row for row in answer["batches"] if row["batch_size"] == answer["optimal"]["batch_size"])
    assert answer["objective"] == "epochs_to_target"
    assert best["objective_value"]["median"] == pytest.approx(best["steps_to_target"] * best["batch_size"] / 500)
    exported = bssearch("export", "task", "--to", "counts", cwd=folder)
    assert exported.stdout == "task.txt\n" and (folder / "task.txt").read_text() == "4\n"
    ends = [line.split() for line in (folder / "ends.txt").read_text().splitlines()]
    assert sorted(ends) == sorted([f"{trial['number']}", trial["state"]] for trial in trials)


def test_the_pruner_of_the_guide_stops_slow_trials(folder: Path) -> None:
    from bssearch.records import Progress
    from bssearch.search.pruners.base import Action, Standings, make_pruner
    from bssearch.spec import PrunerSpec

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
    assert read(folder, "import", "lines", "lines.txt", "--steps", "7") == [{"study": "lines", "runs": 2, "reached": 2}]
    assert read(folder, "probe", "samples", "task.yaml", "--times", "3") == {"samples": 3000}


def test_the_log_of_the_guide_is_read(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "accuracy.curve").write_text("8 0.2 0.4 0.6")
    words = ("import", "curves", "run", "--target", "0.5")
    assert read(folder, *words) == [{"study": "run", "runs": 1, "reached": 1}]


def test_the_loop_around_the_sampler_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (one for one in blocks(DOCUMENTS["team"], "python") if "TimeToTargetSampler" in one)
    script = (OWN_TRAINING / "optuna_sampler.py").read_text(encoding="utf-8")
    assert script.endswith(block)
    values: dict[str, Any] = {}
    exec(compile(script, "optuna_sampler.py", "exec"), values)
    study = values["study"]
    assert len(study.trials) == 20
    done = [one for one in study.trials if one.state is optuna.trial.TrialState.COMPLETE]
    assert study.best_trial in done and study.best_value < done[0].value


ANY_PROGRAM = DOCUMENTS["own-training"].split("## Any program")[1].split("\n## ")[0]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the guide's programs and their specs; `plain.py` is the program without its diff."""
    for name in ("train.sh", "train.py", "toy.yaml", "program.yaml"):
        assert f"`{name}`" in ANY_PROGRAM or f"/{name}`" in ANY_PROGRAM
        shutil.copy(OWN_TRAINING / name, tmp_path)
    (tmp_path / "plain.py").write_text(plain("Any program"))
    (report,) = (one for one in spans(ANY_PROGRAM) if one.startswith("report: "))
    values = yaml.safe_load((tmp_path / "program.yaml").read_text())
    words = values["command"]
    assert yaml.safe_load(blocks(ANY_PROGRAM, "yaml")[0]) == {"command": words}
    every = words.index("--evaluate-every")
    command = ["plain.py" if word == "train.py" else word for word in words[:every] + words[every + 2 :]]
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump({**values, **yaml.safe_load(report), "command": command}))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "basis"),
    [
        ("toy.yaml", SecondsBasis.WALL),
        ("program.yaml", SecondsBasis.REPORTED),
        ("plain.yaml", SecondsBasis.WALL),
    ],
)
def test_the_programs_of_the_guide_train_and_report(spec: str, basis: SecondsBasis, programs: Path) -> None:
    read = load_spec(programs / spec)
    command = LoadedCommand(
        Load(
            settings=ExecutorSettings(workload="command", folder=programs, device="cpu", program=program_of(read)),
            slot=0,
        )
    )
    untrained = command.describe().model.initial_metrics["accuracy"]
    asked = request(target=read.record_target, configuration=read.default_configuration, seconds=20.0)
    outcome, observed = run_command(command, changed(asked, eval_every_steps=10))
    assert (outcome.state, outcome.seconds_basis, outcome.warnings) == (TrialState.REACHED, basis, ())
    assert len(observed) > 1 and observed[0].step == 0
    assert untrained is not None and 0 < untrained < 0.8, "the evaluation before the first step"


OWN_LOOP = DOCUMENTS["own-training"].split("## A loop of your own")[1].split("\n## ")[0]


@pytest.mark.slow
def test_the_lightning_script_of_the_guide_is_a_study(tmp_path: Path) -> None:
    script, (spec,) = script_of("Lightning"), blocks(OWN_LOOP, "yaml")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "own.yaml").write_text(spec)
    done = ran(tmp_path, "run", "own.yaml", "--set", "confirm.runs=0", "--set", "executor.device=cpu")
    assert "Trainer(max_epochs=4) ends trials at this limit" in done.stderr
    assert any(trial["state"] == "reached" for trial in read(tmp_path, "trial", "list", "own-loop"))


@pytest.mark.slow
def test_the_loop_of_the_guide_is_a_study(tmp_path: Path) -> None:
    script, (spec,) = script_of("A loop of your own"), blocks(OWN_LOOP, "yaml")
    script = script.replace(
        "inputs = torch.randn",
        """if trial.batch_size == 16:
    raise ValueError("sixteen is not for this model")
inputs = torch.randn""",
    )
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "own.yaml").write_text(spec)
    done = ran(tmp_path, "run", "own.yaml", "--set", "confirm.runs=0", "--set", "executor.device=cpu")
    assert "left out batch size 16" in done.stderr and "sixteen is not for this model" in done.stderr
    trials = read(tmp_path, "trial", "list", "own-loop")
    assert any(trial["state"] == "reached" for trial in trials)
    assert {trial["batch_size"] for trial in trials} <= {32, 64}
    again = bssearch("run", "own.yaml", "--set", "budget.trials=7", "--set", "confirm.runs=0", cwd=tmp_path)
    assert again.returncode == 0 and "timing steps" not in again.stderr, "the refused size is known"


@pytest.mark.slow
def test_the_trainer_of_the_guide_trains_alone_and_is_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script, spec = script_of("Hugging Face Trainer"), (OWN_TRAINING / "trainer.yaml").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "trainer.yaml").write_text(spec)
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    (told,) = re.findall(r"step (\d+): (.*)", alone.stderr)
    assert told[0] == "50" and "accuracy " in told[1] and "eval_" not in told[1]
    changes = ["confirm.runs=0", "executor.device=cpu", "budget.trials=3"]
    printed(tmp_path, "run", "trainer.yaml", *(word for one in changes for word in ("--set", one)))
    trials = read(tmp_path, "trial", "list", "trainer")
    assert len(trials) == 3 and any(trial["state"] == "reached" for trial in trials)
    assert all(trial["steps_to_target"] > 0 for trial in trials if trial["state"] == "reached")


TEXT = DOCUMENTS["own-training"]
EXAMPLE, SPEC = ((OWN_TRAINING / name).read_text(encoding="utf-8") for name in ("my_text.py", "my_text.yaml"))
(STEP,) = (block for block in blocks(TEXT, "python") if "def training_step(self, step)" in block)


def run(folder: Path, code: str, *changes: str) -> Any:
    (folder / "my_text.py").write_text(code)
    (folder / "my_text.yaml").write_text(SPEC)
    few = ["budget.trials=3", "confirm.runs=0", "executor.name=inline", "space.batch_size.low=64", *changes]
    printed(folder, "run", "my_text.yaml", *(word for one in few for word in ("--set", one)))
    return read(folder, "best", "my-text")


@pytest.mark.slow
def test_ragged_texts_in_dicts_with_an_optimizer_of_their_own_are_searched(tmp_path: Path) -> None:
    answer = run(tmp_path, EXAMPLE)
    assert answer["optimal"]["batch_size"] in (32, 64, 128)
    assert answer["optimal"]["time_to_target_s"]["median"] > 0
    changes = ["--set", "executor.name=inline", "--set", "budget.trial_train_seconds=1"]
    checked = bssearch("check", "my_text.yaml", *changes, "--format", "json", cwd=tmp_path)
    assert json.loads(checked.stdout)["train_samples"] == 2000, checked.stderr


@pytest.mark.slow
def test_the_training_step_of_the_guide_takes_the_place_of_the_loss(tmp_path: Path) -> None:
    step = "".join(f"    {line}\n" if line else "\n" for line in STEP.splitlines())
    own = EXAMPLE.replace("    def loss(", step.replace("step.model(inputs)", "step.model(**inputs)") + "\n    def _(")
    assert "def _(" in own and run(tmp_path, own)["optimal"]["time_to_target_s"]["median"] > 0


def test_the_table_of_optimizers_has_their_options_their_defaults_and_their_usual_rates() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`\w+` .*?) \| ([\d.]+) \|", TEXT, flags=re.MULTILINE)
    table = {name: (dict(re.findall(r"`(\w+)` ([^,]+)", options)), float(rate)) for name, options, rate in rows}

    def shown(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"

    assert table == {
        name: ({option: shown(value) for option, value in kind.option_defaults().items()}, SCRATCH_RATES[name])
        for name, kind in OPTIMIZERS.items()
    }


def test_the_loop_of_several_ranks_is_part_of_its_script() -> None:
    (shown,) = blocks(section_of("Several ranks"), "python")
    script = script_of("Several ranks")
    assert all(part in script for part in shown.split("...\n"))


LIBRARIES = {"Lightning", "Hugging Face Trainer"}
MOST_ADDED = {"A loop of your own": 8, "Any program": 8, **dict.fromkeys(sorted(LIBRARIES), 5)}
"""Most lines that a section's diff may add."""

each = pytest.mark.parametrize("section", MOST_ADDED)


def section_of(name: str) -> str:
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]


def diff_of(section: str) -> str:
    (diff,) = blocks(section_of(section), "diff")
    return diff


def hunks(section: str) -> list[tuple[str, str]]:
    """Both sides of each hunk of a section's diff: plain script and trial."""
    sides = []
    for is_line, lines in groupby(diff_of(section).splitlines(), key=lambda line: not line.startswith("@@")):
        if is_line:
            found = list(lines)
            sides.append(
                tuple("".join(f"{line[1:]}\n" for line in found if not line.startswith(other)) for other in "+-")
            )
    return sides  # type: ignore[return-value]


def script_of(section: str) -> str:
    """Script that a section shows or names."""
    named = re.findall(r"tests/data/own_training/(\w+\.py)", section_of(section))
    shown = [(OWN_TRAINING / name).read_text(encoding="utf-8") for name in named]
    (script,) = shown or blocks(section_of(section), "python")
    return script


def plain(section: str) -> str:
    """Plain script of a section: its script with the diff reversed."""
    script = script_of(section)
    for before, after in hunks(section):
        assert f"\n{script}".count(f"\n{after}") == 1, f"not once in the script:\n{after}"
        script = f"\n{script}".replace(f"\n{after}", f"\n{before}")[1:]
    return script


def counts(section: str) -> dict[str, int]:
    """Numbers of added, changed and deleted lines of a diff."""
    found = {"adds": 0, "changes": 0, "deletes": 0}
    for is_change, lines in groupby(diff_of(section).splitlines(), key=lambda line: line[:1] in ("+", "-")):
        signs = [line[0] for line in lines] if is_change else []
        added, gone = signs.count("+"), signs.count("-")
        found["changes"] += min(added, gone)
        found["adds"] += max(0, added - gone)
        found["deletes"] += max(0, gone - added)
    return found


@each
def test_the_guide_says_how_many_lines_its_diff_has_and_they_are_few(section: str) -> None:
    (said,) = re.findall(r"The diff (adds .*):\n\n```diff", section_of(section))
    told = {kind: int(number) for kind, number in re.findall(r"(adds|changes|deletes) (\d+)", said)}
    found = counts(section)
    assert told == {kind: number for kind, number in found.items() if number}
    assert found["adds"] <= MOST_ADDED[section]


@each
def test_the_diff_is_all_that_bssearch_asks_of_the_plain_script(section: str) -> None:
    script = plain(section)
    assert "bssearch" not in script and "trial" not in script
    compile(script, section, "exec")


@pytest.mark.slow
@each
def test_the_plain_script_trains_to_its_end_and_prints_its_accuracy(section: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(plain(section))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    reached = re.findall(r"accuracy\W+([\d.]+)", done.stdout)
    assert reached and float(reached[-1]) > 0.85, done.stdout
