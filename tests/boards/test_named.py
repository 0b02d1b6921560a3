"""Which boards a study has, and what refuses one that is not there before anything runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from bssearch.boards.base import load_board
from bssearch.boards.named import LIBRARIES, TARGETS, boards_of, check_boards
from bssearch.boards.reports import without_secrets
from bssearch.errors import SpecError, UsageError
from bssearch.spec import StudySpec, load_spec
from bssearch.spec.parts import BOARDS
from tests.cli.task import INLINE, SPEC, bssearch, write_task
from tests.factories import make_spec


def test_the_variable_adds_to_what_the_spec_names(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(log=["mlflow"])
    assert boards_of(spec) == ("mlflow",)
    monkeypatch.setenv("BSSEARCH_LOG", " tensorboard,mlflow ,")
    assert boards_of(spec) == ("mlflow", "tensorboard")


def test_an_unknown_board_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"there is no board 'mflow', there are .*; did you mean mlflow\?"):
        load_spec({**SPEC, "log": ["mflow"]})
    with pytest.raises(SpecError, match="'mlflow' stands there more than once"):
        load_spec({**SPEC, "log": ["mlflow", "mlflow"]})
    monkeypatch.setenv("BSSEARCH_LOG", "tensorbord")
    with pytest.raises(UsageError, match="BSSEARCH_LOG has 'tensorbord'") as refused:
        boards_of(make_spec())
    assert refused.value.hint == "did you mean tensorboard?"


def test_where_it_is_logged_is_no_part_of_the_question() -> None:
    assert make_spec(log=["mlflow"]).question_hash == make_spec().question_hash


def missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))


@pytest.mark.parametrize("command", [("run",), ("run", "--dry-run"), ("check",)], ids=" ".join)
def test_a_board_that_is_not_installed_is_refused_before_anything_runs(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch, "mlflow")
    spec = write_task(tmp_path, log=["mlflow"], executor=INLINE)
    done = bssearch(*command, spec.name, cwd=tmp_path)
    assert done.returncode == 2
    assert "log = mlflow needs MLflow >= 3, which is not installed" in done.stderr
    assert "pip install 'bssearch[mlflow]'" in done.stderr
    assert not (tmp_path / "bssearch.db").exists()


def test_a_board_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "2.22.0")
    with pytest.raises(UsageError, match=r"log = mlflow needs MLflow >= 3, and 2\.22\.0 is installed"):
        check_boards(["mlflow"])


def test_the_folder_that_a_board_leaves_behind_is_not_taken_for_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nowhere_installed").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    library = LIBRARIES["wandb"]
    monkeypatch.setitem(LIBRARIES, "wandb", type(library)(library.called, "nowhere_installed", "none", (0,)))
    with pytest.raises(UsageError, match="not installed"):
        check_boards(["wandb"])


def test_every_board_of_the_schema_has_a_library_and_a_class() -> None:
    assert set(BOARDS) == set(LIBRARIES) == set(TARGETS)
    assert StudySpec.model_json_schema()["properties"]["log"]["items"] == {"enum": list(BOARDS)}


def test_a_board_is_found_by_its_target() -> None:
    assert type(load_board("tests.boards.fakes:Keeping")).__name__ == "Keeping"


def test_texts_whose_name_says_that_they_are_secret_are_left_out() -> None:
    values = {
        "workload_settings": {"password": "x", "hf_token": "x", "tokens": 5, "tokenizer": "bpe", "n": [1, 2]},
        "command": ["./train", "--api-key=x", "--password", "x", "--lr", "0.1"],
    }
    assert without_secrets(values) == {
        "workload_settings": {"password": "***", "hf_token": "***", "tokens": 5, "tokenizer": "bpe", "n": [1, 2]},
        "command": ["./train", "--api-key=***", "--password", "***", "--lr", "0.1"],
    }
