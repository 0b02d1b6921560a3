"""What holds for every importer of runs: it makes studies of a file, all or none, and names one that it cannot read.

`import study` takes in studies that are made already: `tests/storage/transfer`.

A new importer needs a file of its own kind here, or the first test fails.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bssearch import StudySpec, open_store, registry
from bssearch.exchange.optuna_study import OptunaStudy, optuna_database, write_study
from bssearch.records import StudyRecord, TrialRecord, TrialState
from tests.cli.task import bssearch, printed, ran, read, refused
from tests.factories import EPOCH, make_environment, make_spec, make_trial
from tests.storage.transfer.copies import rows


@cache
def _optuna_database() -> bytes:
    """Return what `export --to optuna` writes."""
    trials = [
        make_trial(3 * index + seed, batch_size=size, seconds=2.5 + seed, steps=100 + seed, seed=seed)
        for index, size in enumerate((32, 64))
        for seed in range(3)
    ]
    trials.append(make_trial(7, batch_size=128, state=TrialState.PRUNED, steps=500))
    record = StudyRecord.created(make_spec(name="optuna").new_study("someone"), EPOCH, make_environment())
    with TemporaryDirectory() as place:
        path = Path(place, "optuna.db")
        write_study(OptunaStudy.of(record, trials, {}), optuna_database(str(path)))
        return path.read_bytes()


IMPORTERS = tuple(name for name in registry.names("importers") if name != "study")

FILES: dict[str, str | Callable[[], bytes]] = {
    "runs": "batch_size,seed,reached,steps,train_seconds,final_metric\n"
    + "".join(f"{size},{seed},true,{100 + seed},{2.5 + seed},0.9{seed}\n" for size in (32, 64) for seed in range(3))
    + "128,0,false,500,60,0.8\n",
    "rcp": json.dumps(
        {
            f"resnet_{size}": {
                "Benchmark": "resnet",
                "BS": size,
                "Hyperparams": {"optimizer": "lars", "opt_base_learning_rate": 7.4},
                "Epochs to converge": epochs,
            }
            for size, epochs in ((1632, [34, 34, 35]), (3264, [36, 35, 37]))
        }
    ),
    "optuna": _optuna_database,
    "curves": "run,seed,batch_size,step,train_seconds,val_acc\n"
    + "".join(
        f"{size}-{seed},{seed},{size},{step},{0.1 * step * size + seed},{step / 50}\n"
        for size in (32, 64)
        for seed in range(3)
        for step in range(10, 41, 10)
    ),
}
"""For each importer a file of runs at two batch sizes or more, each with several seeds, or what makes it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of each importer's kind, and a database with nothing in it."""
    for name, content in FILES.items():
        (tmp_path / f"{name}.txt").write_bytes(content.encode() if isinstance(content, str) else content())
    open_store(f"sqlite:///{tmp_path}/bssearch.db").close()
    return tmp_path


def do(folder: Path, importer: str, *arguments: str) -> list[str]:
    """Import the importer's file; return the studies' names."""
    return ran(folder, "import", importer, f"{importer}.txt", *arguments).stdout.splitlines()


def stored(folder: Path) -> dict[str, tuple[StudyRecord, StudySpec, list[TrialRecord]]]:
    """Return what the folder's database holds, by the studies' names."""
    with open_store(f"sqlite:///{folder}/bssearch.db", write=False) as store:
        studies = [store.studies.get(one.name) for one in store.studies.summaries()]
        return {one.name: (one, StudySpec.model_validate(one.spec), store.trials.of(one.name)) for one in studies}


def refuse(folder: Path, importer: str, *arguments: str, code: int) -> str:
    """Have an import refused with nothing stored; return what was said."""
    before = stored(folder)
    told = refused(folder, "import", importer, *arguments, code=code)
    assert stored(folder) == before
    return told


def test_every_importer_has_a_file_here() -> None:
    assert set(IMPORTERS) == set(FILES)


