"""An open database: transactions, retries and ids."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import URL, Connection, Function, Select, bindparam, event, func, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from bssearch.errors import BSSearchError, DatabaseError
from bssearch.records import Environment, to_json
from bssearch.storage import migrate
from bssearch.storage.connection.engine import (
    ConnectionLostError,
    create_engine_for,
    looking,
    masked,
    reading,
    shown,
    translated,
    writing,
)
from bssearch.storage.models import ENVIRONMENT_ROWS, STUDY_ROWS, to_columns
from bssearch.storage.statements import insert_if_absent, no_study

# Longer than the restart or replacement of a server takes.
RETRY_FOR_S = 900.0

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0


class Patience:
    """Retries calls after a lost connection, with growing random pauses, for up to `RETRY_FOR_S` seconds.

    ``notify`` reports each loss and each return of the connection once.
    """

    def __init__(self, where: str, notify: Callable[[str], None]) -> None:
        self._where = where
        self._notify = notify
        self.is_waiting = False
        self._lock = threading.Lock()
        self._over = threading.Event()

    def end(self) -> None:
        """Stop retrying. Later calls fail at the first lost connection."""
        self._over.set()

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, or raise `DatabaseError` if the connection stays lost.

        ``work`` must be idempotent, because the connection may break after the commit.
        """
        try:
            return work()
        except ConnectionLostError as error:
            if self._over.is_set():
                raise
            self._tell(f"{error.message}; retrying for up to {RETRY_FOR_S / 60:.0f} minutes", waiting=True)
        try:
            result = self._repeat(work)
        except (ConnectionLostError, KeyboardInterrupt) as error:
            tried = "stopped retrying" if self._over.is_set() else f"retried for {RETRY_FOR_S / 60:.0f} minutes"
            # After giving up or Ctrl-C, later calls during cleanup must not wait again.
            self.end()
            self.is_waiting = False
            if isinstance(error, KeyboardInterrupt):
                raise
            raise DatabaseError(
                f"{error.message}; {tried}",
                hint="stored results are safe; run the same command again to resume",
            ) from error
        except BSSearchError:  # the database answered, so the connection works again
            self._tell_back()
            raise
        self._tell_back()
        return result

    def _repeat(self, work: Callable[[], Result]) -> Result:
        # Import only after a lost connection, because the import is slow.
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            sleep_using_event,
            stop_after_delay,
            stop_when_event_set,
            wait_random_exponential,
        )

        retrying = Retrying(
            retry=retry_if_exception_type(ConnectionLostError),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=stop_after_delay(RETRY_FOR_S) | stop_when_event_set(self._over),
            sleep=sleep_using_event(self._over),
            reraise=True,
        )
        return retrying(work)

    def _tell_back(self) -> None:
        self._tell(f"the connection to {self._where} is back", waiting=False)

    def _tell(self, message: str, *, waiting: bool) -> None:
        with self._lock:
            if self.is_waiting is waiting:
                return
            self.is_waiting = waiting
        self._notify(message)


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Notify = Callable[[str], None]

# The server ends a transaction that holds a lock if no statement comes for these seconds. Otherwise a suspended driver
# would block the other drivers, even from marking the suspended driver's trials as lost.
LONGEST_TURN_SECONDS = 10.0

# Longest pause before a turn on SQLite. Writers poll for the lock every 100 ms: without the pause, one of 8 drivers
# never started a trial.
SPREAD_SECONDS = 0.1


_STUDY_ID = select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.name == bindparam("name"))


