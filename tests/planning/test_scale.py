"""How many devices are worth it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.planning.scale import Hardware, Interval, Load, plan_devices

FREE = Hardware(alpha_s=0.0, beta_s=0.001, gradient_bytes=1.0, bandwidth_gb_s=1e9)
"""Devices that exchange gradients in no time."""

LINKED = Hardware(alpha_s=0.01, beta_s=0.001, gradient_bytes=1e8, bandwidth_gb_s=10.0, latency_us=5.0)
CRITICAL = Interval(estimate=1000.0, low=500.0, high=2000.0)


def test_a_ring_all_reduce_takes_the_bytes_over_the_bandwidth_twice_and_its_messages() -> None:
    assert LINKED.all_reduce_seconds(1) == 0
    assert LINKED.all_reduce_seconds(4) == pytest.approx(2 * 3 / 4 * 1e8 / 1e10 + 2 * 3 * 5e-6)


def test_what_overlaps_is_hidden_but_no_longer_than_there_is_computing() -> None:
    half = replace(LINKED, overlap=0.5)
    whole = LINKED.all_reduce_seconds(4)
    assert half.exposed_seconds(4, compute_s=1.0) == pytest.approx(whole / 2)
    assert replace(LINKED, overlap=1.0).exposed_seconds(4, compute_s=0.001) == pytest.approx(whole - 0.001)


def test_with_a_batch_that_grows_the_law_alone_bends_the_time() -> None:
    found = plan_devices(40, FREE, Load(per_device_batch=50, samples_to_target=1e6, at_batch=50), CRITICAL)
    for row in found.rows:
        samples = 1e6 * (1 + row.batch / 1000) / (1 + 50 / 1000)
        assert row.time_to_target_s == pytest.approx(samples * 0.001 / row.devices)
        assert row.speedup == pytest.approx(found.rows[0].time_to_target_s / row.time_to_target_s)  # type: ignore[operator]
        assert row.throughput_efficiency == pytest.approx(1)


def test_the_number_at_which_b_crit_is_passed_has_the_interval_of_b_crit() -> None:
    found = plan_devices(64, FREE, Load(per_device_batch=50), CRITICAL).passes_b_crit
    assert (found.low, found.estimate, found.high) == (11, 21, 41)
    one_sided = plan_devices(64, FREE, Load(per_device_batch=50), Interval(estimate=1000.0, low=500.0)).passes_b_crit
    assert (one_sided.low, one_sided.estimate, one_sided.high) == (11, 21, None)


def test_more_devices_pay_while_each_does_half_of_what_a_single_one_would() -> None:
    # (1 + 50/1000) / (1 + 50 n/1000) >= 1/2 up to n = 22; with B_crit = 500 up to 12, with 2000 up to 42.
    found = plan_devices(64, FREE, Load(per_device_batch=50), CRITICAL)
    assert (found.pays_up_to.low, found.pays_up_to.estimate, found.pays_up_to.high) == (12, 22, 42)
    assert found.rows[21].efficiency >= 0.5 > found.rows[22].efficiency
    assert found.fastest == 64


def test_a_fixed_batch_is_planned_on_the_numbers_that_divide_it_and_slows_down_by_communication() -> None:
    hardware = replace(LINKED, alpha_s=0.05)
    found = plan_devices(12, hardware, Load(batch=96), CRITICAL)
    assert [row.devices for row in found.rows] == [1, 2, 3, 4, 6, 8, 12]
    assert all(row.batch == 96 and row.relative_samples == found.rows[0].relative_samples for row in found.rows)
    assert [row.speedup for row in found.rows] == [
        pytest.approx(found.rows[0].step_s / row.step_s) for row in found.rows
    ]
    assert found.pays_up_to.estimate == 3, "the fixed cost of a step is not shared"
    assert found.passes_b_crit.estimate is None
    assert plan_devices(2, hardware, Load(batch=1200), CRITICAL).passes_b_crit.estimate == 1


def test_accumulation_pays_the_fixed_cost_once_a_micro_batch() -> None:
    (row,) = plan_devices(1, LINKED, Load(batch=96, max_micro=40), CRITICAL).rows
    assert (row.micro_batch, row.accumulation_steps) == (32, 3)
    assert row.step_s == pytest.approx(3 * (0.01 + 0.032))


def test_cost_is_device_hours_times_the_price_and_unknown_without_samples() -> None:
    priced = Load(per_device_batch=50, samples_to_target=3.6e6, at_batch=50, price_per_device_hour=2.0)
    single = plan_devices(1, FREE, priced, CRITICAL).rows[0]
    assert [single.time_to_target_s, single.device_hours, single.cost] == pytest.approx([3600, 1, 2])
    bare = plan_devices(2, FREE, Load(per_device_batch=50), CRITICAL).rows[1]
    assert (bare.time_to_target_s, bare.device_hours, bare.cost) == (None, None, None)
    assert bare.speedup > 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Hardware(alpha_s=-1.0, beta_s=0.1), "alpha_s = -1 must be a finite number >= 0"),
        (lambda: Hardware(alpha_s=0.1, beta_s=0.0), "beta_s = 0 must be a finite number > 0"),
        (lambda: Hardware(alpha_s=math.nan, beta_s=0.1), "alpha_s = nan must be"),
        (lambda: Hardware(alpha_s=0.1, beta_s=0.1, overlap=1.5), "overlap = 1.5 must be in [0, 1]"),
        (lambda: Hardware(alpha_s=0.1, beta_s=0.1, bandwidth_gb_s=0.0), "bandwidth_gb_s = 0 must be"),
        (lambda: Interval(estimate=math.inf), "b_crit = inf must be"),
        (lambda: Interval(estimate=100.0, low=200.0), "b_crit_low = 200 must be <= b_crit = 100"),
        (lambda: Interval(estimate=100.0, high=50.0), "b_crit_high = 50 must be >= b_crit = 100"),
        (lambda: Load(), "batch = None and per_device_batch = None: give one of them"),
        (lambda: Load(batch=8, per_device_batch=8), "batch = 8 and per_device_batch = 8: give one of them"),
        (lambda: Load(batch=0), "batch = 0 must be"),
        (lambda: Load(batch=8, at_batch=8), "at_batch = 8 says where samples_to_target were counted"),
        (lambda: Load(batch=8, price_per_device_hour=0.0), "price_per_device_hour = 0 must be"),
        (lambda: plan_devices(0, FREE, Load(batch=8), CRITICAL), "devices = 0 must be a whole number from 1 to 4,096"),
        (lambda: plan_devices(10**6, FREE, Load(batch=8), CRITICAL), "devices = 1000000 must be"),
        (
            lambda: plan_devices(2, Hardware(alpha_s=0.1, beta_s=0.1), Load(batch=8), CRITICAL),
            "devices = 2 exchange gradients: bandwidth_gb_s",
        ),
    ],
)
def test_wrong_numbers_and_contradictions_are_refused(make: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert said in caught.value.message
