"""Past searches replayed on a virtual clock under other pruning policies: their costs and misses.

A draw is some of a table's trials in a random order, the same for every policy. Its cost is the train seconds of its
trials, relative to running each to its target or its end. A draw is missed unless the fastest trial that the policy
kept is within 5 % of the fastest of the draw. A paused trial resumes at its place and costs no time meanwhile.
"""

import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from bssearch.errors import UsageError
from bssearch.exchange.exporters.exports import RecordedTable
from bssearch.records import Configuration, ProbeRecord, Target, TrialState
from bssearch.records.intervals import CONFIDENCE, FLAT_RATIO, student_t
from bssearch.search.engine import Engine
from bssearch.search.history import measured_seconds
from bssearch.search.pruners.base import Pruner, make_pruner
from bssearch.spec import SearchSpace, StudySpec, parse_value
from bssearch.spec.parts import BudgetSpec, ConfirmSpec, DefaultSpec, ExecutorSpec, PrunerSpec, TargetSpec
from tests.benchmarks.simulate.plain import plain
from tests.benchmarks.simulate.replay import Replay, VirtualClock, replays

LEAST_IMPROVEMENT: float = BudgetSpec.model_fields["least_improvement"].default

WORST_REGRET = 9.0  # greatest ratio of times in a regret, and the ratio without a winner


@dataclass(frozen=True, slots=True)
class Draw:
    """A policy on one draw of a table; costs are shares of the cost without pruning.

    ``within`` is the cost when the incumbent first was within 5 % of the draw's best, or the whole cost. ``wall`` is
    the virtual wall time, in the unit of the cost without pruning over the workers.
    """

    table: str
    best: float
    cost: float
    ratio: float
    within: float
    wall: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean or share over draws with its 95 % interval; None if all draws of a table have one winner."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A policy over all draws: relative cost, miss rate, and regret (a geometric mean)."""

    draws: int
    relative_cost: Interval
    miss_rate: Interval
    regret: float
    cost_to_within: float
    wall: float


