"""Costs and misses of each pruning policy on recorded curves, and the bars of `safe`, `balanced` and `fast`.

Run as ``python tests/benchmarks/pruning.py TABLE.csv.gz…``, a few minutes for six tables: 60 draws of 50 trials of each
table with each of 10 seeds, one trial at a time. Exits 1 if `safe`, `balanced` or `fast` costs more than 0.39, 0.31 or
0.23 of no pruning, or misses the winner in more than 1, 5 or 12 % of the draws. Also exits 1 if another policy is
better in both.

Then one table is left out in turn: the other tables choose the patience of least cost that keeps three quarters of the
bar's misses. Its cost and misses on the left-out table are printed.
"""

if not __package__:
    __import__("from_clone")

from collections.abc import Sequence
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

SEEDS = range(10)
DRAWS = 60
TRIALS = 50
BARS = {"safe": (0.39, 0.01), "balanced": (0.31, 0.05), "fast": (0.23, 0.12)}
PACE = "safe:patience="
PATIENCES = (1.7, 1.9, 2.0, 2.1, 2.2, 2.4, 2.6, 2.7, 3.0, 3.5, 4.0, 4.5)


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


def against_the_bars(tables: Sequence[RecordedTable]) -> bool:
    """Print every policy over all tables; return whether the bars are met."""
    policies = {name: summarize(draws) for name, draws in by_policy(all_draws(tables, PRUNERS, SEEDS).values())}
    kept = True
    for name, one in policies.items():
        print(told(name, one))
    for name, (cost, missed) in BARS.items():
        ours = policies[name]
        kept &= ours.relative_cost.mean <= cost and ours.miss_rate.mean <= missed
        for other, one in policies.items():
            better = one.relative_cost.mean < ours.relative_cost.mean and one.miss_rate.mean < ours.miss_rate.mean
            if other not in BARS and better:
                print(f"{other} is better than {name} in both")
                kept = False
    return kept


def leave_one_out(tables: Sequence[RecordedTable]) -> None:
    """Print the results of each table with the patience that the other tables choose."""
    by_table = all_draws(tables, [f"{PACE}{patience:g}" for patience in PATIENCES], SEEDS[:3])
    for name, (_, bar) in BARS.items():
        left_out: list[Draw] = []
        chosen = []
        for table in by_table:
            others = [found for other, found in by_table.items() if other != table]
            joined = {patience: summarize(draws, repeats=2) for patience, draws in by_policy(others)}
            allowed = [patience for patience, one in joined.items() if one.miss_rate.mean <= 0.75 * bar]
            best = min(allowed or joined, key=lambda patience: joined[patience].relative_cost.mean)
            chosen.append(best.removeprefix(PACE))
            left_out += by_table[table][best]
        pace = make_pruner(pruner_settings(name))
        assert isinstance(pace, Pace)
        print(f"{told(name, summarize(left_out))}   patience {', '.join(chosen)} (in use: {pace.patience:g})")


def main(paths: Annotated[list[Path], typer.Argument(metavar="TABLE.csv.gz")]) -> bool:
    """Simulate, print, compare."""
    tables = [read_table(path) for path in paths]
    print(f"{len(tables)} tables, {DRAWS} draws of {TRIALS} trials, {len(SEEDS)} seeds; 95 % intervals")
    kept = against_the_bars(tables)
    print("leaving one table out, 3 seeds")
    leave_one_out(tables)
    return kept


if __name__ == "__main__":
    script(main, __doc__)
