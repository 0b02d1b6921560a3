"""Searches of a recorded table on a virtual clock: what a sampler with a pruner has spent when it has found the best.

A sampler chooses among the table's cells, the combinations of parameters that occur; each trial is one of the cell's
seeds, drawn at random. It has found the best within 25 % when its incumbent's true train seconds to the target, the
mean over the cell's seeds, are at most 1.25 times those of the table's best cell.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import statistics
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from bssearch.errors import UsageError
from bssearch.pruners.base import Cap, Policy, Progress, slack_for
from bssearch.pruners.registry import PEERS, policy_maker
from bssearch.pruners.seed_noise import seed_noise
from bssearch.samplers.time_model.candidates import GridCandidates
from bssearch.samplers.time_model.extrapolation import Run
from bssearch.samplers.time_model.sampler import Auto
from bssearch.samplers.time_model.step_times import StepTimes
from bssearch.simulation.replay import Replay, State, VirtualClock
from bssearch.simulation.table_space import TableSpace

AUTO = "auto"
SAMPLERS = (AUTO, "random", "tpe", "gp")
"""Ours, and Optuna's; see `bssearch.simulation.optuna_baselines`."""

WITHIN = {"25": 1.25, "10": 1.10}
"""Factors of the best cell's train seconds, by what they are called."""

PROBE_STEPS = 20
AFFORDABLE = 0.02
"""A step time is probed ahead of its first trial where that costs at most this share of a trial's limit."""

PROCESSES = 2
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Sampler(Protocol):
    """What chooses cells; ``runs`` are the trials so far, in the order in which they began."""

    @property
    def charged(self) -> float:
        """The train seconds that were spent on probes until now."""

    def ask(self, runs: Sequence[Run]) -> int:
        """Return the cell to run next."""

    def ended(self, number: int, run: Run) -> None:
        """Take note that a trial has ended, and does not merely wait."""

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        """Return the cell held for the fastest; None while there is none."""


@dataclass(frozen=True, slots=True)
class Search:
    """What one search came to.

    ``within``: train seconds of all workers and probes, when the incumbent was first so near to the best (∞: never).
    ``recommended_within_10``: whether the incumbent's batch size after the budget has a cell within 10 % of the best.
    """

    within: Mapping[str, float]
    recommended_within_10: bool
    trials: int
    probes_s: float


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """A sampler with a pruner over all repeats: medians, misses counted as ∞, None where fewer than half get there.

    ``found_*``: the share of the repeats that get there; ``*_p90``: what nine in ten have spent at most. In seconds.
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
    """What all searches of a simulation share; ``budget`` in train seconds, ``default`` the point to begin with."""

    space: TableSpace
    budget: float
    default: int | None = None
    workers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UsageError` for a number that is out of its bounds."""
        if not self.budget > 0 or math.isinf(self.budget):
            raise UsageError(f"budget = {self.budget:g} must be a number of train seconds > 0")
        if self.workers < 1:
            raise UsageError(f"workers = {self.workers} must be >= 1")
        if self.seed < 0:
            raise UsageError(f"seed = {self.seed} must be >= 0")


class AutoSampler:
    """Our sampler; a probe of a batch size's step time costs 20 of its steps, one that a trial shows nothing."""

    def __init__(self, space: TableSpace, *, default: int | None, seed: int) -> None:
        self.charged = 0.0
        self._space = space
        if unknown := [size for size in space.seconds_by_batch_size if size not in space.step_seconds]:
            raise UsageError(f"no trial of table {space.table!r} with batch size {unknown[0]} has a step > 0")
        self._step_times = StepTimes(
            list(space.seconds_by_batch_size), self._probe, AFFORDABLE * space.limit / PROBE_STEPS
        )
        self._auto = Auto(
            GridCandidates(space.names, space.cells),
            default=space.middle if default is None else default,
            target_gain=space.target_gain,
            step_times=self._step_times,
            seed=seed,
        )

    def ask(self, runs: Sequence[Run]) -> int:
        """Return the cell to run next."""
        for run in runs:
            if run.progress.train_seconds:
                size = self._space.batch_size(run.point)
                self._step_times.learn(size, self._space.step_seconds[size])
        return self._auto.ask(runs)

    def ended(self, number: int, run: Run) -> None:
        """Take note of nothing: the runs themselves tell."""

    def incumbent(self, runs: Sequence[Run]) -> int | None:
        """Return the cell held for the fastest."""
        return self._auto.incumbent(runs)

    def _probe(self, batch_size: int) -> float:
        seconds = self._space.step_seconds[batch_size]
        self.charged += PROBE_STEPS * seconds
        return seconds


class _Asked:
    """The trials that a sampler asks for, as long as it is asked; of a cell's seeds one at random."""

    has_more = True

    def __init__(self, space: TableSpace, sampler: Sampler, rng: np.random.Generator) -> None:
        self.runs: list[Run] = []
        self._space = space
        self._sampler = sampler
        self._rng = rng

    @property
    def charged(self) -> float:
        """The train seconds that the sampler's probes took."""
        return self._sampler.charged

    def begin(self, progress: Progress) -> Replay:
        """Return the trial that the sampler asks for next."""
        point = self._sampler.ask(self.runs)
        self.runs.append(Run(point, progress))
        seeds = self._space.trials[point]
        return seeds[self._rng.integers(len(seeds))]


def check_pair(sampler: str, pruner: str) -> None:
    """Raise `UsageError` for a sampler or a pruner that is not known."""
    if sampler not in SAMPLERS:
        raise UsageError(f"sampler = {sampler!r} is not known; there are {', '.join(SAMPLERS)}")
    policy_maker(pruner)


