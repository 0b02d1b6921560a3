"""``bssearch export``: a study as other programs read it."""

from __future__ import annotations

from typing import Annotated

import typer

from bssearch import registry
from bssearch.cli.arguments import DatabaseOption
from bssearch.errors import UsageError


def export(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY…", help="The names of studies.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="KIND",
            help="What to write: `bssearch guide team` has the kinds.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE|URL",
            show_default="STUDY with the kind's ending",
            help="Where to, of one study: a file, or for a database its URL.",
        ),
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Write studies: their trials for other programs, or everything for another database."""
    exporter = registry.load("exporters", to)
    from bssearch.storage.repository import open_store

    if file is not None and len(studies) > 1:
        raise UsageError(f"--file = {file} is one place, and there are {len(studies)} studies: {', '.join(studies)}")
    with open_store(db, write=False) as store:
        for study in studies:
            exported = exporter(store, study, file)
            for line in exported.written:
                typer.echo(line)
            for note in exported.notes:
                typer.echo(note, err=True)
