"""A whole study in memory and in a file of JSON lines, compressed with gzip.

The header has the format, the versions, the study's name and the counts of rows. Rows follow as ``{kind: row}``,
ordered by `Kind` and key. The last line has the counts and the SHA-256 of all earlier lines.
"""

import gzip
import hashlib
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DataError, IntegrityError

from bssearch.errors import DatabaseError, NotFoundError, OtherDeviceError, SpecError, UsageError, require
from bssearch.files import check_file, replacing
from bssearch.records import Environment, StudyRecord, TrialState, spec_digest
from bssearch.records.text import plural
from bssearch.spec import IMPORTED, check_study_name, spec_of
from bssearch.spec.reader import shortened
from bssearch.storage.connection.engine import from_json
from bssearch.storage.database import environment_digest
from bssearch.storage.integrity import KEPT_OF_FINDINGS, LAYOUTS, Kind, checked, columns_of, rows_of, words
from bssearch.storage.migrate import REVISIONS, SCHEMA_HEAD, UNRELEASED
from bssearch.storage.models import (
    ENVIRONMENT_ROWS,
    FINDING_ROWS,
    LOG_ROWS,
    OBSERVATION_ROWS,
    STUDY_ROWS,
    TRIAL_ROWS,
    from_columns,
    to_columns,
)
from bssearch.storage.statements import insert_if_absent, is_running, of_its_kind, raise_revision
from bssearch.storage.trials import ended_by

Row = dict[str, Any]
Key = tuple[Any, ...]

AT_ONCE = 1000

EXPORT_AGAIN = "export the study again"

_REFERENCES = {"environment": Kind.ENVIRONMENT, "trial": Kind.TRIAL, "retry_of": Kind.TRIAL}

_RUNS = TRIAL_ROWS.c.state == TrialState.RUNNING


@dataclass(slots=True)
class Copy:
    """A study's rows by kind and key, in file order.

    Attributes:
        source: The file or database, for messages.
        running: Numbers of running trials.
    """

    source: str
    rows: dict[Kind, dict[Key, Row]] = field(default_factory=lambda: {kind: {} for kind in Kind})
    running: Sequence[int] = ()

    @property
    def study(self) -> Row:
        return self.rows[Kind.STUDY][()]

    @property
    def name(self) -> str:
        return str(self.study["name"])

    @property
    def environment(self) -> Environment | None:
        digest = self.study["environment"]
        return None if digest is None else from_columns(Environment, self.rows[Kind.ENVIRONMENT][(digest,)])

    def curves(self) -> dict[int, dict[str, Row]]:
        """Each trial's observations by name, such as ``evaluation at step 5``."""
        found: dict[int, dict[str, Row]] = defaultdict(dict)
        for (trial, step), row in self.rows[Kind.OBSERVATION].items():
            found[trial][f"evaluation at step {step}"] = row
        return found

    def add(self, kind: Kind, row: object) -> None:
        """Add a row. Raises `UsageError` if the row is invalid, is a duplicate, or refers to a missing row."""
        values = checked(kind, row)
        key = tuple(values[name] for name in LAYOUTS[kind].keys)
        if key in self.rows[kind]:
            raise UsageError(f"{words(kind, values)} occurs twice")
        for name, other in _REFERENCES.items():
            value = values.get(name)
            if value is not None and (value,) not in self.rows[other]:
                raise UsageError(f"{words(kind, values)}: {name} = {shortened(value)} refers to a missing row")
        _check_digest(kind, values)
        self.rows[kind][key] = values


def read_copy(connection: Connection, study_id: int, source: str, *, with_running: bool = False) -> Copy:
    """Read a study from a database. Raises `DatabaseError` for an invalid row.

    Unless ``with_running``, leave out running trials, because a copy has no leases.
    """
    copy = Copy(source)
    try:
        for kind in Kind:
            for row in _rows(connection, kind, study_id, with_running):
                copy.add(kind, row)
    except UsageError as error:
        name = connection.scalar(select(STUDY_ROWS.c.name).where(STUDY_ROWS.c.id == study_id))
        raise DatabaseError(
            f"study {name!r} of {source} has an invalid row: {error.message}",
            hint="correct the row with SQL, or delete the study",
        ) from None
    running = select(TRIAL_ROWS.c.number).where(TRIAL_ROWS.c.study_id == study_id, _RUNS).order_by(TRIAL_ROWS.c.number)
    copy.running = connection.scalars(running).all()
    return copy


