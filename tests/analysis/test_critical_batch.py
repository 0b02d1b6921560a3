"""The critical batch size and the optimum that a minute of measurements speaks for."""

from __future__ import annotations

import math

import pytest

from bssearch.analysis.law.batch_model import LawPoint, RunnableStep
from bssearch.analysis.law.quick import critical_batch, expected_optimum

SIZES = [2**power for power in range(2, 11)]


def steps(alpha: float = 0.01, beta: float = 0.0001) -> list[RunnableStep]:
    return [RunnableStep(size, size, alpha + beta * size) for size in SIZES]


def points(b_crit: float, *sizes: int) -> list[LawPoint]:
    return [LawPoint(size, (1000 * (1 + size / b_crit),)) for size in sizes]


def test_the_noise_scale_alone_tells_b_crit_within_its_own_doubt() -> None:
    found = critical_batch(SIZES, 100.0)
    low, high = found.interval
    assert found.estimate == pytest.approx(100, rel=0.02)
    assert low == pytest.approx(100 / 2 ** (1.5 * 1.645), rel=0.03)
    assert high == pytest.approx(553, rel=0.03)


def test_what_runs_show_outweighs_the_law() -> None:
    """The law alone would say that 128 takes two thirds of the steps of 64."""
    runs = [LawPoint(size, (samples,) * 20) for size, samples in ((32, 1e3), (64, 1e3), (128, 2e3), (256, 2e3))]
    steps_of = critical_batch(SIZES, None, runs).log_steps([64, 128]).mean(axis=0)
    assert steps_of[1] - steps_of[0] == pytest.approx(0.0, abs=0.2), "twice the samples: as many steps"


def test_a_larger_batch_that_missed_where_a_smaller_one_reached_bounds_b_crit_from_above() -> None:
    reached = points(50.0, 16)
    without = critical_batch(SIZES, None, reached).interval[1]
    missed = [*reached, LawPoint(1024, (), missed_at=(10_000.0,))]
    assert critical_batch(SIZES, None, missed).interval[1] < without / 2


def test_the_optimum_is_where_steps_times_seconds_are_least() -> None:
    b_crit, alpha, beta = 64.0, 0.01, 0.0001
    posterior = critical_batch(SIZES, None, [LawPoint(size, (1e3 * (1 + size / b_crit),) * 40) for size in SIZES])
    found = expected_optimum(posterior, steps(alpha, beta), SIZES)
    best = math.sqrt(b_crit * alpha / beta)
    assert found.step.batch_size == 64 and best == pytest.approx(80)
    assert found.interval == (64, 64), "the nearest on the ladder, of all that can be run"
    assert found.flat_range[0] <= 64 <= found.flat_range[1]
    ratio = (1 + b_crit / 4) * (alpha + beta * 4) / ((1 + b_crit / 64) * (alpha + beta * 64))
    assert found.relative_times[4] == pytest.approx(ratio, rel=0.1)


def test_only_the_ladder_is_recommended() -> None:
    found = expected_optimum(critical_batch(SIZES, 64.0), steps(), [4, 1024])
    assert found.step.batch_size == 1024 and found.interval[1] < 1024
    with pytest.raises(ValueError, match="no step time is known of the batch sizes 5, 6"):
        expected_optimum(critical_batch(SIZES, 64.0), steps(), [5, 6])


def test_a_ladder_of_one_batch_size_is_that_one() -> None:
    posterior = critical_batch([64], 64.0, points(64.0, 64))
    found = expected_optimum(posterior, [step for step in steps() if step.batch_size == 64], [64])
    assert (found.step.batch_size, found.interval, found.flat_range) == (64, (64, 64), (64, 64))
