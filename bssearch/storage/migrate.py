"""The schema's revisions. Alembic is imported only for a migration."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import URL, Connection, Engine, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from bssearch.errors import DatabaseError, SchemaError, UsageError
from bssearch.settings import packaged_folder
from bssearch.storage.access.grants import (
    WRITER_RIGHTS,
    Roles,
    become_owner,
    found_roles,
    give_rights,
    is_member,
    make_roles,
    refuse_without_reading,
    refuse_without_writing,
    right_statements,
    role_statements,
)
from bssearch.storage.connection.engine import (
    ALONE,
    copy_sqlite,
    create_engine_for,
    limited_waits,
    lock_tables,
    reading,
    writing,
)
from bssearch.storage.connection.urls import missing_right, parse_url, shown, sqlite_file
from bssearch.storage.models import Base

if TYPE_CHECKING:
    from alembic.config import Config

REVISIONS: Final = ("0001_initial", "0002_world_size")

# Pre-release revisions without an upgrade path; their study files can be imported.
UNRELEASED: Final = frozenset(f"{number:04d}" for number in range(1, 17))

SCHEMA_HEAD: Final = REVISIONS[-1]
VERSION_TABLE: Final = "bss_alembic_version"
UPGRADE_COMMAND: Final = "bssearch db upgrade"

# SQLSTATEs of a table that exists; the last two if another session has just committed it
_EXISTS = frozenset({"42P07", "42710", "23505"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """Schema revisions before and after an upgrade, and the backup file, if any."""

    before: str | None
    after: str
    copy: Path | None = None

    def __str__(self) -> str:
        kept = f" (the file as it was is kept as {self.copy})" if self.copy else ""
        return f"{self.after}{kept}"


def current(database: str | URL | Engine) -> str | None:
    """Schema revision of a database; None without bssearch tables."""
    if isinstance(database, Engine):
        return _current(database)
    engine = create_engine_for(database, write=False)
    try:
        return _current(engine)
    finally:
        engine.dispose()


def check(database: str | URL | Engine) -> None:
    """Raise `SchemaError` unless the database's schema is at `SCHEMA_HEAD`."""
    name = shown(database.url if isinstance(database, Engine) else parse_url(database))
    _refuse_another(current(database), name)


def _refuse_another(revision: str | None, name: str) -> None:
    if revision == SCHEMA_HEAD:
        return
    if revision is None:
        raise SchemaError(f"{name} has no bssearch tables", hint=f"check --db, or create them with `{UPGRADE_COMMAND}`")
    _refuse_unknown(revision, name)
    raise SchemaError(
        f"the schema of {name} is at revision {revision}; this version needs {SCHEMA_HEAD}",
        hint=f"upgrade it with `{UPGRADE_COMMAND}`",
    )


def prepare(engine: Engine, notify: Callable[[str], None]) -> None:
    """Upgrade a SQLite file, or check a server, for writing.

    ``notify`` reports an upgrade. Raises `SchemaError` if a server is outdated, `DatabaseError` if a right is missing.
    """
    if sqlite_file(engine.url) is None:
        _refuse_another(_current(engine, to_write=True), shown(engine.url))
        with reading(engine) as connection:
            refuse_without_writing(connection, VERSION_TABLE)
        return
    if current(engine) == SCHEMA_HEAD:
        return
    done = upgrade(engine.url)
    if done.copy is not None:
        notify(f"upgraded the schema of {shown(engine.url)} from {done.before} to {done}")


