"""The law of steps across scales."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bssearch.analysis.law.scales import LocalBatch, ScaledSteps, ScalingLaw, interval

SIZES = (4, 16, 64, 256)


def points(
    power: float, *, model_power: float = 0.0, models: Callable[[float], float] = lambda samples: samples, noise: float
) -> Iterator[ScaledSteps]:
    """Yield runs of B_crit = 30 · (D / 1000)^power and S_min = 100 · (D / 1000)^0.5 · N^model_power."""
    rng = np.random.default_rng(0)
    for samples in (1e3, 4e3, 16e3, 32e3):
        parameters = models(samples)
        for size in SIZES:
            s_min, b_crit = 100 * (samples / 1e3) ** 0.5 * parameters**model_power, 30 * (samples / 1e3) ** power
            yield ScaledSteps(parameters, samples, size, s_min * (1 + b_crit / size) * math.exp(rng.normal(0, noise)))


def test_law_finds_the_power_and_extrapolates_b_crit_and_steps() -> None:
    law = ScalingLaw(list(points(0.5, noise=1e-4)))
    assert law.power.value == pytest.approx(0.5, abs=0.01)
    assert law.b_crit(1e5).value == pytest.approx(300, rel=0.02)
    assert interval(law.steps(1e5, 1e5, [300])[:, 0]).value == pytest.approx(2000, rel=0.02)
    assert law.is_shown and law.knows(1e5, 1e5) and not law.knows(1e7, 1e5)


def test_steps_follow_the_model_if_its_size_varies_apart_from_the_data() -> None:
    law = ScalingLaw(list(points(0.5, model_power=-0.2, models=lambda samples: 1e6 + samples % 3e3, noise=0.0)))
    assert not law.knows(1e9, 1e5)  # sizes within 0.2 % show no power of N
    sizes = {1e3: 1e6, 4e3: 1e5, 16e3: 1e7, 32e3: 1e6}
    law = ScalingLaw(list(points(0.5, model_power=-0.2, models=sizes.__getitem__, noise=0.0)))
    assert law.knows(1e9, 1e5)
    small, large = (law.steps(parameters, 1e5, [300])[0, 0] for parameters in (1e3, 1e6))
    assert small / large == pytest.approx(1000**0.2, rel=0.02)


def test_interval_is_wider_with_more_noise_and_a_constant_b_crit_shows_no_growth() -> None:
    exact, noisy = (ScalingLaw(list(points(0.0, noise=noise))) for noise in (0.01, 0.1))
    assert not exact.is_shown and not noisy.is_shown
    assert exact.power.low is not None and noisy.power.low is not None
    assert noisy.power.value - noisy.power.low > 3 * (exact.power.value - exact.power.low)


def test_local_critical_batch_sizes_narrow_the_power_whatever_their_ratio_to_b_crit() -> None:
    noisy = list(points(0.5, noise=0.2))
    alone = ScalingLaw(noisy).power
    branches = [LocalBatch(samples, 7 * samples**0.5) for samples in np.geomspace(1e3, 1e7, 9)]
    joined = ScalingLaw(noisy, branches).power
    assert abs(joined.value - 0.5) < abs(alone.value - 0.5)
    assert joined.low is not None and alone.low is not None
    assert joined.value - joined.low < alone.value - alone.low
    assert ScalingLaw(noisy, branches[:1]).power.value == pytest.approx(alone.value, abs=1e-3)  # a level needs two