@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_studies_that_are_printed_are_those_that_are_stored(folder: Path, importer: str) -> None:
    names = do(folder, importer)
    assert names == [importer]  # the file's own
    assert list(stored(folder)) == names
    assert do(folder, importer, "--name", "mine") == ["mine"]
    assert {row["name"] for row in read(folder, "study", "list")} == {importer, "mine"}


@pytest.fixture
def imported(folder: Path, importer: str) -> None:
    """The importer's own file has been imported."""
    do(folder, importer)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_trials_of_a_study_are_finished_and_fit_its_spec(folder: Path, importer: str) -> None:
    (record, spec, trials) = stored(folder)[importer]
    assert record.spec_hash == spec.question_hash
    assert len(trials) == spec.budget.trials
    assert {trial.configuration.batch_size for trial in trials} <= set(spec.batch_sizes)
    assert len({(trial.configuration.key, trial.seed) for trial in trials}) == len(trials)
    for trial in trials:
        outcome = trial.outcome
        assert trial.state.is_finished and outcome is not None
        assert (outcome.steps_to_target is not None) is (trial.state is TrialState.REACHED)
        assert outcome.time_to_target_s is None or outcome.time_to_target_s > 0
        assert outcome.samples == outcome.steps * trial.configuration.batch_size
        assert outcome.wall_seconds >= 0.0


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_studies_are_answered_and_cannot_be_run(folder: Path, importer: str) -> None:
    _, spec, _ = stored(folder)[importer]
    answer = read(folder, "best", importer)
    assert answer["optimal"]["batch_size"] in spec.batch_sizes
    assert [row["batch_size"] for row in answer["batches"]] == list(spec.batch_sizes)
    assert bssearch("study", "confirm", importer, cwd=folder).returncode == 2


@pytest.mark.parametrize("importer", IMPORTERS)
def test_a_name_that_is_taken_or_is_none_stores_nothing(folder: Path, importer: str) -> None:
    (other,) = {"runs", "curves"} - {importer} if importer in ("runs", "curves") else {"runs"}
    do(folder, other)
    assert other in refuse(folder, importer, f"{importer}.txt", "--name", other, code=2)
    assert "'a b'" in refuse(folder, importer, f"{importer}.txt", "--name", "a b", code=2)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("importer", IMPORTERS)
def test_a_second_import_of_the_same_file_changes_nothing(folder: Path, importer: str) -> None:
    before = stored(folder)
    assert "stored already" in ran(folder, "import", importer, f"{importer}.txt").stderr
    assert stored(folder) == before


@pytest.mark.parametrize("importer", IMPORTERS)
def test_a_file_that_is_not_there_or_says_nothing_is_named(folder: Path, importer: str) -> None:
    assert "nowhere.txt" in refuse(folder, importer, "nowhere.txt", code=3)
    (folder / "empty.txt").write_text("")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "folder").mkdir()
    for name in ("empty.txt", "bytes.txt", "folder"):
        assert name in refuse(folder, importer, name, code=2)
    for other in set(FILES) - {importer}:
        assert f"{other}.txt" in refuse(folder, importer, f"{other}.txt", code=2)


def rows_of(folder: Path, database: str) -> dict[str, Any]:
    with open_store(f"sqlite:///{folder}/{database}", write=False) as store:
        return {one.name: rows(store, one.name) for one in store.studies.summaries()}


@pytest.mark.usefixtures("imported")
@pytest.mark.slow
@pytest.mark.parametrize("importer", IMPORTERS)
def test_the_studies_go_into_other_databases_whole(folder: Path, importer: str) -> None:
    for words in (
        ("export", importer, "--to", "study", "--file", "whole.gz"),
        ("import", "study", "whole.gz", "--db", "sqlite:///through-a-file.db"),
        ("import", "study", "sqlite:///bssearch.db", "--db", "sqlite:///merged.db"),
    ):
        printed(folder, *words)
    assert rows_of(folder, "bssearch.db") == rows_of(folder, "through-a-file.db") == rows_of(folder, "merged.db")