def check_study(copy: Copy) -> None:
    """Check the name and the spec. Raises `UsageError`, or `SpecError` for an unreadable spec."""
    study = copy.study
    check_study_name(copy.name)
    try:
        spec = spec_of(from_columns(StudyRecord, {**study, "archived_at": None}, absent="environment"))
    except DatabaseError as error:
        raise SpecError(f"{copy.source}: {error.message}", hint=error.hint) from None
    asked = to_columns(spec.new_study(study["created_by"]))
    for name in sorted(asked.keys() & study.keys() - {"spec"}):
        require(
            asked[name] == study[name],
            f"{copy.source}: study {copy.name!r}: {name} = {shortened(study[name])}, but the study's spec has "
            f"{shortened(asked[name])}",
            hint=EXPORT_AGAIN,
        )


def _check_digest(kind: Kind, values: Mapping[str, Any]) -> None:
    if kind is Kind.ENVIRONMENT:
        digest = environment_digest(from_columns(Environment, values))
    elif kind is Kind.SPEC:
        digest = spec_digest(values["spec"])
    else:
        return
    require(digest == values["digest"], f"{words(kind, values)}: expected {digest}, the digest of the content")


def _rows(connection: Connection, kind: Kind, study_id: int, with_running: bool) -> Iterator[Row]:
    columns = columns_of(kind)
    query = rows_of(kind, study_id, {name: columns[name] for name in LAYOUTS[kind].exported.model_fields})
    if not with_running and (kind is Kind.TRIAL or "trial" in columns):
        query = query.where(~_RUNS)
    for found in connection.execute(query, execution_options={"yield_per": AT_ONCE}).mappings():
        row = dict(found)
        if kind is Kind.FINDING:
            row["answer"] = {name: row["answer"].get(name) for name in KEPT_OF_FINDINGS}
        if kind is not Kind.FINDING or any(row["answer"].values()):
            yield row


# Trial fields that never change after planning.
ASKED = frozenset(
    {
        *("number", "phase", "uncapped", "batch_size", "learning_rate", "warmup_epochs", "weight_decay", "dropout"),
        *("label_smoothing", "optimizer", "parameters", "sampled", "seed", "retry_of"),
    }
)

# An end in the copy replaces these states.
_OPEN = {TrialState.QUEUED, TrialState.RUNNING, TrialState.PAUSED, TrialState.LOST}

_COUNTED = {
    "trials": (Kind.TRIAL,),
    "observations": (Kind.OBSERVATION,),
    "measurements": (Kind.PROBE, Kind.VISIT, Kind.BRANCH),
}

_DIVERGED = "trials ran in both places, or a program changed rows; keep one copy, or use separate databases"


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of `join`, with counts by kind of row."""

    study: str
    source: str
    is_new: bool
    is_changed: bool
    skipped: Sequence[int]
    counts: Mapping[str, int]

    @property
    def document(self) -> dict[str, Any]:
        told = {"study": self.study, "source": self.source, "is_new": self.is_new, "is_changed": self.is_changed}
        return {**told, "trials_skipped": list(self.skipped), **self.counts}

    @property
    def sentence(self) -> str:
        new, changed = self.counts["trials_new"], self.counts["trials_changed"]
        done = f"{plural(new, 'trial')} added, {changed} replaced" if self.is_changed else "no changes"
        running = ", ".join(map(str, self.skipped))
        skipped = f"; skipped running trials: {running}" if running else ""
        return f"study {self.study} {'is new' if self.is_new else 'already existed'}: {done}{skipped}"


def join(connection: Connection, copy: Copy, name: str | None = None) -> Joined:
    """Insert missing rows, replace open or lost trials by the copy's ended trials, and return the counts."""
    check_study(copy)
    study_id = _known(connection, copy)
    is_new = study_id is None
    if study_id is None:
        study_id = _create(connection, copy, name or copy.name)
    here = read_copy(connection, study_id, "this database", with_running=True)
    return _Join(connection, copy, here, study_id, is_new).run()


