"""The exact split of a batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.errors import UsageError
from bssearch.planning.accumulation import plan_accumulation


def codes(**given: Any) -> list[str]:
    return [one["code"] for one in plan_accumulation(**given).document()["notes"]]


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 64))
def test_the_split_multiplies_to_the_batch_exactly(micro: int, steps: int, devices: int) -> None:
    batch = micro * steps * devices
    found = plan_accumulation(batch=batch, micro=micro, devices=devices).document()
    assert {name: found[name] for name in ("micro_batch", "accumulation_steps", "devices", "batch")} == {
        "micro_batch": micro,
        "accumulation_steps": steps,
        "devices": devices,
        "batch": batch,
    }


def test_a_largest_micro_batch_gives_way_to_one_that_divides() -> None:
    found = plan_accumulation(batch=1024, max_micro=24, devices=4)
    assert (found.micro_batch, found.accumulation_steps) == (16, 16)
    assert plan_accumulation(batch=24, devices=2).micro_batch == 12, "all at once"


def test_a_batch_that_cannot_be_split_is_refused_with_the_nearest_that_can() -> None:
    with pytest.raises(UsageError) as caught:
        plan_accumulation(batch=1024, micro=24, devices=4)
    assert "the nearest are 960 (10 steps) and 1056 (11 steps)" in caught.value.message
    assert caught.value.hint is not None and caught.value.hint.endswith("exactly is 16")
    with pytest.raises(UsageError, match=r"the nearest are 32 \(1 step\)"):
        plan_accumulation(batch=30, micro=32)
    with pytest.raises(UsageError, match=r"must be a multiple of 3; the nearest are 999 .* and 1002"):
        plan_accumulation(batch=1000, devices=3)


def test_what_is_not_the_same_as_a_batch_at_once_is_told() -> None:
    assert codes(batch=64, micro=64) == []
    assert codes(batch=64, micro=32) == ["batch_norm", "token_weighted_loss", "accumulation_cost"]
    assert codes(batch=64, micro=32, batch_norm_layers=0) == ["token_weighted_loss", "accumulation_cost"]
    assert codes(batch=64, micro=8, batch_norm_layers=3) == [
        "batch_norm_small_batch",
        "batch_norm_accumulation",
        "tiny_micro_batch",
        "token_weighted_loss",
        "accumulation_cost",
    ]
    assert codes(batch=544, micro=32, batch_norm_layers=0)[-2:] == ["accumulation_not_stale", "accumulation_cost"]
    assert "no_sync" in codes(batch=64, micro=16, devices=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": 0}, "batch = 0 must be a whole number from 1"),
        ({"batch": -8}, "batch = -8 must be"),
        ({"batch": 10**10}, "batch = 10000000000 must be a whole number from 1 to 1,000,000,000"),
        ({"batch": 8, "micro": 0}, "micro = 0 must be"),
        ({"batch": 8, "devices": 0}, "devices = 0 must be"),
        ({"batch": 8.5}, "batch = 8.5 must be a whole number"),
        ({"batch": True}, "batch = True must be a whole number"),
        ({"batch": 8, "batch_norm_layers": -1}, "batch_norm_layers = -1 must be"),
        ({"batch": 8, "micro": 4, "max_micro": 4}, "micro = 4 and max_micro = 4 contradict each other"),
    ],
)
def test_wrong_numbers_and_contradictions_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_accumulation(**given)
    assert said in caught.value.message
