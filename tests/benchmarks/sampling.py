"""Train seconds of the sampler `auto` to find the best of a recorded table, compared with other samplers.

Run as ``python tests/benchmarks/sampling.py TABLE.csv.gz`` on ``fmnist_adamw``, 20 minutes on two cores: 50 searches
with each pair of a sampler and a pruner, one trial at a time and eight at once, all from one configuration and with one
budget. Exits 1 if `auto` with `balanced` misses a bar:

- within 25 % of the best cell in half the time of the best of Optuna's TPE with Median, SuccessiveHalving and
  Hyperband, and in 95 % of the searches;
- within 10 % in no more time than the best of these, and in 85 %;
- a recommended batch size within 10 % of the best in 90 %.

``--denoised`` judges by a smooth model of the cells' times instead of the means of their seeds.

Two searches that know the table show what is possible; both pay for the probes. The *oracle* runs the best cell with
two seeds. The *race* runs the best cell of each batch size for as long as the best cell takes.
"""

if not __package__:
    __import__("from_clone")

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks.harness import script
from tests.benchmarks.simulate.script import read
from tests.benchmarks.simulate.searches import Plan, SearchSummary, simulate_searches
from tests.benchmarks.simulate.table_space import TableSpace, table_space
from tests.benchmarks.simulate.table_study import probes_cost, table_probes
from tests.benchmarks.simulate.truth import Truth

DEFAULT = "batch_size=32,learning_rate=1e-3,weight_decay=0.01,dropout=0"
NEVER = "never"  # instead of a configuration: one that never reaches the target
WORKERS = (1, 8)
OURS = "auto+balanced"
REFERENCES = ("tpe+median", "tpe+asha", "tpe+hyperband")
OTHERS = ("auto+safe", "auto+fast", "random+none", "tpe+cap", "tpe+race:lag=2")
HEAD = (
    f"{'':14} {'to 25 %':>8} {'found':>6} {'p90':>8} {'to 10 %':>8} {'found':>6} {'batch':>6} {'trials':>7} {'took':>7}"
)


def seconds(value: float | None) -> float:
    """Replace None by ∞."""
    return math.inf if value is None else value


def told(name: str, one: SearchSummary, took: float) -> str:
    costs = [
        f"{seconds(value):8.2f}" for value in (one.cost_to_within_25, one.cost_to_within_25_p90, one.cost_to_within_10)
    ]
    return (
        f"{name:14} {costs[0]} {one.found_25:6.0%} {costs[1]} {costs[2]} {one.found_10:6.0%} "
        f"{one.recommended_within_10:6.0%} {one.trials:7g} {took:5.0f} s"
    )


def first_point(space: TableSpace, default: str) -> int:
    """Return the cell of a configuration; of `NEVER`, the first such cell, of the middle batch size if possible."""
    if default != NEVER:
        return space.point_of(default)
    sizes = list(space.seconds_by_batch_size)
    fastest = [min(trial.target_seconds for trial in trials) for trials in space.trials]
    never = [point for point, least in enumerate(fastest) if math.isinf(least)]
    return min(never, key=lambda point: space.batch_size(point) != sizes[len(sizes) // 2])


def oracle_seconds(space: TableSpace, true_seconds: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of the oracle and of the race."""
    probes, best = probes_cost(table_probes(space)), min(true_seconds)
    race = sum(min(one, best) for one in space.least_by_batch_size(true_seconds).values())
    return probes + 2 * best, probes + race


def keeps_the_bars(found: Mapping[str, SearchSummary], known: tuple[float, float]) -> bool:
    """Print the bars as met or not met; return whether all are met."""
    ours = found[OURS]
    best_25 = min(seconds(found[name].cost_to_within_25) for name in REFERENCES)
    best_10 = min(seconds(found[name].cost_to_within_10) for name in REFERENCES)
    oracle, race = (one / best_25 for one in known)
    print(f"train seconds of the oracle and the race: {known[0]:.2f}, {known[1]:.2f}")
    print(f"to within 25 %: the oracle takes {oracle:.2f}, the race {race:.2f} of the best reference")
    ratio_25, ratio_10 = seconds(ours.cost_to_within_25) / best_25, seconds(ours.cost_to_within_10) / best_10
    bars = {
        f"to within 25 %: {ratio_25:.2f} of the best of {', '.join(REFERENCES)} (at most 0.5)": ratio_25 <= 0.5,
        f"within 25 % in {ours.found_25:.0%} (at least 95 %)": ours.found_25 >= 0.95,
        f"to within 10 %: {ratio_10:.2f} of the best of them (at most 1)": ratio_10 <= 1,
        f"within 10 % in {ours.found_10:.0%} (at least 85 %)": ours.found_10 >= 0.85,
        f"batch size within 10 % in {ours.recommended_within_10:.0%} (at least 90 %)": ours.recommended_within_10
        >= 0.9,
    }
    for bar, met in bars.items():
        print(f"{'met    ' if met else 'NOT MET'} {OURS} {bar}")
    return all(bars.values())


def main(
    table: Path,
    repeats: int = 50,
    workers: Annotated[list[int] | None, typer.Option(help="how many trials run at once")] = None,
    target: Annotated[float | None, typer.Option(help="another target than the table's")] = None,
    budget: Annotated[float, typer.Option(help="train seconds of each search")] = 40.0,
    default: Annotated[str, typer.Option(help=f"the first configuration, or {NEVER}")] = DEFAULT,
    denoised: Annotated[bool, typer.Option(help="judge by a smooth model of the times")] = False,
) -> bool:
    """Search, print, compare."""
    recorded = read(table, target)
    space = table_space(recorded)
    first = first_point(space, default)
    true_seconds = Truth(space).seconds if denoised else space.seconds
    print(
        f"{recorded.name}, {recorded.target.metric} {recorded.target.goal.sign} {recorded.target.value:g}: best cell "
        f"{min(true_seconds):.3f} s, {repeats} searches of {budget:g} train seconds each, from "
        f"{space.cells[first]}, {true_seconds[first] / min(true_seconds):.2f} times the best"
    )
    kept = True
    for at_once in workers or WORKERS:
        plan = Plan(space, budget, default=first, workers=at_once, true_seconds=true_seconds)
        print(f"\n{at_once} at once; medians in train seconds, probes charged\n{HEAD}")
        found = {}
        for name in (OURS, *REFERENCES, *OTHERS):
            sampler, pruner = name.split("+")
            begun = time.perf_counter()
            (found[name],) = simulate_searches(plan, [(sampler, pruner)], repeats=repeats).values()
            print(told(name, found[name], time.perf_counter() - begun), flush=True)
        kept &= keeps_the_bars(found, oracle_seconds(space, true_seconds))
    return kept


if __name__ == "__main__":
    script(main, __doc__)
