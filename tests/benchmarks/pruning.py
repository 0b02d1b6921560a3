"""Costs and misses of each pruning policy on recorded curves, and the bars of `safe`, `balanced` and `fast`.

Run as ``python tests/benchmarks/pruning.py TABLE.csv.gz…``, a few minutes for six tables: 60 draws of 50 trials of each
table with each of 10 seeds, one trial at a time. Exits 1 if `safe`, `balanced` or `fast` costs more than 0.39, 0.31 or
0.23 of no pruning, or misses the winner in more than 1, 5 or 12 % of the draws. Also exits 1 if another policy is
better in both. Each table's cost and misses show on which tables a promise holds.

Then one table is left out in turn: the other tables choose each pruner's patience of least cost that keeps three
quarters of the bar's misses. Its cost and misses on the left-out table are printed.
"""

if not __package__:
    __import__("from_clone")

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from bssearch.exchange.exporters.exports import RecordedTable
from bssearch.search.pruners.base import make_pruner
from bssearch.search.pruners.pace import Pace
from tests.benchmarks.harness import script
from tests.benchmarks.simulate.draws import PRUNERS, Draw, Summary, by_policy, pruner_settings, simulate, summarize
from tests.benchmarks.simulate.tables import read_table

PROCESSES = 2
"""Most machines have two spare cores; results do not depend on this number."""

DRAWS = 60
TRIALS = 50
BARS = {"safe": (0.39, 0.01), "balanced": (0.31, 0.05), "fast": (0.23, 0.12)}
PATIENCES = {
    "safe": (4.5, 6.0, 7.0, 7.7, 8.3, 9.0, 10.0, 12.0),
    "balanced": (1.7, 2.1, 2.4, 2.7, 3.0, 3.5, 4.0, 5.0),
    "fast": (1.7, 1.9, 2.1, 2.4, 2.7, 3.0, 3.5, 5.0),
}


def draws_of(table: RecordedTable, names: Sequence[str], seed: int) -> dict[str, list[Draw]]:
    """Return the draws of one seed, by policy."""
    return simulate(table, names, draws=DRAWS, trials=TRIALS, seed=seed)


def all_draws(
    tables: Sequence[RecordedTable], names: Sequence[str], seeds: Sequence[int]
) -> dict[str, dict[str, list[Draw]]]:
    """Return the draws of every seed, by table and policy; each table with each seed is one task."""
    with ProcessPoolExecutor(PROCESSES) as pool:
        tasks = {table.name: [pool.submit(draws_of, table, list(names), seed) for seed in seeds] for table in tables}
        return {name: dict(by_policy(task.result() for task in of_table)) for name, of_table in tasks.items()}


def told(name: str, one: Summary) -> str:
    cost, missed = one.relative_cost, one.miss_rate
    return (
        f"{name:12} {cost.mean:.3f} [{cost.low:.3f}, {cost.high:.3f}]   {missed.mean:6.2%} [{missed.low:.2%}, "
        f"{missed.high:.2%}]   regret {one.regret:.4f}   to within 5 %: {one.cost_to_within:.3f}"
    )


def print_by_table(name: str, of_tables: Mapping[str, Sequence[Draw]]) -> None:
    """Print a policy's cost and misses of each table."""
    for table, draws in of_tables.items():
        one = summarize(draws, repeats=2)
        print(f"  {name:10} {table:30} cost {one.relative_cost.mean:.3f}   missed {one.miss_rate.mean:6.1%}")


def against_the_bars(tables: Sequence[RecordedTable], seeds: Sequence[int]) -> bool:
    """Print every policy over all tables; return whether the bars are met."""
    found = all_draws(tables, PRUNERS, seeds)
    policies = {name: summarize(draws) for name, draws in by_policy(found.values())}
    kept = True
    for name, one in policies.items():
        print(told(name, one))
    for name, (cost, missed) in BARS.items():
        print_by_table(name, {table: draws[name] for table, draws in found.items()})
        ours = policies[name]
        kept &= ours.relative_cost.mean <= cost and ours.miss_rate.mean <= missed
        for other, one in policies.items():
            better = one.relative_cost.mean < ours.relative_cost.mean and one.miss_rate.mean < ours.miss_rate.mean
            if other not in BARS and better:
                print(f"{other} is better than {name} in both")
                kept = False
    return kept


def leave_one_out(tables: Sequence[RecordedTable], seeds: Sequence[int]) -> None:
    """Print the results of each table with the patience that the other tables choose."""
    for name, (_, bar) in BARS.items():
        prefix = f"{name}:patience="
        by_table = all_draws(tables, [f"{prefix}{patience:g}" for patience in PATIENCES[name]], seeds)
        left_out: dict[str, list[Draw]] = {}
        chosen = []
        for table in by_table:
            others = [found for other, found in by_table.items() if other != table]
            by_others = {patience: summarize(draws, repeats=2) for patience, draws in by_policy(others)}
            allowed = [patience for patience, one in by_others.items() if one.miss_rate.mean <= 0.75 * bar]
            best = min(allowed or by_others, key=lambda patience: by_others[patience].relative_cost.mean)
            chosen.append(best.removeprefix(prefix))
            left_out[table] = by_table[table][best]
        pace = make_pruner(pruner_settings(name))
        assert isinstance(pace, Pace)
        joined = summarize([draw for draws in left_out.values() for draw in draws])
        print(f"{told(name, joined)}   patience {', '.join(chosen)} (in use: {pace.patience:g})")
        print_by_table(name, left_out)


def main(paths: Annotated[list[Path], typer.Argument(metavar="TABLE.csv.gz")], seeds: int = 10) -> bool:
    """Simulate, print, compare; ``seeds`` of the draws, at most three of them to leave a table out."""
    tables = [read_table(path) for path in paths]
    print(f"{len(tables)} tables, {DRAWS} draws of {TRIALS} trials, {seeds} seeds; 95 % intervals")
    kept = against_the_bars(tables, range(seeds))
    print("leaving one table out")
    leave_one_out(tables, range(min(seeds, 3)))
    return kept


if __name__ == "__main__":
    script(main, __doc__)
