"""Train seconds of samplers with pruners to find the best of a recorded table.

Run as ``python tests/benchmarks/simulate/searching.py TABLE.csv.gz --sampler S --pruner P --budget SECONDS
[--repeats 50] [--default NAME=VALUE,…]``. Samplers and pruners are those of a study, also of installed
packages; random, tpe and gp are plain studies of Optuna.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    __import__("from_clone")

import typer

from bssearch.cli.output import Format, FormatOption, print_json, print_rows, print_table
from tests.benchmarks.harness import script
from tests.benchmarks.simulate.script import SeedOption, TargetOption, WorkersOption, read
from tests.benchmarks.simulate.searches import Plan, simulate_searches
from tests.benchmarks.simulate.table_space import table_space

COLUMNS = (
    "search",
    "s to within 25 %",
    "found 25 %",
    "s to within 10 %",
    "found 10 %",
    "right batch size",
    "trials",
)


def simulate(
    path: Annotated[
        Path, typer.Argument(metavar="TABLE.csv.gz", help="Recorded curves: `export STUDY --to curves` makes one.")
    ],
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Of a search, in train seconds of all workers.")],
    sampler: Annotated[
        list[str] | None,
        typer.Option(help="A study's sampler; several times for several.", show_default="auto"),
    ] = None,
    pruner: Annotated[
        list[str] | None, typer.Option(help="A policy; several times for several.", show_default="balanced")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Searches with each sampler and pruner.")] = 50,
    default: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE,…", help="The configuration that every search begins with.", show_default=False
        ),
    ] = None,
    target: TargetOption = None,
    workers: WorkersOption = 1,
    seed: SeedOption = 0,
    form: FormatOption = Format.TABLE,
) -> None:
    """Search the combinations of parameters of a recorded table on a virtual clock, with every sampler and pruner.

    Prints the median train seconds until the incumbent's mean over the seeds is within 25 % and 10 % of the best
    combination's.
    """
    pairs = [(one, other) for one in sampler or ["auto"] for other in pruner or ["balanced"]]
    space = table_space(read(path, target))
    point = None if default is None else space.point_of(default)
    plan = Plan(space, budget, default=point, workers=workers, seed=seed)
    found = {pair: asdict(one) for pair, one in simulate_searches(plan, pairs, repeats=repeats).items()}
    named = {f"{sampler}+{pruner}": one for (sampler, pruner), one in found.items()}
    if form is Format.TABLE:
        print_table([dict(zip(COLUMNS, (name, *_cells(one)), strict=True)) for name, one in named.items()], COLUMNS)
    elif form is Format.JSON:
        print_json({"samplers": named})
    else:
        print_rows(
            [{"sampler": sampler, "pruner": pruner, **one} for (sampler, pruner), one in found.items()], (), form
        )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _cells(one: Mapping[str, Any]) -> list[Any]:
    shares = ("found_25", "found_10", "recommended_within_10")
    found_25, found_10, right = map(_percent, map(one.get, shares))
    return [one["cost_to_within_25"], found_25, one["cost_to_within_10"], found_10, right, one["trials"]]


if __name__ == "__main__":
    script(simulate)
