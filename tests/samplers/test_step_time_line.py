from __future__ import annotations

import pytest

from bssearch.samplers.time_model.acquisition import SLOWEST_FALL, StepTimes

TRUE = {8: 1.0, 16: 1.2, 32: 1.6, 64: 2.4, 128: 4.0}
"""1 + (B − 8) / 40 seconds: affine."""


def measured(affordable: float = float("inf"), sizes: tuple[int, ...] = tuple(TRUE)) -> tuple[StepTimes, list[int]]:
    """Return step times, and the batch sizes that were measured for them."""
    probed: list[int] = []

    def probe(batch_size: int) -> float:
        probed.append(batch_size)
        return TRUE[batch_size]

    return StepTimes(sizes, probe, affordable), probed


def test_all_are_measured_where_that_is_cheap_from_the_smallest_up() -> None:
    times, probed = measured(sizes=(128, 8, 64, 16, 32))
    assert probed == [8, 16, 32, 64, 128]
    assert [times.at(size) for size in TRUE] == list(TRUE.values())


def test_two_are_measured_whatever_they_cost_and_the_rest_lies_on_their_line() -> None:
    times, probed = measured(affordable=0.0)
    assert probed == [8, 16]
    assert [times.at(size) for size in TRUE] == pytest.approx(list(TRUE.values()))


def test_what_is_dearer_than_affordable_is_not_measured() -> None:
    _, probed = measured(affordable=2.0)
    assert probed == [8, 16, 32]


def test_what_a_trial_shows_is_taken_in_but_no_measurement_is_given_up_for_it() -> None:
    times, _ = measured(affordable=0.0)
    times.learn(128, 6.0)
    times.learn(8, 100.0)
    assert (times.at(8), times.at(128)) == (1.0, 6.0)
    assert times.at(72) == pytest.approx((1.2 + 6.0) / 2), "between its neighbours"


def test_of_one_batch_size_the_step_time_is_that_one() -> None:
    times, _ = measured(sizes=(32,))
    assert times.at(32) == 1.6
    assert times.at(64) == 1.6


def test_noise_makes_no_larger_batch_size_faster_than_a_share_of_a_smaller_one() -> None:
    times = StepTimes((8, 16, 1024), {8: 1.0, 16: 0.9, 1024: 0.0}.__getitem__, 0.0)
    assert times.at(1024) == 1.0, "no line falls"
    assert times.at(1024) >= SLOWEST_FALL