def _known(connection: Connection, copy: Copy) -> int | None:
    study = copy.study
    same: list[ColumnElement[bool]] = [
        STUDY_ROWS.c.created_at == study["created_at"],
        STUDY_ROWS.c.created_by == study["created_by"],
        STUDY_ROWS.c.spec_hash == study["spec_hash"],
    ]
    if study["spec"]["workload"] == IMPORTED and copy.environment is not None:
        same.append(
            STUDY_ROWS.c.environment_id.in_(select(ENVIRONMENT_ROWS.c.id).where(*of_its_kind(copy.environment)))
        )
    return connection.scalar(select(STUDY_ROWS.c.id).where(*same).order_by(STUDY_ROWS.c.id).with_for_update())


def _create(connection: Connection, copy: Copy, name: str) -> int:
    check_study_name(name)
    study = copy.study
    columns = {**study, "name": name, "spec": {**study["spec"], "name": name}}
    del columns["environment"]
    if not insert_if_absent(connection, STUDY_ROWS, columns):
        by, at = connection.execute(
            select(STUDY_ROWS.c.created_by, STUDY_ROWS.c.created_at).where(STUDY_ROWS.c.name == name)
        ).one()
        raise UsageError(
            f"another study {name!r} exists, created by {by} at {at:%Y-%m-%d %H:%M:%S} UTC; the study of {copy.source} "
            f"was created by {study['created_by']} at {study['created_at']:%Y-%m-%d %H:%M:%S} UTC",
            hint="rename the study here with `bssearch study rename OLD NEW`, or import with --as NAME",
        )
    return int(connection.execute(select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == name)).scalar_one())


