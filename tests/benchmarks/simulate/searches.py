"""Searches of a recorded table on a virtual clock: the cost of a sampler with a pruner until it finds the best.

A sampler chooses among the table's cells, its combinations of parameters; each trial is one of the cell's seeds, drawn
at random. The best within 25 % is found when the incumbent's true train seconds to the target (see `Plan`) are at most
1.25 times those of the best cell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bssearch import registry
from bssearch.errors import UsageError
from bssearch.records import Configuration, Progress, TrialPlan, TrialState
from bssearch.search.engine import Engine
from bssearch.search.history import measured_seconds
from bssearch.search.pruners.base import make_pruner
from bssearch.search.samplers.base import make_sampler
from bssearch.search.samplers.time_model.candidates import Run
from bssearch.search.samplers.time_model.sampler import TimeModelSampler
from bssearch.spec import ConfirmSpec, PrunerSpec
from tests.benchmarks.simulate.draws import UNTIMED, pruner_settings
from tests.benchmarks.simulate.plain import plain
from tests.benchmarks.simulate.processes import PROCESSES, repeating
from tests.benchmarks.simulate.replay import Replay, VirtualClock
from tests.benchmarks.simulate.table_space import TableSpace
from tests.benchmarks.simulate.table_study import (
    TableRows,
    TableSearchSpace,
    probes_cost,
    table_probes,
    table_study,
)

if TYPE_CHECKING:
    from tests.benchmarks.simulate.optuna_baselines import OptunaSearch

# Samplers of plain Optuna studies, see `tests.benchmarks.simulate.optuna_baselines`; other samplers search as studies
OPTUNA = ("random", "tpe", "gp")

WITHIN = {"25": 1.25, "10": 1.10}  # factors of the best cell's train seconds, by name

PEERS = ("median", "asha", "hyperband")  # Optuna's own pruners: with a sampler of Optuna, both are one Optuna study


@dataclass(frozen=True, slots=True)
class Search:
    """The result of one search.

    ``within``: train seconds of all workers and probes until the incumbent was within a factor of the best (∞: never).
    ``recommended_within_10``: whether the incumbent's batch size after the budget has a cell within 10 % of the best.
    """

    within: Mapping[str, float]
    recommended_within_10: bool
    trials: int
    probes_s: float


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """A sampler with a pruner over all repeats: medians in seconds, misses counted as ∞, None if over half miss.

    ``found_*``: share of successful repeats; ``*_p90``: cost of the slowest of nine in ten.
    """

    cost_to_within_25: float | None
    found_25: float
    cost_to_within_10: float | None
    found_10: float
    recommended_within_10: float
    trials: float
    cost_to_within_25_p90: float | None
    cost_to_within_10_p90: float | None
    probes_s: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Shared by all searches of a simulation; ``budget`` in train seconds, ``default`` the first point.

    ``true_seconds`` of the cells judge the searches, by default the means of the cells' seeds.
    """

    space: TableSpace
    budget: float
    default: int | None = None
    workers: int = 1
    seed: int = 0
    true_seconds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.budget > 0 or math.isinf(self.budget):
            raise UsageError(f"budget = {self.budget:g} must be a number of train seconds > 0")
        if self.workers < 1:
            raise UsageError(f"workers = {self.workers} must be >= 1")
        if self.seed < 0:
            raise UsageError(f"seed = {self.seed} must be >= 0")


def search(plan: Plan, sampler: str, pruner: str, repeat: int) -> Search:
    """Run one search until its budget is spent; the plan's seed and the repeat determine all choices.

    A sampler searches as a study, with a study's policy and the pruner, until the budget is spent. Samplers of `OPTUNA`
    are plain Optuna studies: one of Optuna's pruners joins the study; other pruners have a slack of 1. Raises
    `UsageError` for a study's search on a table without step times.
    """
    rng = np.random.default_rng((plan.seed, repeat))
    seed = int(rng.integers(2**31))
    if sampler in OPTUNA:
        return _peer_search(plan, sampler, pruner, seed, rng)
    return _study_search(plan, sampler, pruner, seed)


def _study_search(plan: Plan, name: str, pruner: str, seed: int) -> Search:
    """Run the search of a study over the table."""
    table = plan.space
    if unknown := [size for size in table.seconds_by_batch_size if size not in table.step_seconds]:
        raise UsageError(f"no trial of table {table.table!r} with batch size {unknown[0]} has a step > 0")
    spec, space = table_study(
        table,
        default=table.middle if plan.default is None else plan.default,
        sampler=name,
        pruner=PrunerSpec(),
        workers=plan.workers,
        seed=seed,
        budget=plan.budget,
        least_improvement=0.0,
        confirm=ConfirmSpec(runs=0),
    )
    probes = table_probes(table)
    sampler = make_sampler(spec)
    engine = Engine(spec, slots=plan.workers, sampler=sampler, pruner=make_pruner(pruner_settings(pruner)))
    clock = VirtualClock(
        engine,
        TableRows(table, space),
        probes=probes,
        workers=plan.workers,
        budget=plan.budget,
        charged=probes_cost(probes),
        searches_only=True,
    )

    def incumbent() -> int | None:
        history = engine.history
        best = sampler.incumbent(history) if isinstance(sampler, TimeModelSampler) else history.incumbent
        return None if best is None else space.point_of(best.configuration)

    return _watched(plan, clock, incumbent)


