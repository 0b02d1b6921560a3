"""Checkpoints of paused trials in a folder or a remote store: complete or not at all."""

import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import fsspec
import pytest

from bssearch.errors import CheckpointError, UsageError
from bssearch.files import new_guarded_file, new_private_file
from bssearch.search.pruners import checkpoints
from bssearch.search.pruners.checkpoints import (
    HEADER_BYTES,
    Checkpoints,
    CheckpointStore,
    SilentStoreError,
    check_store_url,
)
from tests.factories import EPOCH, make_study_record, not_none
from tests.search.pruners.stores import Troubled, troubled
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def _own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path))


def test_checkpoints_of_two_studies_are_separate_and_survive_a_rename(tmp_path: Path) -> None:
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


def test_an_unwritable_folder_has_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert kept.refusal.endswith(": the path is a link; replace the link with a folder")
    assert not list(victim.iterdir())


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoints(make_study_record())
    kept.folder.mkdir(mode=0o700)
    monkeypatch.setattr("bssearch.files.os.geteuid", lambda: kept.folder.stat().st_uid + 1)
    assert not kept.is_writable()
    assert kept.file_for(1) is None
    assert ": the folder belongs to user " in kept.refusal


def test_a_new_file_follows_no_link_and_is_private(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "trial-1.pt.part"
    victim.write_text("kept")
    place.symlink_to(victim)
    with new_private_file(place) as file:
        file.write(b"new")
    assert victim.read_text() == "kept"
    assert place.read_bytes() == b"new" and not place.is_symlink()
    assert place.stat().st_mode & 0o777 == 0o600


GROUP, ADA, EVE = 54321, 54322, 54323  # ids of a group and two users that no machine has


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
def test_a_folder_opened_to_a_group_is_shared_by_that_group_only(
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
def test_a_folder_not_shared_on_purpose_keeps_its_files_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "open"))
    file = not_none(Checkpoints(make_study_record()).file_for(1))
    with new_guarded_file(file) as content:
        content.write(b"own")
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_in_a_groups_folder_links_and_folders_open_to_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2770)
    monkeypatch.setenv("BSSEARCH_CHECKPOINT_DIR", str(tmp_path / "team"))
    kept, victim = Checkpoints(make_study_record()), tmp_path / "victim"
    victim.mkdir()
    kept.folder.symlink_to(victim)
    assert kept.file_for(1) is None
    assert kept.refusal.endswith(": the path is a link or a file; remove the link or file, or name another path")
    kept.folder.unlink()
    kept.folder.mkdir()
    kept.folder.chmod(0o2777)
    owner = kept.folder.stat().st_uid
    monkeypatch.setattr("bssearch.files.os.geteuid", lambda: owner + 1)
    again = Checkpoints(make_study_record())
    assert again.file_for(1) is None
    assert f": the folder belongs to user {owner} and is not open to group " in again.refusal


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


# Remote stores --------------------------------------------------------------------------------------------------------


MARK = "0123456789abcdef"
CONTENT = os.urandom(5 * 2**20)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path / 'store'}"


@pytest.fixture
def trouble() -> Iterator[type[Troubled]]:
    with troubled() as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "here" / "trial-3.pt"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


def names(url: str) -> list[str]:
    files, root = fsspec.url_to_fs(url)
    return [name.rpartition("/")[2] for name in files.find(root)]


def test_a_stored_file_replaces_an_earlier_one_unchanged(url: str, file: Path, tmp_path: Path) -> None:
    store = CheckpointStore(url, MARK)
    assert store.look().saved == frozenset()
    file.write_bytes(b"earlier")
    store.put(3, file)
    file.write_bytes(CONTENT)
    size = store.put(3, file)
    assert size == HEADER_BYTES + len(CONTENT)
    assert names(url) == ["trial-3.pt"], "no other file is left"
    held = CheckpointStore(url, MARK).look()
    assert held.saved == {3} and held.bytes == size
    there = tmp_path / "elsewhere" / "trial-3.pt"
    CheckpointStore(url, MARK).get(3, there)
    assert there.read_bytes() == CONTENT
    assert [one.name for one in there.parent.iterdir()] == ["trial-3.pt"]
    store.remove(3)
    store.remove(3)
    assert store.look().bytes == 0


def test_studies_are_kept_apart_and_one_is_cleared_alone(url: str, file: Path) -> None:
    one, other = CheckpointStore(url, MARK), CheckpointStore(url, MARK[::-1])
    for store in (one, other):
        store.put(3, file)
    one.clear()
    assert one.look().saved == set() and other.look().saved == {3}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: whole[:-1], "the file has 5242879 of 5242880 bytes"),
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "the file is damaged"),
        (lambda whole: whole[:100], "not a checkpoint of bssearch"),
        (lambda whole: b"", "not a checkpoint of bssearch"),
        (lambda whole: CONTENT, "not a checkpoint of bssearch"),
        (lambda whole: whole.replace(b"bssearch, 1", b"bssearch, 9"), "the file is a checkpoint of bssearch, 9"),
        (lambda whole: whole.replace(b"0123456789abcdef", b"f" * 16), "the file belongs to study ffffffffffffffff"),
        (lambda whole: whole.replace(b'"trial": 3', b'"trial": 4'), "the file belongs to trial 4"),
    ],
)
def test_an_altered_checkpoint_is_refused_and_leaves_no_file(url: str, file: Path, content: object, said: str) -> None:
    store = CheckpointStore(url, MARK)
    store.put(3, file)
    files, root = fsspec.url_to_fs(url)
    path = f"{root}/{MARK}/trial-3.pt"
    files.pipe_file(path, content(files.cat_file(path)))  # type: ignore[operator]
    file.unlink()
    with pytest.raises(CheckpointError, match="downloading trial 3 failed: ") as raised:
        store.get(3, file)
    assert said in raised.value.message
    assert not list(file.parent.iterdir())


