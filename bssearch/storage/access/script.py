"""SQL for a database administrator."""

from __future__ import annotations

from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

import bssearch.storage.queue
import bssearch.storage.repository  # noqa: F401 - each has a table
from bssearch.storage.access.grants import Roles, right_statements, role_statements
from bssearch.storage.migrate import SCHEMA_HEAD, UPGRADE_COMMAND, VERSION_TABLE, beside_tables
from bssearch.storage.models import Base

SCHEMA = "public"


def script(roles: Roles | None) -> str:
    """Return psql's SQL for tables and roles, in one transaction.

    Existing tables change only their rights. The SQL fails on another schema revision.
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
