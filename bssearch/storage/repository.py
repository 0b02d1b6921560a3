"""The store: an open database with studies, trials and queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL, Connection, delete, select

from bssearch.settings import database_url
from bssearch.storage import migrate
from bssearch.storage.connection.engine import lock_tables, opened_engine, sqlite_file
from bssearch.storage.database import Database, Notify, StorePart, inside, patiently
from bssearch.storage.models import STUDY_ROWS, now
from bssearch.storage.probes import ProbeStore
from bssearch.storage.queue import QueueStore
from bssearch.storage.studies import FindingStore, FinishedStudy, StudyStore, add_study, is_stored
from bssearch.storage.trials import LeaseStore, TrialStore

if TYPE_CHECKING:
    from bssearch.storage.transfer.study_copy import Copy, Joined


def open_store(url: str | URL | None = None, *, write: bool = True, notify: Notify | None = None) -> Store:
    """Open the database at ``url``, else at ``BSSEARCH_DB_URL``, else at the URL in the file ``BSSEARCH_DB_URL_FILE``.

    Without a URL, open ``bssearch.db`` in the current folder.

    With ``write``, opening creates or upgrades a SQLite file. ``notify`` receives one-line messages about upgrades and
    the connection.

    Raises `UsageError` for a malformed URL, and `DatabaseError` if opening fails.

    ::

        with bssearch.open_store("sqlite:///runs.db", write=False) as store:
            print([study.name for study in store.studies.summaries()])
    """
    return Store(url if isinstance(url, URL) else database_url(url), write=write, notify=notify)


def check_writable(url: str | None = None) -> None:
    """Raise the error of `open_store` if the database is not writable, without changing a file."""
    with opened_engine(database_url(url)) as engine:
        if sqlite_file(engine.url) is None:
            migrate.prepare(engine, lambda message: None)


class Transfer(StorePart):
    """Exports and imports of whole studies."""

    def import_finished(self, studies: Sequence[FinishedStudy], replaced: Collection[str] = ()) -> None:
        """Delete the studies ``replaced`` and store all new studies, or change no study.

        Raises `UsageError` if a name is taken.
        """
        tried_at: datetime | None = None

        def add() -> None:
            nonlocal tried_at
            with self._database.writing() as connection:
                if tried_at is None:
                    tried_at = now(connection)
                elif all(is_stored(connection, one, tried_at) for one in studies):
                    return  # the connection broke after the commit
                connection.execute(delete(STUDY_ROWS).where(STUDY_ROWS.c.name.in_(replaced)))
                environments = dict.fromkeys(one.environment for one in studies)
                ids = {one: self._database.environment_id(connection, one) for one in environments}
                for study in studies:
                    add_study(connection, study, tried_at, ids[study.environment])

        self.patience.run(add)

    def write(self, study: str, path: Path) -> Sequence[int]:
        """Write a study to a file, except running trials, and return the running trials' numbers."""
        from bssearch.storage.transfer.study_copy import write_study

        (copy,) = self.read([study], self._database.masked_url)
        write_study(path, copy)
        return copy.running

    def read(self, names: Collection[str] | None, source: str) -> list[Copy]:
        """Read the named studies, except running trials. If ``names`` is None, read all unarchived studies.

        ``source`` names the database in messages.
        """
        from bssearch.storage.transfer.study_copy import read_copy

        with self._database.reading() as connection:
            shown = select(STUDY_ROWS.c.name).where(STUDY_ROWS.c.archived_at.is_(None)).order_by(STUDY_ROWS.c.id)
            found = connection.scalars(shown).all() if names is None else names
            return [read_copy(connection, self._database.study_id(connection, name), source) for name in found]

    @inside(Database.writing)
    def join(
        self, connection: Connection, copies: Sequence[Copy], *, name: str | None = None, dry_run: bool = False
    ) -> list[Joined]:
        """Insert missing rows, and replace open or lost trials by a copy's ended trials. Return the counts.

        ``name`` renames a new first study. ``dry_run`` undoes all changes.
        """
        from bssearch.storage.transfer.study_copy import join

        lock_tables(connection, [STUDY_ROWS.name])  # only one import runs at a time
        joined = [join(connection, copy, None if index else name) for index, copy in enumerate(copies)]
        if dry_run:
            connection.rollback()
        return joined


class Store(Database):
    """An open database, which threads may share.

    If the database was opened for writing, calls wait for an unreachable server (`Patience`). Methods raise
    `DatabaseError`, and `NotFoundError` for an unknown study.

    Example: ``store: bssearch.Store = bssearch.open_store("sqlite:///runs.db")``
    """

    def __init__(self, url: str | URL, *, write: bool = True, notify: Notify | None = None) -> None:
        super().__init__(url, write=write, notify=notify)
        self.studies = StudyStore(self)
        self.findings = FindingStore(self)
        self.probes = ProbeStore(self)
        self.trials = TrialStore(self, self.probes)
        self.leases = LeaseStore(self)
        self.queue = QueueStore(self)
        self.transfer = Transfer(self)

    @patiently
    def time(self) -> datetime:
        """The database's time."""
        with self.reading() as connection:
            return now(connection)
