"""``bssearch merge``: the studies of other databases in this one."""

from __future__ import annotations

from typing import Annotated

import typer

from bssearch.cli.output import Format, FormatOption, note, print_rows
from bssearch.settings import DATABASE_URL_VARIABLE


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="URL…", help="Databases to read; they stay as they are.")],
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            "--db",
            metavar="URL",
            envvar=DATABASE_URL_VARIABLE,
            show_default="sqlite:///bssearch.db",
            help="The database that takes them in.",
        ),
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option("--study", metavar="NAME", help="This study alone; may be repeated.", show_default="all"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be new.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Join the studies of other databases with those of this one; what is here already stays.

    Copies of a study add up, in any order and however often. Where they contradict each other nothing of that database
    is stored.
    """
    from bssearch.commands.transfer import merge as command

    merged = command.merge(sources, into=into, studies=study, dry_run=dry_run, notify=note)
    print_rows([command.told(one) for one in merged.studies], command.COLUMNS, form)
    for text in [*merged.notes, *(["nothing was stored: --dry-run"] if dry_run else [])]:
        note(text)
