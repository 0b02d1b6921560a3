"""How many devices are worth it."""

from __future__ import annotations

from typing import Any

import pytest

from bssearch.planning.scale import ScalePlan, ScaleRequest, plan_devices

FREE: dict[str, Any] = {"alpha_s": 0.0, "beta_s": 0.001, "parameters": 1, "gradient_bytes": 1.0, "bandwidth_gb_s": 1e9}
"""Devices that exchange gradients in no time."""

LINKED: dict[str, Any] = {
    "alpha_s": 0.01,
    "beta_s": 0.001,
    "parameters": 10**8,
    "gradient_bytes": 1.0,
    "bandwidth_gb_s": 10.0,
    "latency_us": 5.0,
}
CRITICAL = {"b_crit": 1000.0, "b_crit_low": 500.0, "b_crit_high": 2000.0}


def plan(devices: int, hardware: dict[str, Any], **load: Any) -> ScalePlan:
    return plan_devices(ScaleRequest(**{"devices": devices, **hardware, **CRITICAL, **load}))


def linked(**changes: Any) -> ScaleRequest:
    return ScaleRequest(**{"devices": 4, "batch": 64, **LINKED, **changes})


def test_a_ring_all_reduce_takes_the_bytes_over_the_bandwidth_twice_and_its_messages() -> None:
    assert linked().all_reduce_seconds(1) == 0
    assert linked().all_reduce_seconds(4) == pytest.approx(2 * 3 / 4 * 1e8 / 1e10 + 2 * 3 * 5e-6)


def test_what_overlaps_is_hidden_but_no_longer_than_there_is_computing() -> None:
    whole = linked().all_reduce_seconds(4)
    assert linked(overlap=0.5).exposed_seconds(4, compute_s=1.0) == pytest.approx(whole / 2)
    assert linked(overlap=1.0).exposed_seconds(4, compute_s=0.001) == pytest.approx(whole - 0.001)


def test_with_a_batch_that_grows_the_law_alone_bends_the_time() -> None:
    found = plan(40, FREE, per_device_batch=50, samples_to_target=1e6, at_batch=50)
    for row in found.rows:
        samples = 1e6 * (1 + row.batch / 1000) / (1 + 50 / 1000)
        assert row.time_to_target_s == pytest.approx(samples * 0.001 / row.devices)
        assert row.speedup == pytest.approx(found.rows[0].time_to_target_s / row.time_to_target_s)  # type: ignore[operator]
        assert row.throughput_efficiency == pytest.approx(1)


def test_the_number_at_which_b_crit_is_passed_has_the_interval_of_b_crit() -> None:
    found = plan(64, FREE, per_device_batch=50).passes_b_crit
    assert (found.low, found.estimate, found.high) == (11, 21, 41)
    one_sided = plan(64, FREE, per_device_batch=50, b_crit_high=None).passes_b_crit
    assert (one_sided.low, one_sided.estimate, one_sided.high) == (11, 21, None)


def test_more_devices_pay_while_each_does_half_of_what_a_single_one_would() -> None:
    # (1 + 50/1000) / (1 + 50 n/1000) >= 1/2 up to n = 22; with B_crit = 500 up to 12, with 2000 up to 42.
    found = plan(64, FREE, per_device_batch=50)
    assert (found.pays_up_to.low, found.pays_up_to.estimate, found.pays_up_to.high) == (12, 22, 42)
    assert found.rows[21].efficiency >= 0.5 > found.rows[22].efficiency
    assert found.fastest == 64


def test_a_fixed_batch_is_planned_on_the_numbers_that_divide_it_and_slows_down_by_communication() -> None:
    hardware = {**LINKED, "alpha_s": 0.05}
    found = plan(12, hardware, batch=96)
    assert [row.devices for row in found.rows] == [1, 2, 3, 4, 6, 8, 12]
    assert all(row.batch == 96 and row.relative_samples == found.rows[0].relative_samples for row in found.rows)
    assert [row.speedup for row in found.rows] == [
        pytest.approx(found.rows[0].step_s / row.step_s) for row in found.rows
    ]
    assert found.pays_up_to.estimate == 3, "the fixed cost of a step is not shared"
    assert found.passes_b_crit.estimate is None
    assert plan(2, hardware, batch=1200).passes_b_crit.estimate == 1


def test_accumulation_pays_the_fixed_cost_once_a_micro_batch() -> None:
    (row,) = plan(1, LINKED, batch=96, max_micro=40).rows
    assert (row.micro_batch, row.accumulation_steps) == (32, 3)
    assert row.step_s == pytest.approx(3 * (0.01 + 0.032))


def test_cost_is_device_hours_times_the_price_and_unknown_without_samples() -> None:
    priced = {"per_device_batch": 50, "samples_to_target": 3.6e6, "at_batch": 50, "price_per_device_hour": 2.0}
    single = plan(1, FREE, **priced).rows[0]
    assert [single.time_to_target_s, single.device_hours, single.cost] == pytest.approx([3600, 1, 2])
    bare = plan(2, FREE, per_device_batch=50).rows[1]
    assert (bare.time_to_target_s, bare.device_hours, bare.cost) == (None, None, None)
    assert bare.speedup > 1
