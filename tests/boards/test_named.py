"""Which boards a study has, and what refuses one that is not there before anything runs."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from bssearch import registry
from bssearch.boards.base import without_secrets
from bssearch.boards.named import LIBRARIES, boards_of, check_boards
from bssearch.errors import SpecError, UsageError
from bssearch.spec import StudySpec, load_spec
from tests.cli.task import INLINE, SPEC, refused, write_task
from tests.factories import make_spec


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
