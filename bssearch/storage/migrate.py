"""The schema's revisions and the roles of a team's database."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import URL, Connection, Engine, Table, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from bssearch.errors import DatabaseError, SchemaError, UsageError, require
from bssearch.records.text import plural
from bssearch.settings import packaged_folder
from bssearch.storage.connection.engine import (
    ALONE,
    OTHER_DATABASE_HINT,
    copy_sqlite,
    limited_waits,
    lock_tables,
    missing_right,
    opened_engine,
    parse_url,
    reading,
    shown,
    sqlite_file,
    writing,
)
from bssearch.storage.models import METADATA, STUDY_ROWS, TRIAL_ROWS

if TYPE_CHECKING:
    from alembic.config import Config


PREFIX: Final = "bss_"  # of the names of our tables
VERSION_TABLE: Final = "bss_alembic_version"

DEFAULT_PREFIX = "bssearch"
NOTE = "roles of bssearch: "

# PostgreSQL names have at most 63 characters; suffixes need seven.
LONGEST_PREFIX = 50


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a team's database. People's logins are members.

    Readers see studies, writers run studies, and owners upgrade tables.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        require(
            re.fullmatch(rf"(?!pg_)[a-z][a-z0-9_]{{0,{LONGEST_PREFIX - 1}}}", self.prefix),
            f"invalid role prefix {self.prefix!r}",
            hint=f"use a-z, 0-9 and _; start with a letter but not with pg_; use at most {LONGEST_PREFIX} characters",
        )

    @property
    def reader(self) -> str:
        return f"{self.prefix}_reader"

    @property
    def writer(self) -> str:
        return f"{self.prefix}_writer"

    @property
    def owner(self) -> str:
        return f"{self.prefix}_owner"

    @property
    def names(self) -> tuple[str, str, str]:
        return self.reader, self.writer, self.owner


def _update(rows: Table, *, but: frozenset[str]) -> str:
    return f"UPDATE ({', '.join(column.name for column in rows.columns if column.name not in but)})"


_QUESTION = {"spec_hash", "objective", "target_metric", "target_value", "target_goal"}
_MAKER = {"created_by", "created_at", "login"}

# Rights beside SELECT. Add every new table here.
WRITER_RIGHTS: Mapping[str, tuple[str, ...]] = {
    "bss_environment": ("INSERT",),
    # A trigger checks who may rename, archive or delete a study.
    "bss_study": ("INSERT", _update(STUDY_ROWS, but=frozenset({"id"} | _QUESTION | _MAKER)), "DELETE"),
    # Only the deletion of a study deletes trials.
    "bss_trial": ("INSERT", _update(TRIAL_ROWS, but=frozenset({"id", "study_id", "number"}))),
    "bss_observation": ("INSERT",),
    "bss_probe": ("INSERT", "DELETE"),  # a new measurement replaces an earlier measurement
    "bss_visit": ("INSERT",),
    "bss_branch": ("INSERT",),
    "bss_spec": ("INSERT",),
    "bss_finding": ("INSERT", "UPDATE"),
    "bss_log": ("INSERT", "UPDATE"),
    "bss_claim": ("INSERT", "UPDATE", "DELETE"),
    # A trigger checks who may cancel, pause, resume, rename or delete a submission. The request never changes.
    "bss_submission": ("INSERT", "UPDATE (name, state, reason, served_seconds)", "DELETE"),
    "bss_worker": ("INSERT", "UPDATE", "DELETE"),
}

FUNCTIONS = ("bss_check_maker()", "bss_check_submitter()")

SEQUENCES = tuple(
    f"bss_{table}_id_seq" for table in ("environment", "study", "trial", "probe", "visit", "branch", "submission")
)


def role_statements(roles: Roles, schema: str) -> list[str]:
    return [
        *(
            # Roles belong to the whole server: an upgrade of another database may create the roles at the same moment.
            f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') "
            f"THEN CREATE ROLE {name} NOLOGIN; END IF; "
            "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
            for name in roles.names
        ),
        # Only a superuser or a member can make a role the owner of tables.
        f"DO $$ BEGIN IF NOT pg_has_role(current_user, '{roles.owner}', 'USAGE') "
        f"THEN GRANT {roles.owner} TO CURRENT_USER; END IF; END $$",
        # Before PostgreSQL 15, every login could create functions beside our tables, which other logins might call.
        f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
        f"GRANT USAGE ON SCHEMA {schema} TO {', '.join(roles.names)}",
        f"GRANT CREATE ON SCHEMA {schema} TO {roles.owner}",
    ]


def right_statements(roles: Roles, schema: str) -> list[str]:
    tables = ", ".join([*WRITER_RIGHTS, VERSION_TABLE])
    return [
        *_owned(roles.owner, schema, [*WRITER_RIGHTS, VERSION_TABLE]),
        f"COMMENT ON TABLE {VERSION_TABLE} IS '{NOTE}{roles.prefix}'",
        f"REVOKE ALL ON {tables} FROM PUBLIC, {roles.reader}, {roles.writer}",
        f"GRANT SELECT ON {tables} TO {roles.reader}, {roles.writer}",
        *(f"GRANT {', '.join(rights)} ON {table} TO {roles.writer}" for table, rights in WRITER_RIGHTS.items()),
        f"GRANT USAGE ON SEQUENCE {', '.join(SEQUENCES)} TO {roles.writer}",
        # Readers see new tables at once; an upgrade grants the other rights.
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {roles.owner} IN SCHEMA {schema} "
        f"GRANT SELECT ON TABLES TO {roles.reader}, {roles.writer}",
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {roles.owner} IN SCHEMA {schema} "
        f"GRANT USAGE ON SEQUENCES TO {roles.writer}",
    ]


def _owned(owner: str, schema: str, tables: Sequence[str]) -> list[str]:
    # Use exact names, because similarly named objects of other programs must not get the rights.
    things = [("TABLE", "pg_class", "relowner", f"{schema}.{name}", "regclass") for name in tables]
    things += [("FUNCTION", "pg_proc", "proowner", f"{schema}.{name}", "regprocedure") for name in FUNCTIONS]
    return [
        f"DO $$ BEGIN IF EXISTS (SELECT FROM {catalogue} WHERE oid = to_{kind}('{name}') "
        f"AND {owned_by} <> '{owner}'::regrole) THEN ALTER {what} {name} OWNER TO {owner}; END IF; END $$"
        for what, catalogue, owned_by, name, kind in things
    ]


PRINT_COMMAND = "bssearch db init --roles --print"


def found_roles(connection: Connection) -> Roles | None:
    if connection.dialect.name != "postgresql":
        return None
    comment = connection.scalar(
        text("SELECT obj_description(to_regclass(:table)::oid, 'pg_class')"), {"table": VERSION_TABLE}
    )
    prefix = re.fullmatch(rf"{NOTE}(\w+)", comment or "")
    if prefix is None:
        return None
    roles = Roles(prefix.group(1))
    known = text("SELECT count(*) FROM pg_roles WHERE rolname = ANY(:names)")
    return roles if connection.scalar(known, {"names": list(roles.names)}) == len(roles.names) else None


def make_roles(connection: Connection, roles: Roles) -> None:
    login, may_make, found = connection.execute(
        text(
            "SELECT current_user, rolsuper OR rolcreaterole, "
            "(SELECT count(*) FROM pg_roles WHERE rolname = ANY(:names)) FROM pg_roles WHERE rolname = current_user"
        ),
        {"names": list(roles.names)},
    ).one()
    require(
        found >= len(roles.names) or may_make,
        f"{shown(connection.engine.url)}: the role {login!r} lacks CREATEROLE and may not make other roles",
        hint=f"ask an administrator to run the output of `{PRINT_COMMAND}` with psql",
        error=DatabaseError,
    )
    _execute(connection, role_statements(roles, _schema(connection)))


def give_rights(connection: Connection, roles: Roles) -> None:
    _execute(connection, right_statements(roles, _schema(connection)))


def become_owner(connection: Connection, roles: Roles) -> None:
    """Act as the owner until the transaction ends. Raises `DatabaseError` unless the login is a member."""
    login = connection.scalar(text("SELECT current_user"))
    if not is_member(connection, roles.owner):
        raise needs(roles.owner, login, "to upgrade the schema", connection)
    connection.execute(text(f"SET LOCAL ROLE {roles.owner}"))


def is_member(connection: Connection, role: str) -> bool:
    """True if the login is a member or a superuser."""
    return bool(connection.scalar(text("SELECT pg_has_role(current_user, :role, 'MEMBER')"), {"role": role}))


def refuse_without_reading(connection: Connection, *, to_write: bool) -> None:
    roles = found_roles(connection)
    lacks = text("SELECT current_user WHERE NOT has_table_privilege(:table, 'SELECT')")
    login = connection.scalar(lacks, {"table": VERSION_TABLE}) if roles else None
    if roles and login:
        role, doing = (roles.writer, "to write") if to_write else (roles.reader, "to read studies")
        raise needs(role, login, doing, connection)


def refuse_without_writing(connection: Connection) -> None:
    if connection.dialect.name != "postgresql":
        return
    lacking = connection.execute(_LACKING).first()
    if lacking is None:
        return
    login, right, thing = lacking
    roles = found_roles(connection)
    if roles is None:
        raise missing_right(login, right, thing, shown(connection.engine.url))
    raise needs(roles.writer, login, f"to write, because the right {right} on {thing} is missing", connection)


def needs(role: str, login: str | None, doing: str, connection: Connection) -> DatabaseError:
    return DatabaseError(
        f"{shown(connection.engine.url)}: {login!r} needs the role {role} {doing}",
        hint=f'ask an owner of the database to run: GRANT {role} TO "{login}"',
    )


def _needed() -> list[tuple[str, str, str]]:
    rights = [(table, one.partition(" ")[0]) for table, rights in WRITER_RIGHTS.items() for one in rights]
    rights.remove(("bss_study", "DELETE"))  # no run deletes a study
    tables = [("any_column" if right in {"INSERT", "UPDATE"} else "table", right, table) for table, right in rights]
    return [*tables, *(("sequence", "USAGE", name) for name in SEQUENCES)]


def _lacking_query() -> str:
    values = ", ".join(
        f"({number}, '{kind}', '{right}', '{name}')" for number, (kind, right, name) in enumerate(_needed())
    )
    return (
        "SELECT current_user, \"right\", CASE kind WHEN 'sequence' THEN 'sequence ' ELSE 'table ' END || name "
        f'FROM (VALUES {values}) AS needed(number, kind, "right", name) WHERE NOT CASE kind '
        "WHEN 'sequence' THEN has_sequence_privilege(name, \"right\") "
        "WHEN 'table' THEN has_table_privilege(name, \"right\") "
        'ELSE has_any_column_privilege(name, "right") END ORDER BY number LIMIT 1'
    )


_LACKING = text(_lacking_query())


def _schema(connection: Connection) -> str:
    return connection.scalar(text("SELECT quote_ident(current_schema())")) or "public"


def _execute(connection: Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        connection.execute(text(statement))


REVISIONS: Final = ("0001_initial", "0002_world_size")

# Pre-release revisions without an upgrade path; their study files can be imported.
UNRELEASED: Final = frozenset(f"{number:04d}" for number in range(1, 17))

SCHEMA_HEAD: Final = REVISIONS[-1]
UPGRADE_COMMAND: Final = "bssearch db upgrade"

# SQLSTATEs if a table exists; the last two if another session has just committed the table
_EXISTS = frozenset({"42P07", "42710", "23505"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """The schema revisions before and after an upgrade, and the backup file, if any."""

    before: str | None
    after: str
    copy: Path | None = None

    def __str__(self) -> str:
        kept = f" (backup: {self.copy})" if self.copy else ""
        return f"{self.after}{kept}"


def current(database: str | URL | Engine) -> str | None:
    """A database's schema revision; None if bssearch's tables are missing."""
    if isinstance(database, Engine):
        return _current(database)
    with opened_engine(database, write=False) as engine:
        return _current(engine)


def check(database: str | URL | Engine) -> None:
    """Raise `SchemaError` unless the database's schema is at `SCHEMA_HEAD`."""
    _refuse_another(current(database), shown(database.url if isinstance(database, Engine) else parse_url(database)))


