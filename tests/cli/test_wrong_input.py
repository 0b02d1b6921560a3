"""Wrong input: the message names the thing and the bound, the exit code is right; options have one definition."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import typer
import yaml

from bssearch.cli import run, study
from bssearch.cli.arguments import launched, typed
from bssearch.commands.launch import HERE, OPTIONS, Launch
from bssearch.registry import Option
from bssearch.storage.repository import open_store
from tests.cli.task import (
    INLINE,
    SPEC,
    UNCONFIRMED,
    WORKLOAD,
    bssearch,
    command,
    environment,
    printed,
    ran,
    read,
    refused,
    space_of,
    write_task,
)
from tests.factories import make_spec, not_none, store_study
from tests.packages import installed
from tests.schema import execute


def refuse(folder: Path, *arguments: str, code: int, said: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    told = refused(folder, *arguments, code=code)
    assert said in told, told
    after = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    assert after == [name for name in before if name != "__pycache__"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere://bucket/x", "unknown protocol nowhere://; choose from "),
        ("lacking://ada:s3cr@t@host/x", "lacking://ada:***@host/x' needs a package that is not installed: Install it"),
    ],
)
def test_a_checkpoint_store_that_cannot_be_spoken_to_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str
) -> None:
    fsspec.register_implementation("lacking", "lackingfs.Files", clobber=True, errtxt="Install it")
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", place)
    write_task(tmp_path)
    (tmp_path / "task.py").write_text("raise RuntimeError('it is loaded')")
    refuse(tmp_path, "run", "task.yaml", code=2, said=said)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", 300 * "a"], 3),
        (["run", f"{300 * 'a'}.yaml"], 3),
        (["import", "runs", f"{300 * 'a'}.csv", "--target", "0.9"], 2),
        (["import", "study", 300 * "a"], 2),
        (["best", "task", "--db", f"sqlite:///{300 * 'a'}.db"], 2),
        (["db", "init", "--db", f"sqlite:///{300 * 'a'}.db"], 2),
    ],
)
def test_a_name_that_is_too_long_for_a_file(tmp_path: Path, arguments: list[str], code: int) -> None:
    refuse(tmp_path, *arguments, code=code, said="ile name too long")


def test_a_workload_that_does_not_import_shows_the_users_own_line(tmp_path: Path) -> None:
    write_task(tmp_path, executor=INLINE)
    (tmp_path / "task.py").write_text("import torch\nx = no_such_thing\n")
    refuse(tmp_path, "run", "task.yaml", code=2, said="task.py:2: x = no_such_thing")


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_folder_is_no_spec_and_the_specs_in_it_are_named(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    write_task(folder)
    told = refused(tmp_path, command, folder, code=2)
    assert f"'{folder}' is a folder" in told and "task.yaml" in told
    (tmp_path / "none").mkdir()
    refuse(tmp_path, command, "none", code=2, said="'none' is a folder")


@pytest.mark.parametrize(
    "arguments",
    [
        ("best", "--export", "xml"),
        ("best", "--format", "xml"),
        ("trial", "list", "--phase", "search,confirm"),
        ("init", "mine", "--kind", "sound"),
        ("schema", "worst"),
        ("import", "runs", "x.csv", "--goal", "most"),
    ],
)
def test_an_option_of_another_value_is_told_without_the_words_of_a_library(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    told = refused(tmp_path, *arguments, code=2)
    assert "is not one of" in told and repr(arguments[-1]) in told
    assert "Value error" not in told


@pytest.mark.parametrize("executor", ["local", "inline"])
def test_more_threads_than_cpus_are_refused_where_they_would_run(tmp_path: Path, executor: str) -> None:
    write_task(tmp_path, executor={"device": "cpu", "name": executor, "threads": 4096})
    refuse(tmp_path, "run", "task.yaml", code=2, said=f"executor.threads = 4096 must be <= {os.cpu_count()}")
    assert bssearch("run", "task.yaml", "--dry-run", cwd=tmp_path).returncode == 0, "it may run on another machine"


@pytest.mark.usefixtures("task")
@pytest.mark.usefixtures("by_law")
def test_databases_that_are_none(tmp_path: Path) -> None:
    refuse(tmp_path, "best", "task", code=4, said="bssearch.db")
    refuse(tmp_path, "best", "task", "--db", "not a url", code=2, said="not a url")
    refuse(tmp_path, "best", "task", "--db", "nosuch://x/y", code=2, said="nosuch")
    (tmp_path / "notes.db").write_text("these are not the tables you are looking for\n" * 100)
    refuse(tmp_path, "best", "task", "--db", "sqlite:///notes.db", code=4, said="notes.db")
    refuse(tmp_path, "run", "task.yaml", "--db", "sqlite:///no/such/folder/x.db", code=4, said="no/such/folder")
    execute(tmp_path / "their.db", "CREATE TABLE their_table (id INTEGER)")
    assert "'their_table'" in ran(tmp_path, "run", "task.yaml", "--db", "sqlite:///their.db").stderr
    refuse(tmp_path, "trial", "add", "task", "batch_size=64", code=4, said="no database at bssearch.db")


@pytest.mark.usefixtures("by_law")
def test_a_database_in_a_parent_folder_is_named(tmp_path: Path) -> None:
    write_task(tmp_path)
    other, folder = tmp_path / "bssearch.db", tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    write_task(folder)
    assert str(other) not in ran(tmp_path, "run", "task.yaml").stderr
    refuse(folder, "best", "task", code=4, said=f"--db sqlite:///{other}")
    assert f"--db sqlite:///{other}" in ran(folder, "run", "task.yaml").stderr
    refuse(folder, "best", "another", code=3, said=f"--db sqlite:///{other}")
    assert str(other) not in ran(folder, "run", "task.yaml").stderr, "the study is here"
    said = ran(folder, "run", "task.yaml", "--set", "name=new", "--db", "sqlite:///own.db").stderr
    assert "own.db" in said and str(other) not in said


@pytest.mark.usefixtures("by_law")
def test_check_takes_the_database_as_run_does(tmp_path: Path) -> None:
    write_task(tmp_path)
    printed(tmp_path, "check", "task.yaml", "--db", "sqlite:///own.db")
    assert not list(tmp_path.glob("*.db*"))
    refuse(tmp_path, "check", "task.yaml", "--db", "nosuch://x/y", code=2, said="nosuch")
    refuse(tmp_path, "check", "task.yaml", "--db", "sqlite:///no/folder/x.db", code=4, said="no/folder")
    ran(tmp_path, "run", "task.yaml", "--db", "sqlite:///own.db")
    changed = ("check", "task.yaml", "--set", "target.value=0.5", "--db", "sqlite:///own.db")
    refuse(tmp_path, *changed, code=2, said="target.value")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:se@cret@h/x", "'postgresql://u:***@h/x': unexpected '@'"),
        ("host=h password=secret user=u", "'host=h password=***' is not a database URL"),
    ],
)
def test_no_part_of_a_password_is_printed(tmp_path: Path, url: str, said: str) -> None:
    told = refused(tmp_path, "best", "task", "--db", url, code=2)
    assert said in told
    assert "cret" not in told


@pytest.mark.usefixtures("by_law")
def test_a_newer_schema_and_an_unknown_study(tmp_path: Path) -> None:
    printed(tmp_path, "db", "upgrade")
    refuse(tmp_path, "best", "nothing", code=3, said="nothing")
    refuse(tmp_path, "trial", "list", code=3, said="no study")
    execute(tmp_path / "bssearch.db", "UPDATE bss_alembic_version SET version_num = '9999'")
    refuse(tmp_path, "best", "nothing", code=4, said="9999")
    write_task(tmp_path)
    refuse(tmp_path, "run", "task.yaml", code=4, said="update bssearch")


@pytest.mark.usefixtures("task")
@pytest.mark.usefixtures("by_law")
def test_a_read_only_database_is_read_but_not_written(tmp_path: Path) -> None:
    assert bssearch("db", "upgrade", cwd=tmp_path).returncode == 0
    (tmp_path / "bssearch.db").chmod(0o444)
    refuse(tmp_path, "run", "task.yaml", code=4, said="read-only")
    assert read(tmp_path, "study", "list") == []


def test_usage_errors_exit_with_two(tmp_path: Path) -> None:
    assert bssearch("frobnicate", cwd=tmp_path).returncode == 2
    refuse(tmp_path, "trial", "show", "first", code=2, said="'first' is not a trial number")


@pytest.mark.usefixtures("task")
def test_dry_run_is_printed_in_the_format_that_is_asked_for(tmp_path: Path) -> None:
    found = read(tmp_path, "run", "task.yaml", "--dry-run")
    assert (found["study"], found["trials"], found["batch_sizes"]) == ("task", 12, [8, 16, 32, 64, 128])
    assert found["longest_search_s"] == pytest.approx(12 * 2.0 / 0.8)
    assert not (tmp_path / "bssearch.db").exists()
    assert 0 < found["expected_s"] < found["longest_search_s"] + found["longest_confirmation_s"]
    assert found["longest_confirmation_s"] == pytest.approx(found["finalists"] * 3 * 2.0 / 0.8)
    rows = bssearch("run", "task.yaml", "--dry-run", "--format", "csv", cwd=tmp_path).stdout.splitlines()
    assert len(rows) == 2 and rows[0].startswith("study,")


BROKEN_PRUNERS = {
    "gone": "no_such_package.pruner:Patient",
    "raises": "broken_pruners.raising:Pruner",
    "another": "broken_pruners.another:Pruner",
}


@pytest.mark.usefixtures("by_law")
@pytest.mark.parametrize("name", BROKEN_PRUNERS)
@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_pruner_that_cannot_be_loaded_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    modules = {
        "raising": "from bssearch.search.pruners.base import Pruner as Base\n"
        "class Pruner(Base):\n    def __init__(self):\n        raise OSError('no such file')\n",
        "another": "Pruner = 3\n",
    }
    points = "[bssearch.pruners]\n" + "".join(f"{one} = {value}\n" for one, value in BROKEN_PRUNERS.items())
    with installed(tmp_path / "site", "broken_pruners", modules, points):
        (tmp_path / "study").mkdir()
        write_task(tmp_path / "study", pruner={"name": name})
        refuse(tmp_path / "study", "run", "task.yaml", *words, code=2, said=name)


def test_a_metric_outside_its_declared_range(tmp_path: Path) -> None:
    write_task(tmp_path, executor=INLINE)
    (tmp_path / "task.py").write_text(WORKLOAD.replace(".float().mean().item()", ".float().mean().item() * 100"))
    assert "outside the declared range [0, 1]" in refused(tmp_path, "run", "task.yaml", code=2)


@pytest.mark.parametrize("arguments", [["run", "digits", "--dry-run"], ["schema", "spec"]])
@pytest.mark.slow
def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path, arguments: Any) -> None:
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    not_none(process.stdout).close()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("study delete mine --yes --db sqlite:///a.db --db sqlite:///b.db", "--db"),
        ("run digits --db sqlite:///a.db --db=sqlite:///b.db", "--db"),
        ("plan lr --from-batch 8 --from-batch 16 --learning-rate 1 --batch 8", "--from-batch"),
    ],
)
def test_an_option_of_one_value_that_is_given_twice_is_refused(tmp_path: Path, words: str, option: str) -> None:
    refuse(tmp_path, *words.split(), code=2, said=f"{option} takes one value, not 2")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (run.run, {"db", "data_dir", "allow_changed_workload", "allow_busy", "verbose"}),
        (study.confirm, {"db", "workload", "data_dir", "allow_busy", "verbose"}),
        (study.audit, {"db", "workload", "data_dir", "allow_busy", "verbose"}),
    ],
)
def test_a_command_has_the_help_and_the_default_of_the_class(command: Any, names: set[str]) -> None:
    single = typer.Typer(add_completion=False)
    single.command()(command)
    made: Any = typer.main.get_command(single)
    found = {one.name: one for one in made.params}
    assert found.keys() & OPTIONS.keys() == names
    for name in names:
        assert (found[name].help, found[name].envvar) == (OPTIONS[name].help, OPTIONS[name].variable)
        assert found[name].opts[0] == f"--{name.replace('_', '-')}"


def test_what_is_given_comes_to_the_command_as_one_launch() -> None:
    got: list[Launch] = []

    @launched("db", "allow_busy")
    def command(launch: Launch, form: str = "table") -> None:
        got.append(launch)

    command(db="sqlite://", allow_busy=True, form="json")
    command(db=None, allow_busy=False, form="json")
    assert got == [Launch(db="sqlite://", allow_busy=True), HERE]


def test_the_choices_of_an_option_stand_in_its_help() -> None:
    assert typed(Option("Which.", choices=("a", "b"))).help == "Which. (a, b)"


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    said = refused(tmp_path, "best", code=2)
    assert "does not run on Windows" in said and "Subsystem for Linux" in said


# Forged values of a command -------------------------------------------------------------------------------------------


TRAIN = 'for step in 1 2 3; do echo "{\\"step\\": $step, \\"accuracy\\": 0.$((2 * step + 3))}"; sleep 0.02; done; : '
SHELL = f"""
name: shell
command: [bash, -c, '{TRAIN} {{batch_size}} {{learning_rate}} {{activation}}']
target: {{metric: accuracy, value: 0.9, goal: maximize}}
space:
  batch_size: [32, 64]
  learning_rate: {{reference_batch: 32, low: 0.01, high: 1.0, rule: sqrt}}
  model: {{activation: [relu, gelu]}}
