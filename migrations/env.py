"""Runs migrations on the connection of `bssearch.storage.migrate`."""

from __future__ import annotations

from alembic import context

import bssearch.storage.queue  # noqa: F401 - defines the remaining tables
from bssearch.storage.migrate import VERSION_TABLE, is_ours
from bssearch.storage.models import METADATA

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run migrations with `bssearch db upgrade`")

context.configure(
    connection=connection,
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
    include_name=is_ours,
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
