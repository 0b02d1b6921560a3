"""``bssearch simulate --sampler``: what samplers with pruners would have spent to find the best of a recorded table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from bssearch.cli.output import Format, print_json, print_rows, print_table
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.recorded import RecordedTable
    from bssearch.simulation.searching import SearchSummary

PRUNER = "balanced"
REPEATS = 50
COLUMNS = (
    "search",
    "s to within 25 %",
    "found 25 %",
    "s to within 10 %",
    "found 10 %",
    "right batch size",
    "trials",
)


def compare_samplers(
    table: RecordedTable,
    pairs: Sequence[tuple[str, str]],
    *,
    budget: float | None,
    repeats: int,
    default: str | None,
    workers: int,
    seed: int,
    form: Format,
) -> None:
    """Search a table with every pair of a sampler and a pruner, and print when the best was found."""
    from bssearch.simulation.searching import Plan, check_pair, simulate_searches
    from bssearch.simulation.table_space import table_space

    for sampler, pruner in pairs:
        check_pair(sampler, pruner)
    if budget is None:
        raise UsageError("--sampler needs --budget SECONDS: how long each search trains, over all workers")
    space = table_space(table)
    point = None if default is None else space.point_of(default)
    plan = Plan(space, budget, default=point, workers=workers, seed=seed)
    found = simulate_searches(plan, pairs, repeats=repeats, done=_progress)
    summaries = {f"{sampler}+{pruner}": one for (sampler, pruner), one in found.items()}
    if form is Format.TABLE:
        print_table([_row(name, one) for name, one in summaries.items()], COLUMNS)
    elif form is Format.JSON:
        print_json({"samplers": {name: asdict(one) for name, one in summaries.items()}})
    else:
        rows = [{"sampler": pair[0], "pruner": pair[1], **asdict(one)} for pair, one in found.items()]
        print_rows(rows, (), form)


def _progress(sampler: str, pruner: str) -> None:
    """Say what is done, to a person who waits."""
    if sys.stderr.isatty():
        typer.echo(f"{sampler}+{pruner} done", err=True)


def _row(name: str, one: SearchSummary) -> dict[str, Any]:
    shares = (one.found_25, one.found_10, one.recommended_within_10)
    found_25, found_10, right = (f"{share:.0%}".replace("%", " %") for share in shares)
    cells = (name, one.cost_to_within_25, found_25, one.cost_to_within_10, found_10, right, one.trials)
    return dict(zip(COLUMNS, cells, strict=True))
