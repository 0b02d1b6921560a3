"""``bssearch export``: a study as other programs read it."""

from __future__ import annotations

from typing import Annotated

import typer

from bssearch import registry
from bssearch.cli.arguments import DatabaseOption


def export(
    study: Annotated[str, typer.Argument(help="The study's name.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="KIND",
            help="curves: its learning curves, as `simulate` reads them. "
            "optuna: an Optuna study in a database, for `optuna`, optuna-dashboard and `optuna.load_study`.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE|URL",
            show_default="STUDY.csv.gz or STUDY.optuna.db",
            help="Where to. Of optuna: a database URL, or the path of a SQLite file; it is made where there is none, "
            "and may hold other Optuna studies.",
        ),
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Write a study's search trials for other programs: learning curves as a table, or an Optuna study."""
    exporter = registry.load("exporters", to)
    from bssearch.storage.repository import open_store

    with open_store(db, write=False) as store:
        exported = exporter(store, study, file)
    for line in exported.written:
        typer.echo(line)
    for note in exported.notes:
        typer.echo(note, err=True)
