"""Past searches run again on a virtual clock, under other pruning policies: what each costs, and what it loses.

A draw is some of a table's trials in a random order, the same for every policy. Its cost are the train seconds of all
of them, relative to running each to its target or its end; it is missed where the fastest trial that the policy kept is
not within 5 % of the fastest of the draw. A trial that waits goes on from where it was, and costs nothing meanwhile.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bssearch.errors import UsageError
from bssearch.intervals import FLAT_RATIO
from bssearch.pruners.base import Policy
from bssearch.pruners.registry import policy_maker
from bssearch.recorded import RecordedTable
from bssearch.simulation.replay import Order, Replay, State, VirtualClock, replays

WORST_REGRET = 9.0
"""What a winner's time over the fastest one's counts for at most, and where none was kept."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a policy came to on one draw of a table; costs are shares of the cost without pruning.

    ``within`` is what was spent when the incumbent first was within 5 % of the draw's best, all where it never was.
    ``wall`` is the virtual wall time, in the unit of the cost without pruning over the workers.
    """

    table: str
    best: float
    cost: float
    ratio: float
    within: float
    wall: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over draws with its 95 % interval; None where a table has had a single winner in all its draws."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy over all draws: what it costs, how often it misses, and how far off (a geometric mean)."""

    draws: int
    relative_cost: Interval
    miss_rate: Interval
    regret: float
    cost_to_within: float
    wall: float


def simulate(
    table: RecordedTable, names: Collection[str], *, draws: int, trials: int, seed: int, workers: int = 1
) -> dict[str, list[Draw]]:
    """Run policies on the same draws of a table; draws of which no trial reaches the target are left out.

    Raises `UsageError` for an unknown policy, numbers below 1, and a table with fewer trials or no hit at all.
    """
    makers = {name: policy_maker(name) for name in names}
    for what, value in (("draws", draws), ("trials", trials), ("workers", workers)):
        if value < 1:
            raise UsageError(f"{what} = {value} must be >= 1")
    pool = replays(table)
    if trials > len(pool):
        raise UsageError(f"trials = {trials} must be <= {len(pool)}, the trials of table {table.name!r}")
    rng = random.Random(seed)
    found: dict[str, list[Draw]] = {name: [] for name in makers}
    for _ in range(draws):
        order = rng.sample(pool, trials)
        best = min(one.target_seconds for one in order)
        if math.isinf(best):
            continue
        whole = math.fsum(one.end for one in order)
        for name, make in makers.items():
            found[name].append(_draw(table.name, order, make(max(one.limit for one in order)), best, whole, workers))
    if not all(found.values()):
        raise UsageError(
            f"none of {draws} draws of {trials} trials of table {table.name!r} has one that reaches the target",
            hint="more --draws, or more --trials",
        )
    return found


def _draw(table: str, order: Sequence[Replay], policy: Policy, best: float, whole: float, workers: int) -> Draw:
    clock = VirtualClock(Order(order), policy, workers)
    incumbents: list[tuple[float, float]] = []
    for trial, state in clock.run():
        seconds = order[trial].target_seconds
        if state is State.REACHED and (not incumbents or seconds < incumbents[-1][1]):
            incumbents.append((clock.cost, seconds))
    fastest = incumbents[-1][1] if incumbents else math.inf
    within = next((cost for cost, seconds in incumbents if seconds <= FLAT_RATIO * best), clock.cost)
    return Draw(table, best, clock.cost / whole, fastest / best, within / whole, clock.now * workers / whole)


def summarize(draws: Sequence[Draw], repeats: int = 1000) -> Summary:
    """Return a policy's means over draws with 95 % bootstrap intervals, clustered by the draw's winner.

    Draws that have the same fastest trial succeed or fail together. Tables weigh alike, by how many draws they have.
    """
    cost, missed = ([value(one) for one in draws] for value in (lambda one: one.cost, _is_missed))
    intervals = _bootstrap(draws, repeats)
    regrets = [math.log(min(WORST_REGRET, one.ratio)) for one in draws]
    return Summary(
        draws=len(draws),
        relative_cost=Interval(statistics.fmean(cost), *intervals["cost"]),
        miss_rate=Interval(statistics.fmean(missed), *intervals["missed"]),
        regret=math.exp(statistics.fmean(regrets)),
        cost_to_within=statistics.fmean(one.within for one in draws),
        wall=statistics.fmean(one.wall for one in draws),
    )


def _is_missed(draw: Draw) -> float:
    return float(draw.ratio > FLAT_RATIO)


Ends = tuple[float | None, float | None]


def _bootstrap(draws: Iterable[Draw], repeats: int) -> dict[Literal["cost", "missed"], Ends]:
    """Return the 95 % intervals of mean cost and miss rate, from winners drawn anew within each table."""
    tables: dict[str, dict[float, list[Draw]]] = defaultdict(lambda: defaultdict(list))
    for draw in draws:
        tables[draw.table][draw.best].append(draw)
    if any(len(winners) < 2 for winners in tables.values()):
        return {"cost": (None, None), "missed": (None, None)}
    rng = np.random.default_rng(0)
    sums = np.zeros((repeats, 3))
    for winners in tables.values():
        rows = np.array([[len(one), sum(d.cost for d in one), sum(map(_is_missed, one))] for one in winners.values()])
        picked = rng.integers(len(rows), size=(repeats, len(rows)))
        drawn = rows[picked].sum(axis=1)
        sums += drawn * (rows[:, 0].sum() / drawn[:, :1])  # each table keeps its weight
    low, high = np.quantile(sums[:, 1:] / sums[:, :1], (0.025, 0.975), axis=0)
    return {"cost": (float(low[0]), float(high[0])), "missed": (float(low[1]), float(high[1]))}


def by_policy(found: Iterable[Mapping[str, Sequence[Draw]]]) -> Iterator[tuple[str, list[Draw]]]:
    """Yield each policy with its draws of all tables."""
    joined: dict[str, list[Draw]] = defaultdict(list)
    for one in found:
        for name, draws in one.items():
            joined[name] += draws
    yield from joined.items()
