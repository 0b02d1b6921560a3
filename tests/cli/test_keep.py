"""Studies are renamed, put away, brought back and deleted; nothing is lost without being asked for."""

import os
import pty
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from bssearch.storage.repository import open_store
from tests.cli.conftest import search_by_law
from tests.cli.task import bssearch, printed, read, refused
from tests.search.pruners.stores import troubled


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("measured")
    for name in ("task", "other"):
        search_by_law(place / "bssearch.db", name)
    return place


def names(folder: Path) -> list[str]:
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        return [one.name for one in store.studies.summaries()]


def at_a_terminal(folder: Path, *arguments: str, typed: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose input is a terminal at which a line is typed."""
    ours, theirs = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, closing(os.fdopen(theirs)) as terminal:
        patch.setattr(sys, "stdin", terminal)
        os.write(ours, typed.encode() + b"\n")
        done = bssearch(*arguments, cwd=folder)
    os.close(ours)
    return done


def test_a_renamed_study_keeps_its_trials_and_goes_on_under_its_new_name(folder: Path) -> None:
    before = read(folder, "trial", "list", "task")
    assert read(folder, "study", "rename", "task", "better") == {"study": "better", "renamed_from": "task"}
    assert names(folder) == ["better", "other"]
    assert read(folder, "trial", "list", "better") == before
    search_by_law(folder / "bssearch.db", "better", trials=6)
    kept = read(folder, "trial", "list", "better")[:5]
    assert [{**row, "answer": None} for row in kept] == [{**row, "answer": None} for row in before]
    assert len(read(folder, "trial", "list", "better")) == 6


def test_an_archived_study_is_out_of_sight_until_it_is_brought_back(folder: Path) -> None:
    printed(folder, "study", "archive", "other")
    assert [row["name"] for row in read(folder, "study", "list")] == ["task"]
    listed = read(folder, "study", "list", "--all")
    assert [(row["name"], row["archived_at"] is not None) for row in listed] == [("task", False), ("other", True)]
    assert "archived at" in printed(folder, "study", "list", "--all")
    assert read(folder, "study", "show")["study"] == "task"
    assert len(read(folder, "trial", "list", "other")) == 5
    printed(folder, "study", "archive", "task")
    assert "every study of the database is archived" in refused(folder, "best", code=3)
    printed(folder, "study", "archive", "other", "--undo")
    assert [row["name"] for row in read(folder, "study", "list")] == ["other"]


def test_deleting_without_a_terminal_takes_a_yes(folder: Path) -> None:
    with open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as store:
        observations = sum(map(len, store.trials.curves("task", range(1, 6)).values()))
    what = f"study task with 5 trials and {observations} observations"
    assert f"cannot confirm the deletion of {what}" in refused(folder, "study", "delete", "task", code=2)
    assert names(folder) == ["task", "other"]
    assert what in printed(folder, "study", "delete", "task", "--yes")
    assert names(folder) == ["other"]
    assert len(read(folder, "trial", "list", "other")) == 5


def test_what_waited_of_a_deleted_study_goes_and_where_the_store_is_away_that_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with troubled() as store, open_store(f"sqlite:///{folder / 'bssearch.db'}", write=False) as studies:
        (tmp_path / "store").mkdir()
        monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", f"troubled://{tmp_path}/store")
        for name in ("task", "other"):
            (tmp_path / "store" / studies.studies.get(name).mark).mkdir()
            (tmp_path / "store" / studies.studies.get(name).mark / "trial-1.pt").touch()
        printed(folder, "study", "delete", "task", "--yes")
        assert len(list((tmp_path / "store").rglob("trial-1.pt"))) == 1
        store.is_away = True
        done = bssearch("study", "delete", "other", "--yes", cwd=folder)
    assert (done.returncode, names(folder)) == (0, [])
    left = "checkpoints of paused trials may remain"
    assert f"{left}: the checkpoint store troubled://{tmp_path}/store: " in done.stderr
    assert "; delete the files\n" in done.stderr


def test_at_a_terminal_deleting_asks_for_the_name(folder: Path) -> None:
    wrong = at_a_terminal(folder, "study", "delete", "task", typed="y")
    assert wrong.returncode == 2, wrong.stderr
    assert "bssearch keeps the study" in wrong.stderr
    assert names(folder) == ["task", "other"]
    right = at_a_terminal(folder, "study", "delete", "task", typed="task")
    assert right.returncode == 0, right.stderr
    assert "bssearch will delete study task with 5 trials and" in right.stderr
    assert names(folder) == ["other"]


@pytest.mark.parametrize("arguments", [("rename", "a", "b"), ("archive", "a"), ("delete", "a", "--yes")])
def test_no_database_is_made_to_look_for_a_study(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    refused(tmp_path, "study", *arguments, code=4)
    assert list(tmp_path.iterdir()) == []