def _watched(
    plan: Plan,
    clock: VirtualClock,
    incumbent: Callable[[], int | None],
    ended: Callable[[], None] = lambda: None,
) -> Search:
    """Run a clock to its end, and record when its incumbent was near the best; ``ended`` is called at each end."""
    table = plan.space
    seconds = plan.true_seconds or table.seconds
    best = min(seconds)
    within: dict[str, float] = {}
    for trial in clock.run():
        if trial.state is TrialState.RUNNING:
            continue
        ended()
        if len(within) < len(WITHIN) and (point := incumbent()) is not None:
            found = [name for name, factor in WITHIN.items() if seconds[point] <= factor * best]
            within = dict.fromkeys(found, clock.cost) | within
    last = incumbent()
    return Search(
        within={name: within.get(name, math.inf) for name in WITHIN},
        recommended_within_10=last is not None
        and table.least_by_batch_size(seconds)[table.batch_size(last)] <= WITHIN["10"] * best,
        trials=len(clock.trials),
        probes_s=clock.charged,
    )


def _peer_search(plan: Plan, sampler: str, pruner: str, seed: int, rng: np.random.Generator) -> Search:
    """Run the search of an Optuna study over the table."""
    from tests.benchmarks.simulate.optuna_baselines import OptunaSearch, PrunedByStudy

    table = plan.space
    own = pruner if pruner in PEERS else None
    study = OptunaSearch(table, sampler, pruner=own, default=plan.default, seed=seed)
    runs: list[Run] = []
    spec, space = table_study(
        table,
        default=table.middle if plan.default is None else plan.default,
        pruner=PrunerSpec(slack=1.0),
        workers=plan.workers,
        seed=seed,
        budget=plan.budget,
        confirm=ConfirmSpec(runs=0),
    )
    engine = Engine(
        spec,
        slots=plan.workers,
        pruner=PrunedByStudy(study) if own else make_pruner(pruner_settings(pruner)),
        make_planner=plain(Asked(study, space, runs)),
    )

    def rows(trial: TrialPlan) -> Replay:
        seeds = table.trials[space.point_of(trial.configuration)]
        return seeds[rng.integers(len(seeds))]

    clock = VirtualClock(
        engine,
        rows,
        probes=dict.fromkeys(table.seconds_by_batch_size, UNTIMED) | table_probes(table),
        workers=plan.workers,
        budget=plan.budget,
        searches_only=True,
    )

    return _watched(plan, clock, lambda: study.incumbent(runs), ended=lambda: _tell(study, runs, clock))


class Asked:
    """The trials of an Optuna study, as long as it is asked."""

    has_more = True

    def __init__(self, study: OptunaSearch, space: TableSearchSpace, runs: list[Run]) -> None:
        self._study = study
        self._space = space
        self._runs = runs

    def begin(self) -> Configuration:
        """Return the configuration of the next trial."""
        point = self._study.ask(self._runs)
        self._runs.append(Run(point, Progress()))
        return self._space.configuration(point)


def _tell(study: OptunaSearch, runs: list[Run], clock: VirtualClock) -> None:
    for number, trial in clock.trials.items():
        run = runs[number - 1]
        if run.running and trial.state is not TrialState.RUNNING:
            run.progress = clock.engine.history.curves.get(number, run.progress)
            run.hit = measured_seconds(trial) if trial.state is TrialState.REACHED else None
            if trial.state is not TrialState.PAUSED:
                run.running = False
                study.ended(number - 1, run)


def simulate_searches(
    plan: Plan,
    pairs: Sequence[tuple[str, str]],
    *,
    repeats: int,
    processes: int = PROCESSES,
) -> dict[tuple[str, str], SearchSummary]:
    """Run every pair of a sampler and a pruner ``repeats`` times.

    The number of processes does not change results; 0 uses this process. Raises `UsageError` as
    `search` does, and for an unknown sampler or pruner.
    """
    for sampler, pruner in pairs:
        registry.load("samplers", sampler)
        pruner_settings(pruner)
    found = {}
    with repeating(search, plan, processes) as mapped:
        for sampler, pruner in dict.fromkeys(pairs):
            found[sampler, pruner] = summarize_searches(list(mapped(range(repeats), sampler, pruner)))
    return found


def summarize_searches(searches: Sequence[Search]) -> SearchSummary:
    """Return the medians and shares over all repeats."""
    near = {name: sorted(one.within[name] for one in searches) for name in WITHIN}
    found = {name: sum(map(math.isfinite, costs)) / len(costs) for name, costs in near.items()}
    return SearchSummary(
        cost_to_within_25=_median(near["25"]),
        found_25=found["25"],
        cost_to_within_10=_median(near["10"]),
        found_10=found["10"],
        recommended_within_10=statistics.fmean(one.recommended_within_10 for one in searches),
        trials=statistics.median(one.trials for one in searches),
        cost_to_within_25_p90=_finite(near["25"][math.ceil(0.9 * len(searches)) - 1]),
        cost_to_within_10_p90=_finite(near["10"][math.ceil(0.9 * len(searches)) - 1]),
        probes_s=statistics.median(one.probes_s for one in searches),
        repeats=len(searches),
    )


def _median(costs: Sequence[float]) -> float | None:
    """Return the median of sorted costs, the lower middle if only half are finite."""
    return _finite(statistics.median(costs)) or _finite(statistics.median_low(costs))


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
