"""Studies with boards: what boards are told, and that no board changes a study."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bssearch as library
from bssearch import registry
from bssearch.errors import SpecError, UsageError
from bssearch.exchange.boards import base
from bssearch.exchange.boards.base import LIBRARIES, boards_of, check_boards, without_secrets
from bssearch.records import TrialRecord
from bssearch.spec import StudySpec, load_spec
from bssearch.storage.repository import open_store
from tests.cli.task import INLINE, SPEC, refused, write_task
from tests.exchange.boards.conftest import Notebook
from tests.factories import make_spec, not_none
from tests.search.law import LawExecutor
from tests.waiting import Ear


def run(folder: Path, *boards: str) -> tuple[library.Answer, list[TrialRecord], list[str]]:
    """Run a study; return its answer, its trials, and the notes about its boards."""
    url, ear = f"sqlite:///{folder / '-'.join(['study', *boards])}.db", Ear()
    spec = make_spec(log=list(boards), budget={"trials": 8, "trial_train_seconds": 10.0})
    answer = library.run_study(spec, library.Launch(db=url, make_executor=lambda *_: LawExecutor(), listener=ear))
    with open_store(url, write=False) as store:
        return answer, store.trials.of(spec.name), [note for note in ear.notes if note.partition(":")[0] in boards]


@pytest.mark.slow
@pytest.mark.parametrize("board", ["Sleeping", "Holding", "Unmade", "Absent", "Missing", "Away", "Crashing"])
def test_a_study_with_a_bad_board_is_the_study_without_it(
    board: str, tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SILENT_SECONDS", 0.0)
    answer, trials, notes = run(tmp_path, board)
    alone, trials_alone, _ = run(tmp_path)
    assert answer.optimal.batch_size == alone.optimal.batch_size
    assert [(one.state, one.configuration) for one in trials] == [
        (one.state, one.configuration) for one in trials_alone
    ]
    assert len([note for note in notes if " of " in note]) == 1, "the count is said once"


def test_a_board_is_told_what_is_stored(tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SILENT_SECONDS", 1e9)
    monkeypatch.setattr(base, "LAST_SECONDS", 1e9)
    answer, trials, notes = run(tmp_path, "Keeping")
    assert notes == []
    with open_store(f"sqlite:///{tmp_path}/study-Keeping.db", write=False) as store:
        curves = store.trials.curves(answer.study, [trial.number for trial in trials])
    calls = notebook.calls("Keeping")
    of: dict[str, list[dict[str, Any]]] = {call["call"]: [] for call in calls}
    for call in calls:
        of[call["call"]].append(call)
    assert [calls[0]["call"], calls[-2]["call"], calls[-1]["call"]] == ["opened", "answered", "close"]
    assert set(calls[0]["about"]) == {"target", "objective", "device", "spec"}
    assert [call["number"] for call in of["started"]] == [trial.number for trial in trials]
    for trial, start, end in zip(trials, of["started"], of["ended"], strict=True):
        assert start["at"] == trial.created_at.timestamp()
        expected = {"batch_size": trial.configuration.batch_size, "phase": trial.phase, "seed": trial.seed}
        assert expected.items() <= start["parameters"].items()
        assert (end["number"], end["state"], end["is_elsewhere"]) == (trial.number, trial.state, False)
        assert end["figures"]["train_seconds"] == not_none(trial.outcome).train_seconds
        points = [point for call in of["observed"] if call["number"] == trial.number for point in call["points"]]
        for (step, at, figures), stored in zip(points, curves[trial.number], strict=True):
            assert (step, figures["accuracy"], figures["samples"]) == (stored.step, stored.metric, stored.samples)
            assert at == pytest.approx(start["at"] + stored.train_seconds)
    last = of["answered"][-1]
    assert last["trials"] == len(trials)
    assert library.Answer.model_validate_json(last["words"]["document"]).optimal == answer.optimal
    assert last["figures"]["optimal_batch_size"] == last["parameters"]["batch_size"] == answer.optimal.batch_size
    assert (last["figures"]["flat_range_low"], last["figures"]["flat_range_high"]) == tuple(answer.flat_range)


def test_a_process_that_cannot_start_fails_no_study(
    tmp_path: Path, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr("bssearch.commands.reporting.BoardProcess", refuse)
    _, trials, _ = run(tmp_path, "Keeping")
    assert trials
    assert notebook.calls("Keeping") == []


# Which boards ---------------------------------------------------------------------------------------------------------


def test_the_variable_adds_to_what_the_spec_names(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(log=["mlflow"])
    assert boards_of(spec) == ("mlflow",)
    monkeypatch.setenv("BSSEARCH_LOG", " tensorboard,mlflow ,")
    assert boards_of(spec) == ("mlflow", "tensorboard")


def test_an_unknown_board_is_refused_with_the_names_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="tensorboard, mlflow, wandb"):
        load_spec({**SPEC, "log": ["mflow"]})
    with pytest.raises(SpecError, match="'mlflow'"):
        load_spec({**SPEC, "log": ["mlflow", "mlflow"]})
    monkeypatch.setenv("BSSEARCH_LOG", "tensorbord")
    with pytest.raises(UsageError, match=r"BSSEARCH_LOG has 'tensorbord'.* tensorboard, mlflow, wandb"):
        boards_of(make_spec())


@pytest.mark.usefixtures("notebook")
def test_a_board_of_another_package_needs_no_library_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_LOG", "Away")
    names = boards_of(make_spec(log=["Keeping"]))
    assert names == ("Keeping", "Away")
    check_boards(names)


def test_where_it_is_logged_is_no_part_of_the_question() -> None:
    assert make_spec(log=["mlflow"]).question_hash == make_spec().question_hash


def installed(monkeypatch: pytest.MonkeyPatch, *versions: str) -> None:
    """Have each distribution be installed in these versions."""
    found = [SimpleNamespace(version=version) for version in versions]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found)


@pytest.mark.parametrize("command", [("run",), ("run", "--dry-run"), ("check",)], ids=" ".join)
def test_a_board_that_is_not_installed_is_refused_before_anything_runs(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    spec = write_task(tmp_path, log=["mlflow"], executor=INLINE)
    told = refused(tmp_path, *command, spec.name, code=2)
    assert "log = mlflow needs mlflow-skinny >= 3; none is installed" in told
    assert "pip install 'bssearch[mlflow]'" in told
    assert not (tmp_path / "bssearch.db").exists()


@pytest.mark.parametrize(("name", "oldest", "older"), [("mlflow", "3.0", "2.22.0"), ("wandb", "0.19.10", "0.19.9")])
def test_a_board_whose_library_is_too_old_is_refused(
    name: str, oldest: str, older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, oldest)
    check_boards([name])
    installed(monkeypatch, older)
    with pytest.raises(UsageError, match=rf"{name} .*; {older} is installed") as refused:
        check_boards([name])
    assert refused.value.hint == f"pip install 'bssearch[{name}]'"


def test_every_built_in_board_has_a_library_and_is_in_the_schema() -> None:
    names = list(registry.BUILT_IN["boards"])
    assert set(names) == set(LIBRARIES)
    items = StudySpec.model_json_schema()["properties"]["log"]["items"]
    assert items == {"anyOf": [{"enum": names}, {"type": "string"}]}


def test_texts_whose_name_says_that_they_are_secret_are_left_out() -> None:
    values = {
        "workload_settings": {"password": "x", "hf_token": "x", "tokens": 5, "tokenizer": "bpe", "n": [1, 2]},
        "command": ["./train", "--api-key=x", "--password", "x", "--lr", "0.1"],
    }
    assert without_secrets(values) == {
        "workload_settings": {"password": "***", "hf_token": "***", "tokens": 5, "tokenizer": "bpe", "n": [1, 2]},
        "command": ["./train", "--api-key=***", "--password", "***", "--lr", "0.1"],
    }