def limit_silence(connection: Connection) -> None:
    """Make a server end this transaction after `LONGEST_TURN_SECONDS` without a statement."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(_silence_limit()))


def _locked(connection: Connection, query: Select[Any]) -> Select[Any]:
    # Set the limit in the statement that takes the lock, to save a message to the server.
    return (query.add_columns(_silence_limit()) if connection.dialect.name == "postgresql" else query).with_for_update()


def _silence_limit() -> Function[Any]:
    return func.set_config("idle_in_transaction_session_timeout", f"{LONGEST_TURN_SECONDS:g}s", True)


class _Turn(threading.local):
    # A thread's transaction that holds a lock; ``connection`` is None before the lock and after the first write.

    connection: Connection | None = None
    ending = ExitStack()


class _TurnOver(Exception):  # noqa: N818 - this exception only rolls back
    pass


def _close(connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.close()


class Database:
    """A database engine and its transactions."""

    def __init__(self, url: str | URL, *, write: bool = True, notify: Notify | None = None) -> None:
        self._engine = create_engine_for(url, write=write)
        self._write = write
        self._environment_ids: dict[Environment, int] = {}
        self.asked: dict[str, int] = {}  # ids of the studies asked for; their rows are checked after an unknown error
        self._turn = _Turn()
        notify = notify or (lambda message: None)
        self.patience = Patience(shown(self._engine.url), notify)
        try:
            if write:
                migrate.prepare(self._engine, notify)
            else:
                self.patience.end()
                migrate.check(self._engine)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, BSSearchError):
                self._refuse_faulty_rows(error)
        finally:
            self.close()

    def _refuse_faulty_rows(self, error: Exception) -> None:
        from bssearch.storage.integrity import first_fault

        for name, study_id in (self.asked or self._all_studies()).items():
            with self.reading() as connection:
                fault = first_fault(connection, study_id)
            if fault is not None:
                raise DatabaseError(
                    f"study {name!r} has an invalid row: {fault}",
                    hint="correct the row with SQL, or delete the study",
                ) from error

    def _all_studies(self) -> dict[str, int]:
        with self.reading() as connection:
            return {name: study_id for name, study_id in connection.execute(select(STUDY_ROWS.c.name, STUDY_ROWS.c.id))}

    def close(self) -> None:
        """Stop retrying and close all connections. A connection in use closes after its use."""
        self.patience.end()
        event.listen(self._engine, "checkin", _close)
        self._engine.dispose()

    @property
    def masked_url(self) -> str:
        """The database's URL without secrets."""
        return masked(self._engine.url)

    @property
    def has_secret(self) -> bool:
        """True if the database's URL holds a secret."""
        return self.masked_url != self._engine.url.render_as_string(hide_password=False).replace("+psycopg:", ":", 1)

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a transaction that reads one snapshot of the database, or return this thread's `turn`."""
        return self._in_turn() or reading(self._engine)

    def looking(self) -> AbstractContextManager[Connection]:
        """Open a connection. Outside a `turn`, each statement on a server is a separate transaction."""
        return self._in_turn() or looking(self._engine)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction that commits on exit and ends this thread's `turn`."""
        if not self._write:
            raise DatabaseError(f"{self.masked_url} was opened read-only; open the store with write=True")
        held, self._turn.connection = self._turn.connection, None
        if held is None:
            with writing(self._engine) as connection:
                yield connection
            return
        with self._turn.ending.pop_all():
            yield held

    @contextmanager
    def turn(self, study: str) -> Iterator[None]:
        """Lock a study until this thread's first write, which commits the transaction, or until the block ends.

        If the server ends the lock, the write retries in a new transaction.
        """

        def take() -> None:
            with ExitStack() as stack:
                connection = stack.enter_context(self.writing())
                self.lock_study(connection, study)
                self._turn.ending, self._turn.connection = stack.pop_all(), connection

        if self._engine.dialect.name == "sqlite":
            time.sleep(random.uniform(0.0, SPREAD_SECONDS))
        self.patience.run(take)
        try:
            yield
        finally:
            self._end_turn()

    def _in_turn(self) -> AbstractContextManager[Connection] | None:
        connection = self._turn.connection
        return None if connection is None else self._reading_in(connection)

    @contextmanager
    def _reading_in(self, connection: Connection) -> Iterator[Connection]:
        try:
            with translated(self._engine.url):
                yield connection
        except ConnectionLostError:
            self._end_turn()
            raise

    def _end_turn(self) -> None:
        if self._turn.connection is not None:
            self._turn.connection = None
            with suppress(_TurnOver, ConnectionLostError), self._turn.ending.pop_all():
                raise _TurnOver

    def on_study(self, name: str, work: Callable[[Connection, int], Result]) -> Result:
        """Run ``work`` on a locked study in one transaction, with retries."""
        study_id: int | None = None  # retries keep this id, because the first try may have renamed or deleted the study

        def once() -> Result:
            nonlocal study_id
            with self.writing() as connection:
                if study_id is None:
                    study_id = self.lock_study(connection, name)
                else:
                    connection.execute(_locked(connection, select(STUDY_ROWS.c.id).where(STUDY_ROWS.c.id == study_id)))
                return work(connection, study_id)

        return self.patience.run(once)

    def study_id(self, connection: Connection, name: str) -> int:
        """Return a study's id, or raise `NotFoundError`."""
        return self._found(connection, name, _STUDY_ID)

    def lock_study(self, connection: Connection, name: str) -> int:
        """Lock a study's row, and return the study's id."""
        return self._found(connection, name, _locked(connection, _STUDY_ID))

    def _found(self, connection: Connection, name: str, query: Select[Any]) -> int:
        # Query the id each time: another process may rename or delete the study, and SQLite may reuse the id.
        study_id: int | None = connection.scalar(query, {"name": name})
        if study_id is None:
            raise no_study(connection, name)
        self.asked[name] = study_id
        return study_id

    def environment_id(self, connection: Connection, environment: Environment) -> int:
        """Store an environment if new, and return the id. Call only once per environment in a transaction."""
        if environment in self._environment_ids:
            return self._environment_ids[environment]
        digest = environment_digest(environment)
        inserted = insert_if_absent(connection, ENVIRONMENT_ROWS, {"digest": digest, **to_columns(environment)})
        known = select(ENVIRONMENT_ROWS.c.id).where(ENVIRONMENT_ROWS.c.digest == digest)
        found: int = connection.execute(known).scalar_one()
        if not inserted:
            # Cache only committed ids: this transaction may roll back.
            self._environment_ids[environment] = found
        return found


