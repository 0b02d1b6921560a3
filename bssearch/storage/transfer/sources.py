"""Databases that studies are taken from: they are only read, and stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bssearch.storage import migrate
from bssearch.storage.connection.engine import copy_sqlite
from bssearch.storage.connection.urls import parse_url, sqlite_file
from bssearch.storage.repository import Store, open_store


@contextmanager
def opened_source(url: str) -> Iterator[Store]:
    """Give the store of a database for reading; of an older SQLite file that of an upgraded copy.

    Raises `SchemaError` where a newer bssearch has written it, and for a server's database whose schema is behind:
    a server is upgraded by those who own it.
    """
    database = parse_url(url)
    path = sqlite_file(database)
    revision = migrate.current(database)
    if path is None or revision is None or revision == migrate.SCHEMA_HEAD or revision not in migrate.REVISIONS:
        with open_store(database, write=False) as store:
            yield store
        return
    with TemporaryDirectory(prefix="bssearch-merge-") as folder:
        copy = Path(folder) / path.name
        copy_sqlite(path, copy)
        upgraded = f"sqlite:///{copy}"
        migrate.upgrade(upgraded)
        with open_store(upgraded, write=False) as store:
            yield store
