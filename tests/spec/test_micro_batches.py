from __future__ import annotations

import pytest

from bssearch.spec.space import UNKNOWN, MemoryBoundary, choose_micro_batch, in_force, split_batch
from tests.factories import make_probe


def test_the_boundary_is_monotone() -> None:
    boundary = MemoryBoundary.of(fitting=[8, 100, 64], too_large=[128, 96])
    assert boundary == MemoryBoundary(fits=64, too_large=96)
    assert [size for size in (64, 95, 96, 1000) if boundary.may_fit(size)] == [64, 95]
    assert boundary.without(32) == MemoryBoundary(fits=None, too_large=32)
    assert boundary.without(200) == boundary
    assert UNKNOWN.may_fit(10**9)
    assert UNKNOWN.without(1).nothing_fits and not boundary.nothing_fits


@pytest.mark.parametrize(
    ("batch_size", "cap", "memory", "micro"),
    [
        (64, None, UNKNOWN, 64),
        (64, 48, UNKNOWN, 32),
        (64, 48, MemoryBoundary(fits=8), 32),  # what fits is no bound
        (64, None, MemoryBoundary(too_large=64), 32),
        (96, None, MemoryBoundary(too_large=64), 48),
        (64, 16, MemoryBoundary(fits=32, too_large=64), 16),
        (1024, None, MemoryBoundary(fits=1000, too_large=1050), 512),  # 1024 is not known to fit
        (4096, None, MemoryBoundary(fits=1030, too_large=1050), 1024),
        (960, None, MemoryBoundary(fits=8, too_large=500), 480),  # what is known to fit is far below
        (97, None, MemoryBoundary(too_large=97), 1),
        (8, None, MemoryBoundary(too_large=1), None),
    ],
)
def test_a_batch_is_split_into_the_largest_micro_batches_that_may_fit(
    batch_size: int, cap: int | None, memory: MemoryBoundary, micro: int | None
) -> None:
    assert choose_micro_batch(batch_size, cap, memory) == micro


def test_the_step_time_in_force_is_that_of_the_largest_split_below_the_boundary() -> None:
    whole, half, quarter = (make_probe(64, micro_batch_size=size) for size in (64, 32, 16))
    again = make_probe(64, micro_batch_size=32, step_seconds=9.0)
    failed = make_probe(128, out_of_memory=True)
    timed = [quarter, half, again, whole, failed]
    assert in_force(timed, UNKNOWN) == {64: whole}
    assert in_force(timed, MemoryBoundary(too_large=64)) == {64: half}
    assert in_force(timed, MemoryBoundary(too_large=17)) == {64: quarter}
    assert in_force(timed, MemoryBoundary(too_large=16)) == {}


def test_a_step_time_measured_alone_takes_the_place_of_one_that_was_not_but_for_its_cadence() -> None:
    shared = make_probe(64, step_seconds=9.0, contended=True, eval_every_steps=3)
    alone = make_probe(64, step_seconds=1.0, eval_every_steps=7)
    later = make_probe(64, step_seconds=2.0, eval_every_steps=8)
    assert in_force([shared, alone, later], UNKNOWN) == {64: make_probe(64, step_seconds=1.0, eval_every_steps=3)}
    assert in_force([alone, shared], UNKNOWN) == {64: alone}


def test_a_batch_is_split_by_its_largest_divisor_up_to_the_limit() -> None:
    for batch in range(1, 70):
        for most in range(1, 75):
            micro = max(size for size in range(1, most + 1) if batch % size == 0)
            assert split_batch(batch, most) == (micro, batch // micro)
    assert split_batch(999_999_937, 999_999_936) == (1, 999_999_937), "a prime"
