"""Database URLs: parsing and display without secrets."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from bssearch.errors import DatabaseError, UsageError
from bssearch.settings import user_name

URL_FORMS = "a database URL is sqlite:///FILE (a path from this folder), sqlite:////PATH or postgresql://USER@HOST/NAME"
ENCODE_HINT = "within user, password, database and options write @ as %40, : as %3A and / as %2F"

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
# Similar names may be typos.
_SECRETS = ("password", "passwd", "passphrase", "sslpassword")

_LARGEST_PORT = 65535


def masked(url: str | URL) -> str:
    """URL with its password as ``***``, even if malformed."""
    text = url.render_as_string(hide_password=True).replace("+psycopg:", ":", 1) if isinstance(url, URL) else url
    if not isinstance(url, URL) or "@" in (url.host or ""):
        text = re.sub(r"^((?:[^:/@]*:?//)?[^:/@]*):.*@", r"\1:***@", text, flags=re.DOTALL)
        # Without a host, the text in its place may be the password.
        text = re.sub(r"^([^:/@]*:?//[^:/@\[\]]*):(?!\d{1,5}(?:[/?]|$))[^@]*$", r"\1:***", text, flags=re.DOTALL)
    # Only a URL shows where the value ends.
    rest = "[^&]*" if "://" in text else ".*"
    return re.sub(rf"(\w+)(\s*=)({rest})", _masked_option, text, flags=re.DOTALL)


def _masked_option(found: re.Match[str]) -> str:
    name, equals, value = found.groups()
    if _is_secret(name):
        return f"{name}{equals}***"
    # In libpq's form other options follow: check their names too.
    rest = re.sub(r"(\w+)(\s*=)(.*)", _masked_option, value, flags=re.DOTALL)
    return f"{name}{equals}{rest}"


def _is_secret(option: str) -> bool:
    return bool(difflib.get_close_matches(option.lower(), _SECRETS, n=1, cutoff=0.75))


def parse_url(text: str | URL) -> URL:
    """Parse a database URL."""
    text = text.strip() if isinstance(text, str) else text
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # No cause: its text holds the URL, or the part mistaken for a port.
        raise UsageError(f"{masked(text)!r} is not a database URL", hint=_form_for(text)) from None
    driver = _DRIVERS.get(url.drivername)
    if driver is None:
        raise UsageError(
            f"{masked(text)!r} has an unsupported scheme: {url.drivername}",
            hint=_nearest_driver(url.drivername) + URL_FORMS,
        )
    url = url.set(drivername=driver)
    if driver == "sqlite":
        return _checked_sqlite(url)
    _check_at_signs(text, url)
    if url.port is not None and not 1 <= url.port <= _LARGEST_PORT:
        raise UsageError(f"{masked(text)!r}: the port {url.port} must be from 1 to {_LARGEST_PORT}")
    try:
        url.get_dialect().import_dbapi()
    except ImportError as error:
        raise UsageError(
            f"{masked(url)!r} needs the PostgreSQL driver psycopg",
            hint="install it with: pip install 'bssearch[postgres]'",
        ) from error
    return url


def _form_for(text: object) -> str:
    if not isinstance(text, str):
        return URL_FORMS
    if text.count("@") > 1:
        return f"{ENCODE_HINT}; {URL_FORMS}"
    # With a = it is libpq's form, which may hold a password.
    if text and not set(text) & set(":@="):
        return f"for a file write sqlite:///{text}; {URL_FORMS}"
    return _nearest_driver(text) + URL_FORMS


def _nearest_driver(text: str) -> str:
    [scheme] = re.findall(r"^[\w+]*", text.lstrip(" '\"").lower())
    near = difflib.get_close_matches(scheme, _DRIVERS, n=1, cutoff=0.7)
    return f"did you mean {near[0]}://? " if near and not text.startswith(f"{near[0]}://") else ""


def _check_at_signs(text: str | URL, url: URL) -> None:
    # An unescaped @ would end the password and show the rest as host.
    given, expected = (text, url.username is not None) if isinstance(text, str) else (url.host or "", False)
    if given.count("@") > expected:
        raise UsageError(f"{masked(text)!r}: unexpected '@'", hint=ENCODE_HINT)


def _checked_sqlite(url: URL) -> URL:
    given = masked(url)
    if url.host or url.username:
        raise UsageError(f"{given!r} names a host; a file takes three slashes", hint=URL_FORMS)
    if url.query or (url.database or "").startswith("file:"):
        raise UsageError(f"{given!r}: a SQLite URL is a path alone, without options", hint=URL_FORMS)
    if url.database in {None, "", ":memory:"}:
        raise UsageError(f"{given!r} names no file; databases in memory are not supported", hint=URL_FORMS)
    return url


def sqlite_file(url: URL) -> Path | None:
    """SQLite file's path, or None."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def shown(url: URL) -> str:
    """Path, or the masked URL."""
    return str(sqlite_file(url) or masked(url))


def without_secrets(text: str, url: URL) -> str:
    """Replace the URL's passwords by ``***``."""
    for secret in (url.password, *(value for key, value in url.query.items() if _is_secret(key))):
        for one in (secret,) if isinstance(secret, str) else secret or ():
            text = text.replace(one, "***") if one else text
    return text


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
    """Error for a read-only database."""
    return DatabaseError(f"{where} is read-only", hint=f"make it writable, or {OTHER_DATABASE_HINT}")


def missing_right(role: str, right: str, thing: str, where: str) -> DatabaseError:
    """Error for a missing right, with minimal GRANTs."""
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
