from __future__ import annotations

import math

import pytest
import torch

from bssearch.errors import UsageError
from bssearch.training.optimizers import RateSchedule, horizon_steps, schedule_of, warmup_steps
from tests.training.toys import configuration


@pytest.mark.parametrize(("batch_size", "steps"), [(10, 20), (20, 10), (30, 7), (400, 0)])
def test_warmup_is_the_same_in_samples_at_every_batch_size(batch_size: int, steps: int) -> None:
    assert warmup_steps(2.0, 100, batch_size) == steps


def test_a_horizon_is_rounded_up_to_whole_steps() -> None:
    assert [horizon_steps(samples, 32) for samples in (1, 32, 33, 320)] == [1, 1, 2, 10]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (RateSchedule(), {0: 1}),
        (RateSchedule(warmup_steps=4), {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1, 5: 1}),
        (
            RateSchedule(kind="linear", warmup_steps=1, horizon_steps=5),
            {0: 0.5, 1: 1, 2: 0.75, 3: 0.5, 4: 0.25, 5: 0},
        ),
        (
            RateSchedule(kind="cosine", warmup_steps=2, horizon_steps=10),
            {2: 1, 4: (1 + math.cos(math.pi / 4)) / 2, 6: 0.5},
        ),
        (
            RateSchedule(kind="warmup_stable_decay", warmup_steps=2, horizon_steps=20, decay_share=0.4),
            {0: 1 / 3, 2: 1, 11: 1, 12: 1, 14: 1 - math.sqrt(0.25), 19: 1 - math.sqrt(7 / 8), 20: 0},
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, RateSchedule) else "",
)
def test_each_schedule_follows_its_formula(schedule: RateSchedule, factors: dict[int, float]) -> None:
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize(("warmup", "rise"), [(0, 0.3), (10, 0.1)])
def test_one_cycle_is_that_of_torch_with_the_warmup_as_its_rise(warmup: int, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=100, pct_start=rise, cycle_momentum=False
    )
    schedule = RateSchedule(kind="one_cycle", warmup_steps=warmup, horizon_steps=100)
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("exponential", "schedule = 'exponential' must be one of constant"),
        ("cosine", "horizon_samples"),
    ],
)
def test_an_unknown_schedule_and_a_decay_without_a_horizon_are_refused(kind: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        schedule_of(configuration(parameters={"schedule": kind}), 100)
