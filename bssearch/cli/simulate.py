"""``bssearch simulate``: what pruning policies would have cost, and lost, on past searches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.output import Format, FormatOption, print_json, print_rows, print_table

if TYPE_CHECKING:
    from bssearch.search.simulate import Interval, Summary

COLUMNS = ("pruner", "relative cost", "missed", "regret", "cost to within 5 %", "draws")


def simulate(
    tables: Annotated[
        list[Path],
        typer.Argument(metavar="TABLE.csv.gz…", help="Recorded curves: `export STUDY --to curves` makes one."),
    ],
    pruner: Annotated[
        list[str] | None,
        typer.Option(help="A policy; several times for several.", show_default="all of them"),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each table.")] = 60,
    trials: Annotated[int, typer.Option(min=1, help="Trials of a draw.")] = 50,
    workers: Annotated[int, typer.Option(min=1, help="Trials that run at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the draws: the same seed gives the same draws.")] = 0,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run past searches again on a virtual clock, and say what each pruner costs and how often it loses the winner.

    Cost: train seconds over running every trial to its target or its end. Missed: draws whose winner is not within 5 %
    of the draw's fastest trial. Intervals are 95 %, by bootstrap over the draws' winners.
    """
    from bssearch.recorded import read_table
    from bssearch.search.simulate import POLICIES, by_policy, policy_maker, summarize
    from bssearch.search.simulate import simulate as simulated

    names = list(dict.fromkeys(pruner or POLICIES))
    for name in names:
        policy_maker(name)
    found = {}
    for path in tables:
        table = read_table(path)
        drawn = simulated(table, names, draws=draws, trials=trials, seed=seed, workers=workers)
        found[f"{table.name} ({path})" if table.name in found else table.name] = drawn
    policies = {name: summarize(one) for name, one in by_policy(found.values())}
    if form is Format.TABLE:
        print_table([_row(name, one) for name, one in policies.items()], COLUMNS)
    elif form is Format.JSON:
        each = {
            table: {name: _figures(summarize(one)) for name, one in drawn.items()} for table, drawn in found.items()
        }
        print_json({"policies": {name: _figures(one) for name, one in policies.items()}, "tables": each})
    else:
        print_rows([{"pruner": name, **_figures(one)} for name, one in policies.items()], (), form)


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
    mean, low, high = (digits.format(unit * value) for value in (figure.mean, figure.low, figure.high))
    return f"{mean} [{low}, {high}]"


def _figures(one: Summary) -> dict[str, Any]:
    """Return a policy's figures for programs: means, their intervals beside them."""
    found = asdict(one)
    for name in ("relative_cost", "miss_rate"):
        interval = found.pop(name)
        found |= {name: interval["mean"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
    return found
