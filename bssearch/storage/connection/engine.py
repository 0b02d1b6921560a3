"""Database URLs and engines: SQLite for one machine, PostgreSQL for several."""

import difflib
import json
import math
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection, QueuePool

from bssearch.errors import DatabaseError, UsageError, require
from bssearch.settings import NETWORK_FILE_VARIABLE, in_parent_folder, user_name

URL_FORMS = (
    "write sqlite:///FILE for a file in this folder, sqlite:////PATH for an absolute path, or "
    "postgresql://USER@HOST/NAME; within user, password, database and options, write @ as %40, : as %3A and / as %2F"
)

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
# Mask similar names, too, because a similar name may be a typo.
_SECRETS = ("password", "passwd", "passphrase", "sslpassword")

_LARGEST_PORT = 65535


def masked(url: str | URL) -> str:
    """Return a URL with each secret as ``***``, even if the URL is malformed."""
    text = url.render_as_string(hide_password=True).replace("+psycopg:", ":", 1) if isinstance(url, URL) else url
    if not isinstance(url, URL) or "@" in (url.host or ""):
        text = re.sub(r"^((?:[^:/@]*:?//)?[^:/@]*):.*@", r"\1:***@", text, flags=re.DOTALL)
        # Without a host, the text in the host's place may be the password.
        text = re.sub(r"^([^:/@]*:?//[^:/@\[\]]*):(?!\d{1,5}(?:[/?]|$))[^@]*$", r"\1:***", text, flags=re.DOTALL)
    # Without a URL, the end of the value is unknown.
    rest = "[^&]*" if "://" in text else ".*"
    return re.sub(rf"(\w+)(\s*=)({rest})", _masked_option, text, flags=re.DOTALL)


def _masked_option(found: re.Match[str]) -> str:
    name, equals, value = found.groups()
    if _is_secret(name):
        return f"{name}{equals}***"
    # In libpq's form, other options follow the value: check the names of these options, too.
    rest = re.sub(r"(\w+)(\s*=)(.*)", _masked_option, value, flags=re.DOTALL)
    return f"{name}{equals}{rest}"


def _is_secret(option: str) -> bool:
    return bool(difflib.get_close_matches(option.lower(), _SECRETS, n=1, cutoff=0.75))


def parse_url(text: str | URL) -> URL:
    """Parse a database URL. Raises `UsageError` if the URL is malformed or the driver is not installed."""
    text = text.strip() if isinstance(text, str) else text
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Drop the cause, because its text holds the URL, or a password in the port's place.
        raise UsageError(f"{masked(text)!r} is not a database URL", hint=URL_FORMS) from None
    driver = _DRIVERS.get(url.drivername)
    if driver is None:
        raise UsageError(f"{masked(text)!r} has an unsupported scheme: {url.drivername}", hint=URL_FORMS)
    url = url.set(drivername=driver)
    if driver == "sqlite":
        return _checked_sqlite(url)
    _check_at_signs(text, url)
    require(
        url.port is None or 1 <= url.port <= _LARGEST_PORT,
        f"{masked(text)!r}: the port {url.port} must be from 1 to {_LARGEST_PORT}",
    )
    try:
        url.get_dialect().import_dbapi()
    except ImportError as error:
        raise UsageError(
            f"{masked(url)!r} needs the PostgreSQL driver psycopg",
            hint="install the driver with: pip install 'bssearch[postgres]'",
        ) from error
    return url


def _check_at_signs(text: str | URL, url: URL) -> None:
    # An unescaped @ would end the password early, and show the rest as the host.
    given, expected = (text, url.username is not None) if isinstance(text, str) else (url.host or "", False)
    require(given.count("@") <= expected, f"{masked(text)!r}: unexpected '@'", hint=URL_FORMS)


def _checked_sqlite(url: URL) -> URL:
    given = masked(url)
    require(
        not url.host and not url.username, f"{given!r} names a host; write three slashes before a file", hint=URL_FORMS
    )
    require(
        not url.query and not (url.database or "").startswith("file:"),
        f"{given!r}: a SQLite URL takes a path only, without options",
        hint=URL_FORMS,
    )
    require(
        url.database not in {None, "", ":memory:"},
        f"{given!r} names no file; databases in memory are not supported",
        hint=URL_FORMS,
    )
    return url


def sqlite_file(url: URL) -> Path | None:
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def shown(url: URL) -> str:
    return str(sqlite_file(url) or masked(url))


