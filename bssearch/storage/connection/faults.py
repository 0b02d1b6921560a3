"""Database errors: problem, place and remedy."""

from __future__ import annotations

import os
import re

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from bssearch.errors import DatabaseError
from bssearch.settings import user_name
from bssearch.storage.connection.urls import shown, sqlite_file, without_secrets

BUSY_TIMEOUT_S = 30.0

OTHER_DATABASE_HINT = "name another database with --db or BSSEARCH_DB_URL"

# SQLSTATEs of a lost or refused connection (https://www.postgresql.org/docs/current/errcodes-appendix.html). 25P03:
# silent for `bssearch.storage.database.LONGEST_TURN_SECONDS`.
_LOST_STATES = ("08", "25P03", "57P01", "57P02", "57P03", "53300")
# Conflicts and deadlocks, which can be retried.
_GAVE_WAY = ("40001", "40P01")

# After a wait of `lock_timeout`.
LOCK_TIMEOUT = "55P03"

# No privilege, or no schema with a right to create.
_NO_RIGHT = ("42501", "3F000")

MAKER_TRIGGERS = ("bss_study_maker", "bss_submission_submitter")

_NOT_POSTGRESQL = re.compile(r"invalid response to \w+ negotiation|expected authentication request")
_REFUSED = {
    # libpq's messages for a refused connection, which has no SQLSTATE. Waiting would not help.
    re.compile(r'database "[^"]*" does not exist'): "make it with createdb, or " + OTHER_DATABASE_HINT,
    re.compile(r'role "[^"]*" does not exist'): "create the role with createuser, or use another user in the URL",
    re.compile(r"password authentication failed|no password supplied|empty password"): (
        "check user and password of the URL; BSSEARCH_DB_URL_FILE may name a file with the URL"
    ),
    re.compile(r"authentication failed|no pg_hba\.conf entry"): "ask the server's administrator to admit this user",
    re.compile(
        r"permission denied for database|not permitted to log in"
    ): "ask the server's administrator to admit this user",
    re.compile(r"invalid (port number|\w+ value|connection option)[^()]*"): "check the port and the options of the URL",
}


class ConnectionLostError(DatabaseError):
    """Server unreachable, or transaction refused for another; retry."""


def as_database_error(error: SQLAlchemyError, url: URL) -> DatabaseError:
    """Translate an SQLAlchemy error."""
    cause = " ".join(without_secrets(str(getattr(error, "orig", None) or error), url).split())
    where = shown(url)
    if sqlite_file(url) is None:
        return _of_server(error, cause, where, url)
    if "readonly" in cause:
        return read_only(where)
    if "file is not a database" in cause:
        return DatabaseError(f"{where} is not a SQLite database", hint=OTHER_DATABASE_HINT)
    if "database is locked" in cause:
        return DatabaseError(f"{where} is locked by another process (waited {BUSY_TIMEOUT_S:g} s)")
    return DatabaseError(f"{where}: {cause}")


def read_only(where: str) -> DatabaseError:
    """Return the error for a read-only database."""
    return DatabaseError(f"{where} is read-only", hint=f"make it writable, or {OTHER_DATABASE_HINT}")


def missing_right(role: str, right: str, thing: str, where: str) -> DatabaseError:
    """Return the error for a missing right, with minimal GRANTs."""
    whom = f'TO "{role}"'
    if thing.startswith("schema "):
        rights = "USAGE, CREATE" if right == "CREATE" else "USAGE"
        grants = [f"GRANT {rights} ON SCHEMA {thing.removeprefix('schema ')} {whom}"]
    elif right == "SELECT":
        grants = [f"GRANT SELECT ON ALL TABLES IN SCHEMA public {whom}"]
    else:
        grants = [
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public {whom}",
            f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public {whom}",
        ]
    return DatabaseError(
        f"{where}: the role {role!r} lacks the right {right} on {thing}",
        hint=f"ask an owner of the database to run: {'; '.join(grants)}",
    )


def _of_server(error: SQLAlchemyError, cause: str, where: str, url: URL) -> DatabaseError:
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    if state in _NO_RIGHT:
        return _without_right(error, cause, where, url)
    if state == LOCK_TIMEOUT:
        return DatabaseError(f"{where}: another session held a lock for too long", hint="try again")
    if state in _GAVE_WAY:
        return ConnectionLostError(f"{where}: the transaction conflicted with another: {cause}")
    if state.startswith(_LOST_STATES) or getattr(error, "connection_invalidated", False):
        return ConnectionLostError(f"{where}: the connection was lost: {cause}")
    if state or not isinstance(error, DBAPIError):
        return DatabaseError(f"{where}: {cause}")
    if _NOT_POSTGRESQL.search(cause):
        return DatabaseError(f"{where} is not a PostgreSQL server: {cause}", hint="check host and port of the URL")
    for pattern, hint in _REFUSED.items():
        found = pattern.search(cause)
        if found:
            return DatabaseError(f"{where}: {found.group()}", hint=hint)
    if isinstance(error, OperationalError):
        return ConnectionLostError(
            f"{where} cannot be reached: {cause}", hint=f"check host and port, or {OTHER_DATABASE_HINT}"
        )
    return DatabaseError(f"{where}: {cause}")


def _without_right(error: SQLAlchemyError, cause: str, where: str, url: URL) -> DatabaseError:
    said = getattr(getattr(error, "orig", None), "diag", None)
    if getattr(said, "constraint_name", None) in MAKER_TRIGGERS:
        return DatabaseError(f"{where}: {getattr(said, 'message_primary', cause)}", hint="ask one of them")
    owned = re.search(r"must be owner of (\w+ \S+)", cause)
    if owned:
        return DatabaseError(
            f"{where}: the role {_role(url)!r} cannot change {owned.group(1)}, which another role owns",
            hint="ask its owner to run `bssearch db upgrade`",
        )
    named = re.search(r"permission denied for (\w+ \S+)", cause)
    if named is None and cause.startswith("permission denied"):  # to create a role, or to grant membership
        return DatabaseError(
            f"{where}: {cause}", hint=f"the role {_role(url)!r} lacks the right; ask the server's administrator"
        )
    thing = named.group(1) if named else "schema public"
    return missing_right(_role(url), _right(getattr(error, "statement", None) or "", thing), thing, where)


def _right(statement: str, thing: str) -> str:
    if thing.startswith("schema"):
        return "CREATE" if statement.lstrip().startswith(("CREATE", "ALTER")) else "USAGE"
    # SELECT FOR UPDATE needs the right to update the rows.
    return "UPDATE" if " FOR " in statement else (statement.split() or ["SELECT"])[0].upper()


def _role(url: URL) -> str:
    return url.username or os.environ.get("PGUSER") or user_name()