def search(plan: Plan, sampler: str, pruner: str, repeat: int) -> Search:
    """Run one search until its budget is spent; the plan's seed and the number of the repeat make the same choices.

    Raises `UsageError` for a sampler or a pruner that is not known, and for ours on a table without step times.
    """
    check_pair(sampler, pruner)
    rng = np.random.default_rng((plan.seed, repeat))
    seed = int(rng.integers(2**31))
    if sampler == AUTO:
        chooser: Sampler = AutoSampler(plan.space, default=plan.default, seed=seed)
        policy = policy_maker(pruner)(plan.space.limit)
    else:
        chooser, policy = _peer(plan, sampler, pruner, seed)
    if sampler != AUTO or pruner in PEERS:
        return search_with(plan, chooser, policy, rng)
    return search_with(plan, chooser, policy, rng, exempt={0}, has_slack=True)


def _peer(plan: Plan, sampler: str, pruner: str, seed: int) -> tuple[Sampler, Policy]:
    """Return a study of Optuna, and the policy: of one of its own pruners there is one study of both."""
    from bssearch.simulation.optuna_baselines import OptunaSearch, PrunedByStudy

    own = pruner if pruner in PEERS else None
    study = OptunaSearch(plan.space, sampler, pruner=own, default=plan.default, seed=seed)
    limit = plan.space.limit
    return study, PrunedByStudy(limit, study) if own else policy_maker(pruner)(limit)


def _noise(runs: Sequence[Run]) -> float:
    """Return the noise of the seeds, as the runs of a search show it."""
    stopped = {run.point for run in runs if run.hit is None and not run.running}
    return seed_noise(((run.point, run.hit) for run in runs if run.hit is not None), stopped)


def search_with(
    plan: Plan,
    sampler: Sampler,
    policy: Policy,
    rng: np.random.Generator,
    *,
    exempt: Collection[int] = (),
    has_slack: bool = False,
) -> Search:
    """Run one search with a sampler under a policy, which has no say over the trials in ``exempt``.

    Where it ``has_slack`` that follows the noise of the seeds, as in a study.
    """
    space = plan.space
    asked = _Asked(space, sampler, rng)
    if has_slack and isinstance(policy, Cap):
        policy.allow(slack_for(_noise(())))
    clock = VirtualClock(asked, policy, plan.workers, budget=plan.budget, exempt=exempt)
    within: dict[str, float] = {}
    for number, state in clock.run():
        run = asked.runs[number]
        run.running = state is State.RUNNING
        if run.running:
            continue
        if state is State.REACHED:
            run.hit = run.progress.now
        if state is State.REACHED and has_slack and isinstance(policy, Cap):
            policy.allow(slack_for(_noise(asked.runs)))
        if state is not State.WAITING:
            sampler.ended(number, run)
        if len(within) < len(WITHIN) and (point := sampler.incumbent(asked.runs)) is not None:
            found = [name for name, factor in WITHIN.items() if space.seconds[point] <= factor * space.best]
            within = dict.fromkeys(found, clock.cost) | within
    incumbent = sampler.incumbent(asked.runs)
    return Search(
        within={name: within.get(name, math.inf) for name in WITHIN},
        recommended_within_10=incumbent is not None
        and space.seconds_by_batch_size[space.batch_size(incumbent)] <= WITHIN["10"] * space.best,
        trials=len(asked.runs),
        probes_s=asked.charged,
    )


Progressed = Callable[[str, str], None]


def simulate_searches(
    plan: Plan,
    pairs: Sequence[tuple[str, str]],
    *,
    repeats: int,
    processes: int = PROCESSES,
    done: Progressed = lambda sampler, pruner: None,
) -> dict[tuple[str, str], SearchSummary]:
    """Run every pair of a sampler and a pruner ``repeats`` times; ``done`` is called with each that is finished.

    The number of processes changes nothing but the time it takes; with 0 they run in this one. Raises `UsageError` as
    `search` does, and for fewer than 1 repeat.
    """
    if repeats < 1:
        raise UsageError(f"repeats = {repeats} must be >= 1")
    for sampler, pruner in pairs:
        check_pair(sampler, pruner)
    found = {}
    with _mapping(plan, processes) as mapped:
        for sampler, pruner in dict.fromkeys(pairs):
            found[sampler, pruner] = summarize_searches(list(mapped(sampler, pruner, range(repeats))))
            done(sampler, pruner)
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
    """Return the median of sorted costs, the lower middle one where only half are finite."""
    return _finite(statistics.median(costs)) or _finite(statistics.median_low(costs))


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


_PLAN: Plan | None = None
"""That of a process of `_mapping`."""


def _have(plan: Plan) -> None:
    """Keep the plan in a process that is there for it; leave Ctrl-C to the one that started it, and end with that."""
    global _PLAN
    _PLAN = plan
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _search(sampler: str, pruner: str, repeat: int) -> Search:
    assert _PLAN is not None
    return search(_PLAN, sampler, pruner, repeat)


Mapped = Callable[[str, str, Sequence[int]], Iterator[Search]]


@contextmanager
def _mapping(plan: Plan, processes: int) -> Iterator[Mapped]:
    """Yield what runs the repeats of a pair, in order."""
    if processes == 0:
        yield lambda sampler, pruner, repeats: map(partial(search, plan, sampler, pruner), repeats)
        return
    with _one_thread_each():
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_have, initargs=(plan,))
        try:
            yield lambda sampler, pruner, repeats: pool.map(partial(_search, sampler, pruner), repeats)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Have processes that start meanwhile compute with one thread: faster here, and alike on any number of cores."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
