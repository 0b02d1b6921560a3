"""What a fresh seed would take: a smooth model of a table's cells, and the luck of other cells' runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from tests.benchmarks.simulate.table_space import TableSpace, table_space
from tests.benchmarks.simulate.truth import Truth
from tests.simulation.lines import Seconds, grid

SIZES, RATES = (8, 16, 32, 64), (0.01, 0.04, 0.16)

CELLS = [(size, rate) for size in SIZES for rate in RATES]


def log_seconds(size: int, rate: float) -> float:
    return 4 + 0.2 * math.log2(size / 32) ** 2 + 0.2 * math.log2(rate / 0.04)


def space(missing: Sequence[int] = (), noise: float = 0.1) -> TableSpace:
    """Return a table whose best is at batch size 32 and the least rate; ``missing`` of 4 seeds never reach, by cell."""
    rng = np.random.default_rng(0)
    cells: Seconds = {
        cell: [round(math.exp(log_seconds(*cell) + noise * rng.normal())) for _ in range(4)] for cell in CELLS
    }
    for place, (cell, seconds) in enumerate(cells.items()):
        count = missing[place] if place < len(missing) else 0
        cells = {**cells, cell: [*seconds[count:], *[5000.0] * count]}
    return table_space(grid(cells, limit=1000.0))


def test_the_truth_is_smooth_where_the_luck_of_few_seeds_is_not() -> None:
    truth = Truth(space())
    assert np.abs(truth.log_seconds - [log_seconds(*cell) for cell in CELLS]).max() < 0.15
    least = truth.seconds_by_batch_size
    assert list(least) == list(SIZES)
    assert min(least, key=lambda size: least[size]) == 32
    assert abs(float(np.median(truth.residuals))) < 1e-12
    assert 0.05 < truth.residuals.std() < 0.2


def test_a_fresh_run_is_the_same_for_one_cell_and_seed_and_differs_between_seeds() -> None:
    table = space()
    one, other = Truth(table), Truth(table)
    assert [one.fresh_run(3, seed) for seed in range(5)] == [other.fresh_run(3, seed) for seed in range(5)]
    assert len({one.fresh_run(3, seed).target_seconds for seed in range(30)}) > 20
    assert one.fresh_run(3, 7).target_seconds != one.fresh_run(4, 7).target_seconds


def test_a_fresh_run_takes_the_models_time_times_the_luck_of_another_cell() -> None:
    """Never a residual of its own cell: the winner's lucky run is not its own confirmation."""
    truth = Truth(space())
    for point in (0, 7):
        off = [math.log(truth.fresh_run(point, seed).target_seconds) - truth.log_seconds[point] for seed in range(300)]
        own = truth.residuals[4 * point : 4 * point + 4]
        others = np.delete(truth.residuals, range(4 * point, 4 * point + 4))
        assert all(np.isclose(others, one, atol=1e-9).any() for one in off)
        assert not any(np.isclose(own, one, atol=1e-9).any() for one in off)
        assert abs(float(np.median(off))) < 0.05


def test_a_fresh_run_misses_as_often_as_the_recorded_ones() -> None:
    truth = Truth(space(missing=[1, 3]))
    missed = Counter(
        point for point in (0, 1, 2) for seed in range(400) if math.isinf(truth.fresh_run(point, seed).target_seconds)
    )
    assert missed[0] / 400 == pytest.approx(0.25, abs=0.08)
    assert missed[1] / 400 == pytest.approx(0.75, abs=0.08)
    assert missed[2] == 0
    assert [math.isinf(seconds) for seconds in truth.seconds[:3]] == [False, True, False], "half of them or more"