def without_secrets(text: str, url: URL) -> str:
    for secret in (url.password, *(value for key, value in url.query.items() if _is_secret(key))):
        for one in (secret,) if isinstance(secret, str) else secret or ():
            text = text.replace(one, "***") if one else text
    return text


BUSY_TIMEOUT_S = 30.0

OTHER_DATABASE_HINT = "name another database with --db or BSSEARCH_DB_URL"

CHECK_HINT = f"try again, or {OTHER_DATABASE_HINT}"

RETRY_HINT = "run the same command again"

FULL_DISK_HINT = "free space on the database's disk, then run the same command again"

# SQLSTATE after a wait of `lock_timeout`.
LOCK_TIMEOUT = "55P03"

# SQLSTATEs of a missing privilege, or of no schema with a right to create.
_NO_RIGHT = ("42501", "3F000")

MAKER_TRIGGERS = ("bss_study_maker", "bss_submission_submitter")

_NOT_POSTGRESQL = re.compile(r"invalid response to \w+ negotiation|expected authentication request")
_REFUSED = {
    # libpq's messages for a refused connection, which has no SQLSTATE. A retry would not help.
    re.compile(r'database "[^"]*" does not exist'): "create the database with createdb, or " + OTHER_DATABASE_HINT,
    re.compile(r'role "[^"]*" does not exist'): "create the role with createuser, or use another user in the URL",
    re.compile(r"password authentication failed|no password supplied|empty password"): (
        "check the user and the password of the URL; BSSEARCH_DB_URL_FILE may name a file with the URL"
    ),
    re.compile(r"authentication failed|no pg_hba\.conf entry"): "ask the server's administrator to admit this user",
    re.compile(
        r"permission denied for database|not permitted to log in"
    ): "ask the server's administrator to admit this user",
    re.compile(r"invalid (port number|\w+ value|connection option)[^()]*"): "check the port and the options of the URL",
}


class ConnectionLostError(DatabaseError):
    """The server is unreachable, or another transaction conflicted. A retry may succeed."""


# Words before the cause, hint and error by SQLSTATE or its class
# (https://www.postgresql.org/docs/current/errcodes-appendix.html).
_BY_STATE: Mapping[tuple[str, ...], tuple[str, str, type[DatabaseError]]] = {
    ("53100",): ("", FULL_DISK_HINT, DatabaseError),
    (LOCK_TIMEOUT,): ("another session held a lock for too long: ", "try again", DatabaseError),
    # Conflicts and deadlocks.
    ("40001", "40P01"): ("the transaction conflicted with another transaction: ", RETRY_HINT, ConnectionLostError),
    # 25P03: no statement for `bssearch.storage.database.LONGEST_TURN_SECONDS`.
    ("08", "25P03", "57P01", "57P02", "57P03", "53300"): (
        "the connection was lost: ",
        RETRY_HINT,
        ConnectionLostError,
    ),
}


def as_database_error(error: SQLAlchemyError, url: URL) -> DatabaseError:
    cause = " ".join(without_secrets(str(getattr(error, "orig", None) or error), url).split())
    where = shown(url)
    if sqlite_file(url) is None:
        return _of_server(error, cause, where, url)
    if "readonly" in cause:
        return read_only(where)
    if "file is not a database" in cause:
        return DatabaseError(f"{where} is not a SQLite database", hint=OTHER_DATABASE_HINT)
    if "database is locked" in cause:
        return DatabaseError(
            f"waited {BUSY_TIMEOUT_S:g} s for {where}, which is locked, probably by another process",
            hint="try again when the other process has ended",
        )
    return DatabaseError(f"{where}: {cause}", hint=FULL_DISK_HINT if "disk is full" in cause else CHECK_HINT)


def read_only(where: str) -> DatabaseError:
    return DatabaseError(f"{where} is read-only", hint=f"make the database writable, or {OTHER_DATABASE_HINT}")


def missing_right(role: str, right: str, thing: str, where: str) -> DatabaseError:
    whom = f'TO "{role}"'
    if thing.startswith("schema "):
        rights = "USAGE, CREATE" if right == "CREATE" else "USAGE"
        grants = [f"GRANT {rights} ON SCHEMA {thing.removeprefix('schema ')} {whom}"]
    elif right == "SELECT":
        grants = [f"GRANT SELECT ON ALL TABLES IN SCHEMA public {whom}"]
    else:
        grants = [
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public {whom}",
            f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public {whom}",
        ]
    return DatabaseError(
        f"{where}: the role {role!r} lacks the right {right} on {thing}",
        hint=f"ask an owner of the database to run: {'; '.join(grants)}",
    )


