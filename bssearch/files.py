"""Write files atomically or privately, and CSV files without formulas."""

import csv
import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from bssearch.errors import UsageError, require
from bssearch.records.text import visible

_SQLITE = b"SQLite format 3\0"  # start of every SQLite database (https://www.sqlite.org/fileformat.html)

# The group may read, write and enter; new files get the folder's group (inode(7)).
_FOR_A_GROUP = stat.S_ISGID | stat.S_IRWXG


def check_file(path: Path) -> None:
    with naming(path):
        require(
            path.parent.is_dir(),
            f"{path} cannot be written: there is no folder {path.parent}",
            hint="create the folder first",
        )
        kind = "a folder" if path.is_dir() else "not a regular file"
        require(path.is_file() or not path.exists(), f"{path} cannot be written: the path is {kind}; name another file")
        _refuse_database(path)


def _refuse_database(path: Path) -> None:
    require(
        not is_sqlite(path),
        f"{path} is a SQLite database, which bssearch does not overwrite",
        hint="name another file",
    )


def is_sqlite(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def check_folder(path: Path, files: Sequence[str]) -> None:
    with naming(path):
        require(not path.exists() or path.is_dir(), f"{path} is not a folder; name a folder")
        require(
            path.parent.is_dir(),
            f"{path} cannot be created: there is no folder {path.parent}",
            hint="create the parent folder first",
        )
        is_there = path.exists()
    for name in files if is_there else ():
        check_file(path / name)


def make_private_folder(path: Path) -> None:
    """Make a folder for this user alone. Raises `OSError` for a link, a file or another user's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "the path is a link; replace the link with a folder", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"the folder belongs to user {found.st_uid}; name another folder", str(path))
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)


def is_for_a_group(folder: Path) -> bool:
    """True if a folder is open to its group, as after ``chmod 2770``."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_mode & _FOR_A_GROUP == _FOR_A_GROUP and not found.st_mode & 0o002


def make_guarded_folder(path: Path) -> None:
    """Make a folder for this user alone, or for the group if the parent folder is open to a group.

    Raises `OSError` if the path is a link, a file, or a folder for other users.
    """
    if not is_for_a_group(path.parent):
        make_private_folder(path)
        return
    if not os.path.lexists(path):
        _make_for_a_group(path)
    found, group = path.lstat(), path.parent.stat().st_gid
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "the path is a link or a file; remove the link or file, or name another path", str(path)
        )
    if found.st_uid == os.geteuid() and (found.st_gid != group or not is_for_a_group(path)):
        os.chown(path, -1, group)
        path.chmod(0o2770)
        found = path.lstat()
    if found.st_gid != group or not is_for_a_group(path):
        what = f"the folder belongs to user {found.st_uid} and is not open to group {group} alone; name another folder"
        raise PermissionError(errno.EPERM, what, str(path))


def _make_for_a_group(path: Path) -> None:
    # The folder gets its name last, so that no member is refused.
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        os.chown(draft, -1, path.parent.stat().st_gid)
        draft.chmod(0o2770)
        draft.rename(path)
    except OSError:
        with suppress(OSError):
            draft.rmdir()
        if not path.is_dir():  # unless another driver was faster
            raise


def new_private_file(path: Path) -> BinaryIO:
    """Create a file for this user alone, and replace an existing file or link."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w+b")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file, and hold the lock inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def new_guarded_file(path: Path) -> BinaryIO:
    """Create a file for this user alone, or for the group if the folder is open to a group."""
    make_guarded_folder(path.parent)
    try:
        file = new_private_file(path)
    except FileNotFoundError:
        make_guarded_folder(path.parent)
        file = new_private_file(path)
    if is_for_a_group(path.parent):
        os.fchmod(file.fileno(), 0o660)
    return file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UsageError` that names the path."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="name a writable path, or free disk space",
        ) from error


@contextmanager
def replacing(paths: Sequence[Path], *, binary: bool = False) -> Iterator[list[Any]]:
    """Yield open draft files, one per path, and replace the originals when all drafts are complete.

    If a path is a link, the draft replaces the link's target.

    Raises `UsageError` if a path is a SQLite database or cannot be written.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]
    for path in targets:
        with naming(path):
            _refuse_database(path)
    drafts = [target.with_name(f".bssearch-{os.getpid()}-new-{target.name[-40:]}") for target in targets]
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(_opened(path, draft, binary)) for path, draft in zip(paths, drafts, strict=True)]
        for path, draft, target in zip(paths, drafts, targets, strict=True):
            with naming(path):
                draft.replace(target)
    finally:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, draft: Path, binary: bool) -> Iterator[Any]:
    with naming(path), draft.open("wb") if binary else draft.open("w", encoding="utf-8", newline="") as file:
        yield file


Row = Mapping[str, Any]
# First characters of formulas (https://owasp.org/www-community/attacks/CSV_Injection).
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(file: TextIO, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write a header and the ``columns`` of each row, with lists and mappings as JSON."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_csv_cell, columns))
    for row in rows:
        writer.writerow(_csv_cell(row.get(column)) for column in columns)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, datetime):
        return value.isoformat()
    if not isinstance(value, str):
        return value
    text = visible(value.replace("\r\n", "\n").replace("\r", "\n"))  # the csv module does not quote \r
    return f"'{text}" if value.startswith(FORMULA) else text
