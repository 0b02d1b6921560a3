"""Whole studies on a recorded table: search, confirmation and verdict, by the engine of real studies.

Recommendations and claims (tied batch sizes, intervals) are compared with a truth without luck
(`tests.benchmarks.simulate.truth`).
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer
from bssearch.errors import TargetNotReachedError, UsageError
from bssearch.records import Environment, Phase, ProbeRecord, StudyRecord, TrialPlan, TrialRecord
from bssearch.search.engine import Engine
from bssearch.spec import ConfirmSpec, StudySpec
from bssearch.spec.space import UNKNOWN
from tests.benchmarks.harness import holds
from tests.benchmarks.simulate.draws import pruner_settings
from tests.benchmarks.simulate.processes import PROCESSES, run_pairs
from tests.benchmarks.simulate.replay import BEGIN, Replay, VirtualClock
from tests.benchmarks.simulate.searches import Plan, Progressed, check_pair
from tests.benchmarks.simulate.table_study import TableRows, TableSearchSpace, probes_cost, table_probes, table_study
from tests.benchmarks.simulate.truth import Truth

WITHIN = {"5": 1.05, "10": 1.10}  # factors of the least true time, by name

DEVICE = Environment(
    device_name="recorded",
    device_type="recorded",
    device_memory_bytes=None,
    precision="recorded",
    compile_mode="none",
    torch_version="",
    cuda_version=None,
    driver_version=None,
    python_version="",
    host="simulation",
    workload_revision=None,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one simulated study.

    ``recommended``: the batch size, None if no trial reached the target; ``ratio``: its least true time over the least
    of all. ``claims``: true ratios of the batch sizes that the answer calls within 5 % of the optimum. ``covered``:
    whether each 95 % interval of a confirmed batch size holds the configuration's true median. ``is_provisional``: more
    runs could change the recommendation. ``cost`` in train seconds, ``runs`` counts trials.
    """

    recommended: int | None
    ratio: float
    claims: tuple[float, ...]
    covered: tuple[bool, ...]
    is_provisional: bool
    cost: float
    runs: int


@dataclass(frozen=True, slots=True)
class StudiesSummary:
    """Simulated studies of one sampler and pruner: shares over the studies, medians of ``cost_s`` and ``runs``.

    ``claimed_within_5``: share of true claims; ``covered_95``: share of 95 % intervals that hold the truth; both None
    without claims. ``recommended`` counts the batch sizes.
    """

    recommended_within_5: float
    recommended_within_10: float
    claimed_within_5: float | None
    covered_95: float | None
    provisional: float
    cost_s: float
    runs: float
    repeats: int
    recommended: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyPlan:
    """Shared by all studies of a simulation; ``search.budget`` excludes confirmation."""

    search: Plan
    truth: Truth


def simulate_studies(
    plan: Plan,
    pairs: Sequence[tuple[str, str]],
    *,
    repeats: int,
    processes: int = PROCESSES,
    done: Progressed = lambda sampler, pruner: None,
) -> dict[tuple[str, str], StudiesSummary]:
    """Run the study of every pair of a sampler and a pruner ``repeats`` times; ``done`` is called after each pair.

    Raises `UsageError` for unknown names and a table without step times.
    """
    for sampler, pruner in pairs:
        check_pair(sampler, pruner)
    table = plan.space
    if unknown := [size for size in table.seconds_by_batch_size if size not in table.step_seconds]:
        raise UsageError(f"no trial of table {table.table!r} with batch size {unknown[0]} has a step > 0")
    shared = StudyPlan(plan, Truth(table))
    return run_pairs(simulate_study, shared, pairs, summarize_studies, repeats=repeats, processes=processes, done=done)


def simulate_study(shared: StudyPlan, sampler: str, pruner: str, repeat: int) -> Verdict:
    """Run one study over a table to its verdict; the plan's seed and the repeat determine all choices."""
    plan, truth = shared.search, shared.truth
    table = plan.space
    seed = int(np.random.default_rng((plan.seed, repeat)).integers(2**31))
    spec, space = table_study(
        table,
        default=table.middle if plan.default is None else plan.default,
        sampler=sampler,
        pruner=pruner_settings(pruner),
        workers=plan.workers,
        seed=seed,
        budget=plan.budget,
        confirm=ConfirmSpec(),
    )
    searched = TableRows(table, space)

    def rows(run: TrialPlan) -> Replay:
        if run.phase is Phase.SEARCH:
            return searched(run)
        return truth.fresh_run(space.point_of(run.configuration), run.seed)

    probes = table_probes(table)
    engine = Engine(spec, slots=plan.workers)
    clock = VirtualClock(engine, rows, probes=probes, workers=plan.workers, charged=probes_cost(probes))
    for _ in clock.run():
        pass
    return _verdict(spec, space, clock, truth)


def _verdict(spec: StudySpec, space: TableSearchSpace, clock: VirtualClock, truth: Truth) -> Verdict:
    """Compare the answer of a study with the truth."""
    trials = [clock.trials[number] for number in sorted(clock.trials)]
    try:
        answer = answer_of(spec, trials, clock.engine.history.probes)
    except TargetNotReachedError:
        return Verdict(None, math.inf, (), (), True, clock.cost, len(trials))
    best = min(truth.seconds)
    least = {size: seconds / best for size, seconds in truth.seconds_by_batch_size.items()}
    by_number = {trial.number: trial for trial in trials}
    covered = [
        holds(row.time_to_target_s, truth.seconds[space.point_of(by_number[row.best.trial].configuration)])
        for row in answer.batches
        if row.best is not None
    ]
    return Verdict(
        recommended=answer.optimal.batch_size,
        ratio=least[answer.optimal.batch_size],
        claims=tuple(least[size] for size in answer.tied),
        covered=tuple(one for one in covered if one is not None),
        is_provisional=answer.provisional,
        cost=clock.cost,
        runs=len(trials),
    )


def answer_of(spec: StudySpec, trials: Sequence[TrialRecord], probes: Mapping[int, ProbeRecord]) -> Answer:
    """Return the answer of a real study with these trials; raise `TargetNotReachedError` without one."""
    study = StudyRecord.created(spec.new_study("simulation"), BEGIN, DEVICE)
    return build_answer(study, spec, list(trials), dict(probes), UNKNOWN, [], [])


def summarize_studies(verdicts: Sequence[Verdict]) -> StudiesSummary:
    """Return the shares and medians over all studies."""
    claims = [ratio <= WITHIN["5"] for one in verdicts for ratio in one.claims]
    covered = [held for one in verdicts for held in one.covered]
    counts = Counter(one.recommended for one in verdicts if one.recommended is not None)
    return StudiesSummary(
        recommended_within_5=statistics.fmean(one.ratio <= WITHIN["5"] for one in verdicts),
        recommended_within_10=statistics.fmean(one.ratio <= WITHIN["10"] for one in verdicts),
        claimed_within_5=statistics.fmean(claims) if claims else None,
        covered_95=statistics.fmean(covered) if covered else None,
        provisional=statistics.fmean(one.is_provisional for one in verdicts),
        cost_s=statistics.median(one.cost for one in verdicts),
        runs=statistics.median(one.runs for one in verdicts),
        repeats=len(verdicts),
        recommended={str(size): count for size, count in sorted(counts.items())},
    )
