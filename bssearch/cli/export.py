"""``bssearch export``: a study as other programs read it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bssearch.cli.arguments import DatabaseOption


class Kind(StrEnum):
    """What a study is exported as."""

    CURVES = "curves"


def export(
    study: Annotated[str, typer.Argument(help="The study's name.")],
    to: Annotated[Kind, typer.Option("--to", help="curves: its learning curves, as `simulate` reads them.")],
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE.csv.gz", show_default="STUDY.csv.gz", help="Where to.")
    ] = None,
    db: DatabaseOption = None,
) -> None:
    """Write the learning curves of a study's search trials as a table, and a description of it that ends in .json."""
    from bssearch.commands.export import recorded_table, stopped_early
    from bssearch.recorded import write_table
    from bssearch.storage.repository import open_store

    with open_store(db, write=False) as store:
        table = recorded_table(store, study)
        early = stopped_early(store, study)
    for path in write_table(table, file or Path(f"{study}.csv.gz")):
        typer.echo(path)
    if early:
        typer.echo(
            f"note: the study's own pruner stopped {early} of {len(table.trials)} trials, whose curves end there: to "
            "compare pruners without that, run a study with --set pruner.name=none",
            err=True,
        )
