"""The roles of a team's database: made, given their rights, and asked for where somebody lacks a right."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqlalchemy import Connection, text

from bssearch.errors import DatabaseError
from bssearch.storage.access.grants import NOTE, SEQUENCES, WRITER_RIGHTS, Roles, right_statements, role_statements
from bssearch.storage.connection.faults import missing_right
from bssearch.storage.connection.urls import shown

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
