"""Where the trials of a study that wait are kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bssearch.files import new_private_file
from bssearch.pruners.checkpoints import Checkpoints
from tests.factories import EPOCH, make_study_record


@pytest.fixture(autouse=True)
def _own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path))


def test_checkpoints_of_two_studies_are_kept_apart_and_stay_where_one_is_renamed(tmp_path: Path) -> None:
    one = make_study_record()
    kept = Checkpoints(one)
    others = [
        Checkpoints(replace(one, created_by="other")),
        Checkpoints(replace(one, created_at=EPOCH + timedelta(seconds=1))),
    ]
    assert kept.held().bytes == 0
    assert not kept.folder.exists()
    file = kept.file_for(3)
    assert file is not None
    assert file.is_relative_to(tmp_path)
    file.write_bytes(b"abc")
    assert kept.has(3)
    assert not kept.has(4)
    assert kept.held().bytes == 3
    assert kept.held().saved == {3}
    assert not any(other.has(3) for other in others)
    assert Checkpoints(replace(one, name="renamed")).has(3)
    file.with_name(f"{file.name}.part").touch()
    kept.forget(4)
    kept.close()
    assert kept.has(3)
    kept.forget(3)
    assert not list(kept.folder.iterdir())
    kept.close()
    assert not kept.folder.exists()
    kept.clear()
    kept.clear()
    assert not kept.folder.exists()


def test_where_nothing_can_be_written_there_are_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(blocked))
    kept = Checkpoints(make_study_record())
    assert kept.file_for(0) is None
    assert not kept.has(0)
    assert kept.held().bytes == 0
    kept.forget(0)
    kept.clear()


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    kept = Checkpoints(make_study_record())
    kept.folder.mkdir(mode=0o777)
    kept.folder.chmod(0o777)
    assert kept.is_writable()
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert kept.file_for(1) is not None


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    kept, victim = Checkpoints(make_study_record()), tmp_path / "victim"
    victim.mkdir()
    kept.folder.symlink_to(victim)
    assert not kept.is_writable()
    assert kept.file_for(1) is None
    assert kept.why_not == "it is a link, not a folder"
    assert not list(victim.iterdir())


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoints(make_study_record())
    kept.folder.mkdir(mode=0o700)
    monkeypatch.setattr("bssearch.files.os.geteuid", lambda: kept.folder.stat().st_uid + 1)
    assert not kept.is_writable()
    assert kept.file_for(1) is None
    assert kept.why_not.startswith("it belongs to the user number ")


def test_a_new_file_follows_no_link_and_is_readable_by_nobody_else(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "trial-1.pt.part"
    victim.write_text("kept")
    place.symlink_to(victim)
    with new_private_file(place) as file:
        file.write(b"new")
    assert victim.read_text() == "kept"
    assert place.read_bytes() == b"new" and not place.is_symlink()
    assert place.stat().st_mode & 0o777 == 0o600