def _of_server(error: SQLAlchemyError, cause: str, where: str, url: URL) -> DatabaseError:
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    if state in _NO_RIGHT:
        return _without_right(error, cause, where, url)
    for states, (what, hint, kind) in _BY_STATE.items():
        if state.startswith(states):
            return kind(f"{where}: {what}{cause}", hint=hint)
    if getattr(error, "connection_invalidated", False):
        return ConnectionLostError(f"{where}: the connection was lost: {cause}", hint=RETRY_HINT)
    if state or not isinstance(error, DBAPIError):
        return DatabaseError(f"{where}: {cause}", hint=CHECK_HINT)
    if _NOT_POSTGRESQL.search(cause):
        return DatabaseError(f"{where} is not a PostgreSQL server: {cause}", hint="check the URL's host and port")
    for pattern, hint in _REFUSED.items():
        if found := pattern.search(cause):
            return DatabaseError(f"{where}: {found.group()}", hint=hint)
    if isinstance(error, OperationalError):
        return ConnectionLostError(
            f"{where} cannot be reached: {cause}", hint=f"check the host and the port, or {OTHER_DATABASE_HINT}"
        )
    return DatabaseError(f"{where}: {cause}", hint=CHECK_HINT)


def _without_right(error: SQLAlchemyError, cause: str, where: str, url: URL) -> DatabaseError:
    said = getattr(getattr(error, "orig", None), "diag", None)
    if getattr(said, "constraint_name", None) in MAKER_TRIGGERS:
        return DatabaseError(
            f"{where}: {getattr(said, 'message_primary', cause)}", hint="ask one of the named users to make this change"
        )
    if owned := re.search(r"must be owner of (\w+ \S+)", cause):
        return DatabaseError(
            f"{where}: the role {_role(url)!r} cannot change {owned.group(1)}, which another role owns",
            hint="ask the owner to run `bssearch db upgrade`",
        )
    named = re.search(r"permission denied for (\w+ \S+)", cause)
    if named is None and cause.startswith("permission denied"):  # right to create a role, or to grant membership
        return DatabaseError(
            f"{where}: {cause}", hint=f"ask the server's administrator to give the role {_role(url)!r} this right"
        )
    thing = named.group(1) if named else "schema public"
    return missing_right(_role(url), _right(getattr(error, "statement", None) or "", thing), thing, where)


def _right(statement: str, thing: str) -> str:
    if thing.startswith("schema"):
        return "CREATE" if statement.lstrip().startswith(("CREATE", "ALTER")) else "USAGE"
    # SELECT FOR UPDATE needs the right to update the rows.
    return "UPDATE" if " FOR " in statement else (statement.split() or ["SELECT"])[0].upper()


def _role(url: URL) -> str:
    return url.username or os.environ.get("PGUSER") or user_name()