@dataclass(slots=True)
class _Join:
    connection: Connection
    copy: Copy
    here: Copy
    study_id: int
    is_new: bool
    added: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)
    skipped: list[int] = field(default_factory=list)
    environment_ids: dict[str, int] = field(default_factory=dict)
    trial_ids: dict[int, int] = field(default_factory=dict)
    revision: int = 0

    def run(self) -> Joined:
        self._sort_trials()
        new = {kind: self._new_rows(kind) for kind in Kind}
        binds = self._binds()
        is_changed = self.is_new or binds or bool(self.replaced) or any(new.values())
        if is_changed:
            self.revision = raise_revision(self.connection, self.study_id)
            try:
                self._store(new, binds)
            except (IntegrityError, DataError) as error:
                problem = str(error.orig).partition("\n")[0]
                raise UsageError(f"{self.copy.source}: a row cannot be stored: {problem}", hint=EXPORT_AGAIN) from None
        return Joined(
            study=self.here.name,
            source=self.copy.source,
            is_new=self.is_new,
            is_changed=is_changed,
            skipped=self.skipped,
            counts=self._counts(new),
        )

    # Selection of rows

    def _sort_trials(self) -> None:
        live = select(TRIAL_ROWS.c.number).where(
            *is_running(self.study_id), TRIAL_ROWS.c.lease_expires_at > ended_by(self.connection)
        )
        held = set(self.connection.scalars(live))
        curves, curves_here = self.copy.curves(), self.here.curves()
        for key, there in self.copy.rows[Kind.TRIAL].items():
            number, here = key[0], self.here.rows[Kind.TRIAL].get(key)
            if here is None:
                self.added.add(number)
                continue
            self._refuse_different(number, here, there, ASKED)
            if there["state"] in _OPEN:
                continue
            if here["state"] not in _OPEN:
                here, there = here | curves_here[number], there | curves[number]
                self._refuse_different(number, here, there, here.keys() | there.keys())
            elif number in held:
                self.skipped.append(number)
            else:
                self.replaced.add(number)

    def _refuse_different(self, number: int, here: Row, there: Row, names: Collection[str]) -> None:
        for name in sorted(names):
            if here.get(name) != there.get(name):
                raise UsageError(
                    f"study {self.here.name!r}, trial {number}: {name} = {shortened(here.get(name))} here, and "
                    f"{shortened(there.get(name))} in {self.copy.source}",
                    hint=_DIVERGED,
                )

    def _new_rows(self, kind: Kind) -> list[Row]:
        rows = self.copy.rows[kind]
        if kind is Kind.TRIAL:
            return [row for row in rows.values() if row["number"] in self.added]
        if "trial_id" in LAYOUTS[kind].table.c:
            taken = self.added | self.replaced
            return [row for row in rows.values() if row["trial"] in taken]
        if kind is Kind.ENVIRONMENT:
            return []  # `_environment_id` inserts an environment with the first row that refers to the environment
        return [row for key, row in rows.items() if key not in self.here.rows[kind]]

    def _binds(self) -> bool:
        here, there = self.here.environment, self.copy.environment
        if here is not None and there is not None and here.fingerprint != there.fingerprint:
            raise OtherDeviceError(
                f"study {self.here.name!r} was measured on {here.fingerprint} here, and on {there.fingerprint} in "
                f"{self.copy.source}; a study pools only trials of one device, precision and compile mode",
                hint=_DIVERGED,
            )
        return here is None and there is not None

    def _counts(self, new: Mapping[Kind, list[Row]]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for name, kinds in _COUNTED.items():
            inserted = [row for kind in kinds for row in new[kind]]
            counts[f"{name}_changed"] = sum(row.get("trial") in self.replaced for row in inserted)
            counts[f"{name}_new"] = len(inserted) - counts[f"{name}_changed"]
            counts[f"{name}_known"] = sum(len(self.copy.rows[kind]) for kind in kinds) - len(inserted)
        counts["trials_changed"] = len(self.replaced)
        counts["trials_known"] -= len(self.replaced)
        return dict(counts)

    # Storage of rows

    def _store(self, new: Mapping[Kind, list[Row]], binds: bool) -> None:
        columns: dict[str, Any] = {"revision": self.revision}
        if binds:
            columns["environment_id"] = self._environment_id(self.copy.study["environment"])
        if self.replaced:
            columns["rewritten_at_revision"] = self.revision
        if new[Kind.PROBE] or new[Kind.VISIT]:
            columns["probed_at_revision"] = self.revision
        self.connection.execute(update(STUDY_ROWS).where(STUDY_ROWS.c.id == self.study_id).values(columns))
        self._insert(Kind.SPEC, new[Kind.SPEC])
        self._insert(Kind.TRIAL, new[Kind.TRIAL])
        query = select(TRIAL_ROWS.c.number, TRIAL_ROWS.c.id).where(TRIAL_ROWS.c.study_id == self.study_id)
        self.trial_ids = {number: trial_id for number, trial_id in self.connection.execute(query)}
        for number in self.replaced:
            self._replace(number)
        for kind in (Kind.OBSERVATION, Kind.LOG, Kind.PROBE, Kind.VISIT, Kind.BRANCH):
            self._insert(kind, new[kind])
        finding: dict[str, Any] = {"stamp": ""}  # marks the stored answer as outdated
        for row in new[Kind.FINDING]:
            finding = self._columns(Kind.FINDING, row)
            insert_if_absent(self.connection, FINDING_ROWS, finding)
        self.connection.execute(update(FINDING_ROWS).where(FINDING_ROWS.c.study_id == self.study_id).values(finding))

    def _replace(self, number: int) -> None:
        row, trial_id = self.copy.rows[Kind.TRIAL][(number,)], self.trial_ids[number]
        for table in (OBSERVATION_ROWS, LOG_ROWS):
            self.connection.execute(delete(table).where(table.c.trial_id == trial_id))
        columns = {**self._columns(Kind.TRIAL, row), "lease_owner": None, "lease_expires_at": None}
        self.connection.execute(update(TRIAL_ROWS).where(TRIAL_ROWS.c.id == trial_id).values(columns))

    def _insert(self, kind: Kind, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), AT_ONCE):
            values = [self._columns(kind, row) for row in rows[start : start + AT_ONCE]]
            self.connection.execute(insert(LAYOUTS[kind].table), values)

    def _columns(self, kind: Kind, row: Row) -> dict[str, Any]:
        values, table = dict(row), LAYOUTS[kind].table
        if "environment" in values:
            values["environment_id"] = self._environment_id(values.pop("environment"))
        if "trial" in values:
            values["trial_id"] = self.trial_ids[values.pop("trial")]
        if "study_id" in table.c:
            values["study_id"] = self.study_id
        if kind is Kind.TRIAL:
            values["revision"] = self.revision
        if kind is Kind.FINDING:
            values |= {"stamp": "", "answer": {"made_by": 0, "answer": None, **values["answer"]}}
        return values

    def _environment_id(self, digest: str | None) -> int | None:
        if digest is None:
            return None
        if digest not in self.environment_ids:
            insert_if_absent(self.connection, ENVIRONMENT_ROWS, self.copy.rows[Kind.ENVIRONMENT][(digest,)])
            query = select(ENVIRONMENT_ROWS.c.id).where(ENVIRONMENT_ROWS.c.digest == digest)
            self.environment_ids[digest] = self.connection.execute(query).scalar_one()
        return self.environment_ids[digest]


