"""Shared by the scripts of the simulation: options, reading a table, errors as messages."""

from pathlib import Path
from typing import Annotated

import typer

from bssearch.cli.output import note
from bssearch.exchange.exporters.exports import RecordedTable
from tests.benchmarks.simulate.replay import ended_before, with_target
from tests.benchmarks.simulate.tables import read_table

TargetOption = Annotated[float | None, typer.Option(help="Another target than the table's own.", show_default=False)]
WorkersOption = Annotated[int, typer.Option(min=1, help="Trials that run at once.")]
SeedOption = Annotated[int, typer.Option(help="Random seed: the same seed gives the same result.")]


def read(path: Path, target: float | None) -> RecordedTable:
    """Return a table, with another target if one is given."""
    table = read_table(path)
    if target is None:
        return table
    changed = with_target(table, target)
    if early := ended_before(table, changed.target):
        note(
            f"{early} of {len(table.trials)} trials of table {table.name!r} ended at its own target "
            f"{table.target.value:g}: here they never reach {target:g}"
        )
    return changed