SERVER_OPTIONS: dict[str, int] = {
    # Seconds per address of a host: two addresses (IPv6, IPv4) take at most ten seconds.
    "connect_timeout": 5,
    # Notice a cut network within half a minute; by default, most systems take two hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_MOST_DIGITS = 309

# A connection used within these seconds counts as alive, because a server takes longer to restart.
UNASKED_S = 0.1

_WRITES = "bss_writes"
_LAST_USE = "bss_last_use"
_WAL_PAUSE_S = 0.02

# Bytes (https://www.sqlite.org/fileformat.html)
_SMALLEST_PAGE = 512


def create_engine_for(url: str | URL, *, write: bool = True, foreign_keys: bool = True) -> Engine:
    """Make an engine without connecting.

    If ``write`` is False, a SQLite file must exist.
    """
    url = parse_url(url)
    path = sqlite_file(url)
    if path is None:
        engine = create_engine(
            url,
            connect_args={name: value for name, value in SERVER_OPTIONS.items() if name not in url.query},
            pool_size=1,  # keep one connection, because a server has about a hundred for all drivers of a team
            max_overflow=9,
            json_serializer=_to_json,
            json_deserializer=from_json,
        )
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", partial(_ping_after_a_while, engine))
        return engine
    _check_file(path, write=write)
    file = _OpenFile(path)
    engine = create_engine(
        url,
        creator=partial(_connect_sqlite, file, write=write, foreign_keys=foreign_keys),
        poolclass=QueuePool,
        json_serializer=_to_json,
        json_deserializer=from_json,
    )
    event.listen(engine, "begin", partial(_begin, file))
    return engine


@contextmanager
def opened_engine(url: str | URL, *, write: bool = True, foreign_keys: bool = True) -> Iterator[Engine]:
    engine = create_engine_for(url, write=write, foreign_keys=foreign_keys)
    try:
        yield engine
    finally:
        engine.dispose()


def reading(engine: Engine) -> AbstractContextManager[Connection]:
    # SQLite transactions always see one state and lack this level; `_open_for_reading` opens files read-only.
    return _connected(engine, isolation_level="REPEATABLE READ", postgresql_readonly=True)


def looking(engine: Engine) -> AbstractContextManager[Connection]:
    return _connected(engine, isolation_level="AUTOCOMMIT")


@contextmanager
def _connected(engine: Engine, **of_server: Any) -> Iterator[Connection]:
    options = of_server if engine.dialect.name == "postgresql" else {}
    with translated(engine.url), engine.execution_options(**options).connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    with translated(engine.url), engine.execution_options(**{_WRITES: True}).begin() as connection:
        yield connection


@contextmanager
def translated(url: URL) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        fault = as_database_error(error, url)
        text = str(error)
        # A traceback shows the cause, so drop a cause that contains the password.
        raise fault from (error if text == without_secrets(text, url) else None)


def _note_use(connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info[_LAST_USE] = time.monotonic()


def _ping_after_a_while(
    engine: Engine, connection: DBAPIConnection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection
) -> None:
    # SQLAlchemy's `pool_pre_ping` checks before every use; these checks would be a large part of a driver's messages.
    used = record.info.get(_LAST_USE)
    if used is not None and time.monotonic() - used > UNASKED_S and not _answers(engine, connection):
        raise DisconnectionError


def _answers(engine: Engine, connection: DBAPIConnection) -> bool:
    try:
        return engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error:
        return False


def _check_file(path: Path, *, write: bool) -> None:
    # Replace SQLite's obscure errors. Never open the file here, because a close would drop all locks of this process.
    require(
        path.parent.is_dir(),
        f"no folder {path.parent} for the database {path.name}",
        hint=f"create the folder, or {OTHER_DATABASE_HINT}",
        error=DatabaseError,
    )
    require(not path.is_dir(), f"{path} is a folder, not a database", hint=OTHER_DATABASE_HINT, error=DatabaseError)
    exists = path.exists()
    if not exists and not write:
        other = in_parent_folder(f"sqlite:///{path}") or OTHER_DATABASE_HINT
        raise DatabaseError(f"no database at {path}", hint=f"{other}, or create the database with `bssearch run`")
    require(
        not exists or not 0 < path.stat().st_size < _SMALLEST_PAGE,
        f"{path} is not a SQLite database",
        hint=OTHER_DATABASE_HINT,
        error=DatabaseError,
    )
    if write and exists and not _is_writable(path):
        raise read_only(str(path))
    if write and not _is_writable(path.parent):
        raise read_only(f"the folder {path.parent.resolve()}")
    if write:
        refuse_network_file(path)


def _is_writable(path: Path) -> bool:
    # `os.access` always permits root, so also check the permission bits.
    return _has_write_bit(path) and os.access(path, os.W_OK)


def _has_write_bit(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o222)


class _OpenFile:
    # SQLite would silently write to a deleted or replaced file.

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def check(self) -> None:
        require(
            self._identity in {None, self._now()},
            f"{self.path} was deleted or replaced while open; results stored since then are lost",
            hint="restore the file; studies missing from the file start from the beginning",
            error=DatabaseError,
        )

    def opened(self) -> None:
        self._identity = self._identity or self._now()
        self.check()

    def _now(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _connect_sqlite(file: _OpenFile, *, write: bool, foreign_keys: bool) -> sqlite3.Connection:
    file.check()  # SQLite would create a new file
    connection = _open_for_writing(file.path) if write else _open_for_reading(file.path)
    try:
        file.opened()
    except DatabaseError:
        connection.close()
        raise
    connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
    return connection


def _open(path: Path, options: str) -> sqlite3.Connection:
    # isolation_level=None: the driver starts no transactions; `_begin` does.
    return sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{options}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )


def _open_for_writing(path: Path) -> sqlite3.Connection:
    connection = _open(path, "mode=rwc")
    try:
        _enter_wal_mode(connection)
        # In WAL mode, this setting keeps all commits after a kill; only a power cut can lose the last commits.
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _enter_wal_mode(connection: sqlite3.Connection) -> None:
    # SQLite's busy timeout does not help: a change of mode upgrades a read lock, and a conflict fails at once.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_WAL_PAUSE_S)


def _open_for_reading(path: Path) -> sqlite3.Connection:
    if _is_writable(path) and _is_writable(path.parent):
        # A reader with write permission deletes the log when closing last; `query_only` prevents the deletion.
        connection = _open(path, "mode=rw")
        connection.execute("PRAGMA query_only = ON")
        return connection
    log = path.with_name(path.name + "-wal")
    if not log.exists() and not (_has_write_bit(path) and _has_write_bit(path.parent)):
        # The file has no writers. As a reader, root would leave a log and a shared-memory file in the folder.
        return _open(path, "mode=ro&immutable=1")
    connection = _open(path, "mode=ro")
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        connection.close()
        # In WAL mode a reader creates a shared-memory file, which a read-only folder forbids. If the write-ahead
        # log is missing or empty, the database file is complete and cannot change.
        if log.exists() and log.stat().st_size:
            raise
        return _open(path, "mode=ro&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _begin(file: _OpenFile, connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    if writes:
        file.check()
    # A transaction with BEGIN IMMEDIATE first waits for other writers, and later never fails on a lock.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def _to_json(value: Any) -> str:
    try:
        return _encode(value)
    except ValueError as error:
        raise DatabaseError(f"{value!r} cannot be stored: a number is not finite") from error


def from_json(stored: str | bytes) -> Any:
    """Parse stored JSON. Raises `ValueError` for invalid JSON, NaN, infinities, overlong integers and bad Unicode."""
    try:
        text = stored if isinstance(stored, str) else stored.decode()
        value = _DECODER.decode(text)
        if "\\u" in text:  # other texts are valid Unicode already
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; expected at most {_MOST_DIGITS}")
    return int(text)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_whole, parse_constant=_finite)


def copy_sqlite(source: Path, copy: Path) -> None:
    """Copy a database, including its write-ahead log, or raise `DatabaseError` and leave no copy."""
    partial_copy = copy.with_name(copy.name + ".part")
    partial_copy.unlink(missing_ok=True)
    try:
        partial_copy.touch(0o600)  # the rows may be private
        with closing(_open_for_reading(source)) as read, closing(sqlite3.connect(partial_copy)) as written:
            read.backup(written)
        shutil.copymode(source, partial_copy)
        partial_copy.replace(copy)
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(
            f"{source} cannot be copied to {copy}: {error}", hint="make the folder writable, or free space on its disk"
        ) from error
    finally:
        partial_copy.unlink(missing_ok=True)


# SQLite's locks and shared memory do not work across machines:
# https://sqlite.org/wal.html ("all processes using a database must be on the same host computer"),
# https://sqlite.org/howtocorrupt.html (2.1, file systems with broken or missing locks).

# Even file systems with correct locks do not share the memory of a write-ahead log between machines.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "davfs"),
        *("lustre", "gpfs", "beegfs", "ceph", "orangefs", "pvfs2", "panfs", "wekafs", "glusterfs"),
    }
)