def _refuse_another(revision: str | None, name: str) -> None:
    if revision == SCHEMA_HEAD:
        return
    if revision is None:
        raise SchemaError(
            f"{name} has no bssearch tables", hint=f"check --db, or create the tables with `{UPGRADE_COMMAND}`"
        )
    _refuse_unknown(revision, name)
    raise SchemaError(
        f"the schema of {name} is at revision {revision}; this version needs {SCHEMA_HEAD}",
        hint=f"upgrade the schema with `{UPGRADE_COMMAND}`",
    )


def prepare(engine: Engine, notify: Callable[[str], None]) -> None:
    """Prepare a database for writing: upgrade a SQLite file, or check a server.

    ``notify`` reports an upgrade or another program's tables.
    """
    if sqlite_file(engine.url) is None:
        _refuse_another(_current(engine, to_write=True), shown(engine.url))
        with reading(engine) as connection:
            refuse_without_writing(connection)
        return
    before = current(engine)
    if before == SCHEMA_HEAD:
        return
    others = [name for name in inspect(engine).get_table_names() if not name.startswith(PREFIX)]
    if before is None and others:
        notify(
            f"{shown(engine.url)} has tables of another program, such as {others[0]!r}; adding bssearch's tables. "
            f"To keep the tables apart, {OTHER_DATABASE_HINT}"
        )
    done = upgrade(engine.url)
    if done.copy is not None:
        notify(f"upgraded the schema of {shown(engine.url)} from {done.before} to {done}")


