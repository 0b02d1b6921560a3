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
            help="curves: its learning curves as a table. "
            "optuna: an Optuna study in a database, for `optuna`, optuna-dashboard and `optuna.load_study`. "
            "csv, parquet: all trials as one table, all observations as another. "
            "study: everything, to be taken into another database with `import study`.",
        ),
    ],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE|URL",
            show_default="STUDY.csv.gz, STUDY.optuna.db, STUDY.csv, STUDY.parquet or STUDY.bssearch.jsonl.gz",
            help="Where to, of one study. Of optuna: a database URL, or the path of a SQLite file; it is made where "
            "there is none, and may hold other Optuna studies.",
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
