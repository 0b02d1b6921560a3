"""Whole studies simulated on recorded tables, compared with plain Optuna studies."""

import math
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from bssearch.records import Progress
from bssearch.search.samplers.time_model.candidates import Run
from tests.benchmarks.simulate.optuna_baselines import OptunaSearch
from tests.benchmarks.simulate.searches import Plan
from tests.benchmarks.simulate.studies import (
    StudiesSummary,
    StudyPlan,
    Verdict,
    simulate_studies,
    simulate_study,
    summarize_studies,
)
from tests.benchmarks.simulate.table_space import table_space
from tests.benchmarks.simulate.truth import Truth
from tests.simulation.lines import Seconds, grid

# Batch size 32 is three times as fast as any other
CLEAR: Seconds = {
    (size, rate): [round(seconds * (1 + 0.5 * (rate != 0.1)) * luck) for luck in (0.95, 1.0, 1.05)]
    for size, seconds in {8: 90, 32: 20, 128: 70}.items()
    for rate in (0.01, 0.1)
}

PAIR = ("random", "race")


def plan(cells: Seconds = CLEAR, **options: Any) -> Plan:
    return Plan(table_space(grid(cells, limit=200.0)), **{"budget": 400.0, **options})


def studies(of: Plan, *pairs: tuple[str, str], repeats: int = 2, processes: int = 0) -> StudiesSummary:
    return next(iter(simulate_studies(of, pairs or [PAIR], repeats=repeats, processes=processes).values()))


@pytest.fixture(scope="module")
def clear() -> StudiesSummary:
    return studies(plan())


def test_a_batch_size_that_is_clearly_best_is_recommended(clear: StudiesSummary) -> None:
    assert clear.recommended == {"32": 2}
    assert (clear.recommended_within_5, clear.recommended_within_10, clear.repeats) == (1.0, 1.0, 2)
    assert clear.claimed_within_5 == 1.0
    assert clear.covered_95 is not None and clear.covered_95 >= 0.5  # of few: beaten sizes have no interval
    assert clear.cost_s > 400.0, "the confirmation comes on top"
    assert clear.runs > 10


def test_the_same_seed_gives_the_same_study() -> None:
    shared = [StudyPlan(one, Truth(one.space)) for one in (plan(), plan(seed=1))]
    first, again, other = (simulate_study(one, *PAIR, 0) for one in (shared[0], shared[0], shared[1]))
    assert first == again != other
    assert first != simulate_study(shared[0], *PAIR, 1)


def test_our_sampler_and_pruner_run_whole_studies_too() -> None:
    of = plan(budget=400.0)
    one = simulate_study(StudyPlan(of, Truth(of.space)), "auto", "balanced", 0)
    assert (one.recommended, one.ratio) == (32, 1.0)


def verdict(ratio: float, claims: tuple[float, ...] = (), covered: tuple[bool, ...] = (), size: int = 32) -> Verdict:
    return Verdict(size, ratio, claims, covered, ratio > 1.07, cost=10 * ratio, runs=3)


def test_a_summary_counts_shares_over_studies_and_over_all_claims() -> None:
    one = summarize_studies(
        [
            verdict(1.0, (1.0, 1.04, 1.06), (True, False)),
            verdict(1.08, (1.2,), (True, True), size=8),
            Verdict(None, math.inf, (), (), True, cost=100.0, runs=1),
        ]
    )
    assert one.recommended_within_5 == pytest.approx(1 / 3)
    assert one.recommended_within_10 == pytest.approx(2 / 3)
    assert (one.claimed_within_5, one.covered_95) == (0.5, 0.75)
    assert one.provisional == pytest.approx(2 / 3)
    assert (one.cost_s, one.runs, one.recommended) == (10.8, 3, {"8": 1, "32": 1})


CELLS: Seconds = {(size, rate): [5] for size in (8, 16, 32) for rate in (0.01, 0.1)}


def ran(point: int, *gains: float) -> Run:
    progress = Progress()
    for moment, gain in enumerate(gains):
        progress.add(float(moment + 1), gain)
    return Run(point, progress, running=False)


def trials(found: OptunaSearch) -> list[FrozenTrial]:
    return list(found.study.get_trials(deepcopy=False))


def test_a_study_is_told_the_time_to_target_or_twice_the_limit_and_the_shortfall() -> None:
    found = OptunaSearch(table_space(grid(CELLS)), "random", seed=0)
    hit, missed, never_seen, waiting = (found.ask([]) for _ in range(4))
    reached = ran(hit, 0.5, 1.0)
    reached.hit = 2.0
    found.ended(0, reached)
    found.ended(1, ran(missed, 0.3, 0.2, math.nan))
    found.ended(2, ran(never_seen))
    assert [trial.state for trial in trials(found)] == [TrialState.COMPLETE] * 3 + [TrialState.RUNNING]
    assert [trial.value for trial in trials(found)] == [2.0, 2 * 20 + 0.7, 2 * 20, None]
    assert found.incumbent([reached, ran(missed, 0.3), ran(waiting)]) == hit
    assert found.incumbent([ran(missed, 0.3)]) is None


def test_the_first_configuration_comes_first() -> None:
    space = table_space(grid(CELLS))
    for default in range(len(space.cells)):
        assert OptunaSearch(space, "tpe", default=default, seed=0).ask([]) == default


@pytest.mark.parametrize("sampler", ["random", "tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_only_combinations_that_occur_are_run(sampler: str) -> None:
    space = table_space(grid({(8, 0.01): [5], (16, 0.1): [7], (32, 1.0): [6], (64, 0.01): [9]}))
    found = OptunaSearch(space, sampler, seed=1)
    asked = []
    for number in range(14):
        point = found.ask([])
        asked.append(point)
        run = ran(point, 1.0)
        run.hit = space.seconds[point]
        found.ended(number, run)
    assert set(asked) <= set(range(4)) and len(set(asked)) > 1
    told = [trial for trial in trials(found) if trial.state is TrialState.COMPLETE]
    assert [space.points[trial.params["batch_size"], trial.params["learning_rate"]] for trial in told] == asked
    assert [trial.value for trial in told] == [space.seconds[point] for point in asked]
