"""What ``best --export`` prints is read back, value for value, by what it is meant for."""

import argparse
import ast
import csv
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from bssearch.analysis.answer import Answer, Figure
from bssearch.analysis.shape import Notice
from bssearch.cli.answer import exported
from bssearch.cli.arguments import Export
from bssearch.commands.best import for_export
from bssearch.spec import StudySpec
from tests.benchmarks.simulate.draws import simulate
from tests.benchmarks.simulate.tables import read_table
from tests.cli.conftest import run_by_law
from tests.cli.task import INLINE, bssearch, printed, read, refused, space_of, write_task
from tests.factories import make_spec

AWKWARD: dict[str, bool | int | float | str | None] = {
    "learning_rate": 0.1 + 0.2,
    "weight_decay": 1e-05,
    "epsilon": 5e-324,
    "horizon_samples": 10**7,
    "clip_norm": 1e22,
    "dropout": 0.0,
    "optimizer": "no",
    "schedule": 'two words, $HOME \'quoted\'\n; $(id) `id` """; import os # !!python/object:os.system',
    "it's $(id);\n: !!x \"": "y",
    "nesterov": True,
    "amsgrad": False,
    "nothing": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        run_by_law(patch)
        printed(place, "run", write_task(place).name, "--set", "budget.trials=6")
    return place


def awkward(folder: Path, **changes: Any) -> Answer:
    answer = Answer.model_validate_json(bssearch("best", "--format", "json", cwd=folder).stdout)
    optimal = answer.optimal.model_copy(update={"parameters": AWKWARD, **changes})
    return answer.model_copy(update={"optimal": optimal})


def same(read: dict[str, Any], values: dict[str, Any]) -> bool:
    return list(read.items()) == list(values.items()) and [*map(type, read.values())] == [*map(type, values.values())]


def read_arguments(line: str, values: dict[str, Any]) -> dict[str, Any]:
    """Read a line as a training script would."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(option, type=type(value))
    return vars(parser.parse_args(shlex.split(line)))


def test_yaml_is_read_back_and_says_where_it_is_from(folder: Path) -> None:
    done = bssearch("best", "task", "--export", "yaml", cwd=folder)
    answer = read(folder, "best")
    values = yaml.safe_load(done.stdout)
    whole = {"batch_size": answer["optimal"]["batch_size"], **answer["optimal"]["parameters"]}
    assert [*values] == [*whole] and same_but_for(values, whole, {"learning_rate"})
    assert values["learning_rate"] == float(f"{whole['learning_rate']:.4g}")
    header = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert header[0] == "# study task: accuracy >= 0.93"
    assert answer["device"]["name"] in header[1]
    time = answer["optimal"]["time_to_target_s"]
    interval = "" if time["low"] is None else f" [{time['low']:.3g}, {time['high']:.3g}]"
    assert f"{time['median']:.3g} s{interval} of training" in header[2]
    assert set(AWKWARD) >= {"learning_rate", "optimizer", "schedule", "nesterov"} <= set(values)


def same_but_for(values: dict[str, Any], others: dict[str, Any], names: set[str]) -> bool:
    kept = [{name: one for name, one in many.items() if name not in names} for many in (values, others)]
    return same(kept[0], kept[1])


LISTED, LOW = 0.0123456789, 0.00123456789


def test_an_export_has_four_digits_of_what_a_range_gave() -> None:
    def spec(rate: object) -> StudySpec:
        optimizer = {"name": "adamw", "beta2": {"low": 0.9, "high": 0.99999}}
        space = {"weight_decay": [0.0, LISTED], "clip_norm": {"low": 0.5, "high": 5.0}, "optimizer": optimizer}
        given = {"weight_decay": 0.0, "clip_norm": 1.0, "optimizer": {**optimizer, "beta2": 0.99}}
        default = {"batch_size": 32, "learning_rate": LOW, **given}
        return make_spec(space={"batch_size": [8, 32, 128], "learning_rate": rate, **space}, default=default)

    found = {
        "batch_size": 128,
        "learning_rate": 0.045734072372099865,
        "dropout": 0.123456789,
        "weight_decay": LISTED,
        "beta2": 0.99987654321,
        "clip_norm": 1.23456789,
        "horizon_samples": 1234567,
        "optimizer": "adamw",
        "nesterov": True,
        "nothing": None,
    }
    searched = {"reference_batch": 32, "low": LOW, "high": 1.0, "rule": "sqrt"}
    rounded = {"learning_rate": 0.04573, "beta2": 0.9998765, "clip_norm": 1.235}
    assert same(for_export(found, spec(searched)), found | rounded), "dropout is fixed, weight decay from a list"
    listed = for_export(found, spec([LOW, found["learning_rate"]]))
    assert listed["learning_rate"] == found["learning_rate"]
    at_the_end = found | {"learning_rate": 2 * LOW}
    assert for_export(at_the_end, spec(searched))["learning_rate"] == 2 * LOW, "rounded, it leaves the space"


def test_only_an_export_of_values_is_rounded(folder: Path) -> None:
    for form in get_args(Export):
        assert re.search(r"learning.rate\W+0\.0*[1-9]\d{0,3}\D", printed(folder, "best", "task", "--export", form))
    exact = read(folder, "best")["optimal"]["parameters"]["learning_rate"]
    assert exact != float(f"{exact:.4g}")
    printed(folder, "export", "task", "--to", "csv")
    with (folder / "task.csv").open() as file:
        assert exact in [float(row["learning_rate"]) for row in csv.DictReader(file)]


def test_awkward_values_come_back_as_they_were(folder: Path) -> None:
    answer = awkward(folder)
    values = answer.optimal.values
    assert same(yaml.safe_load(exported(answer, "yaml")), values)
    assert same(ast.literal_eval(exported(answer, "python")), values)
    given = {name: value for name, value in values.items() if value is not None}
    line = exported(answer, "args")
    assert same(read_arguments(line, given), given)
    assert "--nesterov" in shlex.split(line)
    assert "--no-amsgrad" in shlex.split(line)
    assert "nothing" not in line


def test_the_micro_batch_is_there_where_batches_are_accumulated(folder: Path) -> None:
    assert "micro_batch_size" not in awkward(folder).optimal.values
    values = awkward(folder, batch_size=64, micro_batch_size=16, accumulation_steps=4).optimal.values
    assert list(values.items())[:3] == [("batch_size", 64), ("micro_batch_size", 16), ("accumulation_steps", 4)]


def test_where_no_seconds_are_known_the_figure_of_the_objective_is_named(folder: Path) -> None:
    answer = awkward(folder, time_to_target_s=None, objective_value=Figure(median=4.5e7, low=4e7, high=5e7, runs=5))
    answer = answer.model_copy(update={"objective": "samples_to_target"})
    header = exported(answer, "yaml").splitlines()[2]
    assert header == "# with 45,000,000 samples [40,000,000, 50,000,000] (median of 5 runs)"


@pytest.mark.slow
def test_what_makes_the_values_doubtful_is_said_beside_them(folder: Path) -> None:
    moved = bssearch("best", "--export", "yaml", "--target", "0.85", cwd=folder)
    assert "\n# note: the search aimed at accuracy 0.93" in moved.stdout
    for form in get_args(Export):
        said = bssearch("best", "--export", form, "--target", "0.85", cwd=folder)
        assert "note: the search aimed at accuracy 0.93" in said.stderr
    assert yaml.safe_load(moved.stdout)["batch_size"] > 0
    answer = awkward(folder)
    doubts = [Notice(code=code, message=f"two\nlines of {code}") for code in ("unconfirmed", "running", "seed_noise")]
    text = exported(answer.model_copy(update={"warnings": doubts}), "yaml")
    assert [line for line in text.splitlines() if "note" in line] == [
        "# note: two lines of unconfirmed",
        "# note: two lines of running",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "export task --to csv --file {url}",
        "export task --to study --file {url}",
        "report task --html {url}",
        "best {url}",
        "study list {url}",
        "import study {url}",
        "best task --step-times {url}",
        "run {url}",
    ],
)
def test_a_url_where_none_belongs_shows_no_password(folder: Path, words: str) -> None:
    done = bssearch(*words.format(url="postgresql://anna:s3@cret@nohost/x").split(), cwd=folder)
    assert done.returncode != 0
    assert "s3" not in done.stderr + done.stdout and "cret" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    "words", ["export task --to csv --file", "export task --to study --file", "report task --html"]
)
def test_a_database_is_not_overwritten(folder: Path, words: str) -> None:
    database = folder / "bssearch.db"
    before = database.read_bytes()
    assert "a SQLite database is there" in refused(folder, *words.split(), database.name, code=2)
    assert database.read_bytes() == before


@pytest.mark.slow
def test_the_curves_of_a_study_are_exported_for_the_simulation(tmp_path: Path) -> None:
    budget, confirm = {"trials": 5, "trial_train_seconds": 0.5}, {"top": 1, "runs": 0}
    write_task(tmp_path, space=space_of(32, 64), executor=INLINE, budget=budget, confirm=confirm)
    assert bssearch("run", "task.yaml", cwd=tmp_path).returncode == 0
    assert printed(tmp_path, "export", "task", "--to", "curves").splitlines() == ["task.csv.gz", "task.json"]
    stored = read(tmp_path, "trial", "list", "task")
    table = read_table(tmp_path / "task.csv.gz")
    assert [trial.number for trial in table.trials] == [trial["number"] for trial in stored]
    assert [trial.parameters["batch_size"] for trial in table.trials] == [trial["batch_size"] for trial in stored]
    assert all(one.steps[-1] <= trial["steps"] for one, trial in zip(table.trials, stored, strict=True))
    assert all(one.train_seconds[-1] <= trial["train_seconds"] for one, trial in zip(table.trials, stored, strict=True))
    assert len(simulate(table, ["balanced"], draws=3, trials=4, seed=0)["balanced"]) == 3
    refused(tmp_path, "export", "nobody", "--to", "curves", code=3)
    assert "cannot be written" in refused(
        tmp_path, "export", "task", "--to", "curves", "--file", "no/folder.csv.gz", code=2
    )


def test_a_study_without_curves_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("batch_size,reached,steps\n32,true,100\n")
    assert bssearch("import", "runs", "runs.csv", "--target", "0.9", cwd=tmp_path).returncode == 0
    assert "has no learning curves" in refused(tmp_path, "export", "runs", "--to", "curves", code=2)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".db"]
