"""Costs and misses of pruning policies on recorded curves.

Run as ``python tests/benchmarks/simulate/pruning.py TABLE.csv.gz… [--pruner NAME …] [--draws 60] [--trials 50]``.
Pruners are those of studies, also of installed packages, with options as in ``race:lag=2``.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    __import__("from_clone")

import typer

from bssearch.cli.output import Format, FormatOption, note, print_json, print_rows, print_table
from bssearch.errors import UsageError
from bssearch.exchange.exporters.exports import RecordedTable
from tests.benchmarks.harness import script
from tests.benchmarks.simulate import draws as policies
from tests.benchmarks.simulate.draws import PRUNERS, Interval, Summary, by_policy, pruner_settings, summarize
from tests.benchmarks.simulate.script import SeedOption, TargetOption, WorkersOption, read

TRIALS = 50
SHARE = 2 / 3  # largest default share of the smallest table's trials in a draw: draws of all trials have one winner
COLUMNS = ("pruner", "relative cost", "missed", "regret", "cost to within 5 %", "draws")


def simulate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="TABLE.csv.gz…", help="Recorded curves: `export STUDY --to curves` makes one."),
    ],
    pruner: Annotated[
        list[str] | None, typer.Option(help="A policy; several times for several.", show_default="all of them")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each table.")] = 60,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials of a draw.", show_default="50, at most 2/3 of a table")
    ] = None,
    target: TargetOption = None,
    workers: WorkersOption = 1,
    seed: SeedOption = 0,
    form: FormatOption = Format.TABLE,
) -> None:
    """Replay recorded trials on a virtual clock: each pruner's cost and share of missed winners.

    Cost: train seconds over running every trial to its target or its end. Missed: draws whose winner is not within 5 %
    of the draw's fastest trial. Intervals are 95 %: of the cost by bootstrap over the draws' winners, of the missed
    share by Clopper and Pearson, with the effective number of independent draws.
    """
    names = list(dict.fromkeys(pruner or PRUNERS))
    for name in names:
        pruner_settings(name)
    tables = _tables(paths, target)
    trials = trials or min(TRIALS, max(1, int(SHARE * min(len(table.trials) for table in tables.values()))))
    found = {
        name: policies.simulate(table, names, draws=draws, trials=trials, seed=seed, workers=workers)
        for name, table in tables.items()
    }
    summaries = {name: summarize(one) for name, one in by_policy(found.values())}
    if any(one.miss_rate.low is None for one in summaries.values()):
        note("no intervals: all draws of a table have one winner; use fewer --trials")
    if form is Format.TABLE:
        print_table([_row(name, one) for name, one in summaries.items()], COLUMNS)
    elif form is Format.JSON:
        each = {
            table: {name: _figures(summarize(one)) for name, one in drawn.items()} for table, drawn in found.items()
        }
        print_json({"policies": {name: _figures(one) for name, one in summaries.items()}, "tables": each})
    else:
        print_rows([{"pruner": name, **_figures(one)} for name, one in summaries.items()], (), form)


def _tables(paths: Sequence[Path], target: float | None) -> Mapping[str, RecordedTable]:
    """Return the tables by name; raise `UsageError` if a file is named twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a table is named twice: its draws would count twice")
    tables: dict[str, RecordedTable] = {}
    for path in paths:
        table = read(path, target)
        if table.name in tables:
            table = replace(table, name=f"{table.name} ({path})")
        tables[table.name] = table
    return tables


def _row(name: str, one: Summary) -> dict[str, Any]:
    return {
        "pruner": name,
        "relative cost": _with_ends(one.relative_cost, 1.0, "{:.3f}"),
        "missed": f"{_with_ends(one.miss_rate, 100.0, '{:.1f}')} %",
        "regret": f"{one.regret:.4f}",
        "cost to within 5 %": f"{one.cost_to_within:.3f}",
        "draws": one.draws,
    }


def _with_ends(figure: Interval, unit: float, digits: str) -> str:
    mean = digits.format(unit * figure.mean)
    if figure.low is None or figure.high is None:
        return mean
    return f"{mean} [{digits.format(unit * figure.low)}, {digits.format(unit * figure.high)}]"


def _figures(one: Summary) -> dict[str, Any]:
    """Return a policy's figures for programs: means with the bounds of their intervals."""
    found = asdict(one)
    for name in ("relative_cost", "miss_rate"):
        interval = found.pop(name)
        found |= {name: interval["mean"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
    return found


if __name__ == "__main__":
    script(simulate)
