"""What each pruning policy costs and misses on recorded curves, and that the operating points keep their bars.

Run as ``python tests/benchmarks/pruning.py TABLE.csv.gz…``, a few minutes for six tables: 60 draws of 50 trials of each
table with each of 10 seeds, one trial at a time. Exits 1 where `safe`, `balanced` or `fast` costs more than 0.39, 0.31
or 0.23 of no pruning, or misses the winner in more than 1, 5 or 12 % of the draws, or where a policy that is there for
comparison is better than one of them in both.

Then, leave one table out: for each table the patience that the other tables would have chosen (the least cost that
keeps three quarters of the bar's misses on them), and what it comes to on the table left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bssearch.pruners import registry as policies_by_name
from bssearch.pruners.pace import PATIENCE, Pace
from bssearch.recorded import RecordedTable, read_table
from bssearch.simulation.pruning import Draw, Summary, by_policy, simulate, summarize

SEEDS = range(10)
DRAWS = 60
TRIALS = 50
BARS = {"safe": (0.39, 0.01), "balanced": (0.31, 0.05), "fast": (0.23, 0.12)}
PATIENCES = (1.7, 1.9, 2.0, 2.1, 2.2, 2.4, 2.6, 2.7, 3.0, 3.5, 4.0, 4.5)


def all_draws(table: RecordedTable, names: Sequence[str], seeds: Sequence[int]) -> dict[str, list[Draw]]:
    """Return the draws of every seed, by policy."""
    found = (simulate(table, names, draws=DRAWS, trials=TRIALS, seed=seed) for seed in seeds)
    return dict(by_policy(found))


def told(name: str, one: Summary) -> str:
    """Return a policy's figures as a line."""
    cost, missed = one.relative_cost, one.miss_rate
    return (
        f"{name:12} {cost.mean:.3f} [{cost.low:.3f}, {cost.high:.3f}]   {missed.mean:6.2%} [{missed.low:.2%}, "
        f"{missed.high:.2%}]   regret {one.regret:.4f}   to within 5 %: {one.cost_to_within:.3f}"
    )


def against_the_bars(tables: Sequence[RecordedTable]) -> bool:
    """Print every policy over all tables; return whether the operating points keep their bars."""
    found = by_policy(all_draws(table, list(policies_by_name.POLICIES), SEEDS) for table in tables)
    policies = {name: summarize(draws) for name, draws in found}
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
    """Print what the patience chosen on the other tables comes to on each."""
    makers = {f"{patience:g}": lambda limit, patience=patience: Pace(limit, patience) for patience in PATIENCES}
    policies_by_name.POLICIES = makers
    by_table = {table.name: all_draws(table, list(makers), SEEDS[:3]) for table in tables}
    for name, (_, bar) in BARS.items():
        left_out: list[Draw] = []
        chosen = []
        for table in by_table:
            others = [found for other, found in by_table.items() if other != table]
            joined = {patience: summarize(draws, repeats=2) for patience, draws in by_policy(others)}
            allowed = [patience for patience, one in joined.items() if one.miss_rate.mean <= 0.75 * bar]
            best = min(allowed or joined, key=lambda patience: joined[patience].relative_cost.mean)
            chosen.append(best)
            left_out += by_table[table][best]
        print(f"{told(name, summarize(left_out))}   patience {', '.join(chosen)} (in use: {PATIENCE[name]:g})")


def main(paths: Sequence[str]) -> int:
    """Simulate, print, compare."""
    if not paths:
        print("usage: python tests/benchmarks/pruning.py TABLE.csv.gz…")
        return 2
    tables = [read_table(Path(path)) for path in paths]
    print(f"{len(tables)} tables, {DRAWS} draws of {TRIALS} trials, {len(SEEDS)} seeds; 95 % intervals")
    kept = against_the_bars(tables)
    print("leaving one table out, 3 seeds")
    leave_one_out(tables)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