def upgrade(url: str | URL, roles: Roles | None = None) -> Upgrade:
    """Upgrade the schema in one transaction, after a backup of a SQLite file.

    ``roles`` creates roles on a server. Concurrent calls wait for `bssearch.storage.connection.engine.LONGEST_WAIT_S`.

    Raises `SchemaError` if a newer version wrote the database, `UsageError` for roles of a SQLite file, else
    `DatabaseError`.
    """
    url = parse_url(url)
    path = sqlite_file(url)
    if roles:
        refuse_roles_of_a_file(url)
    # Without foreign keys: SQLite rebuilds a table by dropping the old one, which would cascade.
    engine = create_engine_for(url, foreign_keys=False)
    try:
        with writing(engine) as connection, limited_waits(connection):
            _take_turn(connection)
            before = _revision(connection) if _has_version_table(connection) else None
            if before is not None:
                _refuse_unknown(before, shown(url))
            if roles:
                _refuse_other_roles(connection, roles)
                make_roles(connection, roles)
            copy = None
            if path and before not in {None, SCHEMA_HEAD}:
                copy = path.with_name(f"{path.name}.before-{SCHEMA_HEAD}.bak")
                copy_sqlite(path, copy)
            _upgrade(connection, before, roles)
        return Upgrade(before=before, after=SCHEMA_HEAD, copy=copy)
    finally:
        engine.dispose()


def _upgrade(connection: Connection, before: str | None, roles: Roles | None) -> None:
    there = found_roles(connection, VERSION_TABLE)
    if before != SCHEMA_HEAD:
        if there:
            become_owner(connection, there)
        if before is not None:
            # Lock all tables at once: a migration that locks one after the other would wait for each.
            ours = {*WRITER_RIGHTS, VERSION_TABLE}.intersection(inspect(connection).get_table_names())
            lock_tables(connection, [*ours], ALONE)
        _run_migrations(connection)
        _check_references(connection)
    if roles:
        give_rights(connection, roles, VERSION_TABLE)
    elif there and is_member(connection, there.owner):
        give_rights(connection, there, VERSION_TABLE)


def refuse_roles_of_a_file(url: URL) -> None:
    """Raise `UsageError` for a SQLite file, which has no roles."""
    path = sqlite_file(url)
    if path is not None:
        raise UsageError(
            f"{path} is a SQLite file, which has no roles",
            hint="set its permissions with chmod and chgrp, or use PostgreSQL: --db postgresql://USER@HOST/NAME",
        )


def is_ours(name: str | None, kind: str, parents: object) -> bool:
    """Limit Alembic to bssearch's tables."""
    return kind != "table" or (name is not None and name.startswith("bss_") and name != VERSION_TABLE)


def _current(engine: Engine, *, to_write: bool = False) -> str | None:
    with reading(engine) as connection:
        try:
            return _revision(connection)
        except (OperationalError, ProgrammingError):
            connection.rollback()
            if _has_version_table(connection):
                refuse_without_reading(connection, VERSION_TABLE, to_write=to_write)
                return _revision(connection)  # Created by another process in the meantime, unless this fails again.
            _check_schema_is_visible(connection)
            return None


def _revision(connection: Connection) -> str | None:
    revisions = list(connection.scalars(text(f"SELECT version_num FROM {VERSION_TABLE}")))
    if len(revisions) > 1:
        raise SchemaError(f"{VERSION_TABLE} has several revisions: {', '.join(revisions)}")
    return str(revisions[0]) if revisions else None


def _has_version_table(connection: Connection) -> bool:
    return inspect(connection).has_table(VERSION_TABLE)


