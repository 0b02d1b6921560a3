"""Whole studies on the command line: out of a database into a file, and into another database."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bssearch.storage.migrate import SCHEMA_HEAD
from bssearch.storage.repository import open_store
from tests.cli.conftest import search_by_law
from tests.cli.task import bssearch, printed, read, refused
from tests.schema import execute


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    search_by_law(place / "first.db")
    search_by_law(place / "second.db", name="other")
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A folder with first.db, which has the study toy, and second.db, which has the study other."""
    return Path(shutil.copytree(made, tmp_path / "folder"))


def imported(folder: Path, *words: str, db: str = "team.db") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(folder, "import", "study", *words, "--db", f"sqlite:///{db}")
    return found


def test_a_study_goes_through_a_file_and_is_answered_and_gone_on_with(folder: Path) -> None:
    assert printed(folder, "export", "toy", "--to", "study", "--db", "sqlite:///first.db") == "toy.bssearch.jsonl.gz\n"
    there = "--db", "sqlite:///team.db"
    assert printed(folder, "import", "study", "toy.bssearch.jsonl.gz", *there) == "toy\n"
    (row,) = imported(folder, "toy.bssearch.jsonl.gz")
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
    before = {**read(folder, "best", "--db", "sqlite:///first.db"), "next": []}
    assert {**read(folder, "best", *there), "next": []} == before
    search_by_law(folder / "team.db", trials=7)
    assert len(read(folder, "trial", "list", *there)) == 7
    assert "toy" in printed(folder, "report", "toy", *there)


@pytest.mark.slow
def test_another_name_is_given_where_the_study_is_new(folder: Path) -> None:
    printed(folder, "export", "toy", "--to", "study", "--file", "a.gz", "--db", "sqlite:///first.db")
    search_by_law(folder / "team.db")  # another study of its name
    assert "--as NAME" in refused(folder, "import", "study", "a.gz", "--db", "sqlite:///team.db", code=2)
    assert [row["study"] for row in imported(folder, "a.gz", "--as", "theirs")] == ["theirs"]
    assert read(folder, "best", "theirs", "--db", "sqlite:///team.db")["study"] == "theirs"


def test_several_studies_are_exported_each_into_its_own_file(folder: Path) -> None:
    imported(folder, "sqlite:///first.db", db="second.db")
    words = "export", "toy", "other", "--to", "study", "--db", "sqlite:///second.db"
    assert printed(folder, *words).split() == ["toy.bssearch.jsonl.gz", "other.bssearch.jsonl.gz"]
    refused(folder, *words, "--file", "x", code=2)


def test_files_and_databases_are_imported_together_and_stay_as_they_are(folder: Path) -> None:
    printed(folder, "export", "toy", "--to", "study", "--db", "sqlite:///first.db")
    before = {name: (folder / name).read_bytes() for name in ("first.db", "second.db", "toy.bssearch.jsonl.gz")}
    words = "toy.bssearch.jsonl.gz", "sqlite:///second.db", "sqlite:///first.db"
    found = [(row["study"], row["is_new"], row["is_changed"]) for row in imported(folder, *words)]
    assert found == [("toy", True, True), ("other", True, True), ("toy", False, False)]
    assert not any(row["is_changed"] for row in imported(folder, *words))
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_dry_run_stores_nothing_and_one_study_may_be_named(folder: Path) -> None:
    words = "import", "study", "sqlite:///first.db", "--db"
    before = (folder / "second.db").read_bytes()
    dry = bssearch(*words, "sqlite:///second.db", "--dry-run", "--format", "json", cwd=folder)
    assert json.loads(dry.stdout)[0]["is_new"] and "nothing was stored" in dry.stderr
    assert (folder / "second.db").read_bytes() == before
    assert "'x' in sqlite:///first.db" in refused(folder, *words, "sqlite:///second.db", "--study", "x", code=3)
    refused(folder, *words, "sqlite:///new.db", "--dry-run", code=4)
    assert not (folder / "new.db").exists()
    found = imported(folder, "sqlite:///first.db", "sqlite:///second.db", "--study", "other", db="third.db")
    assert [row["study"] for row in found] == ["other"]


def test_sources_that_contradict_each_other_are_refused_and_none_is_stored(folder: Path) -> None:
    (folder / "second.db").unlink()
    search_by_law(folder / "second.db")  # another study of the name toy
    open_store(f"sqlite:///{folder}/team.db").close()
    words = "sqlite:///first.db", "sqlite:///second.db"
    for dry_run in (["--dry-run"], []):
        said = refused(folder, "import", "study", *words, "--db", "sqlite:///team.db", *dry_run, code=2)
        assert "another study 'toy'" in said and "sqlite:///second.db" in said
    assert read(folder, "study", "list", "--db", "sqlite:///team.db") == []
    printed(folder, "study", "rename", "toy", "theirs", "--db", "sqlite:///second.db")
    assert [row["study"] for row in imported(folder, *words)] == ["toy", "theirs"]


def test_archived_studies_are_left_out_unless_they_are_named(folder: Path) -> None:
    printed(folder, "study", "archive", "toy", "--db", "sqlite:///first.db")
    words = "import", "study", "sqlite:///first.db", "--db", "sqlite:///second.db"
    found = bssearch(*words, cwd=folder)
    assert (found.returncode, found.stdout) == (0, "") and "toy" in found.stderr
    assert printed(folder, *words, "--study", "toy") == "toy\n"


def test_a_database_of_a_newer_version_is_refused(folder: Path) -> None:
    execute(folder / "first.db", "UPDATE bss_alembic_version SET version_num = '9999'")
    said = refused(folder, "import", "study", "sqlite:///first.db", "--db", "sqlite:///team.db", code=4)
    assert "9999" in said and SCHEMA_HEAD in said


def test_a_source_that_does_not_exist_is_refused_and_not_made(folder: Path) -> None:
    for source in ("sqlite:///none.db", "none.study"):
        told = refused(folder, "import", "study", source, "--db", "sqlite:///team.db", code=3)
        assert "none" in told and "makes it" not in told
    assert not {one.name for one in folder.iterdir()} & {"none.db", "none.study"}


def test_no_password_is_shown(folder: Path) -> None:
    words = "import", "study", "sqlite:///first.db", "--db"
    said = refused(
        folder, "import", "study", "postgresql://me:secret@host:badport/x", *words[3:], "sqlite:///a.db", code=2
    )
    said += refused(folder, *words, "mysql://me:secret@host/x", code=2)
    assert "secret" not in said
