"""``bssearch simulate --sampler``: what samplers with pruners would have spent to find the best of a recorded table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from bssearch.cli.output import Format, print_json, print_rows, print_table
from bssearch.errors import UsageError

if TYPE_CHECKING:
    from bssearch.recorded import RecordedTable
    from bssearch.simulation.searching import Plan, SearchSummary

SAMPLER = "auto"
PRUNER = "balanced"
REPEATS = 50
STUDY_TRIALS = 20
"""The budget of a study's search where nobody says: as many trials that run to their limit. A choice."""

STUDY_COLUMNS = (
    "study",
    "within 5 %",
    "within 10 %",
    "claims true",
    "95 % covered",
    "provisional",
    "train s",
    "runs",
    "recommended batch × studies",
)
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
    study: bool,
    form: Format,
) -> None:
    """Search a table with every pair of a sampler and a pruner, and print what came of it."""
    from bssearch.simulation.searching import Plan, check_pair, simulate_searches
    from bssearch.simulation.table_space import table_space

    for sampler, pruner in () if study else pairs:
        check_pair(sampler, pruner)
    if budget is None and study:
        budget = STUDY_TRIALS * (table.max_train_seconds or max(one.train_seconds[-1] for one in table.trials))
    if budget is None:
        raise UsageError("--sampler needs --budget SECONDS: how long each search trains, over all workers")
    space = table_space(table)
    point = None if default is None else space.point_of(default)
    plan = Plan(space, budget, default=point, workers=workers, seed=seed)
    if study:
        _compare_studies(plan, pairs, repeats=repeats, form=form)
        return
    found = simulate_searches(plan, pairs, repeats=repeats, done=_progress)
    summaries = {f"{sampler}+{pruner}": one for (sampler, pruner), one in found.items()}
    if form is Format.TABLE:
        print_table([_row(name, one) for name, one in summaries.items()], COLUMNS)
    elif form is Format.JSON:
        print_json({"samplers": {name: asdict(one) for name, one in summaries.items()}})
    else:
        rows = [{"sampler": pair[0], "pruner": pair[1], **asdict(one)} for pair, one in found.items()]
        print_rows(rows, (), form)


def _compare_studies(plan: Plan, pairs: Sequence[tuple[str, str]], *, repeats: int, form: Format) -> None:
    """Run whole studies of every pair, and print what they recommend and claim."""
    from bssearch.simulation.studies import simulate_studies

    found = simulate_studies(plan, pairs, repeats=repeats, done=_progress)
    summaries = {f"{sampler}+{pruner}": asdict(one) for (sampler, pruner), one in found.items()}
    if form is Format.TABLE:
        print_table([_study_row(name, one) for name, one in summaries.items()], STUDY_COLUMNS)
    elif form is Format.JSON:
        print_json({"studies": summaries})
    else:
        rows = [{"sampler": pair[0], "pruner": pair[1], **asdict(one)} for pair, one in found.items()]
        print_rows([{**row, "recommended": _counts(row["recommended"])} for row in rows], (), form)


def _study_row(name: str, one: Mapping[str, Any]) -> dict[str, Any]:
    shares = ("recommended_within_5", "recommended_within_10", "claimed_within_5", "covered_95", "provisional")
    told = ["–" if one[share] is None else f"{100 * one[share]:.0f} %" for share in shares]
    cells = (name, *told, one["cost_s"], one["runs"], _counts(one["recommended"]))
    return dict(zip(STUDY_COLUMNS, cells, strict=True))


def _counts(recommended: Mapping[str, int]) -> str:
    return ", ".join(f"{size} × {count}" for size, count in recommended.items())


def _progress(sampler: str, pruner: str) -> None:
    """Say what is done, to a person who waits."""
    if sys.stderr.isatty():
        typer.echo(f"{sampler}+{pruner} done", err=True)


def _row(name: str, one: SearchSummary) -> dict[str, Any]:
    shares = (one.found_25, one.found_10, one.recommended_within_10)
    found_25, found_10, right = (f"{share:.0%}".replace("%", " %") for share in shares)
    cells = (name, one.cost_to_within_25, found_25, one.cost_to_within_10, found_10, right, one.trials)
    return dict(zip(COLUMNS, cells, strict=True))