def upgrade(url: str | URL, roles: Roles | None = None) -> Upgrade:
    """Upgrade the schema in one transaction, after a backup of a SQLite file.

    With ``roles``, create the roles on a server. Concurrent calls wait up to
    `bssearch.storage.connection.engine.LONGEST_WAIT_S` seconds.
    """
    url = parse_url(url)
    path = sqlite_file(url)
    if roles:
        refuse_roles_of_a_file(url)
    # Open without foreign keys: SQLite rebuilds a table by dropping the old table, and the drop would cascade.
    with (
        opened_engine(url, foreign_keys=False) as engine,
        writing(engine) as connection,
        limited_waits(connection),
    ):
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


def _upgrade(connection: Connection, before: str | None, roles: Roles | None) -> None:
    there = found_roles(connection)
    if before != SCHEMA_HEAD:
        if there:
            become_owner(connection, there)
        if before is not None:
            # Lock all tables at once, because a migration that locks table after table would wait several times.
            ours = {*WRITER_RIGHTS, VERSION_TABLE}.intersection(inspect(connection).get_table_names())
            lock_tables(connection, [*ours], ALONE)
        _run_migrations(connection)
        _check_references(connection)
    if roles:
        give_rights(connection, roles)
    elif there and is_member(connection, there.owner):
        give_rights(connection, there)


