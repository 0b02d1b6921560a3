"""``bssearch db``: the database's schema."""

from __future__ import annotations

import typer

from bssearch.cli.arguments import DatabaseOption

app = typer.Typer(help="The database's schema: upgrade, current, check.", no_args_is_help=True)


@app.command()
def upgrade(db: DatabaseOption = None) -> None:
    """Bring the schema to this version's; a SQLite file is copied first."""
    from bssearch.settings import database_url
    from bssearch.storage.migrate import upgrade as to_head

    typer.echo(f"schema at {to_head(database_url(db))}")


@app.command()
def current(db: DatabaseOption = None) -> None:
    """Print the schema's revision."""
    from bssearch.settings import database_url
    from bssearch.storage.migrate import current as revision_of

    typer.echo(revision_of(database_url(db)) or "no schema")


@app.command()
def check(db: DatabaseOption = None) -> None:
    """Exit with 4 unless the schema is this version's."""
    from bssearch.settings import database_url
    from bssearch.storage.migrate import SCHEMA_HEAD
    from bssearch.storage.migrate import check as require_head

    require_head(database_url(db))
    typer.echo(f"schema at {SCHEMA_HEAD}, as this version needs it")
