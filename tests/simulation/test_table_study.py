"""A recorded table as a space and as a study: only its own combinations are searched."""

import math
import re
from dataclasses import replace

import pytest

from bssearch.errors import UsageError
from bssearch.records import ParameterValue
from bssearch.spec import ConfirmSpec, PrunerSpec
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


RAGGED: Seconds = {(32, 0.1): [6, 8], (8, 0.1): [10, 12], (8, 0.01): [4, 300], (32, 0.001): [9]}


def test_the_space_is_the_tables_own_grid_and_holds_only_what_occurs() -> None:
    space = table_space(grid(RAGGED))
    assert space.grid == ((8, 32), (0.001, 0.01, 0.1))
    assert space.cells == ((8, 0.01), (8, 0.1), (32, 0.001), (32, 0.1))
    assert space.places == ((0, 1), (0, 2), (1, 0), (1, 2))
    assert [len(trials) for trials in space.trials] == [2, 2, 1, 2]
    assert (space.limit, space.target_gain) == (20.0, 1.0)


def test_a_cells_true_time_is_the_mean_over_its_seeds_and_infinite_if_over_a_tenth_never_reach() -> None:
    space = table_space(grid(RAGGED))
    assert space.seconds == (math.inf, 11.0, 9.0, 7.0)
    assert space.best == 7.0
    assert space.seconds_by_batch_size == {8: 11.0, 32: 7.0}
    many = table_space(grid({(8, 0.1): [10, 12], (32, 0.1): [300, *[6] * 9], (32, 1.0): [300, *[6] * 8]}))
    assert many.seconds == pytest.approx((11.0, 7.4, math.inf)), "one miss in ten counts as the limit, 20 s"


def test_the_step_time_of_a_batch_size_is_the_median_of_its_trials() -> None:
    lines = grid({(8, 0.1): [4, 5, 6], (16, 0.1): [7]}, step_seconds=0.5)
    slow = replace(lines.trials[0], steps=tuple(range(1, 5)))
    assert table_space(replace(lines, trials=(slow, *lines.trials[1:]))).step_seconds == {8: 0.5, 16: 0.5}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("batch_size=32", "has no learning_rate; it must have batch_size, learning_rate"),
        ("batch_size=64,learning_rate=0.1", "batch_size = 64 is not in table 'grid'; there are 8, 32"),
        ("batch_size=many,learning_rate=0.1", "batch_size = many is not in table 'grid'"),
        ("batch=32,learning_rate=0.1", "has no parameter 'batch'; it has batch_size, learning_rate"),
        ("batch_size=32,learning_rate=0.01", "the combination does not occur"),
        ("batch_size=32,batch_size=8,learning_rate=0.1", "batch_size is given twice"),
        ("batch_size=32,,learning_rate=0.1", "'' must be name=value"),
    ],
)
def test_a_configuration_that_is_not_in_the_table_is_refused(told: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        table_space(grid(RAGGED)).point_of(told)


def no_batch_size(cell: tuple[ParameterValue, ...]) -> Seconds:
    return {cell: [5], (16, 0.1): [5]}


@pytest.mark.parametrize(
    ("cells", "names", "said"),
    [
        ({(0.1,): [5], (0.2,): [5]}, ("learning_rate",), "table 'grid' has no column 'param.batch_size'"),
        ({(8, 0.1): [5, 6]}, None, "table 'grid' has one combination of parameters"),
        ({(8, None): [5], (16, 0.1): [5]}, None, "trial 0 of table 'grid': param.learning_rate = None must be set"),
        (no_batch_size((8.5, 0.1)), None, "param.batch_size = 8.5 must be a whole number >= 1"),
        (no_batch_size(("big", 0.1)), None, "param.batch_size = 'big' must be a whole number >= 1"),
        (no_batch_size((0, 0.1)), None, "param.batch_size = 0 must be a whole number >= 1"),
        (no_batch_size((8, -0.1)), None, "param.learning_rate = -0.1 must be a number > 0"),
        (no_batch_size((8, math.nan)), None, "param.learning_rate = nan must be finite"),
        ({(8, 0.1): [5, 30], (16, 0.1): [30]}, None, "no combination of parameters of table 'grid' reaches the target"),
    ],
)
def test_a_table_that_cannot_be_searched_is_refused(cells: Seconds, names: tuple[str, ...] | None, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        table_space(grid(cells, names or ("batch_size", "learning_rate")))
