"""``bssearch db``."""

from typing import Annotated

import typer

from bssearch.cli.arguments import DatabaseOption, only_with
from bssearch.cli.output import Format, FormatOption, tell
from bssearch.settings import DEFAULT_DATABASE_URL, database_url

app = typer.Typer(help="Create, upgrade or check the database's schema.", no_args_is_help=True)


@app.command()
def init(
    db: DatabaseOption = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="PostgreSQL: create the roles reader, writer and owner with minimal rights.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default="bssearch", help="Prefix of the role names."),
    ] = None,
    printed: Annotated[
        bool, typer.Option("--print", help="Print the SQL for psql without connecting to a database.")
    ] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Create or upgrade the tables, and create a team's roles (--roles)."""
    from bssearch.storage.connection.engine import parse_url
    from bssearch.storage.migrate import DEFAULT_PREFIX, Roles, refuse_roles_of_a_file, script, upgrade as to_head

    if not roles:
        only_with("--roles", {"--prefix": prefix})
    asked = Roles(prefix or DEFAULT_PREFIX) if roles else None
    url = parse_url(database_url(db))
    if printed:
        if database_url(db) != DEFAULT_DATABASE_URL:
            refuse_roles_of_a_file(url)
        typer.echo(script(asked), nl=False)
        return
    done = to_head(url, asked)
    told = f"schema at {done}" + (", unchanged" if done.before == done.after else "")
    if asked:
        told += f"\nroles {', '.join(asked.names)}; to add a login to a role, run GRANT {asked.writer} TO anna"
    tell(form, told, schema=done.after, before=done.before, roles=list(asked.names) if asked else [])


@app.command()
def upgrade(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Upgrade an old schema; back up a SQLite file first."""
    from bssearch.storage.migrate import upgrade as to_head

    done = to_head(database_url(db))
    tell(form, f"schema at {done}", schema=done.after, before=done.before, copy=done.copy)


@app.command()
def check(db: DatabaseOption = None, form: FormatOption = Format.TABLE) -> None:
    """Exit with code 4 unless the schema is up to date."""
    from bssearch.storage.migrate import SCHEMA_HEAD, check as require_head

    require_head(database_url(db))
    tell(form, f"the schema {SCHEMA_HEAD} is up to date", schema=SCHEMA_HEAD)
