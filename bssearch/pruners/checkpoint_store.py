"""A store elsewhere that keeps paused trials: whatever fsspec speaks to, by a URL, one object a trial.

An object is a header of `HEADER_BYTES`, JSON that says whose it is and has the SHA-256 of the rest, and the file of the
trial as it is. It is written under another name and moved once it is whole. What a URL holds that opens the store is in
no message.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from bssearch.errors import CheckpointError, UsageError
from bssearch.files import new_guarded_file
from bssearch.pruners.checkpoint_folder import Held, held_of
from bssearch.settings import CHECKPOINT_DIR_VARIABLE
from bssearch.storage.connection.urls import masked

HEADER_BYTES = 512
"""Bytes before the file: a choice; two digests and three numbers fit in."""

CHUNK_BYTES = 4 * 2**20
"""Bytes sent at a time: a choice; at 1 MB/s there is progress every few seconds."""

_KIND = "checkpoint of bssearch, 1"

OnProgress = Callable[[], None]


class CheckpointStore:
    """The checkpoints of one study below a URL, in a folder that is named by the study's mark.

    Every method may wait for a network, and raises `CheckpointError` where the store does not do what it is asked.
    Raises `UsageError` for a URL that cannot be one, or whose package is not installed.
    """

    def __init__(self, url: str, mark: str) -> None:
        check_store_url(url)
        self._url, self._mark = url, mark
        self._opened: Any = None
        self.shown = masked(url)

    def look(self) -> Held:
        """Return what lies there now."""
        with self._naming("it cannot be listed"):
            files, folder = self._files(), self._folder
            files.invalidate_cache(folder)
            try:
                entries = files.ls(folder, detail=True)
            except FileNotFoundError:
                return Held()
            return held_of((_base(entry["name"]), entry["size"] or 0) for entry in entries)

    def try_out(self) -> None:
        """Write an object and delete it again."""
        with self._naming("nothing can be written to it"):
            self._make_folder()
            path = posixpath.join(self._folder, "written")
            self._files().pipe_file(path, bytes(2**10))
            self._files().rm_file(path)

    def put(self, number: int, file: Path, on_progress: OnProgress) -> int:
        """Store a trial's file in the place of an earlier one, which it has left behind; return the bytes it takes."""
        place = self._place(number)
        with self._naming(f"trial {number} cannot be stored"):
            try:
                return self._put(place, number, file, on_progress)
            except BaseException:
                with suppress(Exception):
                    self._remove(f"{place}.part")
                raise

    def _put(self, place: str, number: int, file: Path, on_progress: OnProgress) -> int:
        self._make_folder()
        for old in (place, f"{place}.part"):
            self._remove(old)
        with file.open("rb") as content:
            digest = _digest(content, on_progress)
            header = _header(self._mark, number, content.tell(), digest)
            content.seek(0)
            with self._files().open(f"{place}.part", "wb") as target:
                target.write(header)
                while chunk := content.read(CHUNK_BYTES):
                    target.write(chunk)
                    on_progress()
            written = HEADER_BYTES + content.tell()
        self._files().mv(f"{place}.part", place)
        return written

    def get(self, number: int, file: Path, on_progress: OnProgress) -> None:
        """Bring a trial's file; what is cut off, damaged, or of another study or trial is refused.

        Until it is whole it has a name of its own: an earlier one that was abandoned may still be on its way.
        """
        part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")
        with self._naming(f"trial {number} cannot be brought back"):
            try:
                with self._files().open(self._place(number), "rb") as source:
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
                on_progress()
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)

    def remove(self, number: int) -> None:
        """Delete what is kept of a trial."""
        with self._naming(f"trial {number} cannot be deleted"):
            for path in (self._place(number), f"{self._place(number)}.part"):
                self._remove(path)

    def clear(self) -> None:
        """Delete what is kept of every trial."""
        for number in self.look().sizes:
            self.remove(number)

    @property
    def _folder(self) -> str:
        return posixpath.join(self._root, self._mark)

    def _place(self, number: int) -> str:
        return posixpath.join(self._folder, f"trial-{number}.pt")

    def _files(self) -> Any:
        """Return the file system, which some connect to as it is made."""
        if self._opened is None:
            from fsspec.core import url_to_fs

            self._opened = url_to_fs(self._url)
        return self._opened[0]

    @property
    def _root(self) -> str:
        self._files()
        return str(self._opened[1])

    def _make_folder(self) -> None:
        """Make the study's folder where a store has folders; not the one that the URL names: a mount may be away."""
        with suppress(FileExistsError):
            self._files().mkdir(self._folder, create_parents=False)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files().rm_file(path)

    def _checked(self, number: int, header: bytes) -> dict[str, Any]:
        """Return what a header says; raise `_UnfitError` for another's."""
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

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn what any file system raises into a `CheckpointError` that names the store."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"the checkpoint store {self.shown}: {what}: {self._told(error)}") from None

    def _told(self, error: Exception) -> str:
        """Return the first line of what an error says, without what the URL keeps secret."""
        said = str(error) if isinstance(error, _UnfitError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            said = f"it is not there: {error.filename or error}"
        elif isinstance(error, OSError) and error.strerror:
            said = error.strerror
        said = next(iter(said.strip().splitlines()), "").rstrip(": ").replace(self._url, self.shown)
        for secret in _secrets(self._url):
            said = said.replace(secret, "***")
        return said


class _UnfitError(Exception):
    """An object that is not what was stored."""


def check_store_url(url: str) -> None:
    """Raise `UsageError` for a URL that names no store, or one whose package is not installed."""
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
        raise UsageError(f"{named}: {scheme}:// is none of {known}") from None


def _header(mark: str, number: int, size: int, digest: str) -> bytes:
    said = {"kind": _KIND, "study": mark, "trial": number, "bytes": size, "sha256": digest}
    return json.dumps(said).encode().ljust(HEADER_BYTES - 1) + b"\n"


def _digest(file: IO[bytes], on_progress: OnProgress) -> str:
    """Return the SHA-256 of the rest of a file."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        on_progress()
    return digest.hexdigest()


def _secrets(url: str) -> list[str]:
    """Return the password of a URL, as it stands there and as it is meant."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return []
    return [password, unquote(password)] if password else []


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
