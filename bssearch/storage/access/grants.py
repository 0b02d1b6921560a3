"""A team's three roles and the SQL for their rights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from bssearch.errors import DatabaseError, UsageError
from bssearch.storage.connection.urls import missing_right, shown
from bssearch.storage.models import Base, StudyRow, TrialRow

DEFAULT_PREFIX = "bssearch"
NOTE = "roles of bssearch: "

# PostgreSQL names have at most 63 characters; suffixes need seven.
LONGEST_PREFIX = 50


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a team's database; people's logins are members.

    Readers see everything, writers run studies, owners upgrade the tables.
    """

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"(?!pg_)[a-z][a-z0-9_]{{0,{LONGEST_PREFIX - 1}}}", self.prefix):
            raise UsageError(
                f"invalid role prefix {self.prefix!r}",
                hint=f"use a-z, 0-9 and _; start with a letter but not with pg_; use at most {LONGEST_PREFIX} "
                "characters at most",
            )

    @property
    def reader(self) -> str:
        """May read everything."""
        return f"{self.prefix}_reader"

    @property
    def writer(self) -> str:
        """May run studies."""
        return f"{self.prefix}_writer"

    @property
    def owner(self) -> str:
        """Owns the tables."""
        return f"{self.prefix}_owner"

    @property
    def names(self) -> tuple[str, str, str]:
        """The three roles."""
        return self.reader, self.writer, self.owner


def _update(row: type[Base], *, but: frozenset[str]) -> str:
    return f"UPDATE ({', '.join(column.name for column in row.__table__.columns if column.name not in but)})"


_QUESTION = {"spec_hash", "objective", "target_metric", "target_value", "target_goal"}
_MAKER = {"created_by", "created_at", "login"}

# Rights beside SELECT. Add every new table here.
WRITER_RIGHTS: Mapping[str, tuple[str, ...]] = {
    "bss_environment": ("INSERT",),
    # A trigger checks who may rename, archive or delete a study.
    "bss_study": ("INSERT", _update(StudyRow, but=frozenset({"id"} | _QUESTION | _MAKER)), "DELETE"),
    # Trials are deleted only with their study.
    "bss_trial": ("INSERT", _update(TrialRow, but=frozenset({"id", "study_id", "number"}))),
    "bss_observation": ("INSERT",),
    "bss_probe": ("INSERT", "DELETE"),  # a new measurement replaces an earlier one
    "bss_visit": ("INSERT",),
    "bss_branch": ("INSERT",),
    "bss_spec": ("INSERT",),
    "bss_finding": ("INSERT", "UPDATE"),
    "bss_log": ("INSERT", "UPDATE"),
    "bss_claim": ("INSERT", "UPDATE", "DELETE"),
    # A trigger checks who may cancel, pause, resume, rename or delete a submission. Its request never changes.
    "bss_submission": ("INSERT", "UPDATE (name, state, reason, served_seconds)", "DELETE"),
    "bss_worker": ("INSERT", "UPDATE", "DELETE"),
}

FUNCTIONS = ("bss_check_maker()", "bss_check_submitter()")

SEQUENCES = tuple(
    f"bss_{table}_id_seq" for table in ("environment", "study", "trial", "probe", "visit", "branch", "submission")
)


def role_statements(roles: Roles, schema: str) -> list[str]:
    """SQL that creates missing roles with access to a schema."""
    return [
        *(
            # Roles belong to the whole server: another database there may create them at the same moment.
            f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') "
            f"THEN CREATE ROLE {name} NOLOGIN; END IF; "
            "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
            for name in roles.names
        ),
        # Only a superuser or a member of a role can give it tables.
        f"DO $$ BEGIN IF NOT pg_has_role(current_user, '{roles.owner}', 'USAGE') "
        f"THEN GRANT {roles.owner} TO CURRENT_USER; END IF; END $$",
        # Until PostgreSQL 15 everybody could create functions beside our tables, for others to call unawares.
        f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
        f"GRANT USAGE ON SCHEMA {schema} TO {', '.join(roles.names)}",
        f"GRANT CREATE ON SCHEMA {schema} TO {roles.owner}",
    ]


def right_statements(roles: Roles, schema: str, version_table: str) -> list[str]:
    """SQL that sets the roles' rights exactly."""
    tables = ", ".join([*WRITER_RIGHTS, version_table])
    return [
        *_owned(roles.owner, schema, [*WRITER_RIGHTS, version_table]),
        f"COMMENT ON TABLE {version_table} IS '{NOTE}{roles.prefix}'",
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
    # Exact names: similarly named objects of other programs must not get the rights.
    things = [("TABLE", "pg_class", "relowner", f"{schema}.{name}", "regclass") for name in tables]
    things += [("FUNCTION", "pg_proc", "proowner", f"{schema}.{name}", "regprocedure") for name in FUNCTIONS]
    return [
        f"DO $$ BEGIN IF EXISTS (SELECT FROM {catalogue} WHERE oid = to_{kind}('{name}') "
        f"AND {owned_by} <> '{owner}'::regrole) THEN ALTER {what} {name} OWNER TO {owner}; END IF; END $$"
        for what, catalogue, owned_by, name, kind in things
    ]


PRINT_COMMAND = "bssearch db init --roles --print"


def found_roles(connection: Connection, version_table: str) -> Roles | None:
    """Roles named in the version table's comment, or None."""
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
    """Create missing roles; may raise `DatabaseError`."""
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
            hint=f"ask an administrator to run the output of `{PRINT_COMMAND}` with psql",
        )
    _execute(connection, role_statements(roles, _schema(connection)))


def give_rights(connection: Connection, roles: Roles, version_table: str) -> None:
    """Set the roles' rights."""
    _execute(connection, right_statements(roles, _schema(connection), version_table))


def become_owner(connection: Connection, roles: Roles) -> None:
    """Become the owner for this transaction; may raise `DatabaseError`."""
    login = connection.scalar(text("SELECT current_user"))
    if not is_member(connection, roles.owner):
        raise needs(roles.owner, login, "to upgrade the schema", connection)
    connection.execute(text(f"SET LOCAL ROLE {roles.owner}"))


def is_member(connection: Connection, role: str) -> bool:
    """Return whether the login is a member or a superuser."""
    return bool(connection.scalar(text("SELECT pg_has_role(current_user, :role, 'MEMBER')"), {"role": role}))


def refuse_without_reading(connection: Connection, version_table: str, *, to_write: bool) -> None:
    """Raise `DatabaseError` if the login cannot read."""
    roles = found_roles(connection, version_table)
    lacks = text("SELECT current_user WHERE NOT has_table_privilege(:table, 'SELECT')")
    login = connection.scalar(lacks, {"table": version_table}) if roles else None
    if roles and login:
        role, doing = (roles.writer, "to write") if to_write else (roles.reader, "to look at studies")
        raise needs(role, login, doing, connection)


def refuse_without_writing(connection: Connection, version_table: str) -> None:
    """Raise `DatabaseError` if the login cannot write."""
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
    """Error for a login without a role."""
    return DatabaseError(
        f"{shown(connection.engine.url)}: {login!r} needs the role {role} {doing}",
        hint=f'ask an owner of the database for: GRANT {role} TO "{login}"',
    )


def _needed() -> list[tuple[str, str, str]]:
    rights = [(table, one.partition(" ")[0]) for table, rights in WRITER_RIGHTS.items() for one in rights]
    rights.remove(("bss_study", "DELETE"))  # running a study never deletes one
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
