"""The rights of the three roles of a team's database, and the SQL that gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from bssearch.errors import DatabaseError, UsageError
from bssearch.storage.connection.faults import missing_right
from bssearch.storage.connection.urls import shown
from bssearch.storage.models import Base, StudyRow, TrialRow

DEFAULT_PREFIX = "bssearch"
NOTE = "roles of bssearch: "
"""What the comment on the version's table says before the prefix: so a database tells which roles it was given."""

LONGEST_PREFIX = 50
"""Characters of a prefix at most: a name of PostgreSQL has 63, and ours add seven."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The three roles of a team's database, which nobody logs in as: people's logins are their members.

    The reader may look at everything, the writer runs studies, the owner has the tables and upgrades them.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"(?!pg_)[a-z][a-z0-9_]{{0,{LONGEST_PREFIX - 1}}}", self.prefix):
            raise UsageError(
                f"{self.prefix!r} is no prefix for names of roles",
                hint=f"it is of a-z, 0-9 and _, begins with a letter but not with pg_, and has {LONGEST_PREFIX} "
                "characters at most",
            )

    @property
    def reader(self) -> str:
        """The role that may look at everything."""
        return f"{self.prefix}_reader"

    @property
    def writer(self) -> str:
        """The role that runs studies."""
        return f"{self.prefix}_writer"

    @property
    def owner(self) -> str:
        """The role that the tables belong to."""
        return f"{self.prefix}_owner"

    @property
    def names(self) -> tuple[str, str, str]:
        """The three roles."""
        return self.reader, self.writer, self.owner


def _update(row: type[Base], *, but: frozenset[str]) -> str:
    """Return the right to update all columns of a table but some."""
    return f"UPDATE ({', '.join(column.name for column in row.__table__.columns if column.name not in but)})"


_QUESTION = {"spec_hash", "objective", "target_metric", "target_value", "target_goal"}
_MAKER = {"created_by", "created_at", "login"}

WRITER_RIGHTS: Mapping[str, tuple[str, ...]] = {
    "bss_environment": ("INSERT",),
    # A trigger says whose study may be renamed, archived or deleted.
    "bss_study": ("INSERT", _update(StudyRow, but=frozenset({"id"} | _QUESTION | _MAKER)), "DELETE"),
    # Trials go with their study alone.
    "bss_trial": ("INSERT", _update(TrialRow, but=frozenset({"id", "study_id", "number"}))),
    "bss_observation": ("INSERT",),
    "bss_probe": ("INSERT", "DELETE"),  # a measurement takes the place of an earlier one
    "bss_visit": ("INSERT",),
    "bss_branch": ("INSERT",),
    "bss_spec": ("INSERT",),
    "bss_finding": ("INSERT", "UPDATE"),
    "bss_log": ("INSERT", "UPDATE"),
    "bss_claim": ("INSERT", "UPDATE", "DELETE"),
    # A trigger says who may cancel, pause, resume, rename or delete a submission. What it asks for never changes.
    "bss_submission": ("INSERT", "UPDATE (name, state, reason, served_seconds)", "DELETE"),
    "bss_worker": ("INSERT", "UPDATE", "DELETE"),
}
"""What running studies takes beside SELECT, by table. Who adds a table says it here."""

FUNCTIONS = ("bss_check_maker()", "bss_check_submitter()")
"""What our triggers call on PostgreSQL."""

SEQUENCES = tuple(
    f"bss_{table}_id_seq" for table in ("environment", "study", "trial", "probe", "visit", "branch", "submission")
)
"""What numbers the rows of tables on PostgreSQL."""


def role_statements(roles: Roles, schema: str) -> list[str]:
    """Return what makes the roles where they are not, and lets them into a schema."""
    return [
        *(
            # Roles are the whole server's: in another of its databases somebody may make them at the same moment.
            f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') "
            f"THEN CREATE ROLE {name} NOLOGIN; END IF; "
            "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
            for name in roles.names
        ),
        # Who is no superuser gives tables to a role of which they are a member only.
        f"DO $$ BEGIN IF NOT pg_has_role(current_user, '{roles.owner}', 'USAGE') "
        f"THEN GRANT {roles.owner} TO CURRENT_USER; END IF; END $$",
        # Until PostgreSQL 15 everybody may put functions beside our tables, for others to call unawares.
        f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
        f"GRANT USAGE ON SCHEMA {schema} TO {', '.join(roles.names)}",
        f"GRANT CREATE ON SCHEMA {schema} TO {roles.owner}",
    ]


def right_statements(roles: Roles, schema: str, version_table: str) -> list[str]:
    """Return what gives our tables to the owner and each role its rights on them, no less and no more."""
    tables = ", ".join([*WRITER_RIGHTS, version_table])
    return [
        *_owned(roles.owner, schema, [*WRITER_RIGHTS, version_table]),
        f"COMMENT ON TABLE {version_table} IS '{NOTE}{roles.prefix}'",
        f"REVOKE ALL ON {tables} FROM PUBLIC, {roles.reader}, {roles.writer}",
        f"GRANT SELECT ON {tables} TO {roles.reader}, {roles.writer}",
        *(f"GRANT {', '.join(rights)} ON {table} TO {roles.writer}" for table, rights in WRITER_RIGHTS.items()),
        f"GRANT USAGE ON SEQUENCE {', '.join(SEQUENCES)} TO {roles.writer}",
        # What a later version adds can be read at once; its upgrade gives the other rights on it.
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {roles.owner} IN SCHEMA {schema} "
        f"GRANT SELECT ON TABLES TO {roles.reader}, {roles.writer}",
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {roles.owner} IN SCHEMA {schema} "
        f"GRANT USAGE ON SEQUENCES TO {roles.writer}",
    ]


def _owned(owner: str, schema: str, tables: Sequence[str]) -> list[str]:
    """Return what gives our tables, with their sequences, and our functions to the owner, where they are not its.

    By their names alone: what others call alike would get the owner's rights.
    """
    things = [("TABLE", "pg_class", "relowner", f"{schema}.{name}", "regclass") for name in tables]
    things += [("FUNCTION", "pg_proc", "proowner", f"{schema}.{name}", "regprocedure") for name in FUNCTIONS]
    return [
        f"DO $$ BEGIN IF EXISTS (SELECT FROM {catalogue} WHERE oid = to_{kind}('{name}') "
        f"AND {owned_by} <> '{owner}'::regrole) THEN ALTER {what} {name} OWNER TO {owner}; END IF; END $$"
        for what, catalogue, owned_by, name, kind in things
    ]


# The roles of a team's database: made, given their rights, and asked for where somebody lacks a right.

PRINT_COMMAND = "bssearch db init --roles --print"


def found_roles(connection: Connection, version_table: str) -> Roles | None:
    """Return the roles that a server's database was given, None where it has none: a comment on a table tells."""
    if connection.dialect.name != "postgresql":
        return None
    comment = connection.scalar(
        text("SELECT obj_description(to_regclass(:table)::oid, 'pg_class')"), {"table": version_table}
    )
    prefix = re.fullmatch(rf"{NOTE}(\w+)", comment or "")
    if prefix is None:
        return None
    roles = Roles(prefix.group(1))
    known = text("SELECT count(*) FROM pg_roles WHERE rolname = ANY(:names)")
    is_whole = connection.scalar(known, {"names": list(roles.names)}) == len(roles.names)
    return roles if is_whole else None


