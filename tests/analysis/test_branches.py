"""The local critical batch size from the ends of branches: which hold, the interval, and when it is not known."""

import pytest

from bssearch.analysis.law.branches import (
    BranchedSize,
    LocalCriticalBatch,
    bound_of,
    is_rising,
    local_critical_batch,
    plan_branches,
)
from bssearch.errors import UsageError
from bssearch.records import Goal

BASE = (2.00, 2.02, 1.98)


def found(*larger: tuple[float | None, ...], start: float = 3.0, base: tuple[float | None, ...] = BASE) -> object:
    sizes = [BranchedSize(batch_size=8 * 2**octave, ends=ends) for octave, ends in enumerate([base, *larger])]
    one = local_critical_batch(start, sizes, Goal.MINIMIZE)
    return one.verdict, one.batch_size, one.low, one.high


@pytest.mark.parametrize(
    ("larger", "expected"),
    [
        (((2.03,) * 3, (2.02,) * 3, (2.2,) * 3), ("found", 32, 32, 64)),
        (((2.03,) * 3, (2.2,) * 3, (2.0,) * 3), ("found", 16, 16, 32)),
        (((2.03,) * 3, (2.02,) * 3), ("at_least", 32, 32, None)),
        (((2.2,) * 3,), ("below", 8, None, 16)),
        (((2.0, 2.0, None), (2.0,) * 3), ("below", 8, None, 16)),
        (((2.0,) * 3, (None,)), ("found", 16, 16, 32)),
    ],
)
def test_it_is_between_the_last_that_holds_and_the_first_that_does_not(
    larger: tuple[tuple[float | None, ...], ...], expected: tuple[object, ...]
) -> None:
    assert found(*larger) == expected


def test_a_branch_that_diverged_leaves_the_bound() -> None:
    sizes = [BranchedSize(batch_size=8, ends=BASE), BranchedSize(batch_size=16, ends=(None,))]
    assert local_critical_batch(3.0, sizes, Goal.MINIMIZE).bound == bound_of(sizes[0], Goal.MINIMIZE), (
        "that of as many branches as at B"
    )


@pytest.mark.parametrize(
    ("start", "base"), [(2.03, BASE), (3.0, (2.0, 2.0, 2.0)), (3.0, (2.0, None, 2.1)), (3.0, (2.0, 2.1))]
)
def test_nothing_is_told_where_the_branches_at_the_default_are_no_measure(
    start: float, base: tuple[float | None, ...]
) -> None:
    assert found((2.0,) * 3, start=start, base=base) == ("cannot_tell", None, None, None)


def test_the_bound_is_the_one_sided_95_percent_of_students_t() -> None:
    base = BranchedSize(batch_size=8, ends=BASE)
    # t(2, 0.95) = 2.920 (tables); s = 0.02, n = 3.
    assert bound_of(base, Goal.MINIMIZE) == pytest.approx(2.0 + 2.920 * 0.02 * (1 / 3 + 1 / 3) ** 0.5, abs=1e-5)
    assert bound_of(base, Goal.MAXIMIZE) == pytest.approx(2.0 - 2.920 * 0.02 * (1 / 3 + 1 / 3) ** 0.5, abs=1e-5)


def test_of_a_metric_to_maximise_more_is_better() -> None:
    sizes = [BranchedSize(batch_size=8 * 2**octave, ends=ends) for octave, ends in enumerate([BASE, (2.3,) * 3])]
    assert local_critical_batch(1.0, sizes, Goal.MAXIMIZE).verdict == "at_least"
    assert local_critical_batch(1.0, sizes, Goal.MINIMIZE).verdict == "cannot_tell"


@pytest.mark.parametrize(
    ("samples", "octaves", "largest"), [(1000, 6, None), (4096, 3, None), (5000, 9, 300), (17, 6, 99)]
)
def test_all_branches_see_the_same_samples_and_are_evaluated_at_the_same(
    samples: int, octaves: int, largest: int | None
) -> None:
    plan = plan_branches(8, samples, octaves, largest=largest)
    assert plan.batch_sizes[:2] == (8, 16) and len(plan.batch_sizes) <= octaves + 1
    assert samples / 2 < plan.samples <= samples
    assert all(plan.samples % size == 0 == plan.samples_between % size for size in plan.batch_sizes)
    assert largest is None or plan.batch_sizes[-1] <= largest
    assert plan.batch_sizes[-1] == 16 or plan.samples // plan.batch_sizes[-1] >= 8


def test_samples_below_one_step_of_twice_the_default_are_refused() -> None:
    assert plan_branches(8, 16, 6).batch_sizes == (8, 16)
    with pytest.raises(UsageError, match=r"samples = 15 per branch must be >= 16"):
        plan_branches(8, 15, 6)
    with pytest.raises(UsageError, match="batch_size = 8 must be <= 7, half of the training samples"):
        plan_branches(8, 100, 6, largest=15)


def test_a_schedule_rises_where_no_known_batch_size_falls() -> None:
    def at(size: int | None) -> LocalCriticalBatch:
        return LocalCriticalBatch(verdict="cannot_tell" if size is None else "found", batch_size=size)

    assert is_rising([at(8), at(None), at(8), at(32)]) is True
    assert is_rising([at(8), at(32), at(16)]) is False
    assert is_rising([at(8), at(None)]) is None
