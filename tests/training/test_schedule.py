from __future__ import annotations

import math

import pytest
import torch

from bssearch.errors import UsageError
from bssearch.training.schedule import Schedule, horizon_steps, schedule_of, warmup_steps
from tests.training.toys import configuration


@pytest.mark.parametrize(("batch_size", "steps"), [(10, 20), (20, 10), (30, 7), (400, 0)])
def test_warmup_is_the_same_in_samples_at_every_batch_size(batch_size: int, steps: int) -> None:
    assert warmup_steps(2.0, 100, batch_size) == steps


def test_a_horizon_is_rounded_up_to_whole_steps() -> None:
    assert [horizon_steps(samples, 32) for samples in (1, 32, 33, 320)] == [1, 1, 2, 10]


def test_warmup_rises_linearly_from_near_zero_to_the_peak() -> None:
    schedule = Schedule(warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_without_warmup_the_first_step_runs_at_the_peak() -> None:
    assert Schedule().factor(0) == 1


def test_linear_decay_reaches_zero_at_the_horizon_and_not_before() -> None:
    schedule = Schedule(kind="linear", warmup_steps=1, horizon_steps=5)
    assert [schedule.factor(step) for step in range(6)] == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])


def test_cosine_decay_is_half_way_down_in_the_middle() -> None:
    schedule = Schedule(kind="cosine", warmup_steps=2, horizon_steps=10)
    assert schedule.factor(2) == 1
    assert schedule.factor(6) == pytest.approx(0.5)
    assert schedule.factor(4) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_a_decay_after_a_stable_rate_falls_by_the_square_root_in_its_share_of_the_horizon() -> None:
    schedule = Schedule(kind="warmup_stable_decay", warmup_steps=2, horizon_steps=20, decay_share=0.4)
    assert [schedule.factor(step) for step in (0, 2, 11, 12)] == pytest.approx([1 / 3, 1, 1, 1])
    assert schedule.factor(14) == pytest.approx(1 - math.sqrt(0.25))
    assert schedule.factor(19) > 0 == schedule.factor(20)


@pytest.mark.parametrize(("warmup", "rise"), [(0, 0.3), (10, 0.1)])
def test_one_cycle_is_that_of_torch_with_the_warmup_as_its_rise(warmup: int, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=100, pct_start=rise, cycle_momentum=False
    )
    schedule = Schedule(kind="one_cycle", warmup_steps=warmup, horizon_steps=100)
    for step in range(100):
        (rate,) = theirs.get_last_lr()
        assert 0.5 * schedule.factor(step) == pytest.approx(rate, rel=1e-12)
        optimizer.step()
        theirs.step()
    assert schedule.is_over(100)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "warmup_stable_decay"])
@pytest.mark.parametrize("horizon", [2, 4, 5])
def test_a_horizon_within_the_warmup_cuts_it_off(kind: str, horizon: int) -> None:
    schedule = schedule_of(
        configuration(10, warmup_epochs=0.4, parameters={"schedule": kind, "horizon_samples": horizon * 10.0}), 100
    )
    assert schedule.factor(1) == pytest.approx(0.4)
    assert [schedule.is_over(step) for step in (horizon - 1, horizon)] == [False, True]


def test_a_constant_rate_has_no_horizon_unless_given() -> None:
    assert not schedule_of(configuration(), 100).is_over(10**9)
    assert schedule_of(configuration(20, parameters={"horizon_samples": 100}), 100).is_over(5)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="schedule = 'exponential' must be one of constant, cosine, linear"):
        schedule_of(configuration(parameters={"schedule": "exponential"}), 100)


def test_a_decay_without_a_horizon_is_refused() -> None:
    with pytest.raises(UsageError, match="needs horizon_samples"):
        schedule_of(configuration(parameters={"schedule": "cosine"}), 100)