# Prefixes of FUSE subtypes. 9p is absent, because WSL, gVisor and virtual machines use 9p for folders of the host.
NETWORK_FUSE = (
    "sshfs",
    "nfs",
    "smb",
    "cifs",
    "davfs",
    "glusterfs",
    "ceph",
    "juicefs",
    "s3fs",
    "gcsfuse",
    "goofys",
    "rclone",
)


def file_system_of(path: Path) -> str:
    """The file system type of an absolute path, or "" if unknown."""
    with suppress(OSError):
        holding = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
        return max(reversed(holding), key=lambda one: len(one.mountpoint)).fstype if holding else ""
    return ""


def is_shared_by_machines(file_system: str) -> bool:
    kind, _, subtype = file_system.lower().partition(".")
    return kind in NETWORK_FILE_SYSTEMS or (kind in {"fuse", "fuseblk"} and subtype.startswith(NETWORK_FUSE))


def refuse_network_file(path: Path) -> None:
    """Raise `DatabaseError` if a file is on a network file system, unless the user allows such files."""
    if os.environ.get(NETWORK_FILE_VARIABLE) == "1":
        return
    kind = file_system_of(path.resolve())
    require(
        not is_shared_by_machines(kind),
        f"{path} is on a network file system ({kind}); SQLite's log needs memory that all writers share",
        hint="name a local file with --db, or a PostgreSQL database for several machines; set "
        f"{NETWORK_FILE_VARIABLE}=1 if only one process of one machine writes",
        error=DatabaseError,
    )


