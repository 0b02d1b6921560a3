"""``bssearch simulate``: what pruning policies would have cost, and lost, on past searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.output import Format, FormatOption, print_json, print_rows, print_table
from bssearch.errors import UsageError
from bssearch.files import check_file, replacing

if TYPE_CHECKING:
    from bssearch.analysis.simulation_page import Point
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
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Draw cost against misses, too: a page of its own.")
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run past searches again on a virtual clock, and say what each pruner costs and how often it loses the winner.

    Cost: train seconds over running every trial to its target or its end. Missed: draws whose winner is not within 5 %
    of the draw's fastest trial. Intervals are 95 %, by bootstrap over the draws' winners.
    """
    from bssearch.analysis.html import require_plots
    from bssearch.analysis.simulation_page import simulation_page
    from bssearch.recorded import read_table
    from bssearch.search.simulate import POLICIES, by_policy, policy_maker, summarize
    from bssearch.search.simulate import simulate as simulated

    if html is not None:
        require_plots()
        check_file(html)
    names = list(dict.fromkeys(pruner or POLICIES))
    for name in names:
        policy_maker(name)
    if len({path.resolve() for path in tables}) < len(tables):
        raise UsageError("a table is named twice: its draws would count twice")
    found = {}
    for path in tables:
        table = read_table(path)
        if table.name in found:
            table = replace(table, name=f"{table.name} ({path})")
        found[table.name] = simulated(table, names, draws=draws, trials=trials, seed=seed, workers=workers)
    policies = {name: summarize(one) for name, one in by_policy(found.values())}
    if any(one.miss_rate.low is None for one in policies.values()):
        typer.echo("note: no intervals: all draws of a table have one winner; fewer --trials vary it", err=True)
    shows_tables = html is not None or form is Format.JSON
    each = {
        table: {name: summarize(one) for name, one in drawn.items()}
        for table, drawn in (found.items() if shows_tables else ())
    }
    if html is not None:
        protocol = (
            f"{_count(len(tables), 'table')} · {_count(draws, 'draw')} of {_count(trials, 'trial')} each · "
            f"{_count(workers, 'worker')} · seed {seed}"
        )
        page = simulation_page(_points(policies), {name: _points(one) for name, one in each.items()}, protocol)
        with replacing([html]) as (file,):
            file.write(page)
        typer.echo(html, err=True)
    if form is Format.TABLE:
        print_table([_row(name, one) for name, one in policies.items()], COLUMNS)
    elif form is Format.JSON:
        by_table = {table: {name: _figures(one) for name, one in drawn.items()} for table, drawn in each.items()}
        print_json({"policies": {name: _figures(one) for name, one in policies.items()}, "tables": by_table})
    else:
        print_rows([{"pruner": name, **_figures(one)} for name, one in policies.items()], (), form)


def _points(policies: Mapping[str, Summary]) -> list[Point]:
    from bssearch.analysis.simulation_page import Point
    from bssearch.search.pace import PATIENCE
    from bssearch.search.simulate import PEERS

    return [
        Point(
            name=name,
            kind="ours" if name in PATIENCE else "peer" if name in PEERS else "simple",
            relative_cost=astuple(one.relative_cost),
            miss_rate=astuple(one.miss_rate),
            regret=one.regret,
            cost_to_within=one.cost_to_within,
        )
        for name, one in policies.items()
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
    """Return a policy's figures for programs: means, their intervals beside them."""
    found = asdict(one)
    for name in ("relative_cost", "miss_rate"):
        interval = found.pop(name)
        found |= {name: interval["mean"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
    return found
