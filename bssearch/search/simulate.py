"""Past searches run again on a virtual clock, under other pruning policies: what each costs, and what it loses.

A draw is some of a table's trials in a random order, the same for every policy. Its cost are the train seconds of all
of them, relative to running each to its target or its end; it is missed where the fastest trial that the policy kept is
not within 5 % of the fastest of the draw. A trial that waits goes on from where it was, and costs nothing meanwhile.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from bssearch.errors import UsageError
from bssearch.recorded import RecordedTable
from bssearch.search.pace import PATIENCE, Pace
from bssearch.search.policy import Action, Cap, Policy, Race

CLOSE = 1.05
"""A winner within this factor of the fastest trial of its draw is not missed."""

WORST_REGRET = 9.0
"""What a winner's time over the fastest one's counts for at most, and where none was kept."""

MakePolicy = Callable[[float], Policy]


def _peer(limit: float, pruner: str) -> Policy:
    from bssearch.search.peers import OptunaPolicy

    return OptunaPolicy(limit, pruner)


PEERS = ("median", "asha", "hyperband")
"""Those of Optuna; see `bssearch.search.peers`."""

POLICIES: Mapping[str, MakePolicy] = {
    "none": Policy,
    "cap": Cap,
    **{f"lag-{lag:g}": partial(Race, lag=lag) for lag in (1.5, 2.0, 3.0)},
    **{name: partial(Pace, patience=patience) for name, patience in PATIENCE.items()},
    **{name: partial(_peer, pruner=name) for name in PEERS},
}
"""Policies by name, each made for the longest that a trial trains, in seconds."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded trial: gains at train seconds, when it meets the target (∞: never), and its limit."""

    train_seconds: Sequence[float]
    gains: Sequence[float]
    target_seconds: float
    limit: float

    @property
    def end(self) -> float:
        """Return the train seconds at which it ends if nothing stops it."""
        return min(self.target_seconds, self.train_seconds[-1])


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


