"""SQLite files for tests: made quickly, and changed without bssearch."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine

from bssearch.storage import migrate
from bssearch.storage.connection import engine as engines

run_migrations = migrate._run_migrations
_statements: dict[Path, list[str]] = {}
"""SQL statements with the effect of a folder's migrations."""


def make_tables(connection: Connection) -> None:
    """Migrate; in an empty SQLite file, create the tables directly, which saves 0.3 s."""
    folder = migrate.packaged_folder("migrations")  # type: ignore[attr-defined]  # a test may replace the folder
    if connection.dialect.name != "sqlite" or _objects(connection):
        run_migrations(connection)
    elif folder in _statements:
        for statement in _statements[folder]:
            connection.exec_driver_sql(statement)
    else:
        run_migrations(connection)
        version = f"INSERT INTO {migrate.VERSION_TABLE} VALUES ('{migrate._revision(connection)}')"
        _statements[folder] = [*_objects(connection), version]


def _objects(connection: Connection) -> list[str]:
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type = 'index'"
    return list(connection.exec_driver_sql(query).scalars())


def make_engine(url: URL, **options: Any) -> Engine:
    """Engine that shares its dialect and compiled statements with all engines for SQLite files."""
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        shared = _shared_engine()
        engine.dialect = engine.pool._dialect = shared.dialect
        engine._compiled_cache = shared._compiled_cache
    return engine


@cache
def _shared_engine() -> Engine:
    engine = create_engine(
        "sqlite://",
        json_serializer=engines._to_json,
        json_deserializer=engines.from_json,
        query_cache_size=10_000,
    )
    engine.connect().close()  # the dialect asks for the version of SQLite
    return engine


@cache
def optuna_head() -> str:
    """Version of Optuna's tables, cached because Optuna reads all migrations for each storage."""
    [head] = ScriptDirectory(str(files("optuna.storages._rdb") / "alembic")).get_heads()
    return head


def execute(file: Path | str, statement: str, parameters: Sequence[object] = ()) -> list[Any]:
    """Execute a statement in a SQLite file without constraints; return the rows."""
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        return connection.execute(statement, parameters).fetchall()
