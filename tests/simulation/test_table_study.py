"""A recorded table as a study: only its own combinations are searched, and its step times are known."""

from __future__ import annotations

import pytest

from bssearch.spec.parts import ConfirmSpec, PrunerSpec
from tests.benchmarks.simulate.table_space import table_space
from tests.benchmarks.simulate.table_study import TableRows, TableSearchSpace, table_study
from tests.factories import make_plan
from tests.simulation.lines import Seconds, grid

CELLS: Seconds = {
    (8, 0.01, "sgd"): [5, 6, 7],
    (8, 0.1, "adam"): [9],
    (32, 0.1, "sgd"): [4],
    (32, 1.0, "sgd"): [8],
}
NAMES = ("batch_size", "learning_rate", "optimizer")
TABLE = table_space(grid(CELLS, NAMES, step_seconds=0.5))
SPACE = TableSearchSpace.of(TABLE)


def test_the_space_is_the_combinations_that_occur() -> None:
    assert SPACE.rungs == (8, 32)
    assert [one.name for one in SPACE.dimensions()] == ["learning_rate", "optimizer"]
    assert SPACE.cells([32]) == [
        (32, {"learning_rate": 0.1, "optimizer": "sgd"}),
        (32, {"learning_rate": 1.0, "optimizer": "sgd"}),
    ]
    assert len(SPACE.cells([8, 32])) == 4


@pytest.mark.parametrize("point", range(4))
def test_a_cell_is_a_configuration_and_back(point: int) -> None:
    configuration = SPACE.configuration(point)
    assert SPACE.point_of(configuration) == SPACE.point_of(configuration.in_micro_batches(4)) == point
    size, sampled = SPACE.coordinates(point)
    assert SPACE.encode(configuration) == sampled
    assert SPACE.nearest(configuration) == (size, sampled)
    assert SPACE.decode(size, sampled) == configuration
    assert not SPACE.at_edge(configuration)


def test_a_study_has_the_tables_limit_and_target_and_a_budget_over_all_workers() -> None:
    spec, _ = table_study(
        TABLE, default=2, pruner=PrunerSpec(name="safe"), workers=4, seed=3, budget=100.0, confirm=ConfirmSpec(runs=1)
    )
    assert spec.default_configuration == SPACE.configuration(2)
    assert (spec.budget.wall_seconds, spec.budget.trial_train_seconds) == (25.0, 20.0)
    assert (spec.record_target, spec.seed, spec.executor.slots, spec.pruner.name) == (TABLE.target, 3, 4, "safe")


def test_a_plan_runs_the_recorded_trial_of_its_cell_that_its_seed_picks() -> None:
    rows = TableRows(TABLE, SPACE)
    found = [rows(make_plan(configuration=SPACE.configuration(0), seed=seed)).target_seconds for seed in range(4)]
    assert found == [5.0, 6.0, 7.0, 5.0]