def refuse_roles_of_a_file(url: URL) -> None:
    if (path := sqlite_file(url)) is not None:
        raise UsageError(
            f"{path} is a SQLite file, which has no roles",
            hint="set the file's permissions with chmod and chgrp, or use PostgreSQL: --db postgresql://USER@HOST/NAME",
        )


def is_ours(name: str | None, kind: str, parents: object) -> bool:
    """True unless ``name`` is a table of another program or of Alembic."""
    return kind != "table" or (name is not None and name.startswith(PREFIX) and name != VERSION_TABLE)


def _current(engine: Engine, *, to_write: bool = False) -> str | None:
    with reading(engine) as connection:
        try:
            return _revision(connection)
        except (OperationalError, ProgrammingError):
            connection.rollback()
            if _has_version_table(connection):
                refuse_without_reading(connection, to_write=to_write)
                return _revision(connection)  # works if another process created the table in the meantime
            _check_schema_is_visible(connection)
            return None


def _revision(connection: Connection) -> str | None:
    revisions = list(connection.scalars(text(f"SELECT version_num FROM {VERSION_TABLE}")))
    require(
        len(revisions) <= 1,
        f"{VERSION_TABLE} has several revisions: {', '.join(revisions)}",
        hint="restore a backup, or delete the wrong revisions with SQL",
        error=SchemaError,
    )
    return str(revisions[0]) if revisions else None