LONGEST_WAIT_S = 10.0  # longest wait for a lock on a server

LOOK_EVERY_S = 0.5  # seconds between queries for blocking sessions; shorter waits need no second connection

ONE_AT_A_TIME = "SHARE UPDATE EXCLUSIVE"  # conflicts with the same mode, but with neither reads nor writes of rows

ALONE = "ACCESS EXCLUSIVE"  # conflicts with every mode; `ALTER TABLE` takes this lock

STATEMENT_TIMEOUT = "57014"  # SQLSTATE after a statement that took longer than `statement_timeout`

_BLOCKERS = text(
    "SELECT pid, usename, application_name FROM pg_stat_activity WHERE pid = ANY(pg_blocking_pids(:pid)) ORDER BY pid"
)


class BlockedError(DatabaseError):
    """Another session held a lock for `LONGEST_WAIT_S` seconds."""


def lock_tables(connection: Connection, names: Collection[str], mode: str = ONE_AT_A_TIME) -> None:
    """Lock a server's tables until the transaction ends. Raises `BlockedError` after `LONGEST_WAIT_S`.

    SQLite needs no lock, because write transactions exclude each other.
    """
    if connection.dialect.name != "postgresql":
        return
    # Lock the studies first, as writers do.
    ordered = sorted(names, key=lambda name: (name != "bss_study", name))
    with limited_waits(connection, STATEMENT_TIMEOUT):
        # `lock_timeout` limits the wait for one table, `statement_timeout` the wait for all tables.
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{LONGEST_WAIT_S:g}s'")
        connection.exec_driver_sql(f"LOCK TABLE {', '.join(ordered)} IN {mode} MODE")
        connection.exec_driver_sql("SET LOCAL statement_timeout = DEFAULT")


@contextmanager
def limited_waits(connection: Connection, *states: str) -> Iterator[None]:
    """Limit each wait for a lock to `LONGEST_WAIT_S` until the transaction ends.

    Longer waits inside the block, and errors with SQLSTATEs in ``states``, raise `BlockedError` with the blocking
    sessions.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LONGEST_WAIT_S:g}s'")
    watch = _Watch(connection)
    try:
        yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) not in {LOCK_TIMEOUT, *states}:
            raise
        raise watch.blocked() from None
    finally:
        watch.end()


class _Watch:
    # Finds the sessions that block a connection. A separate connection for these queries opens after `LOOK_EVERY_S`.

    def __init__(self, connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None, "the connection is open"
        self._pid: int = driver.info.backend_pid
        self._url = connection.engine.url
        self._where = shown(self._url)
        self._is_over = threading.Event()
        self._blockers: list[tuple[int, str, str]] = []
        threading.Thread(target=self._look, name="bssearch lock watch", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def blocked(self) -> BlockedError:
        if not self._blockers:
            return BlockedError(f"{self._where}: waited {LONGEST_WAIT_S:g} s for a lock", hint="try again")
        named = [f"pid {pid} of {user}{program and f' ({program})'}" for pid, user, program in self._blockers]
        pids = "; ".join(f"SELECT pg_terminate_backend({pid})" for pid, _, _ in self._blockers)
        return BlockedError(
            f"{self._where}: waited {LONGEST_WAIT_S:g} s for a lock that another session holds: {', '.join(named)}",
            hint=f"ask the users to end their transactions, or end the sessions as an administrator: {pids}",
        )

    def _look(self) -> None:
        if self._is_over.wait(LOOK_EVERY_S):
            return
        engine = create_engine(self._url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with suppress(SQLAlchemyError), engine.connect() as connection:
            while not self._is_over.is_set():
                if found := connection.execute(_BLOCKERS, {"pid": self._pid}).all():
                    self._blockers = [(pid, user or "?", program or "") for pid, user, program in found]
                self._is_over.wait(LOOK_EVERY_S)