def _check_schema_is_visible(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        role, schema = connection.execute(text("SELECT current_user, current_schema()")).one()
        if schema is None:
            raise missing_right(role, "USAGE", "schema public", shown(connection.engine.url))


def _refuse_unknown(revision: str, name: str) -> None:
    if revision in UNRELEASED:
        raise SchemaError(
            f"{name} was written by a pre-release version: its schema is at revision {revision}",
            hint="with that version `bssearch export STUDY --to study --file FILE` writes each study to a file, which "
            "`bssearch import study FILE` of this one reads into a new database",
        )
    if revision not in REVISIONS:
        raise SchemaError(
            f"{name} was written by a newer bssearch: its schema is at revision {revision}, "
            f"this version supports up to {SCHEMA_HEAD}",
            hint="update bssearch, or name another database with --db or BSSEARCH_DB_URL",
        )


def _refuse_other_roles(connection: Connection, roles: Roles) -> None:
    # Roles with another prefix would keep their rights.
    there = found_roles(connection, VERSION_TABLE)
    if there not in {None, roles}:
        raise UsageError(
            f"{shown(connection.engine.url)} already has the roles {', '.join(there.names if there else ())}",
            hint="use the same --prefix",
        )


def _take_turn(connection: Connection) -> None:
    # One login at a time upgrades a server. A login that may not change the version table cannot upgrade: it takes no
    # lock.
    if connection.dialect.name != "postgresql":
        return
    if not _has_version_table(connection):
        _create_version_table(connection)
    may_write = text("SELECT has_table_privilege(:table, 'UPDATE, DELETE, TRUNCATE')")
    if connection.scalar(may_write, {"table": VERSION_TABLE}):
        lock_tables(connection, [VERSION_TABLE])


def _create_version_table(connection: Connection) -> None:
    # As Alembic creates the table. If another session creates it, wait for its commit.
    columns = f"version_num VARCHAR(32) NOT NULL, CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(f"CREATE TABLE {VERSION_TABLE} ({columns})")
    except (IntegrityError, ProgrammingError) as error:
        if getattr(error.orig, "sqlstate", None) not in _EXISTS:
            raise


def _run_migrations(connection: Connection) -> None:
    from alembic import command

    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def beside_tables() -> list[str]:
    """SQL in ``POSTGRESQL`` of each revision's module, oldest revision first."""
    from alembic.script import ScriptDirectory

    revisions = reversed(list(ScriptDirectory.from_config(_config()).walk_revisions()))
    return [statement for one in revisions for statement in getattr(one.module, "POSTGRESQL", ())]


def _config() -> Config:
    from alembic.config import Config

    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(packaged_folder("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _check_references(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    if any(str(row[0]).startswith("bss_") for row in broken):
        raise DatabaseError(f"the upgrade would leave {len(broken)} rows with missing references; nothing was changed")


SCHEMA = "public"


def script(roles: Roles | None) -> str:
    """SQL for psql that creates tables and roles in one transaction.

    Of existing tables, only rights change. The SQL fails on another schema revision.
    """
    statements = [
        "BEGIN",
        f"SET LOCAL search_path TO {SCHEMA}",
        *(role_statements(roles, SCHEMA) if roles else ()),
        _refuse_other_revision(),
        *_tables(),
        *(right_statements(roles, SCHEMA, VERSION_TABLE) if roles else ()),
        "COMMIT",
    ]
    return "".join(f"{statement.strip()};\n" for statement in statements)


def _refuse_other_revision() -> str:
    # EXECUTE, because plain SQL would fail if the table does not exist.
    return (
        f"DO $$ DECLARE found text; BEGIN IF to_regclass('{VERSION_TABLE}') IS NOT NULL THEN "
        f"EXECUTE 'SELECT version_num FROM {VERSION_TABLE}' INTO found; IF found <> '{SCHEMA_HEAD}' THEN "
        f"RAISE 'the schema is at revision %, this is for {SCHEMA_HEAD}: `{UPGRADE_COMMAND}` first', found; "
        "END IF; END IF; END $$"
    )


def _tables() -> list[str]:
    import bssearch.storage.repository  # noqa: F401 - so that every table is known

    tables = Base.metadata.sorted_tables
    indexes = [index for table in tables for index in sorted(table.indexes, key=lambda one: str(one.name))]
    return [
        f"CREATE TABLE IF NOT EXISTS {VERSION_TABLE} "
        f"(version_num VARCHAR(32) NOT NULL, CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num))",
        f"INSERT INTO {VERSION_TABLE} SELECT '{SCHEMA_HEAD}' WHERE NOT EXISTS (SELECT FROM {VERSION_TABLE})",
        *(_sql(CreateTable(table, if_not_exists=True)) for table in tables),
        *(_sql(CreateIndex(index, if_not_exists=True)) for index in indexes),
        *beside_tables(),
    ]


def _sql(element: DDLElement) -> str:
    # The dialect doubles each % for the driver.
    return str(element.compile(dialect=postgresql.dialect())).replace("%%", "%")  # type: ignore[no-untyped-call,unused-ignore]