FORMAT = "bssearch study"
# Increment this number if older readers could not read the file.
FORMAT_VERSION = 1

SUFFIX = ".bssearch.jsonl.gz"

# Bytes; a trial with its traceback needs far less.
LONGEST_LINE = 16 * 2**20

# Bytes: some seven million evaluations, 4 GiB of memory.
MOST_BYTES = 2**30

_TOO_LARGE = "import the study from its database: `bssearch import study URL`"

_COMPRESSION = 6
_KINDS = frozenset(kind.value for kind in Kind)


def write_study(path: Path, copy: Copy) -> None:
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
    """Read a study's file. Raises `NotFoundError` for a missing file, and `UsageError` for an invalid file."""
    copy, digest, last = Copy(str(path)), hashlib.sha256(), ""
    for place, line in _lines_of(path):
        try:
            kind, row = _parsed(line)
            if last == "":
                _check_header(kind, row)
            elif last == "end":
                raise UsageError("the file has a line after the end of the study")
            elif kind == "end":
                _check_end(row, digest.hexdigest())
            elif kind in _KINDS:
                copy.add(Kind(kind), row)
            else:
                raise UsageError(f"unknown kind of row {shortened(kind)}")
        except UsageError as error:
            raise UsageError(f"{place}: {error.message}", hint=error.hint or EXPORT_AGAIN) from None
        digest.update(line)
        last = kind
    require(
        last == "end" and copy.rows[Kind.STUDY],
        f"{path} is incomplete: the file is truncated or has no study",
        hint=EXPORT_AGAIN,
    )
    return copy


def _lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    number = total = 0
    try:
        with gzip.open(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                number, total = number + 1, total + len(line)
                place = f"{path}, line {number}"
                require(len(line) <= LONGEST_LINE, f"{place} has more than {LONGEST_LINE:,} bytes", hint=_TOO_LARGE)
                require(total <= MOST_BYTES, f"{path} has more than {MOST_BYTES:,} uncompressed bytes", hint=_TOO_LARGE)
                yield place, line
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}; check the path") from None
    except (OSError, ValueError, EOFError, zlib.error) as error:
        if number:
            raise UsageError(f"{path} cannot be read after line {number}: {error}", hint=EXPORT_AGAIN) from None
        raise UsageError(
            f"{path} cannot be read: {error}", hint="name a file of `bssearch export STUDY --to study`"
        ) from None


def _parsed(line: bytes) -> tuple[str, Any]:
    try:
        value = from_json(line)
    except ValueError as error:
        raise UsageError(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict) or len(value) != 1:
        raise UsageError("expected an object with a single kind of row")
    return next(iter(value.items()))


def _check_header(kind: str, header: Any) -> None:
    if kind != "header" or not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError("the header of a study is missing", hint="name a file of `bssearch export STUDY --to study`")
    require(
        header.get("version") == FORMAT_VERSION and header.get("schema") in (*REVISIONS, *UNRELEASED),
        f"a newer bssearch ({shortened(header.get('written_by'))}) wrote the file: format "
        f"{shortened(header.get('version'))}, schema {shortened(header.get('schema'))}; this version reads up to "
        f"format {FORMAT_VERSION} and schema {SCHEMA_HEAD}",
        hint="update bssearch",
    )


def _check_end(end: Any, digest: str) -> None:
    require(
        isinstance(end, dict) and end.get("sha256") == digest,
        "the lines have changed since the export: the SHA-256 differs",
        hint=EXPORT_AGAIN,
    )
