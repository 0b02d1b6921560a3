"""A whole study in one file: JSON lines, compressed with gzip.

The header has format, version, schema revision, bssearch's version, the study and counts of rows. Rows follow as
``{kind: row}``, ordered by `bssearch.storage.transfer.study_copy.Kind` and key. The last line has the counts and the
SHA-256 of all earlier lines. Equal studies give equal bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bssearch.errors import NotFoundError, UsageError
from bssearch.files import check_file, replacing
from bssearch.storage.connection.engine import from_json
from bssearch.storage.integrity import shown
from bssearch.storage.migrate import REVISIONS, SCHEMA_HEAD, UNRELEASED
from bssearch.storage.transfer.study_copy import Copy, Kind

FORMAT = "bssearch study"
# Increment if older readers could not read the file.
FORMAT_VERSION = 1

SUFFIX = ".bssearch.jsonl.gz"

# Bytes; a trial with its traceback needs far less.
LONGEST_LINE = 16 * 2**20

# Bytes: some seven million evaluations, 4 GiB of memory.
LARGEST = 2**30

_COMPRESSION = 6
_KINDS = frozenset(kind.value for kind in Kind)


def write_study(path: Path, copy: Copy) -> None:
    """Write a study."""
    check_file(path)
    counts = {kind.value: len(copy.rows[kind]) for kind in sorted(Kind)}
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "schema": SCHEMA_HEAD,
        "written_by": version("bssearch"),
        "study": copy.name,
        "counts": counts,
    }
    digest = hashlib.sha256()
    with (
        replacing([path], binary=True) as [raw],
        gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=raw, mtime=0) as file,
    ):
        for line in _lines(header, copy):
            file.write(line)
            digest.update(line)
        file.write(_line("end", {"counts": counts, "sha256": digest.hexdigest()}))


def _lines(header: dict[str, Any], copy: Copy) -> Iterator[bytes]:
    yield _line("header", header)
    for kind, rows in copy.rows.items():
        for row in rows.values():
            yield _line(kind, row)


def _line(kind: str, row: dict[str, Any]) -> bytes:
    text = json.dumps({kind: row}, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_moment)
    return f"{text}\n".encode()


def _moment(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds")


def read_study(path: Path) -> Copy:
    """Read a study; raise `NotFoundError`, or `UsageError` with the invalid line."""
    copy, digest, last = Copy(str(path)), hashlib.sha256(), ""
    for place, line in _lines_of(path):
        try:
            kind, row = _parsed(line)
            if last == "":
                _check_header(kind, row)
            elif last == "end":
                raise UsageError("a line follows the last one")
            elif kind == "end":
                _check_end(row, digest.hexdigest())
            elif kind in _KINDS:
                copy.add(Kind(kind), row)
            else:
                raise UsageError(f"unknown kind of row {shown(kind)}")
        except UsageError as error:
            raise UsageError(f"{place}: {error.message}", hint=error.hint) from None
        digest.update(line)
        last = kind
    if last != "end" or not copy.rows[Kind.STUDY]:
        raise UsageError(f"{path} is incomplete: it is truncated or has no study", hint="export the study again")
    return copy


def _lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    number = total = 0
    try:
        with gzip.open(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                number, total = number + 1, total + len(line)
                if len(line) > LONGEST_LINE or total > LARGEST:
                    raise UsageError(
                        f"{path}, line {number}: more than {LONGEST_LINE:,} bytes in a line, or {LARGEST:,} in all",
                        hint="a larger study can be imported from its database: `bssearch import study URL`",
                    )
                yield f"{path}, line {number}", line
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read after line {number}: {error}") from None


def _parsed(line: bytes) -> tuple[str, Any]:
    try:
        value = from_json(line)
    except ValueError as error:
        raise UsageError(f"not a line of JSON: {error}") from None
    if not isinstance(value, dict) or len(value) != 1:
        raise UsageError("expected an object with one kind of row")
    return next(iter(value.items()))


def _check_header(kind: str, header: Any) -> None:
    if kind != "header" or not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError("not a file of `bssearch export STUDY --to study`: the header is missing")
    if header.get("version") != FORMAT_VERSION or header.get("schema") not in (*REVISIONS, *UNRELEASED):
        raise UsageError(
            f"a newer bssearch ({shown(header.get('written_by'))}) wrote the file: its format is "
            f"{shown(header.get('version'))} and its schema {shown(header.get('schema'))}; this version reads up to "
            f"{FORMAT_VERSION} and {SCHEMA_HEAD}",
            hint="update bssearch",
        )


def _check_end(end: Any, digest: str) -> None:
    if not isinstance(end, dict) or end.get("sha256") != digest:
        raise UsageError("the lines were changed after writing: their SHA-256 differs", hint="export the study again")
