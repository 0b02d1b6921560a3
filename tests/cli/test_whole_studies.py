"""Whole studies on the command line: out of a database into a file, into another, and merged."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bssearch.commands.run import run_study
from bssearch.storage.migrate import SCHEMA_HEAD
from bssearch.storage.repository import open_store
from tests.cli.task import bssearch
from tests.factories import make_spec
from tests.search.law import LawExecutor


def run_by_law(database: Path, *, name: str = "toy", trials: int = 5) -> None:
    spec = make_spec(name=name, budget={"trials": trials, "trial_train_seconds": 100.0}, confirm={"top": 1, "runs": 0})
    run_study(spec, db=f"sqlite:///{database}", make_executor=lambda *_: LawExecutor())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    run_by_law(place / "first.db")
    run_by_law(place / "second.db", name="other")
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A folder with first.db, which has the study toy, and second.db, which has the study other."""
    return Path(shutil.copytree(made, tmp_path / "folder"))


def done(folder: Path, *words: str) -> str:
    found = bssearch(*words, cwd=folder)
    assert found.returncode == 0, found.stderr
    return found.stdout


def refused(folder: Path, code: int, *words: str) -> str:
    found = bssearch(*words, cwd=folder)
    assert (found.returncode, found.stdout) == (code, ""), found.stderr
    assert "Traceback" not in found.stderr
    return found.stderr


def test_a_study_goes_through_a_file_and_is_answered_and_gone_on_with(folder: Path) -> None:
    assert done(folder, "export", "toy", "--to", "study", "--db", "sqlite:///first.db") == "toy.bssearch.jsonl.gz\n"
    there = "--db", "sqlite:///there.db"
    assert done(folder, "import", "study", "toy.bssearch.jsonl.gz", *there) == "toy\n"
    (row,) = json.loads(done(folder, "import", "study", "toy.bssearch.jsonl.gz", *there, "--format", "json"))
    assert (row["study"], row["is_new"], row["is_changed"], row["trials_known"]) == ("toy", False, False, 5)
    before = json.loads(done(folder, "best", "--db", "sqlite:///first.db", "--format", "json"))
    assert json.loads(done(folder, "best", *there, "--format", "json")) == before
    run_by_law(folder / "there.db", trials=7)
    assert len(json.loads(done(folder, "trials", *there, "--format", "json"))) == 7
    assert "toy" in done(folder, "report", "toy", *there)


@pytest.mark.slow
def test_another_name_is_given_where_the_study_is_new(folder: Path) -> None:
    done(folder, "export", "toy", "--to", "study", "--file", "a.gz", "--db", "sqlite:///first.db")
    run_by_law(folder / "there.db")  # another study of its name
    there = "--db", "sqlite:///there.db"
    said = refused(folder, 2, "import", "study", "a.gz", *there)
    assert "there is another study 'toy'" in said and "--as NAME" in said
    assert done(folder, "import", "study", "a.gz", "--as", "theirs", *there) == "theirs\n"
    assert json.loads(done(folder, "best", "theirs", *there, "--format", "json"))["study"] == "theirs"


def test_several_studies_are_exported_each_into_its_own_file(folder: Path) -> None:
    done(folder, "merge", "sqlite:///first.db", "--into", "sqlite:///second.db")
    words = "export", "toy", "other", "--to", "study", "--db", "sqlite:///second.db"
    assert done(folder, *words).split() == ["toy.bssearch.jsonl.gz", "other.bssearch.jsonl.gz"]
    assert "--file = x is one place, and there are 2 studies" in refused(folder, 2, *words, "--file", "x")


def test_databases_are_merged_and_stay_as_they_are(folder: Path) -> None:
    before = {name: (folder / name).read_bytes() for name in ("first.db", "second.db")}
    words = "merge", "sqlite:///first.db", "sqlite:///second.db", "--into", "sqlite:///team.db", "--format", "json"
    assert [(row["study"], row["is_new"]) for row in json.loads(done(folder, *words))] == [
        ("toy", True),
        ("other", True),
    ]
    assert not any(row["is_changed"] for row in json.loads(done(folder, *words)))
    assert {name: (folder / name).read_bytes() for name in before} == before
    listed = json.loads(done(folder, "studies", "--db", "sqlite:///team.db", "--format", "json"))
    assert {row["name"] for row in listed} == {"toy", "other"}


