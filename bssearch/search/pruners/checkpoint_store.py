"""Paused trials in a remote store: any URL that fsspec opens, one object per trial.

An object is a JSON header of `HEADER_BYTES` and the trial's file; written under a temporary name, then moved. Messages
hide secrets of the URL.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from bssearch.errors import CheckpointError, UsageError
from bssearch.files import new_guarded_file
from bssearch.settings import CHECKPOINT_DIR_VARIABLE
from bssearch.storage.connection.urls import masked

HEADER_BYTES = 512  # fits two digests and three numbers

CHUNK_BYTES = 4 * 2**20  # at 1 MB/s there is progress every few seconds

PATIENCE_SECONDS = 60.0  # libraries retry on their part

TICK_SECONDS = 0.2  # delay before an unwanted transfer ends

_KIND = "checkpoint of bssearch, 1"
_NAME = re.compile(r"trial-(\d+)\.pt(\..*)?")

OnProgress = Callable[[], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Held:
    """Saved trials; ``sizes``, in bytes, includes incomplete ones."""

    saved: frozenset[int] = frozenset()
    sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(self.sizes.values())

    def without(self, numbers: Collection[int]) -> Held:
        """Copy without some trials."""
        left = {number: size for number, size in self.sizes.items() if number not in numbers}
        return Held(self.saved.difference(numbers), left)

    def beside(self, number: int, size: int) -> Held:
        """Copy with one more saved trial."""
        return Held(self.saved | {number}, {**self.sizes, number: size})


def held_of(files: Iterable[tuple[str, int]]) -> Held:
    """Trials among files, given as (name, bytes)."""
    saved, sizes = set[int](), Counter[int]()
    for name, size in files:
        if match := _NAME.fullmatch(name):
            sizes[int(match[1])] += size
            if match[2] is None:
                saved.add(int(match[1]))
    return Held(frozenset(saved), sizes)


class SilentStoreError(CheckpointError):
    """The store made no progress for `PATIENCE_SECONDS`."""


class CheckpointStore:
    """Checkpoints of one study, in the folder ``mark`` below a URL.

    Methods block, and raise `CheckpointError` if the store fails or stays silent.
    """

    def __init__(self, url: str, mark: str) -> None:
        check_store_url(url)
        self._url, self._mark = url, mark
        self._shown = masked(url)

    def look(self) -> Held:
        """List the stored trials."""

        def listed(_: OnProgress) -> Held:
            files, folder = self._opened
            files.invalidate_cache(folder)
            try:
                entries = files.ls(folder, detail=True)
            except FileNotFoundError:
                return Held()
            return held_of((entry["name"].rstrip("/").rpartition("/")[2], entry["size"] or 0) for entry in entries)

        return self._ask("it cannot be listed", listed)

    def try_out(self) -> None:
        """Write an object and delete it."""

        def write(_: OnProgress) -> None:
            files, path = self._opened[0], self._path("written")
            self._make_folder()
            files.pipe_file(path, bytes(2**10))
            files.rm_file(path)

        self._ask("nothing can be written to it", write)

    def put(self, number: int, file: Path) -> int:
        """Store or replace a trial's file; return the object's bytes."""

        def write(on_progress: OnProgress) -> int:
            try:
                return self._put(number, file, on_progress)
            except BaseException:
                with suppress(Exception):
                    self._remove(f"trial-{number}.pt.part")
                raise

        return self._ask(f"trial {number} cannot be stored", write)

    def _put(self, number: int, file: Path, on_progress: OnProgress) -> int:
        files, place = self._opened[0], self._path(f"trial-{number}.pt")
        self._make_folder()
        self._remove(f"trial-{number}.pt", f"trial-{number}.pt.part")
        with file.open("rb") as content:
            digest = _digest(content, on_progress)
            header = _header(self._mark, number, content.tell(), digest)
            content.seek(0)
            with files.open(f"{place}.part", "wb") as target:
                target.write(header)
                while chunk := content.read(CHUNK_BYTES):
                    target.write(chunk)
                    on_progress()
            written = HEADER_BYTES + content.tell()
        on_progress()
        files.mv(f"{place}.part", place)
        return written

    def get(self, number: int, file: Path, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Download a trial's file while ``is_wanted``; reject incomplete, damaged or foreign ones."""

        def read(on_progress: OnProgress) -> None:
            # A unique name, because an abandoned upload may still write to the earlier one.
            part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")
            try:
                self._get(number, part, on_progress)
                on_progress()
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)

        self._ask(f"trial {number} cannot be brought back", read, is_wanted)

    def _get(self, number: int, part: Path, on_progress: OnProgress) -> None:
        with self._opened[0].open(self._path(f"trial-{number}.pt"), "rb") as source:
            header = self._checked(number, source.read(HEADER_BYTES))
            with new_guarded_file(part) as target:
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    on_progress()
                size = target.tell()
                target.seek(0)
                digest = _digest(target, on_progress)
        if size != header["bytes"]:
            raise _UnfitError(f"it has {size} of {header['bytes']} bytes")
        if digest != header["sha256"]:
            raise _UnfitError("it is damaged: its SHA-256 is not the one that was stored with it")

    def remove(self, number: int) -> None:
        """Delete a trial's object."""
        names = f"trial-{number}.pt", f"trial-{number}.pt.part"
        self._ask(f"trial {number} cannot be deleted", lambda _: self._remove(*names))

    def clear(self) -> None:
        """Delete all objects."""
        for number in self.look().sizes:
            self.remove(number)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(self._url)
        return files, posixpath.join(root, self._mark)

    def _path(self, name: str) -> str:
        return posixpath.join(self._opened[1], name)

    def _make_folder(self) -> None:
        """Never make the URL's own folder: a mount may be missing."""
        files, folder = self._opened
        with suppress(FileExistsError):
            files.mkdir(folder, create_parents=False)

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._opened[0].rm_file(self._path(name))

    def _checked(self, number: int, header: bytes) -> dict[str, Any]:
        try:
            found = json.loads(header)
            kind, study, trial = found["kind"], found["study"], found["trial"]
        except (ValueError, KeyError, TypeError):
            raise _UnfitError("it is no checkpoint of bssearch") from None
        if kind != _KIND:
            raise _UnfitError(f"it is a {kind}, this bssearch reads a {_KIND}")
        if study != self._mark:
            raise _UnfitError(f"it is that of another study, {study}; this one is {self._mark}")
        if trial != number:
            raise _UnfitError(f"it is that of trial {trial}")
        return dict(found)

    def _ask(
        self, failure: str, work: Callable[[OnProgress], Result], is_wanted: Callable[[], bool] = lambda: True
    ) -> Result:
        kind: type[CheckpointError] = CheckpointError
        try:
            return _patiently(work, is_wanted)
        except Exception as error:
            said = self._told(error)
            kind = SilentStoreError if isinstance(error, _SilentError) else CheckpointError
        raise kind(f"the checkpoint store {self._shown}: {failure}: {said}")

    def _told(self, error: Exception) -> str:
        said = str(error) if isinstance(error, _UnfitError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            said = f"it is not there: {error.filename or error}"
        elif isinstance(error, OSError) and error.strerror:
            said = error.strerror
        said = next(iter(said.strip().splitlines()), "").rstrip(": ").replace(self._url, self._shown)
        for secret in _secrets(self._url):
            said = said.replace(secret, "***")
        return said


class _UnfitError(Exception):
    pass


class _SilentError(_UnfitError):
    pass


def _patiently(work: Callable[[OnProgress], Result], is_wanted: Callable[[], bool]) -> Result:
    """Run ``work`` in a thread: a blocked library call can only be abandoned, and ends at its next progress."""
    result: Future[Result] = Future()
    heard, is_given_up = time.monotonic(), False

    def on_progress() -> None:
        nonlocal heard
        heard = time.monotonic()
        if is_given_up:
            raise _UnfitError("it was given up")

    def run() -> None:
        try:
            result.set_result(work(on_progress))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="bssearch checkpoint", daemon=True).start()
    try:
        while not wait([result], TICK_SECONDS).done:
            if time.monotonic() - heard > PATIENCE_SECONDS:
                raise _SilentError(f"nothing happened for {PATIENCE_SECONDS:g} s, so it was given up")
            if not is_wanted():
                raise _UnfitError("it is not wanted any more")
    finally:
        is_given_up = True
    return result.result()


def check_store_url(url: str) -> None:
    """Raise `UsageError` for an invalid store URL or a missing package."""
    named = f"{CHECKPOINT_DIR_VARIABLE} = {masked(url)!r}"
    scheme, _, rest = url.partition("://")
    if "::" in url or not rest.strip("/") or not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        raise UsageError(f"{named} names no place", hint="it is a folder, or a URL such as s3://BUCKET/FOLDER")
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise UsageError(f"{named} needs a package that is not installed: {error}") from None
    except ValueError:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise UsageError(f"{named}: unknown protocol {scheme}://; choose from {known}") from None


def _header(mark: str, number: int, size: int, digest: str) -> bytes:
    said = {"kind": _KIND, "study": mark, "trial": number, "bytes": size, "sha256": digest}
    return json.dumps(said).encode().ljust(HEADER_BYTES - 1) + b"\n"


def _digest(file: IO[bytes], on_progress: OnProgress) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        on_progress()
    return digest.hexdigest()


def _secrets(url: str) -> list[str]:
    try:
        password = urlsplit(url).password
    except ValueError:
        return []
    return [password, unquote(password)] if password else []
