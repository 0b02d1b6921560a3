"""Engines: SQLite for one machine, PostgreSQL for several."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection, QueuePool

from bssearch.errors import DatabaseError
from bssearch.settings import NETWORK_FILE_VARIABLE, in_parent_folder
from bssearch.storage.connection.urls import (
    BUSY_TIMEOUT_S,
    LOCK_TIMEOUT,
    OTHER_DATABASE_HINT,
    as_database_error,
    parse_url,
    read_only,
    shown,
    sqlite_file,
    without_secrets,
)

SERVER_OPTIONS: dict[str, int] = {
    # Seconds per address of a host: two (IPv6, IPv4) take at most ten.
    "connect_timeout": 5,
    # Notice a cut network within half a minute; most systems take two hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_MOST_DIGITS = 309

# A connection used this recently counts as alive: no server restarts that fast.
UNASKED_S = 0.1

_WRITES = "bss_writes"
_LAST_USE = "bss_last_use"
_WAL_PAUSE_S = 0.02

# Bytes (https://www.sqlite.org/fileformat.html)
_SMALLEST_PAGE = 512


def create_engine_for(url: str | URL, *, write: bool = True, foreign_keys: bool = True) -> Engine:
    """Engine without connecting.

    For reading, a SQLite file must exist.
    """
    url = parse_url(url)
    path = sqlite_file(url)
    if path is None:
        engine = create_engine(
            url,
            connect_args={name: value for name, value in SERVER_OPTIONS.items() if name not in url.query},
            pool_size=1,  # keep one: a server has about a hundred for all drivers of a team
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


def reading(engine: Engine) -> AbstractContextManager[Connection]:
    """Open a transaction that sees one state of the database."""
    # SQLite transactions see one state anyway and lack this level; files are opened read-only.
    return _connected(engine, isolation_level="REPEATABLE READ", postgresql_readonly=True)


def looking(engine: Engine) -> AbstractContextManager[Connection]:
    """Open a connection for independent statements."""
    return _connected(engine, isolation_level="AUTOCOMMIT")


@contextmanager
def _connected(engine: Engine, **of_server: Any) -> Iterator[Connection]:
    options = of_server if engine.dialect.name == "postgresql" else {}
    with translated(engine.url), engine.execution_options(**options).connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that commits on exit."""
    with translated(engine.url), engine.execution_options(**{_WRITES: True}).begin() as connection:
        yield connection


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Raise SQLAlchemy errors as `DatabaseError`."""
    try:
        yield
    except SQLAlchemyError as error:
        fault = as_database_error(error, url)
        text = str(error)
        # A traceback shows the cause, so drop it if it contains the password.
        raise fault from (error if text == without_secrets(text, url) else None)


def _note_use(connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info[_LAST_USE] = time.monotonic()


def _ping_after_a_while(
    engine: Engine, connection: DBAPIConnection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection
) -> None:
    # SQLAlchemy's `pool_pre_ping` checks every time, which is a large part of a driver's messages.
    used = record.info.get(_LAST_USE)
    if used is not None and time.monotonic() - used > UNASKED_S and not _answers(engine, connection):
        raise DisconnectionError


def _answers(engine: Engine, connection: DBAPIConnection) -> bool:
    try:
        return engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error:
        return False


def _check_file(path: Path, *, write: bool) -> None:
    # Replaces SQLite's obscure errors. Never open the file here: closing it would drop all locks of this process.
    if not path.parent.is_dir():
        raise DatabaseError(f"no folder {path.parent} for the database {path.name}", hint=OTHER_DATABASE_HINT)
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder, not a database", hint=OTHER_DATABASE_HINT)
    exists = path.exists()
    if not exists and not write:
        other = in_parent_folder(f"sqlite:///{path}") or OTHER_DATABASE_HINT
        raise DatabaseError(f"no database at {path}", hint=f"the first run creates it; {other}")
    if exists and 0 < path.stat().st_size < _SMALLEST_PAGE:
        raise DatabaseError(f"{path} is not a SQLite database", hint=OTHER_DATABASE_HINT)
    if write and exists and not _is_writable(path):
        raise read_only(str(path))
    if write and not _is_writable(path.parent):
        raise read_only(f"the folder {path.parent.resolve()}")
    if write:
        refuse_network_file(path)


def _is_writable(path: Path) -> bool:
    # Root too needs a write permission.
    return _has_write_bit(path) and os.access(path, os.W_OK)


def _has_write_bit(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o222)


class _OpenFile:
    # SQLite would silently write to a deleted or replaced file.

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def check(self) -> None:
        if self._identity not in {None, self._now()}:
            raise DatabaseError(
                f"{self.path} was deleted or replaced while it was open; results stored since then are lost",
                hint="restore the file; studies that it lacks start from the beginning",
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
        # In WAL mode this keeps all commits after a kill; only a power cut can lose the last ones.
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _enter_wal_mode(connection: sqlite3.Connection) -> None:
    # SQLite's busy timeout does not help: changing the mode upgrades a read lock and fails at once on conflict.
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
        # A reader that can write deletes the log when it closes last; `query_only` prevents that.
        connection = _open(path, "mode=rw")
        connection.execute("PRAGMA query_only = ON")
        return connection
    log = path.with_name(path.name + "-wal")
    if not log.exists() and not (_has_write_bit(path) and _has_write_bit(path.parent)):
        # Nobody writes to it. As a reader root would leave a log and a shared-memory file there.
        return _open(path, "mode=ro&immutable=1")
    connection = _open(path, "mode=ro")
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        connection.close()
        # In WAL mode a reader creates a shared-memory file, which a read-only folder forbids. Without a log, the file
        # alone is the whole database and cannot change.
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
    # IMMEDIATE waits for other writers first and never fails later.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def _to_json(value: Any) -> str:
    try:
        return _encode(value)
    except ValueError as error:
        raise DatabaseError(f"{value!r} cannot be stored: it contains a number that is not finite") from error


def from_json(stored: str | bytes) -> Any:
    """Parse stored JSON; `ValueError` for unbounded numbers or invalid Unicode."""
    try:
        text = stored if isinstance(stored, str) else stored.decode()
        value = _DECODER.decode(text)
        if "\\u" in text:  # else it is Unicode already
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
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_whole, parse_constant=_finite)


def copy_sqlite(source: Path, copy: Path) -> None:
    """Copy a database with its log, whole or not at all."""
    partial_copy = copy.with_name(copy.name + ".part")
    partial_copy.unlink(missing_ok=True)
    try:
        with closing(_open_for_reading(source)) as read, closing(sqlite3.connect(partial_copy)) as written:
            read.backup(written)
        partial_copy.replace(copy)
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(f"{source} cannot be copied to {copy}: {error}") from error
    finally:
        partial_copy.unlink(missing_ok=True)


# SQLite's locks and shared memory do not work across machines:
# https://sqlite.org/wal.html ("all processes using a database must be on the same host computer"),
# https://sqlite.org/howtocorrupt.html (2.1, file systems with broken or missing locks).

# Some lock correctly across machines, but none shares the memory that a write-ahead log needs.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "davfs"),
        *("lustre", "gpfs", "beegfs", "ceph", "orangefs", "pvfs2", "panfs", "wekafs", "glusterfs"),
    }
)

# Prefixes of FUSE subtypes. Not 9p: WSL, gVisor and virtual machines use it for folders of the host.
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
    """File system type of an absolute path; "" if unknown."""
    with suppress(OSError):
        holding = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
        return max(reversed(holding), key=lambda one: len(one.mountpoint)).fstype if holding else ""
    return ""


def is_shared_by_machines(file_system: str) -> bool:
    """Return whether several machines may write here."""
    kind, _, subtype = file_system.lower().partition(".")
    return kind in NETWORK_FILE_SYSTEMS or (kind in {"fuse", "fuseblk"} and subtype.startswith(NETWORK_FUSE))


def refuse_network_file(path: Path) -> None:
    """Raise `DatabaseError` for a network file system, unless allowed or unknown."""
    if os.environ.get(NETWORK_FILE_VARIABLE) == "1":
        return
    kind = file_system_of(path.resolve())
    if is_shared_by_machines(kind):
        raise DatabaseError(
            f"{path} is on a network file system ({kind}); SQLite's log needs memory that all writers share",
            hint="name a local file with --db, or for several machines a PostgreSQL database; if one process of one "
            f"machine writes, set {NETWORK_FILE_VARIABLE}=1",
        )


LONGEST_WAIT_S = 10.0  # longest wait for a lock on a server

LOOK_EVERY_S = 0.5  # interval between looks at those who hold a lock; a shorter wait needs no second connection

ONE_AT_A_TIME = "SHARE UPDATE EXCLUSIVE"  # conflicts with itself, not with reading or writing rows

ALONE = "ACCESS EXCLUSIVE"  # conflicts with everything; `ALTER TABLE` takes it

STATEMENT_TIMEOUT = "57014"  # the SQLSTATE after a statement that took longer than `statement_timeout`

_BLOCKERS = text(
    "SELECT pid, usename, application_name FROM pg_stat_activity WHERE pid = ANY(pg_blocking_pids(:pid)) ORDER BY pid"
)


class BlockedError(DatabaseError):
    """Another session held a lock for `LONGEST_WAIT_S`."""


def lock_tables(connection: Connection, names: Collection[str], mode: str = ONE_AT_A_TIME) -> None:
    """Lock a server's tables until the transaction ends; raise `BlockedError` after `LONGEST_WAIT_S`.

    SQLite needs no lock: its write transactions exclude each other.
    """
    if connection.dialect.name != "postgresql":
        return
    # Writers lock a study before anything else.
    ordered = sorted(names, key=lambda name: (name != "bss_study", name))
    with limited_waits(connection, STATEMENT_TIMEOUT):
        # `lock_timeout` limits the wait for one table; this limits the wait for all.
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{LONGEST_WAIT_S:g}s'")
        connection.exec_driver_sql(f"LOCK TABLE {', '.join(ordered)} IN {mode} MODE")
        connection.exec_driver_sql("SET LOCAL statement_timeout = DEFAULT")


@contextmanager
def limited_waits(connection: Connection, *states: str) -> Iterator[None]:
    """Limit each wait for a lock to `LONGEST_WAIT_S` until the transaction ends.

    A wait inside the block that takes longer raises `BlockedError` with the sessions that hold the lock; so do errors
    with one of the SQLSTATEs ``states``.
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
    """Looks, on a separate connection, who blocks a connection; connects only after `LOOK_EVERY_S`."""

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
            hint=f"ask them to end the transaction, or end the session as an administrator: {pids}",
        )

    def _look(self) -> None:
        if self._is_over.wait(LOOK_EVERY_S):
            return
        engine = create_engine(self._url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with suppress(SQLAlchemyError), engine.connect() as connection:
            while not self._is_over.is_set():
                found = connection.execute(_BLOCKERS, {"pid": self._pid}).all()
                if found:
                    self._blockers = [(pid, user or "?", program or "") for pid, user, program in found]
                self._is_over.wait(LOOK_EVERY_S)