default: {{batch_size: 32, learning_rate: 0.1, model: {{activation: relu}}}}
budget: {{trials: 3, trial_train_seconds: 5}}
confirm: {{runs: 0}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_served", [False, True])
def test_a_forged_text_runs_nothing_in_a_shell(tmp_path: Path, is_served: bool) -> None:
    spec, mine = tmp_path / "spec.yaml", tmp_path / "bssearch.db"
    spec.write_text(SHELL)
    printed(tmp_path, "run", spec)
    printed(tmp_path, "trial", "add", "shell", "model.activation=gelu")
    execute(
        mine,
        "UPDATE bss_trial SET parameters = json_set(parameters, '$.\"model.activation\"', ?) WHERE state = 'queued'",
        ["r$(touch PWNED)"],
    )
    if is_served:
        mine.rename(tmp_path / "theirs.db")
        printed(tmp_path, "db", "init")
        printed(tmp_path, "queue", "submit", "shell", "--name", "shell")
        printed(tmp_path, "import", "study", "sqlite:///theirs.db")
        (tmp_path / "templates.yaml").write_text("templates: {shell: {spec: spec.yaml, values: {}}}")
        spec.write_text(SHELL.replace("trials: 3", "trials: 5"))
        printed(tmp_path, "queue", "worker", "--templates", "templates.yaml", "--until-empty")
    else:
        printed(tmp_path, "run", spec, "--set", "budget.trials=5")
    trials = read(tmp_path, "trial", "list", "shell")
    (refused,) = [one for one in trials if "PWNED" in json.dumps(one)]
    assert (refused["state"], refused["steps"]) == ("failed", 0)
    assert "model.activation" in refused["reason"]
    others = [one["state"] for one in trials if one is not refused]
    assert len(others) == 5 and {*others} <= {"reached", "capped", "pruned"}
    assert not [*tmp_path.rglob("PWNED")]


# A new user's mistakes ------------------------------------------------------------------------------------------------


LOOPS = Path(__file__).parents[1] / "data" / "own_training"
TINY = {"budget": {"trials": 3, "trial_train_seconds": 0.5}, "confirm": UNCONFIRMED}
SPACE = space_of(16, 32)
RATE = {"reference_batch": 32, "low": 0.01, "high": 1.0}
OWN = {
    "workload": "train.py",
    "executor": {"device": "cpu"},
    "space": {"batch_size": [16, 32], "learning_rate": RATE},
    "default": {"batch_size": 32, "learning_rate": 0.1},
}
REPORT = {"step": r"step (\d+)", "accuracy": r"accuracy (\S+)"}
PROGRAM = ["python", "train.py", "{batch_size}", "{learning_rate}"]
LOSS = "return torch.nn.functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)"

Prepare = Callable[[Path], object]


def target(value: object, **changes: object) -> dict[str, object]:
    return {"metric": "accuracy", "value": value, **changes}


def task(code: str = WORKLOAD, **changes: Any) -> Prepare:
    """Write a workload class and its spec."""

    def write(folder: Path) -> None:
        write_task(folder, **{**TINY, "executor": INLINE, "space": SPACE, **changes})
        (folder / "task.py").write_text(code)

    return write


def script(code: str | None, **changes: Any) -> Prepare:
    """Write a training script and its spec; None forgets the script."""

    def write(folder: Path) -> None:
        write_task(folder, **{**TINY, **OWN, **changes})
        if code is not None:
            (folder / "train.py").write_text(code)

    return write


def program(code: str, **changes: Any) -> Prepare:
    """Write a program and its spec, which has a command in place of a workload."""

    def write(folder: Path) -> None:
        given = {**SPEC, **TINY, **OWN, "command": PROGRAM, **changes}
        del given["workload"]
        (folder / "task.yaml").write_text(yaml.safe_dump(given))
        (folder / "train.py").write_text(code)

    return write


def spec_file(text: str) -> Prepare:
    return lambda folder: (folder / "task.yaml").write_text(text)


def with_a_study(folder: Path) -> None:
    """A study that no trial belongs to, and the spec of another question."""
    task(target=target(0.7))(folder)
    with open_store(f"sqlite:///{folder}/bssearch.db") as store:
        store_study(store, make_spec(name="task"))


def loop(old: str = "", new: str = "", *, name: str = "loop.py") -> str:
    """The guide's script with one change."""
    text = (LOOPS / name).read_text()
    assert old in text
    return text.replace(old, new)


class Mistake(NamedTuple):
    """A mistake, its command, exit code and the parts of its message; ``trials`` that are stored."""

    prepare: Prepare
    said: tuple[str, ...]
    words: str = "run task.yaml"
    code: int = 2
    trials: int = 0


MISTAKES = {
    "percent for a share": Mistake(task(target=target(95)), ("target.value = 95", "[0, 1]", "--suggest-target")),
    "percent in a script": Mistake(
        script(loop(), target=target(95)), ("accuracy ≥ 95", "did you mean 0.95?", "target.value"), trials=1
    ),
    "target beyond the metric": Mistake(task(target=target(1.2)), ("target.value = 1.2", "[0, 1]", "--suggest-target")),
    "metric": Mistake(task(target={**target(0.9), "metric": "acuracy"}), ("target.metric = 'acuracy'", "accuracy")),
    "parameter": Mistake(
        task(space={**SPACE, "dropuot": [0.1]}), ("space.dropuot", "did you mean 'dropout'?", "bssearch schema spec")
    ),
    "field": Mistake(task(budgte={}), ("budgte", "did you mean 'budget'?", "bssearch schema spec")),
    "no script": Mistake(script(None), ("train.py", "No such file", "workload:")),
    "crash at import": Mistake(script("raise ValueError('boom')\n"), ("ValueError: boom", "train.py:1")),
    "no report": Mistake(script(loop("evaluate=evaluate, ")), ("no evaluation", "trial.report(")),
    "nothing to read": Mistake(program("print('loss 1')\n", report=REPORT), ("report.accuracy", "accuracy (\\S+)")),
    "nan before an update": Mistake(
        task(WORKLOAD.replace(LOSS, f"{LOSS} * float('nan')")), ("first step", "NaN in the inputs"), code=5, trials=1
    ),
    "limit in kiloseconds": Mistake(
        script(loop(), budget={"trials": 3, "trial_train_seconds": 0.0005}),
        ("trial_train_seconds = 0.0005", "3 × the seconds of a training"),
        trials=1,
    ),
    "rates as exponents": Mistake(
        task(space={**SPACE, "learning_rate": {**RATE, "low": -4, "high": -1}}), ("low = -4", "must be > 0")
    ),
    "required argument": Mistake(
        script(f"import argparse\nargparse.ArgumentParser().parse_args(['unexpected'])\n{loop()}"),
        ("exited with code 2", "`arguments:`"),
    ),
    "file of another folder": Mistake(
        script(f"open('data/train.csv')\n{loop()}"), ("data/train.csv", "the current folder")
    ),
    "number for a dict": Mistake(
        script(loop('return {"accuracy": ', "return (").replace(".item()}", ".item())")),
        ("returned float", "mapping"),
    ),
    "targets too short": Mistake(
        script(loop("TensorDataset(inputs[:1000], targets[:1000])", "TensorDataset(inputs[:1000], targets[:995])")),
        ("Size mismatch", "train.py:8"),
    ),
    "no step": Mistake(script(loop("    optimizer.step()\n")), ("took no step", "call optimizer.step()")),
    "fixed loader": Mistake(
        script(loop("batch_size=trial.micro_batch_size", "batch_size=32")),
        ("without reading trial.batch_size", "DataLoader"),
    ),
    "later version of a spec": Mistake(task(schema_version=2), ("schema_version = 2", "must be 1")),
    "device that is missing": Mistake(task(executor={"device": "cuda:7"}), ("'cuda:7'", "choose auto"), code=6),
    "rates swapped": Mistake(
        task(space={**SPACE, "learning_rate": {**RATE, "low": 1.0, "high": 0.1}}), ("low = 1", "high = 0.1")
    ),
    "batch beyond the data": Mistake(
        task(space=space_of(32, 1024)), ("space.batch_size = 1024 must be <= 500", "choose at most 500")
    ),
    "batch of zero": Mistake(task(space=space_of(0, 32)), ("space.batch_size.0 = 0", ">= 1")),
    "text for a number": Mistake(
        task(budget={"trials": "many"}), ("budget.trials = 'many'", "integer", "bssearch schema spec")
    ),
    "workload": Mistake(task(workload="digitz"), ("workload 'digitz'", "digits", "path/file.py:attribute")),
    "pruner": Mistake(task(pruner={"name": "balancd"}), ("pruner.name = 'balancd'", "balanced")),
    "sampler": Mistake(task(sampler={"name": "tpee"}), ("sampler.name = 'tpee'", "tpe,")),
    "objective": Mistake(task(objective="time"), ("objective = 'time'", "time_to_target")),
    "server": Mistake(
        task(), ("postgresql://localhost:1/x", "--db"), "run task.yaml --db postgresql://localhost:1/x", 4
    ),
    "read-only folder": Mistake(task(), ("/proc", "--db"), "run task.yaml --db sqlite:////proc/x.db", 4),
    "name of another question": Mistake(
        with_a_study, ("study 'task'", "target.value: 0.9 → 0.7", "give the spec another name")
    ),
    "number for fields": Mistake(task(budget=5), ("budget = 5", "mapping of fields", "schema spec")),
    "name in other letters": Mistake(task(name="größe"), ("name = 'größe'", "letters, digits", "schema spec")),
    "confirm without a trial": Mistake(with_a_study, ("'task'", "bssearch run task"), "study confirm task", 5),
    "best of a near name": Mistake(with_a_study, ("'tsk'", "mean 'task'?", "bssearch study list"), "best tsk", 3),
    "prose": Mistake(spec_file("hello world\n"), ("task.yaml", "mapping of fields")),
    "no YAML": Mistake(spec_file("name: [\n"), ("task.yaml:2", "unreadable YAML")),
    "wrong way round": Mistake(
        task(target=target(0.9, goal="minimize")), ("goal: minimize", "before the first step", "correct target.goal")
    ),
    "tab": Mistake(spec_file("target:\n\tmetric: accuracy\n"), ("task.yaml:2", "indent with spaces")),
    "unlogged in Lightning": Mistake(
        script(loop('self.log("accuracy",', "print(", name="lightning_loop.py")), ("'accuracy'", "log")
    ),
    "missing package": Mistake(script("import nopackage\n"), ("train.py:1", "package of module 'nopackage'")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_stops_before_the_second_trial_with_its_remedy(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    if "Lightning" in name:
        pytest.importorskip("lightning")
    mistake.prepare(tmp_path)
    told = refused(tmp_path, *mistake.words.split(), code=mistake.code)
    assert [part for part in mistake.said if part not in told] == [], told
    assert stored(tmp_path) == mistake.trials


def stored(folder: Path) -> int:
    """Number of the stored trials of the study; 0 if no database can be read."""
    return max(0, len(bssearch("trial", "list", "task", "--format", "csv", cwd=folder).stdout.splitlines()) - 1)
