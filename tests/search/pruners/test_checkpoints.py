"""Checkpoints of paused trials in a folder."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import pytest

from bssearch.errors import CheckpointError
from bssearch.files import new_guarded_file, new_private_file
from bssearch.search.pruners.checkpoints import Checkpoints
from tests.factories import EPOCH, make_study_record, not_none
from tests.search.pruners.stores import troubled


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
    file = not_none(kept.file_for(3))
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
    assert kept.refusal.endswith(": it is a link, not a folder")
    assert not list(victim.iterdir())


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoints(make_study_record())
    kept.folder.mkdir(mode=0o700)
    monkeypatch.setattr("bssearch.files.os.geteuid", lambda: kept.folder.stat().st_uid + 1)
    assert not kept.is_writable()
    assert kept.file_for(1) is None
    assert ": it belongs to the user number " in kept.refusal


def test_a_new_file_follows_no_link_and_is_readable_by_nobody_else(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "trial-1.pt.part"
    victim.write_text("kept")
    place.symlink_to(victim)
    with new_private_file(place) as file:
        file.write(b"new")
    assert victim.read_text() == "kept"
    assert place.read_bytes() == b"new" and not place.is_symlink()
    assert place.stat().st_mode & 0o777 == 0o600


GROUP, ADA, EVE = 54321, 54322, 54323
"""Ids of a group and two users that no machine has."""


@contextmanager
def user(number: int, *groups: int) -> Iterator[None]:
    """Act as another user, with these additional groups."""
    before = os.getgroups(), os.getegid()
    os.setgroups(groups)
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(before[1])
        os.setgroups(before[0])


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A folder that every user of this machine can list."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "team").mkdir()
        yield Path(name) / "team"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes several users")
def test_a_folder_that_its_owner_opened_to_a_group_is_shared_by_that_group_and_nobody_else(
    for_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(for_all))
    os.chown(for_all, ADA, GROUP)
    for_all.chmod(0o2770)
    with user(ADA, GROUP):
        kept = Checkpoints(make_study_record())
        assert kept.is_writable()
        file = not_none(kept.file_for(1))
        with new_guarded_file(file) as content:
            content.write(b"ada's")
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o2770
    assert (stat.S_IMODE(file.stat().st_mode), file.stat().st_gid) == (0o660, GROUP)
    with user(EVE, GROUP):
        colleague = Checkpoints(make_study_record())
        assert colleague.has(1) and file.read_bytes() == b"ada's"
        with new_guarded_file(file) as content:
            content.write(b"eve's")
        colleague.forget(1)
        colleague.close()
        assert not colleague.folder.exists()
    with user(EVE):
        stranger = Checkpoints(make_study_record())
        assert not stranger.is_writable() and stranger.file_for(2) is None
        assert stranger.refusal.endswith(": Permission denied")


@pytest.mark.parametrize("mode", [0o770, 0o2777, 0o2750])
def test_a_folder_that_is_not_a_groups_on_purpose_keeps_its_files_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "open"))
    file = not_none(Checkpoints(make_study_record()).file_for(1))
    with new_guarded_file(file) as content:
        content.write(b"own")
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_in_a_groups_folder_neither_a_link_nor_what_is_open_to_all_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2770)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "team"))
    kept, victim = Checkpoints(make_study_record()), tmp_path / "victim"
    victim.mkdir()
    kept.folder.symlink_to(victim)
    assert kept.file_for(1) is None
    assert kept.refusal.endswith(": it is a link, not a folder")
    kept.folder.unlink()
    kept.folder.mkdir()
    kept.folder.chmod(0o2777)
    owner = kept.folder.stat().st_uid
    monkeypatch.setattr("bssearch.files.os.geteuid", lambda: owner + 1)
    again = Checkpoints(make_study_record())
    assert again.file_for(1) is None
    assert f": it belongs to the user number {owner}, and is not for the group number " in again.refusal


def test_a_folder_that_another_driver_removes_in_this_moment_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, tries = Checkpoints(make_study_record()), list[Path]()

    def open_late(path: Path) -> BinaryIO:
        tries.append(path)
        if len(tries) == 1:
            kept.close()
        return new_private_file(path)

    monkeypatch.setattr("bssearch.files.new_private_file", open_late)
    with new_guarded_file(not_none(kept.file_for(1))) as content:
        content.write(b"saved")
    assert len(tries) == 2 and kept.has(1)


@pytest.mark.parametrize(("seconds_left_alone", "is_asked_again"), [(600.0, False), (0.0, True)])
def test_a_store_that_was_silent_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_left_alone: float, is_asked_again: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", f"troubled://{tmp_path}/store")
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.SILENT_SECONDS", seconds_left_alone)
    monkeypatch.setattr("bssearch.search.pruners.checkpoints.PATIENCE_SECONDS", 0.1)
    (tmp_path / "store").mkdir()
    with troubled() as store:
        kept = Checkpoints(make_study_record())
        file = not_none(kept.file_for(1))
        file.write_bytes(b"saved")
        kept.send(1)
        assert kept.has(1) and not file.exists()
        store.holds = "r"
        with pytest.raises(CheckpointError, match="no progress for"):
            kept.bring(1, lambda: True)
        assert kept.has(1) is is_asked_again
        assert bool(kept.away) is not is_asked_again
