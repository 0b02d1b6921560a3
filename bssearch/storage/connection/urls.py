"""Database URLs: parsing and display without secrets."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from bssearch.errors import UsageError

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
    """Return the URL with its password as ``***``, even if malformed."""
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
    """Parse a database URL; raise `UsageError` if invalid."""
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
    """Return a SQLite file's path, or None."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def shown(url: URL) -> str:
    """Return the path, or the masked URL."""
    return str(sqlite_file(url) or masked(url))


def without_secrets(text: str, url: URL) -> str:
    """Replace the URL's passwords by ``***``."""
    for secret in (url.password, *(value for key, value in url.query.items() if _is_secret(key))):
        for one in (secret,) if isinstance(secret, str) else secret or ():
            text = text.replace(one, "***") if one else text
    return text
