"""``bssearch simulate``: what pruning policies and samplers would have cost, and lost, on past searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bssearch.cli.output import Format, FormatOption, print_json, print_rows, print_table
from bssearch.cli.simulate_search import PRUNER, REPEATS, SAMPLER, compare_samplers
from bssearch.errors import UsageError
from bssearch.files import check_file, replacing

if TYPE_CHECKING:
    from bssearch.pages.simulation_page import Point
    from bssearch.recorded import RecordedTable
    from bssearch.simulation.pruning import Interval, Summary

DRAWS = 60
TRIALS = 50
SHARE = 2 / 3
"""Of the smallest table's trials a draw has no more, unless asked to: draws of all have one winner."""
COLUMNS = ("pruner", "relative cost", "missed", "regret", "cost to within 5 %", "draws")


def simulate(
    tables: Annotated[
        list[Path],
        typer.Argument(metavar="TABLE.csv.gz…", help="Recorded curves: `export STUDY --to curves` makes one."),
    ],
    pruner: Annotated[
        list[str] | None,
        typer.Option(help="A policy; several times for several.", show_default=f"all of them; {PRUNER} with --sampler"),
    ] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Draws of each table.", show_default=str(DRAWS))] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials of a draw.", show_default="50, at most 2/3 of a table")
    ] = None,
    sampler: Annotated[
        list[str] | None,
        typer.Option(help="Search the table: auto, random, tpe or gp (--study: grid too); several times for several."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of a search, in train seconds of all workers.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Searches with each sampler and pruner.", show_default=str(REPEATS))
    ] = None,
    default: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE,…", help="The configuration that every search begins with.", show_default=False
        ),
    ] = None,
    study: Annotated[
        bool, typer.Option("--study", help="With --sampler: whole studies, with confirmation and verdict.")
    ] = False,
    target: Annotated[
        float | None, typer.Option(help="Another target than the table's own.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials that run at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Of draws and searches: the same seed gives the same.")] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Draw cost against misses, too: a page of its own.")
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Run past searches again on a virtual clock, and say what each pruner costs and how often it loses the winner.

    Cost: train seconds over running every trial to its target or its end. Missed: draws whose winner is not within 5 %
    of the draw's fastest trial. Intervals are 95 %: of the cost by bootstrap over the draws' winners, of the share
    missed by Clopper and Pearson, with as many independent draws as the winners are worth.

    With --sampler the table is a space to search, from its combinations of parameters: train seconds until the
    incumbent's mean over the seeds is within 25 % and 10 % of the best combination's, the median over the repeats.

    With --study the searches are whole studies: what would have been recommended, at what cost, and how true the claims
    of the answers are. Fresh seeds come from a smooth model of the table and the residuals of its other runs.
    """
    if study and not sampler:
        sampler = [SAMPLER]
    if sampler:
        for name, of_draws in {"draws": draws, "trials": trials, "html": html}.items():
            if of_draws is not None:
                raise UsageError(f"--{name} and --sampler do not go together: a search has no draws")
        if len(tables) > 1:
            raise UsageError(f"--sampler takes one table, not {len(tables)}: a search is of one space")
        compare_samplers(
            _read(tables[0], target),
            [(one, other) for one in sampler for other in pruner or [PRUNER]],
            budget=budget,
            repeats=repeats or REPEATS,
            default=default,
            workers=workers,
            seed=seed,
            study=study,
            form=form,
        )
        return
    for name, of_searches in {"budget": budget, "repeats": repeats, "default": default}.items():
        if of_searches is not None:
            raise UsageError(f"--{name} goes with --sampler only: without one nothing is searched")
    _compare_policies(
        tables,
        pruner,
        target,
        draws=draws or DRAWS,
        trials=trials,
        workers=workers,
        seed=seed,
        html=html,
        form=form,
    )


def _compare_policies(
    tables: Sequence[Path],
    pruner: Sequence[str] | None,
    target: float | None,
    *,
    draws: int,
    trials: int | None,
    workers: int,
    seed: int,
    html: Path | None,
    form: Format,
) -> None:
    """Run policies on draws of tables, and print what they cost and miss."""
    from bssearch.pages.simulation_page import simulation_page
    from bssearch.simulation.pruning import PRUNERS, by_policy, pruner_of, summarize
    from bssearch.simulation.pruning import simulate as simulated

    if html is not None:
        check_file(html)
    names = list(dict.fromkeys(pruner or PRUNERS))
    for name in names:
        pruner_of(name)
    if len({path.resolve() for path in tables}) < len(tables):
        raise UsageError("a table is named twice: its draws would count twice")
    read: dict[str, RecordedTable] = {}
    for path in tables:
        table = _read(path, target)
        if table.name in read:
            table = replace(table, name=f"{table.name} ({path})")
        read[table.name] = table
    trials = trials or min(TRIALS, max(1, int(SHARE * min(len(table.trials) for table in read.values()))))
    found = {
        name: simulated(table, names, draws=draws, trials=trials, seed=seed, workers=workers)
        for name, table in read.items()
    }
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


def _read(path: Path, target: float | None) -> RecordedTable:
    """Return a table, with another target where one is given."""
    from bssearch.recorded import read_table
    from bssearch.simulation.replay import ended_before, with_target

    table = read_table(path)
    if target is None:
        return table
    changed = with_target(table, target)
    if early := ended_before(table, changed.target):
        typer.echo(
            f"note: {early} of {len(table.trials)} trials of table {table.name!r} ended at its own target "
            f"{table.target.value:g}: here they never reach {target:g}",
            err=True,
        )
    return changed


def _points(policies: Mapping[str, Summary]) -> list[Point]:
    from bssearch.pages.simulation_page import Point
    from bssearch.pruners.pace import PATIENCE
    from bssearch.simulation.searching import PEERS

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
