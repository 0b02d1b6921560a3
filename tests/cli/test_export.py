"""What ``best --export`` prints and what ``export`` writes is read back, value for value, by what it is meant for."""

import argparse
import ast
import csv
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from bssearch import StudySpec, open_store
from bssearch.analysis.answer import Answer, Figure
from bssearch.analysis.shape import Notice
from bssearch.cli.answer import exported
from bssearch.cli.arguments import Export
from bssearch.commands.best import for_export
from tests.benchmarks.simulate.draws import simulate
from tests.benchmarks.simulate.tables import read_table
from tests.cli.conftest import search_by_law
from tests.cli.task import bssearch, printed, read, refused
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
def folder(ended_by_law: Path) -> Path:
    return ended_by_law


def awkward(folder: Path, **changes: Any) -> Answer:
    answer = Answer.model_validate_json(bssearch("best", "--format", "json", cwd=folder).stdout)
    return answer.model_copy(update={"optimal": answer.optimal.model_copy(update={"parameters": AWKWARD, **changes})})


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
    of_program = {name: found[name] for name in ("batch_size", "learning_rate")}
    assert for_export(of_program, spec(searched))["learning_rate"] == rounded["learning_rate"]
    assert for_export(found, spec([LOW, found["learning_rate"]]))["learning_rate"] == found["learning_rate"]
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
    assert "is a SQLite database" in refused(folder, *words.split(), database.name, code=2)
    assert database.read_bytes() == before


def test_the_curves_of_a_study_are_exported_for_the_simulation(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "first.db", tmp_path / "bssearch.db")
    assert printed(tmp_path, "export", "toy", "--to", "curves").splitlines() == ["toy.csv.gz", "toy.json"]
    stored = read(tmp_path, "trial", "list", "toy")
    table = read_table(tmp_path / "toy.csv.gz")
    assert [trial.number for trial in table.trials] == [trial["number"] for trial in stored]
    assert [trial.parameters["batch_size"] for trial in table.trials] == [trial["batch_size"] for trial in stored]
    with open_store(f"sqlite:///{tmp_path / 'bssearch.db'}", write=False) as store:
        curves = store.trials.curves("toy", [trial["number"] for trial in stored]).values()
    assert [list(trial.steps) for trial in table.trials] == [[one.step for one in curve] for curve in curves]
    assert len(simulate(table, ["balanced"], draws=3, trials=4, seed=0)["balanced"]) == 3
    refused(tmp_path, "export", "nobody", "--to", "curves", code=3)
    assert "cannot be written" in refused(
        tmp_path, "export", "toy", "--to", "curves", "--file", "no/folder.csv.gz", code=2
    )


def test_a_study_without_curves_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("batch_size,reached,steps\n32,true,100\n")
    assert bssearch("import", "runs", "runs.csv", "--target", "0.9", cwd=tmp_path).returncode == 0
    assert "has no learning curves" in refused(tmp_path, "export", "runs", "--to", "curves", code=2)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".db"]


# Whole studies --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    search_by_law(place / "first.db")
    search_by_law(place / "second.db", name="other")
    return place


@pytest.fixture
def databases(made: Path, tmp_path: Path) -> Path:
    """A databases with first.db, which has the study toy, and second.db, which has the study other."""
    return Path(shutil.copytree(made, tmp_path / "databases"))


def imported(databases: Path, *words: str, db: str = "team.db") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(databases, "import", "study", *words, "--db", f"sqlite:///{db}")
    return found


def test_a_study_goes_through_a_file_and_is_answered_and_gone_on_with(databases: Path) -> None:
    assert (
        printed(databases, "export", "toy", "--to", "study", "--db", "sqlite:///first.db") == "toy.bssearch.jsonl.gz\n"
    )
    there = "--db", "sqlite:///team.db"
    assert printed(databases, "import", "study", "toy.bssearch.jsonl.gz", *there) == "toy\n"
    (row,) = imported(databases, "toy.bssearch.jsonl.gz")
    assert row == {
        "study": "toy",
        "source": "toy.bssearch.jsonl.gz",
        "is_new": False,
        "is_changed": False,
        "trials_new": 0,
        "trials_changed": 0,
        "trials_known": 5,
        "trials_skipped": [],
        "observations_new": 0,
        "observations_changed": 0,
        "observations_known": row["observations_known"],
        "measurements_new": 0,
        "measurements_changed": 0,
        "measurements_known": row["measurements_known"],
    }
    before = {**read(databases, "best", "--db", "sqlite:///first.db"), "next": []}
    assert {**read(databases, "best", *there), "next": []} == before
    search_by_law(databases / "team.db", trials=7)
    assert len(read(databases, "trial", "list", *there)) == 7
    assert "toy" in printed(databases, "report", "toy", *there)


