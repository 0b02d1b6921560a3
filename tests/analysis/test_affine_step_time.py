from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.analysis.law.affine_step_time import fit_step_time, throughput_knee
from bssearch.records import StepTime
from tests.factories import make_probe, not_none

SIZES = [4, 8, 16, 32, 64, 128, 256, 512]


def line(alpha: float, beta: float, sizes: list[int] = SIZES) -> list[StepTime]:
    return [make_probe(size, step_seconds=alpha + beta * size) for size in sizes]


@given(st.floats(0, 1), st.floats(1e-7, 1e-2))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    fit = not_none(fit_step_time(line(alpha, beta)))
    assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-6, abs=1e-6 * beta)
    assert fit.beta_seconds == pytest.approx(beta, rel=1e-6)
    assert fit.max_residual < 1e-6
    assert fit.half_saturation_batch == pytest.approx(alpha / beta, rel=1e-5, abs=1e-5)


def test_the_relative_error_is_made_small_not_the_absolute_one() -> None:
    """The largest batch is 100 times as slow: by absolute error it alone would fix the line."""
    bent = [*line(0.001, 1e-5), make_probe(10_000, step_seconds=0.2)]
    fit = not_none(fit_step_time(bent))
    assert fit.alpha_seconds == pytest.approx(0.001, rel=0.1)
    assert fit.max_residual == pytest.approx(0.45, abs=0.05)


def test_a_step_without_samples_takes_no_negative_time() -> None:
    fit = not_none(fit_step_time([make_probe(size, step_seconds=1e-5 * size**1.2) for size in SIZES]))
    assert fit.alpha_seconds == 0
    assert 1e-5 * 4**0.2 < fit.beta_seconds < 1e-5 * 512**0.2


def test_two_sizes_are_no_line_and_neither_are_steps_that_get_faster() -> None:
    assert fit_step_time(line(0.001, 1e-5, [4, 8])) is None
    assert fit_step_time([make_probe(size, step_seconds=1 / size) for size in SIZES]) is None


def test_accumulated_sizes_and_those_out_of_memory_are_left_out() -> None:
    accumulated = make_probe(1024, micro_batch_size=256, step_seconds=9.0)
    too_large = make_probe(2048, step_seconds=None, out_of_memory=True)
    assert fit_step_time([*line(0.001, 1e-5), accumulated, too_large]) == fit_step_time(line(0.001, 1e-5))


def test_an_accumulated_step_is_its_micro_batches_and_one_update() -> None:
    measured = [*line(0.001, 1e-5), make_probe(96, step_seconds=0.002)]
    fit = not_none(fit_step_time(measured))
    assert fit.predict(384, 96, update_seconds=0.0005) == pytest.approx(4 * (0.002 - 0.0005) + 0.0005)


def test_throughput_levels_off_at_nine_tenths_of_the_largest() -> None:
    """The throughput is B / (B + α/β) of the limit: at 64, 128 and 512 with α/β = 10 that is 0.865, 0.928, 0.981."""
    assert throughput_knee(line(0.001, 1e-4)) == 128
    assert throughput_knee(line(0.001, 1e-5)) == 512
    assert throughput_knee([make_probe(8, step_seconds=None)]) is None


def test_a_micro_batch_that_was_not_timed_is_predicted() -> None:
    fit = not_none(fit_step_time(line(0.001, 1e-5)))
    assert fit.predict(300, 300, update_seconds=0.0005) == pytest.approx(0.004)
    assert fit.predict(600, 300, update_seconds=0.0005) == pytest.approx(2 * 0.0035 + 0.0005)
