from __future__ import annotations

import itertools
import statistics

import pytest
import torch

from bssearch.training.contention import REMEMBERED, ContentionMeter, CorePace
from tests.training.toys import core_of_pace, on_cpu

CPU = torch.device("cpu")


def test_a_look_is_the_fastest_of_a_few_spins() -> None:
    spins = itertools.cycle([9.0, 1.0, 2.0])
    assert CorePace(spin=lambda: next(spins)).look() == 1.0


def test_a_look_is_slow_by_the_fastest_of_all_looks_even_a_later_one() -> None:
    core = core_of_pace(2.0, 1.0, 1.3)
    first, fastest, near = core.look(), core.look(), core.look()
    assert [core.is_slow(look) for look in (first, fastest, near)] == [True, False, False]


def test_the_work_of_a_look_takes_a_fraction_of_a_millisecond() -> None:
    core = CorePace()
    assert 1e-6 < statistics.median(core.look() for _ in range(9)) < 1e-2


def test_computation_on_a_cpu_knows_its_core() -> None:
    assert on_cpu().core is None, "tests look at no pace unless they say so"
    from bssearch.training.computation import Computation

    assert Computation(CPU).core is not None


@pytest.mark.parametrize(
    ("looks", "slow", "contended"), [(10, 0, False), (10, 2, False), (10, 3, True), (2, 1, False), (2, 2, True)]
)
def test_a_core_that_was_slow_at_a_quarter_of_the_looks_was_shared(looks: int, slow: int, contended: bool) -> None:
    """One slow look alone says nothing."""
    core = core_of_pace(1.0, *[1.0] * (looks - slow), *[1.7] * slow)
    core.look()
    meter = ContentionMeter(CPU, 1, core, read_cpu=lambda: None)
    meter.start()
    for _ in range(looks):
        meter.look()
    found = meter.stop()
    assert found.contended is contended
    assert found.reason == (f"the core was slow at {slow} of {looks} looks" if contended else None)


def test_a_pace_that_was_not_kept_up_is_forgotten() -> None:
    core = core_of_pace(0.5, *[1.0] * REMEMBERED)
    core.look()
    later = core.look()
    assert core.is_slow(later)
    for _ in range(REMEMBERED - 1):
        core.look()
    assert not core.is_slow(later)
