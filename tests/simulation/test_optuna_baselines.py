"""Optuna's samplers on a recorded table: what they are told, and what they may ask for."""

from __future__ import annotations

import math

import pytest
from optuna.trial import FrozenTrial, TrialState

from bssearch.records.curves import Progress
from bssearch.search.samplers.time_model.candidates import Run
from tests.benchmarks.simulate.optuna_baselines import OptunaSearch
from tests.benchmarks.simulate.table_space import table_space
from tests.simulation.lines import Seconds, grid

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