def simulate(
    table: RecordedTable, names: Collection[str], *, draws: int, trials: int, seed: int, workers: int = 1
) -> dict[str, list[Draw]]:
    """Run policies on the same draws of a table; draws without a trial that reaches the target are left out.

    Raises `UsageError` for an unknown policy, numbers below 1, and a table with fewer trials or no hit.
    """
    settings = {name: pruner_settings(name) for name in names}
    for what, value in (("draws", draws), ("trials", trials), ("workers", workers)):
        if value < 1:
            raise UsageError(f"{what} = {value} must be >= 1")
    pool = _recorded(table)
    if trials > len(pool):
        raise UsageError(f"trials = {trials} must be <= {len(pool)}, the trials of table {table.name!r}")
    rng = random.Random(seed)
    found: dict[str, list[Draw]] = {name: [] for name in settings}
    for _ in range(draws):
        order = rng.sample(pool, trials)
        best = min(one.replay.target_seconds for one in order)
        if math.isinf(best):
            continue
        for name, one in settings.items():
            found[name].append(_draw(table, order, make_pruner(one), best, workers))
    if not all(found.values()):
        raise UsageError(
            f"none of {draws} draws of {trials} trials of table {table.name!r} has one that reaches the target",
            hint="more --draws, or more --trials",
        )
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trial of a table with its configuration; repeats of a configuration show the noise of seeds."""

    configuration: Configuration
    replay: Replay


def _recorded(table: RecordedTable) -> list[Recorded]:
    """Return the trials of a table; batch sizes do not matter here."""
    return [
        Recorded(
            Configuration(batch_size=1, micro_batch_size=1, learning_rate=1.0, parameters=dict(trial.parameters)), one
        )
        for trial, one in zip(table.trials, replays(table), strict=True)
    ]


class Order:
    """Trials in a fixed order."""

    def __init__(self, trials: Sequence[Recorded]) -> None:
        self._left = deque(trials)

    @property
    def has_more(self) -> bool:
        return bool(self._left)

    def begin(self) -> Configuration:
        """Return the configuration of the next trial."""
        return self._left.popleft().configuration


def _draw(table: RecordedTable, order: Sequence[Recorded], pruner: Pruner, best: float, workers: int) -> Draw:
    """Run the trials of a draw in their order, as a study would run them under a pruner."""
    spec = _spec(table.target, max(one.replay.limit for one in order), workers)
    engine = Engine(spec, slots=workers, pruner=pruner, make_planner=plain(Order(order)))
    rows = iter(one.replay for one in order)
    clock = VirtualClock(engine, lambda plan: next(rows), probes={1: UNTIMED}, workers=workers, searches_only=True)
    whole = math.fsum(one.replay.end for one in order)
    incumbents: list[tuple[float, float]] = []
    for trial in clock.run():
        seconds = measured_seconds(trial)
        if trial.state is TrialState.REACHED and (not incumbents or seconds < incumbents[-1][1]):
            incumbents.append((clock.cost, seconds))
    fastest = incumbents[-1][1] if incumbents else math.inf
    within = next((cost for cost, seconds in incumbents if seconds <= FLAT_RATIO * best), clock.cost)
    return Draw(table.name, best, clock.cost / whole, fastest / best, within / whole, clock.now * workers / whole)


def unbounded_budget(
    limit: float, wall_seconds: float | None = None, least_improvement: float = LEAST_IMPROVEMENT
) -> BudgetSpec:
    """Return a budget in virtual seconds, which may be more than the real ones that a spec takes."""
    return BudgetSpec.model_construct(
        trials=1_000_000, trial_train_seconds=limit, wall_seconds=wall_seconds, least_improvement=least_improvement
    )


def _spec(target: Target, limit: float, workers: int) -> StudySpec:
    """Return the spec of a search of recorded trials; only its pruning matters."""
    return StudySpec(
        schema_version=1,
        name="simulated",
        workload="recorded",
        target=TargetSpec(metric=target.metric, value=target.value, goal=target.goal),
        space=SearchSpace(batch_size=1, learning_rate=1.0),
        default=DefaultSpec(batch_size=1, learning_rate=1.0),
        confirm=ConfirmSpec(runs=0),
        budget=unbounded_budget(limit),
        executor=ExecutorSpec(slots=workers),
    )


# A step time for trials without step times
UNTIMED = ProbeRecord(
    batch_size=1,
    micro_batch_size=1,
    step_seconds=1.0,
    evaluation_seconds=0.0,
    steps_timed=1,
    peak_memory_bytes=None,
    eval_every_steps=1,
)


def pruner_settings(text: str) -> PrunerSpec:
    """Return the settings of a study's pruner, given as ``NAME`` or ``NAME:OPTION=VALUE,…``: ``race:lag=2``.

    Raises `UsageError` for an unknown name or option, and a value out of its bounds.
    """
    name, _, given = text.partition(":")
    pairs = [one.partition("=") for one in given.split(",") if one]
    options = {option: parse_value(value, f"--pruner {text}") for option, _, value in pairs}
    settings = PrunerSpec.model_construct(name=name, options=options)
    make_pruner(settings)
    return settings


# Default policies: no pruning, races, bssearch's, Optuna's
PRUNERS = (
    "none",
    "cap",
    "race:lag=1.5",
    "race:lag=2",
    "race:lag=3",
    "safe",
    "balanced",
    "fast",
    "median",
    "asha",
    "hyperband",
)


def summarize(draws: Sequence[Draw], repeats: int = 1000) -> Summary:
    """Return a policy's means over draws with their 95 % intervals.

    The cost's interval is a bootstrap over the draws' winners, because draws with the same fastest trial succeed or
    fail together. The miss rate's interval is binomial, with the number of independent draws that has the bootstrap's
    variance. Tables have equal weight per draw.
    """
    cost, missed = ([value(one) for one in draws] for value in (lambda one: one.cost, _is_missed))
    resampled = _bootstrap(draws, repeats)
    rate = statistics.fmean(missed)
    regrets = [math.log(min(WORST_REGRET, one.ratio)) for one in draws]
    return Summary(
        draws=len(draws),
        relative_cost=Interval(statistics.fmean(cost), *(resampled.cost if resampled else (None, None))),
        miss_rate=Interval(rate, *(_of_rate(rate, draws, resampled) if resampled else (None, None))),
        regret=math.exp(statistics.fmean(regrets)),
        cost_to_within=statistics.fmean(one.within for one in draws),
        wall=statistics.fmean(one.wall for one in draws),
    )


def _is_missed(draw: Draw) -> float:
    return float(draw.ratio > FLAT_RATIO)


@dataclass(frozen=True, slots=True)
class Resampled:
    """Results of the bootstrap over winners: the 95 % interval of the mean cost, the variance of the miss rate."""

    cost: tuple[float, float]
    miss_rate_variance: float


def _bootstrap(draws: Iterable[Draw], repeats: int) -> Resampled | None:
    """Resample winners within each table; None if a table has a single winner."""
    tables = _by_winner(draws)
    if any(len(winners) < 2 for winners in tables.values()):
        return None
    rng = np.random.default_rng(0)
    sums = np.zeros((repeats, 3))
    for winners in tables.values():
        rows = np.array([[len(one), sum(d.cost for d in one), sum(map(_is_missed, one))] for one in winners.values()])
        picked = rng.integers(len(rows), size=(repeats, len(rows)))
        drawn = rows[picked].sum(axis=1)
        sums += drawn * (rows[:, 0].sum() / drawn[:, :1])  # each table keeps its weight
    means = sums[:, 1:] / sums[:, :1]
    low, high = np.quantile(means[:, 0], (0.025, 0.975))
    return Resampled((float(low), float(high)), float(means[:, 1].var()))


def _by_winner(draws: Iterable[Draw]) -> dict[str, dict[float, list[Draw]]]:
    """Return the draws of each table by their fastest trial."""
    tables: dict[str, dict[float, list[Draw]]] = defaultdict(lambda: defaultdict(list))
    for draw in draws:
        tables[draw.table][draw.best].append(draw)
    return tables


def _of_rate(rate: float, draws: Sequence[Draw], resampled: Resampled) -> tuple[float, float]:
    """Return the 95 % interval of a miss rate, from the effective number of independent draws.

    This number is p (1 − p) / variance, at most the number of draws, times a squared ratio of Student's t: over the
    degrees of freedom of draws and of winners (Korn & Graubard 1998, Survey Methodology 24, p. 193). If no draw or
    every draw is missed, the variance is 0 and each winner counts as one observation.
    """
    winners = [len(one) for one in _by_winner(draws).values()]
    if resampled.miss_rate_variance <= 0:
        return proportion_interval(rate, sum(winners))
    effective = min(len(draws), rate * (1 - rate) / resampled.miss_rate_variance)
    spread = student_t(len(draws) - 1) / student_t(sum(winners) - len(winners))
    return proportion_interval(rate, effective * min(1.0, spread) ** 2)


def proportion_interval(share: float, observations: float) -> tuple[float, float]:
    """Return the 95 % interval of a share over independent observations (Clopper & Pearson 1934).

    ``observations`` may be fractional, as an effective number is (Korn & Graubard 1998, p. 193).
    """
    hits, misses = share * observations, (1 - share) * observations
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits <= 0 else float(betaincinv(hits, misses + 1, tail))
    high = 1.0 if misses <= 0 else float(betaincinv(hits + 1, misses, 1 - tail))
    return low, high


def by_policy(found: Iterable[Mapping[str, Sequence[Draw]]]) -> Iterator[tuple[str, list[Draw]]]:
    """Yield each policy with its draws of all tables."""
    joined: dict[str, list[Draw]] = defaultdict(list)
    for one in found:
        for name, draws in one.items():
            joined[name] += draws
    yield from joined.items()