class StorePart:
    """A part of the store, such as the trials."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.patience = database.patience


def patiently(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Retry an idempotent method while the server is unreachable."""

    @wraps(method)
    def patient(self: Database | StorePart, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self.patience.run(lambda: method(self, *args, **kwargs))

    return patient


def inside(
    opened: Callable[[Database], AbstractContextManager[Connection]],
) -> Callable[
    [Callable[Concatenate[Any, Connection, Parameters], Result]], Callable[Concatenate[Any, Parameters], Result]
]:
    """Call a method of a store's part within a transaction, with retries (`patiently`)."""

    def of_database(
        method: Callable[Concatenate[Any, Connection, Parameters], Result],
    ) -> Callable[Concatenate[Any, Parameters], Result]:
        @patiently
        @wraps(method)
        def within(self: StorePart, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with opened(self._database) as connection:
                return method(self, connection, *args, **kwargs)

        return within

    return of_database


def reads(
    method: Callable[Concatenate[Any, Connection, int, Parameters], Result],
) -> Callable[Concatenate[Any, str, Parameters], Result]:
    """Call a method with the study's id in a reading transaction, with retries (`patiently`)."""

    @inside(Database.reading)
    @wraps(method)
    def of_study(
        self: StorePart, connection: Connection, study: str, /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        return method(self, connection, self._database.study_id(connection, study), *args, **kwargs)

    return of_study


def writes(
    method: Callable[Concatenate[Any, Connection, int, Parameters], Result],
) -> Callable[Concatenate[Any, str, Parameters], Result]:
    """Call a method with the study's id, in a transaction that locks the study."""

    @wraps(method)
    def of_study(self: StorePart, study: str, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self._database.on_study(
            study, lambda connection, study_id: method(self, connection, study_id, *args, **kwargs)
        )

    return of_study


def environment_digest(environment: Environment) -> str:
    told = json.loads(to_json(environment))
    for name in ("git_dirty", "libraries"):  # fields that later versions added count only if known
        if told[name] in (None, []):
            del told[name]
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
