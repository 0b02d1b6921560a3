"""``bssearch export``: a study as other programs read it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bssearch.cli.output import DatabaseOption


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
    """Write a study's learning curves as a table, with a description of the same name that ends in .json."""
    from bssearch.recorded import write_table
    from bssearch.search.exporting import recorded_table
    from bssearch.storage.repository import open_store

    with open_store(db, write=False) as store:
        table = recorded_table(store, study)
    for path in write_table(table, file or Path(f"{study}.csv.gz")):
        typer.echo(path)