def test_a_database_is_named_by_its_url_or_its_file(databases: Path) -> None:
    assert [(row["study"], row["is_new"]) for row in imported(databases, "first.db")] == [("toy", True)]
    assert [(row["study"], row["is_new"]) for row in imported(databases, "sqlite:///first.db")] == [("toy", False)]
    said = refused(databases, "import", "study", ".", "--db", "sqlite:///team.db", code=2)
    assert ". cannot be read: " in said and "name a file of `bssearch export STUDY --to study`" in said


@pytest.mark.slow
def test_another_name_is_given_where_the_study_is_new(databases: Path) -> None:
    printed(databases, "export", "toy", "--to", "study", "--file", "a.gz", "--db", "sqlite:///first.db")
    search_by_law(databases / "team.db")  # another study of its name
    assert "--as NAME" in refused(databases, "import", "study", "a.gz", "--db", "sqlite:///team.db", code=2)
    assert [row["study"] for row in imported(databases, "a.gz", "--as", "theirs")] == ["theirs"]
    assert read(databases, "best", "theirs", "--db", "sqlite:///team.db")["study"] == "theirs"


def test_several_studies_are_exported_each_into_its_own_file(databases: Path) -> None:
    imported(databases, "sqlite:///first.db", db="second.db")
    words = "export", "toy", "other", "--to", "study", "--db", "sqlite:///second.db"
    assert printed(databases, *words).split() == ["toy.bssearch.jsonl.gz", "other.bssearch.jsonl.gz"]
    refused(databases, *words, "--file", "x", code=2)


def test_files_and_databases_are_imported_together_and_stay_as_they_are(databases: Path) -> None:
    printed(databases, "export", "toy", "--to", "study", "--db", "sqlite:///first.db")
    before = {name: (databases / name).read_bytes() for name in ("first.db", "second.db", "toy.bssearch.jsonl.gz")}
    words = "toy.bssearch.jsonl.gz", "sqlite:///second.db", "sqlite:///first.db"
    found = [(row["study"], row["is_new"], row["is_changed"]) for row in imported(databases, *words)]
    assert found == [("toy", True, True), ("other", True, True), ("toy", False, False)]
    assert not any(row["is_changed"] for row in imported(databases, *words))
    assert {name: (databases / name).read_bytes() for name in before} == before


def test_a_dry_run_stores_nothing_and_one_study_may_be_named(databases: Path) -> None:
    words = "import", "study", "sqlite:///first.db", "--db"
    before = (databases / "second.db").read_bytes()
    dry = bssearch(*words, "sqlite:///second.db", "--dry-run", "--format", "json", cwd=databases)
    assert json.loads(dry.stdout)[0]["is_new"] and "bssearch stored no study" in dry.stderr
    assert (databases / "second.db").read_bytes() == before
    assert "'x' in sqlite:///first.db" in refused(databases, *words, "sqlite:///second.db", "--study", "x", code=3)
    refused(databases, *words, "sqlite:///new.db", "--dry-run", code=4)
    assert not (databases / "new.db").exists()
    found = imported(databases, "sqlite:///first.db", "sqlite:///second.db", "--study", "other", db="third.db")
    assert [row["study"] for row in found] == ["other"]


def test_sources_that_contradict_each_other_are_refused_and_none_is_stored(databases: Path) -> None:
    (databases / "second.db").unlink()
    search_by_law(databases / "second.db")  # another study of the name toy
    open_store(f"sqlite:///{databases}/team.db").close()
    words = "sqlite:///first.db", "sqlite:///second.db"
    for dry_run in (["--dry-run"], []):
        said = refused(databases, "import", "study", *words, "--db", "sqlite:///team.db", *dry_run, code=2)
        assert "another study 'toy'" in said and "sqlite:///second.db" in said
    assert read(databases, "study", "list", "--db", "sqlite:///team.db") == []
    printed(databases, "study", "rename", "toy", "theirs", "--db", "sqlite:///second.db")
    assert [row["study"] for row in imported(databases, *words)] == ["toy", "theirs"]


def test_archived_studies_are_left_out_unless_they_are_named(databases: Path) -> None:
    printed(databases, "study", "archive", "toy", "--db", "sqlite:///first.db")
    words = "import", "study", "sqlite:///first.db", "--db", "sqlite:///second.db"
    found = bssearch(*words, cwd=databases)
    assert (found.returncode, found.stdout) == (0, "") and "toy" in found.stderr
    assert printed(databases, *words, "--study", "toy") == "toy\n"


def test_a_source_that_does_not_exist_is_refused_and_not_made(databases: Path) -> None:
    for source in ("sqlite:///none.db", "none.study"):
        told = refused(databases, "import", "study", source, "--db", "sqlite:///team.db", code=3)
        assert "none" in told and "makes it" not in told
    assert not {one.name for one in databases.iterdir()} & {"none.db", "none.study"}