def _has_version_table(connection: Connection) -> bool:
    return inspect(connection).has_table(VERSION_TABLE)


def _check_schema_is_visible(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        role, schema = connection.execute(text("SELECT current_user, current_schema()")).one()
        if schema is None:
            raise missing_right(role, "USAGE", "schema public", shown(connection.engine.url))


def _refuse_unknown(revision: str, name: str) -> None:
    require(
        revision not in UNRELEASED,
        f"{name} was written by a pre-release version: the schema is at revision {revision}",
        hint="export each study with the pre-release version: `bssearch export STUDY --to study --file FILE`; then "
        "import the file into a new database: `bssearch import study FILE`",
        error=SchemaError,
    )
    require(
        revision in REVISIONS,
        f"the schema of {name} is at the unknown revision {revision}; this version supports up to {SCHEMA_HEAD}",
        hint="update bssearch, or name another database with --db or BSSEARCH_DB_URL",
        error=SchemaError,
    )


def _refuse_other_roles(connection: Connection, roles: Roles) -> None:
    # Roles with another prefix would keep their rights.
    there = found_roles(connection)
    require(
        there in {None, roles},
        f"{shown(connection.engine.url)} already has the roles {', '.join(there.names if there else ())}",
        hint="name the prefix of these roles with --prefix",
    )


def _take_turn(connection: Connection) -> None:
    # Only one login upgrades a server at a time. A login without the right to change the version table cannot upgrade,
    # and takes no lock.
    if connection.dialect.name != "postgresql":
        return
    if not _has_version_table(connection):
        _create_version_table(connection)
    may_write = text("SELECT has_table_privilege(:table, 'UPDATE, DELETE, TRUNCATE')")
    if connection.scalar(may_write, {"table": VERSION_TABLE}):
        lock_tables(connection, [VERSION_TABLE])


def _create_version_table(connection: Connection) -> None:
    # The table is equal to Alembic's. If another session creates the table, wait for the session's commit.
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
    """The SQL in ``POSTGRESQL`` of each revision's module, oldest revision first."""
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
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]
    broken = [table for table in found if table.startswith(PREFIX)]
    require(
        not broken,
        f"the upgrade would leave {plural(len(broken), 'row')} of {', '.join(sorted(set(broken)))} with missing "
        "references, so the database is unchanged",
        hint="repair or delete these rows, then run `bssearch db upgrade` again",
        error=DatabaseError,
    )


SCHEMA = "public"


def script(roles: Roles | None) -> str:
    """The SQL for psql that creates the tables and ``roles`` in one transaction.

    Existing tables keep their columns and rows. On another schema revision, the SQL fails.
    """
    statements = [
        "BEGIN",
        f"SET LOCAL search_path TO {SCHEMA}",
        *(role_statements(roles, SCHEMA) if roles else ()),
        # EXECUTE, because plain SQL would fail if the table does not exist.
        f"DO $$ DECLARE found text; BEGIN IF to_regclass('{VERSION_TABLE}') IS NOT NULL THEN "
        f"EXECUTE 'SELECT version_num FROM {VERSION_TABLE}' INTO found; IF found <> '{SCHEMA_HEAD}' THEN "
        f"RAISE 'the schema is at revision %, but this SQL needs {SCHEMA_HEAD}; run `{UPGRADE_COMMAND}`', found; "
        "END IF; END IF; END $$",
        *_tables(),
        *(right_statements(roles, SCHEMA) if roles else ()),
        "COMMIT",
    ]
    return "".join(f"{statement.strip()};\n" for statement in statements)


def _tables() -> list[str]:
    import bssearch.storage.queue  # noqa: F401 - defines the remaining tables

    tables = METADATA.sorted_tables
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
