"""A study with everything in one file: JSON lines, compressed with gzip; no pickle.

The first line is a header: the format's version, the schema's revision, the version of bssearch that wrote it, the
study, and how many rows of each kind follow. Then one row a line, ``{kind: row}``, in the order of
`bssearch.storage.transfer.layout.Kind`, and by what rows are known by within their kind. The last line has the counts
again and the SHA-256 of all bytes before it, so that a file that was cut off or changed is recognised. The same study
makes the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from bssearch.errors import NotFoundError, UsageError
from bssearch.files import check_file, replacing
from bssearch.storage.connection.engine import from_json
from bssearch.storage.migrate import REVISIONS, SCHEMA_HEAD, UNRELEASED
from bssearch.storage.transfer.layout import LAYOUTS, Kind, Row, shown

FORMAT = "bssearch study"
FORMAT_VERSION = 1
"""Counted up where a reader of the version before would not understand the file."""

SUFFIX = ".bssearch.jsonl.gz"

LONGEST_LINE = 16 * 2**20
"""Bytes of a line: a choice, far beyond a trial with its traceback or its last lines."""

_COMPRESSION = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a file, with the ``place`` where it stands."""

    place: str
    kind: Kind
    row: object


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line of a file says."""

    study: str
    revision: str
    counts: Mapping[str, int]

    @property
    def is_complete(self) -> bool:
        """Whether its rows have all columns of this version's tables."""
        return self.revision == SCHEMA_HEAD


def write_study(path: Path, study: str, counts: Mapping[str, int], rows: Iterable[tuple[Kind, Row]]) -> None:
    """Write the rows of a study; the file appears whole or not at all.

    Raises `UsageError` where it cannot be written.
    """
    check_file(path)
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "schema": SCHEMA_HEAD,
        "written_by": version("bssearch"),
        "study": study,
        "counts": dict(sorted(counts.items())),
    }
    with (
        replacing([path], binary=True) as [raw],
        gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=raw, mtime=0) as file,
    ):
        digest, written = hashlib.sha256(), Counter({kind.value: 0 for kind in LAYOUTS})
        _write(file, digest, {"header": header})
        for kind, row in rows:
            _write(file, digest, {kind.value: row})
            written[kind.value] += 1
        assert written == Counter(counts), "both are of one state of the database"
        _write(file, digest, {"end": {"counts": dict(sorted(written.items())), "sha256": digest.hexdigest()}})


def _write(file: Any, digest: Any, value: Mapping[str, Any]) -> None:
    line = (json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    file.write(line)
    digest.update(line)


class StudyFile:
    """A file to be read once, line by line. Every fault of it is a `UsageError` that names the file and the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._digest = hashlib.sha256()
        self._file = _opened(path)
        self._read = gzip.GzipFile(fileobj=self._file, mode="rb")
        try:
            self.header = self._header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._read.close()
        self._file.close()

    def lines(self) -> Iterator[Line]:
        """Yield the rows; that the file is whole is certain only after the last one."""
        seen: Counter[str] = Counter()
        kinds = list(LAYOUTS)
        reached = 0
        while True:
            before = self._digest.hexdigest()
            key, value = self._next()
            if key == "end":
                self._check_end(value, seen, before)
                return
            if key not in kinds:
                raise self._fault(f"{shown(key)} is no kind of row")
            if kinds.index(Kind(key)) < reached:
                raise self._fault(f"a row of kind {key} after those of {kinds[reached]}")
            reached = kinds.index(Kind(key))
            seen[key] += 1
            if seen[key] > self.header.counts[key]:
                raise self._fault(f"more rows of kind {key} than the {self.header.counts[key]} of the header")
            yield Line(f"{self._path}, line {self._number}", Kind(key), value)

    def _header(self) -> Header:
        key, found = self._next()
        if key != "header" or not isinstance(found, dict) or found.get("format") != FORMAT:
            raise self._fault("it is no file of `bssearch export STUDY --to study`: its first line is no header of it")
        written = found.get("version")
        if isinstance(written, bool) or not isinstance(written, int) or written < 1:
            raise self._fault(f"version = {shown(written)} must be a whole number ≥ 1")
        if written > FORMAT_VERSION or found.get("schema") not in (*REVISIONS, *UNRELEASED):
            raise UsageError(
                f"{self._path} was written by a newer bssearch ({shown(found.get('written_by'))}): its format is of "
                f"version {written} and its schema of revision {shown(found.get('schema'))}; this version reads them "
                f"up to {FORMAT_VERSION} and {SCHEMA_HEAD}",
                hint="update bssearch",
            )
        study = found.get("study")
        if not isinstance(study, str):
            raise self._fault(f"study = {shown(study)} must be a text")
        return Header(study, str(found["schema"]), self._counts(found.get("counts")))

    def _counts(self, found: object) -> dict[str, int]:
        if not isinstance(found, dict) or set(found) != {kind.value for kind in LAYOUTS}:
            raise self._fault(f"counts = {shown(found)} must have the number of rows of each kind")
        for kind, layout in LAYOUTS.items():
            count = found[kind.value]
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= layout.most:
                raise self._fault(f"counts.{kind} = {shown(count)} must be a whole number from 0 to {layout.most:,}")
        return found

    def _check_end(self, found: object, seen: Counter[str], digest: str) -> None:
        counts = {kind.value: seen[kind.value] for kind in LAYOUTS}
        if not isinstance(found, dict) or found.get("counts") != counts or self.header.counts != counts:
            raise self._fault("its rows are not as many as its header and its last line say")
        if found.get("sha256") != digest:
            raise self._fault("its lines are not those that were written: their SHA-256 is another one")
        if self._line():
            raise self._fault("something follows after its last line")

    def _next(self) -> tuple[str, object]:
        """Return the kind of the next line, and what it holds."""
        line = self._line()
        if not line:
            raise self._fault("it ends without its last line: it was cut off")
        if not line.endswith(b"\n"):
            raise self._fault("the line has no end: the file was cut off")
        self._digest.update(line)
        try:
            value = from_json(line)
        except ValueError as error:
            raise self._fault(f"it is no line of JSON: {error}") from None
        if not isinstance(value, dict) or len(value) != 1:
            raise self._fault("it must be an object of one kind of row")
        return next(iter(value.items()))

    def _line(self) -> bytes:
        self._number += 1
        try:
            line = self._read.readline(LONGEST_LINE + 1)
        except EOFError:
            raise self._fault("the compressed file was cut off") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            is_other = self._number == 1 and isinstance(error, gzip.BadGzipFile)
            what = "it is not compressed with gzip" if is_other else "the compressed file is damaged"
            raise self._fault(f"{what}: {error}") from None
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror or error}") from None
        if len(line) > LONGEST_LINE:
            raise self._fault(f"the line has more than {LONGEST_LINE:,} bytes")
        return line

    def _fault(self, what: str) -> UsageError:
        return UsageError(f"{self._path}, line {self._number}: {what}")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
