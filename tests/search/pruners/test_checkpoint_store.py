"""Paused trials in a remote store: checkpoints arrive complete or not at all."""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bssearch.errors import CheckpointError, UsageError
from bssearch.search.pruners import checkpoints
from bssearch.search.pruners.checkpoints import HEADER_BYTES, CheckpointStore, SilentStoreError, check_store_url
from tests.search.pruners.stores import Troubled, troubled
from tests.waiting import wait_for

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


def test_a_file_comes_back_as_it_was_in_the_place_of_an_earlier_one(url: str, file: Path, tmp_path: Path) -> None:
    store = CheckpointStore(url, MARK)
    assert store.look().saved == frozenset()
    file.write_bytes(b"earlier")
    store.put(3, file)
    file.write_bytes(CONTENT)
    size = store.put(3, file)
    assert size == HEADER_BYTES + len(CONTENT)
    assert names(url) == ["trial-3.pt"], "nothing else is left"
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
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "the file is damaged: its SHA-256 differs"),
        (lambda whole: whole[:100], "not a checkpoint of bssearch"),
        (lambda whole: b"", "not a checkpoint of bssearch"),
        (lambda whole: CONTENT, "not a checkpoint of bssearch"),
        (lambda whole: whole.replace(b"bssearch, 1", b"bssearch, 9"), "the file is a checkpoint of bssearch, 9"),
        (lambda whole: whole.replace(b"0123456789abcdef", b"f" * 16), "the file belongs to study ffffffffffffffff"),
        (lambda whole: whole.replace(b'"trial": 3', b'"trial": 4'), "the file belongs to trial 4"),
    ],
)
def test_what_was_not_stored_so_is_refused_and_nothing_of_it_is_left_here(
    url: str, file: Path, content: object, said: str
) -> None:
    store = CheckpointStore(url, MARK)
    store.put(3, file)
    files, root = fsspec.url_to_fs(url)
    path = f"{root}/{MARK}/trial-3.pt"
    files.pipe_file(path, content(files.cat_file(path)))  # type: ignore[operator]
    file.unlink()
    with pytest.raises(CheckpointError, match="trial 3 cannot be downloaded: ") as raised:
        store.get(3, file)
    assert said in raised.value.message
    assert not list(file.parent.iterdir())


def test_what_is_gone_is_named(url: str, file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"trial 3 cannot be downloaded: file not found: .*trial-3\.pt"):
        CheckpointStore(url, MARK).get(3, file)


def test_where_the_store_is_full_nothing_is_left_of_the_try(
    tmp_path: Path, file: Path, trouble: type[Troubled]
) -> None:
    url = f"troubled://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    store = CheckpointStore(url, MARK)
    store.put(3, file)
    trouble.is_full = True
    with pytest.raises(CheckpointError, match="trial 3 cannot be stored: No space left on device"):
        store.put(3, file)
    assert store.look().bytes == 0, "nor of the earlier one, which the trial has left behind"


def test_a_store_that_is_away_is_named_whatever_is_asked_of_it(
    tmp_path: Path, file: Path, trouble: type[Troubled]
) -> None:
    trouble.is_away = True
    (tmp_path / "store").mkdir()
    store = CheckpointStore(f"troubled://{tmp_path}/store", MARK)
    for ask in (store.look, store.try_out, lambda: store.put(3, file), lambda: store.get(3, file)):
        with pytest.raises(CheckpointError, match=f"the checkpoint store troubled://{tmp_path}/store: .*refused"):
            ask()


def test_a_folder_that_is_not_there_is_not_made_for_a_mount_may_be_away(tmp_path: Path) -> None:
    store = CheckpointStore(f"file://{tmp_path / 'mount'}", MARK)
    with pytest.raises(CheckpointError, match="cannot be written: file not found: "):
        store.try_out()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def slow_store(tmp_path: Path, trouble: type[Troubled], monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A store that counts as silent after 0.5 s."""
    monkeypatch.setattr(checkpoints, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(checkpoints, "TICK_SECONDS", 0.01)
    (tmp_path / "store").mkdir()
    return CheckpointStore(f"troubled://{tmp_path}/store", MARK)


def test_a_store_that_stays_silent_is_given_up_and_leaves_nothing_behind_when_it_wakes(
    slow_store: CheckpointStore, file: Path, tmp_path: Path, trouble: type[Troubled]
) -> None:
    slow_store.put(4, file)
    trouble.holds = "rw"
    with pytest.raises(SilentStoreError, match=r"trial 3 cannot be stored: no progress for 0\.5 s"):
        slow_store.put(3, file)
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(SilentStoreError, match=r"trial 4 cannot be downloaded: no progress for 0\.5 s"):
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


def test_a_file_that_is_not_wanted_any_more_is_waited_for_no_longer_and_is_not_put_in_its_place(
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
def test_a_url_that_is_none_or_needs_a_package_is_a_usage_error(given: str, said: str) -> None:
    fsspec.register_implementation("lacking", "lackingfs.Files", clobber=True, errtxt="Install lackingfs")
    with pytest.raises(UsageError, match=said) as raised:
        check_store_url(given)
    assert "s3cr" not in raised.value.message
