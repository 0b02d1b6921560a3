"""The database's clock, by which leases are measured whatever the clocks of the drivers say."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from bssearch.storage.columns import UtcDateTime


class database_now(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The time of the database's clock, in UTC."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_now)
def _server_now(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    return "clock_timestamp()"


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: SQLCompiler, **options: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


class database_started(FunctionElement[datetime]):  # noqa: N801 - it reads as the SQL function that it is
    """The time at which the database's server was started; NULL where there is no server."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_started)
def _server_started(element: database_started, compiler: SQLCompiler, **options: Any) -> str:
    return "pg_postmaster_start_time()"


@compiles(database_started, "sqlite")
def _sqlite_started(element: database_started, compiler: SQLCompiler, **options: Any) -> str:
    return "NULL"


def now(connection: Connection) -> datetime:
    """Return the database's time."""
    return connection.execute(select(database_now())).scalar_one()