def policy_maker(name: str) -> MakePolicy:
    """Return how a policy is made. Raises `UsageError` for a name that is not known."""
    if name not in POLICIES:
        raise UsageError(f"pruner = {name!r} is not known; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def replays(table: RecordedTable) -> list[Replay]:
    """Return a table's trials as they can be run again; without a limit in it, each ran for its own."""
    found = []
    for trial in table.trials:
        hits = (
            seconds
            for seconds, metric in zip(trial.train_seconds, trial.metrics, strict=True)
            if table.target.is_met_by(metric)
        )
        gains = [table.target.gain(metric) for metric in trial.metrics]
        limit = table.max_train_seconds or trial.train_seconds[-1]
        found.append(Replay(trial.train_seconds, gains, next(hits, math.inf), limit))
    return found


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
    if all(math.isinf(one.target_seconds) for one in pool):
        target = table.target
        raise UsageError(
            f"no trial of table {table.name!r} reaches {target.metric} {target.goal.sign} {target.value:g}"
        )
    at_once = [
        trial.number for trial, one in zip(table.trials, pool, strict=True) if min(one.end, one.target_seconds) <= 0
    ]
    if at_once:
        raise UsageError(f"trial {at_once[0]} of table {table.name!r} ends, or meets the target, at 0 train seconds")
    dice = random.Random(seed)
    found: dict[str, list[Draw]] = {name: [] for name in makers}
    for _ in range(draws):
        order = dice.sample(pool, trials)
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
    clock = VirtualClock(order, policy, workers)
    clock.run()
    incumbents = clock.incumbents
    fastest = incumbents[-1][1] if incumbents else math.inf
    within = next((cost for cost, seconds in incumbents if seconds <= CLOSE * best), clock.cost)
    return Draw(table, best, clock.cost / whole, fastest / best, within / whole, clock.now * workers / whole)


@dataclass(order=True, slots=True)
class _Busy:
    """A worker's next event, at ``time``: its trial has trained ``until`` then, and ``since`` before.

    ``at_cap``: nothing is seen there, and the trial ends.
    """

    time: float
    worker: int
    trial: int
    evaluation: int
    since: float
    until: float
    at_cap: bool

    @property
    def seconds(self) -> float:
        """Return what is trained from now on until the event."""
        return self.until - self.since


class VirtualClock:
    """Runs recorded trials in order on some workers, under a policy; events happen in the order of their time.

    ``incumbents`` are (train seconds spent by then, time-to-target) of each trial that was the fastest when it reached.
    """

    def __init__(self, order: Sequence[Replay], policy: Policy, workers: int) -> None:
        self.cost = self.now = 0.0
        self.incumbents: list[tuple[float, float]] = []
        self._order = order
        self._policy = policy
        self._workers = workers
        self._next = 0
        self._busy: list[_Busy] = []
        self._paused: dict[int, tuple[int, float]] = {}

    def run(self) -> None:
        """Run until all have ended or wait for nothing."""
        idle = list(range(self._workers))
        while True:
            while idle and (begun := self._begin()) is not None:
                trial, evaluation, trained = begun
                heapq.heappush(self._busy, self._event(idle.pop(), trial, evaluation, trained))
            if not self._busy:
                return
            event = heapq.heappop(self._busy)
            following = self._happen(event)
            if following is None:
                idle.append(event.worker)
            else:
                heapq.heappush(self._busy, following)

    def _begin(self) -> tuple[int, int, float] | None:
        """Return (trial, its next evaluation, train seconds so far) of what a free worker goes on with."""
        fresh = self._next < len(self._order)
        waiting = self._policy.next_waiting(fresh=fresh)
        if waiting is not None:
            return waiting, *self._paused.pop(waiting)
        if not fresh:
            return None
        trial, self._next = self._next, self._next + 1
        self._policy.started(trial)
        return trial, 0, 0.0

    def _event(self, worker: int, trial: int, evaluation: int, trained: float) -> _Busy:
        due, cap = self._order[trial].train_seconds[evaluation], self._policy.cap
        until = max(trained, min(due, cap))
        return _Busy(self.now + until - trained, worker, trial, evaluation, trained, until, due > cap)

    def _happen(self, event: _Busy) -> _Busy | None:
        """Take in an event and return the worker's next one; None where the trial has stopped, ended or waits."""
        self.now = event.time
        self.cost += event.seconds
        trial, trained = event.trial, event.until
        if event.at_cap or trained > self._policy.cap:
            self._policy.ended(trial)
            return None
        replay = self._order[trial]
        gain = replay.gains[event.evaluation]
        if trained >= replay.target_seconds:
            if not self.incumbents or trained < self.incumbents[-1][1]:
                self.incumbents.append((self.cost + self._under_way(), trained))
            self._policy.reached(trial, trained, gain)
            self._end_at_the_cap()
            return None
        action = self._policy.observe(trial, trained, gain)
        evaluation = event.evaluation + 1
        if evaluation == len(replay.train_seconds):
            self._policy.ended(trial)
            return None
        if action is Action.WAIT:
            self._paused[trial] = (evaluation, trained)
        if action is not Action.GO_ON:
            return None
        return self._event(event.worker, trial, evaluation, trained)

    def _under_way(self) -> float:
        """Return the train seconds that the other workers have spent on what they are at."""
        return math.fsum(event.seconds - (event.time - self.now) for event in self._busy)

    def _end_at_the_cap(self) -> None:
        """Have trials that are under way end where they come to the cap, which may have fallen."""
        cap = self._policy.cap
        for event in self._busy:
            so_far = event.until - (event.time - self.now)
            if event.until > cap:
                event.until = max(cap, so_far)
                event.time = self.now + event.until - so_far
                event.at_cap = True
        heapq.heapify(self._busy)


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
    return float(draw.ratio > CLOSE)


Ends = tuple[float | None, float | None]


def _bootstrap(draws: Iterable[Draw], repeats: int) -> dict[Literal["cost", "missed"], Ends]:
    """Return the 95 % intervals of mean cost and miss rate, from winners drawn anew within each table."""
    tables: dict[str, dict[float, list[Draw]]] = defaultdict(lambda: defaultdict(list))
    for draw in draws:
        tables[draw.table][draw.best].append(draw)
    if any(len(winners) < 2 for winners in tables.values()):
        return {"cost": (None, None), "missed": (None, None)}
    dice = np.random.default_rng(0)
    sums = np.zeros((repeats, 3))
    for winners in tables.values():
        rows = np.array([[len(one), sum(d.cost for d in one), sum(map(_is_missed, one))] for one in winners.values()])
        picked = dice.integers(len(rows), size=(repeats, len(rows)))
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