def test_a_missing_checkpoint_is_named(url: str, file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"downloading trial 3 failed: file not found: .*trial-3\.pt"):
        CheckpointStore(url, MARK).get(3, file)


def test_a_full_store_keeps_no_part_of_a_file(tmp_path: Path, file: Path, trouble: type[Troubled]) -> None:
    url = f"troubled://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    store = CheckpointStore(url, MARK)
    store.put(3, file)
    trouble.is_full = True
    with pytest.raises(CheckpointError, match="storing trial 3 failed: No space left on device"):
        store.put(3, file)
    assert store.look().bytes == 0, "nor of the earlier one, which the trial has left behind"


def test_an_unreachable_store_is_named_by_every_operation(tmp_path: Path, file: Path, trouble: type[Troubled]) -> None:
    trouble.is_away = True
    (tmp_path / "store").mkdir()
    store = CheckpointStore(f"troubled://{tmp_path}/store", MARK)
    for ask in (store.look, store.try_out, lambda: store.put(3, file), lambda: store.get(3, file)):
        with pytest.raises(CheckpointError, match=f"the checkpoint store troubled://{tmp_path}/store: .*refused"):
            ask()


def test_a_missing_folder_is_not_made_because_its_mount_may_be_missing(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path / 'mount'}", MARK)
    with pytest.raises(CheckpointError, match="writing failed: file not found: "):
        store.try_out()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def slow_store(tmp_path: Path, trouble: type[Troubled], monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A store that counts as silent after 0.5 s."""
    monkeypatch.setattr(checkpoints, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(checkpoints, "TICK_SECONDS", 0.01)
    (tmp_path / "store").mkdir()
    return CheckpointStore(f"troubled://{tmp_path}/store", MARK)


def test_a_silent_store_is_given_up_and_leaves_no_file_when_it_wakes(
    slow_store: CheckpointStore, file: Path, tmp_path: Path, trouble: type[Troubled]
) -> None:
    slow_store.put(4, file)
    trouble.holds = "rw"
    with pytest.raises(SilentStoreError, match=r"storing trial 3 failed: no progress for 0\.5 s"):
        slow_store.put(3, file)
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(SilentStoreError, match=r"downloading trial 4 failed: no progress for 0\.5 s"):
        slow_store.get(4, there / "trial-4.pt")
    trouble.goes_on.set()
    wait_for(lambda: not list(there.iterdir()))
    while slow_store.look().sizes.keys() != {4}:
        threading.Event().wait(0.01)


def test_a_transfer_that_makes_progress_may_take_longer_than_the_patience(
    slow_store: CheckpointStore, file: Path, trouble: type[Troubled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 2**19)
    monkeypatch.setattr(trouble, "seconds_per_write", 0.1)
    began = time.monotonic()
    slow_store.put(3, file)
    assert time.monotonic() - began > 2 * checkpoints.PATIENCE_SECONDS
    assert slow_store.look().saved == {3}


def test_an_interrupted_download_ends_and_leaves_the_old_file(
    slow_store: CheckpointStore, file: Path, trouble: type[Troubled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PATIENCE_SECONDS", 60.0)
    slow_store.put(3, file)
    trouble.holds = "rw"
    file.write_bytes(b"of before")
    with pytest.raises(CheckpointError, match="no longer wanted"):
        slow_store.get(3, file, is_wanted=lambda: not trouble.is_held.is_set())
    trouble.goes_on.set()
    slow_store.get(3, file.with_name("later"))  # by then the earlier one has ended or is about to
    while len(list(file.parent.iterdir())) > 2:
        threading.Event().wait(0.01)
    assert file.read_bytes() == b"of before"


def test_an_error_shows_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Telling(Troubled):
        protocol = "telling"

        def ls(self, path: str, detail: bool = False, **kwargs: object) -> object:
            raise OSError(f"telling://ada:s3cr%40t@host{tmp_path} and s3cr@t do not let you in")

    with troubled():
        fsspec.register_implementation("telling", Telling, clobber=True)
        store = CheckpointStore(f"telling://ada:s3cr%40t@host{tmp_path}", MARK)
        with pytest.raises(CheckpointError) as raised:
            store.look()
    assert "do not let you in" in raised.value.message
    assert "s3cr" not in raised.value.message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "lacking://bucket/folder",
            "lacking://bucket/folder' needs a package that is not installed: Install lackingfs",
        ),
        ("nowhere://x", r"unknown protocol nowhere://; choose from .*memory"),
        ("s3://", "is not a folder or URL"),
        ("simplecache::memory://x", "is not a folder or URL"),
        ("lacking://ada:s3cr@t@host/x", r"lacking://ada:\*\*\*@host/x"),
    ],
)
def test_an_invalid_url_or_a_missing_package_is_a_usage_error(given: str, said: str) -> None:
    fsspec.register_implementation("lacking", "lackingfs.Files", clobber=True, errtxt="Install lackingfs")
    with pytest.raises(UsageError, match=said) as raised:
        check_store_url(given)
    assert "s3cr" not in raised.value.message