def make_roles(connection: Connection, roles: Roles) -> None:
    """Make the roles that there are not; raise `DatabaseError` where the login may not make any."""
    login, may_make, found = connection.execute(
        text(
            "SELECT current_user, rolsuper OR rolcreaterole, "
            "(SELECT count(*) FROM pg_roles WHERE rolname = ANY(:names)) FROM pg_roles WHERE rolname = current_user"
        ),
        {"names": list(roles.names)},
    ).one()
    if found < len(roles.names) and not may_make:
        raise DatabaseError(
            f"{shown(connection.engine.url)}: the role {login!r} may not make other roles: it lacks CREATEROLE",
            hint=f"`{PRINT_COMMAND}` prints the statements, for somebody who may run them with psql",
        )
    _execute(connection, role_statements(roles, _schema(connection)))


def give_rights(connection: Connection, roles: Roles, version_table: str) -> None:
    """Give each role its rights on our tables, no less and no more."""
    _execute(connection, right_statements(roles, _schema(connection), version_table))


def become_owner(connection: Connection, roles: Roles) -> None:
    """Act as the owner until the transaction ends, so that what is made is the owner's; raise `DatabaseError`."""
    login = connection.scalar(text("SELECT current_user"))
    if not is_member(connection, roles.owner):
        raise needs(roles.owner, login, "to upgrade the schema", connection)
    connection.execute(text(f"SET LOCAL ROLE {roles.owner}"))


def is_member(connection: Connection, role: str) -> bool:
    """Return whether the login is a member of a role, as every superuser is."""
    return bool(connection.scalar(text("SELECT pg_has_role(current_user, :role, 'MEMBER')"), {"role": role}))


def refuse_without_reading(connection: Connection, version_table: str, *, to_write: bool) -> None:
    """Raise `DatabaseError` where the login may not even read the tables of a database that has roles."""
    roles = found_roles(connection, version_table)
    lacks = text("SELECT current_user WHERE NOT has_table_privilege(:table, 'SELECT')")
    login = connection.scalar(lacks, {"table": version_table}) if roles else None
    if roles and login:
        role, doing = (roles.writer, "to write") if to_write else (roles.reader, "to look at studies")
        raise needs(role, login, doing, connection)


def refuse_without_writing(connection: Connection, version_table: str) -> None:
    """Raise `DatabaseError` where the login may not store on a server what a running study stores."""
    if connection.dialect.name != "postgresql":
        return
    lacking = connection.execute(_LACKING).first()
    if lacking is None:
        return
    login, right, thing = lacking
    roles = found_roles(connection, version_table)
    if roles is None:
        raise missing_right(login, right, thing, shown(connection.engine.url))
    raise needs(roles.writer, login, f"to write: it lacks the right {right} on {thing}", connection)


def needs(role: str, login: str | None, doing: str, connection: Connection) -> DatabaseError:
    """Return the error for a login that is not a member of the role that it takes to do something."""
    return DatabaseError(
        f"{shown(connection.engine.url)}: {login!r} needs the role {role} {doing}",
        hint=f'ask an owner of the database for: GRANT {role} TO "{login}"',
    )


def _needed() -> list[tuple[str, str, str]]:
    """Return the rights that a running study needs: how each is asked for, the right, and on what."""
    rights = [(table, one.partition(" ")[0]) for table, rights in WRITER_RIGHTS.items() for one in rights]
    rights.remove(("bss_study", "DELETE"))  # a study runs without
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
"""The first right that the login lacks to run studies; no row where it lacks none."""


def _schema(connection: Connection) -> str:
    quoted: str = connection.scalar(text("SELECT quote_ident(current_schema())")) or "public"
    return quoted


def _execute(connection: Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        connection.execute(text(statement))
