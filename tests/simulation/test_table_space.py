"""A recorded table as a space: its cells, their true times, and what of it cannot be searched."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from bssearch.errors import UsageError
from bssearch.records import ParameterValue
from tests.benchmarks.simulate.table_space import table_space
from tests.simulation.lines import Seconds, grid

RAGGED: Seconds = {(32, 0.1): [6, 8], (8, 0.1): [10, 12], (8, 0.01): [4, 300], (32, 0.001): [9]}


def test_the_space_is_the_tables_own_grid_and_holds_only_what_occurs() -> None:
    space = table_space(grid(RAGGED))
    assert space.grid == ((8, 32), (0.001, 0.01, 0.1))
    assert space.cells == ((8, 0.01), (8, 0.1), (32, 0.001), (32, 0.1))
    assert space.places == ((0, 1), (0, 2), (1, 0), (1, 2))
    assert [len(trials) for trials in space.trials] == [2, 2, 1, 2]
    assert (space.limit, space.target_gain) == (20.0, 1.0)


def test_a_cells_true_time_is_the_mean_over_its_seeds_and_infinite_where_one_never_reaches() -> None:
    space = table_space(grid(RAGGED))
    assert space.seconds == (math.inf, 11.0, 9.0, 7.0)
    assert space.best == 7.0
    assert space.seconds_by_batch_size == {8: 11.0, 32: 7.0}


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
