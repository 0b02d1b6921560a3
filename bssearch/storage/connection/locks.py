"""Locks of a server's tables: only a writer can take one, and a wait ends after 10 s with the holder's name.

PostgreSQL lets everybody take advisory locks, so a reader could hold ours. `LOCK TABLE` in the modes used here needs a
right to write.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from bssearch.errors import DatabaseError
from bssearch.storage.connection.faults import LOCK_TIMEOUT
from bssearch.storage.connection.urls import shown

LONGEST_WAIT_S = 10.0
"""Longest wait for a lock on a server."""

LOOK_EVERY_S = 0.5
"""Interval between looks at those who hold a lock; a shorter wait needs no second connection."""

ONE_AT_A_TIME = "SHARE UPDATE EXCLUSIVE"
"""Conflicts with itself, not with reading or writing rows."""

ALONE = "ACCESS EXCLUSIVE"
"""Conflicts with everything; `ALTER TABLE` takes it."""

STATEMENT_TIMEOUT = "57014"
"""The SQLSTATE after a statement that took longer than `statement_timeout`."""

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
    """Looks, on a connection of its own, who blocks a connection; connects only after `LOOK_EVERY_S`."""

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
        """Return the error that names the blocking sessions."""
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