def test_a_dry_run_stores_nothing_and_one_study_may_be_named(folder: Path) -> None:
    team = "--into", "sqlite:///second.db"
    before = (folder / "second.db").read_bytes()
    dry = bssearch("merge", "sqlite:///first.db", *team, "--dry-run", "--format", "json", cwd=folder)
    assert json.loads(dry.stdout)[0]["is_new"] and "nothing was stored" in dry.stderr
    assert (folder / "second.db").read_bytes() == before
    assert "no study 'x' in sqlite:///first.db" in refused(
        folder, 3, "merge", "sqlite:///first.db", "--study", "x", *team
    )
    assert "no database at new.db" in refused(
        folder, 4, "merge", "sqlite:///first.db", "--dry-run", "--into", "sqlite:///new.db"
    )
    assert not (folder / "new.db").exists()


def test_a_dry_run_refuses_what_the_merge_refuses_between_its_sources(folder: Path) -> None:
    (folder / "second.db").unlink()
    run_by_law(folder / "second.db")  # another study of the name toy
    open_store(f"sqlite:///{folder}/team.db").close()
    words = "merge", "sqlite:///first.db", "sqlite:///second.db", "--into", "sqlite:///team.db"
    said = refused(folder, 2, *words, "--dry-run")
    assert "there is another study 'toy'" in said and "rename one of the two first" in said
    assert "what came before it is stored" not in said
    assert json.loads(done(folder, "studies", "--db", "sqlite:///team.db", "--format", "json")) == []
    done(folder, "rename", "toy", "theirs", "--db", "sqlite:///second.db")
    assert [row["study"] for row in json.loads(done(folder, *words, "--format", "json"))] == ["toy", "theirs"]


def test_archived_studies_are_left_out_unless_they_are_named(folder: Path) -> None:
    done(folder, "archive", "toy", "--db", "sqlite:///first.db")
    words = "merge", "sqlite:///first.db", "--into", "sqlite:///second.db", "--format", "json"
    found = bssearch(*words, cwd=folder)
    assert json.loads(found.stdout) == []
    assert "archived, and left out unless --study names it: toy" in found.stderr
    assert json.loads(done(folder, *words, "--study", "toy"))[0]["is_new"]


def test_a_newer_file_is_refused(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "first.db")) as connection:
        connection.execute("UPDATE bss_alembic_version SET version_num = '9999'")
        connection.commit()
    said = refused(folder, 4, "merge", "sqlite:///first.db", "--into", "sqlite:///team.db")
    assert "written by a newer bssearch" in said and SCHEMA_HEAD in said


def test_a_source_that_contradicts_is_told_with_what_came_before_it(folder: Path) -> None:
    done(folder, "merge", "sqlite:///first.db", "--into", "sqlite:///team.db")
    with closing(sqlite3.connect(folder / "first.db")) as connection:
        connection.execute("UPDATE bss_trial SET final_metric = 0.123 WHERE number = 2")
        connection.commit()
    words = "merge", "sqlite:///second.db", "sqlite:///first.db", "--into", "sqlite:///team.db"
    said = refused(folder, 2, *words)
    assert "study 'toy', trial 2: final_metric = " in said and "and 0.123 in sqlite:///first.db" in said
    assert "what came before it is stored: sqlite:///second.db" in said


def test_no_password_is_shown(folder: Path) -> None:
    said = refused(folder, 2, "merge", "postgresql://me:secret@host:badport/x", "--into", "sqlite:///first.db")
    said += refused(folder, 2, "merge", "sqlite:///first.db", "--into", "mysql://me:secret@host/x")
    assert "secret" not in said
