"""The exact split of a batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.errors import UsageError
from bssearch.planning.scale import plan_accumulation


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 64))
def test_the_split_multiplies_to_the_batch_exactly(micro: int, steps: int, devices: int) -> None:
    batch = micro * steps * devices
    found = plan_accumulation(batch=batch, micro=micro, devices=devices)
    assert (found.micro_batch, found.accumulation_steps, found.devices, found.batch) == (micro, steps, devices, batch)


def test_a_largest_micro_batch_gives_way_to_one_that_divides() -> None:
    found = plan_accumulation(batch=1024, max_micro=24, devices=4)
    assert (found.micro_batch, found.accumulation_steps) == (16, 16)
    assert plan_accumulation(batch=24, devices=2).micro_batch == 12, "all at once"


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ({"batch": 1024, "micro": 24, "devices": 4}, ["960 (10 steps)", "1056 (11 steps)"]),
        ({"batch": 30, "micro": 32}, ["32 (1 step)"]),
        ({"batch": 1000, "devices": 3}, ["999", "1002"]),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_the_nearest_that_can(
    asked: dict[str, Any], nearest: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_accumulation(**asked)
    assert all(size in caught.value.message for size in nearest)
    assert (caught.value.hint is None) == (asked["batch"] % asked.get("devices", 1) != 0)


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ({"micro": 64}, []),
        ({"micro": 32}, ["batch_norm", "token_weighted_loss", "accumulation_cost"]),
        ({"micro": 32, "batch_norm_layers": 0}, ["token_weighted_loss", "accumulation_cost"]),
        (
            {"micro": 8, "batch_norm_layers": 3},
            [
                "batch_norm_small_batch",
                "batch_norm_accumulation",
                "tiny_micro_batch",
                "token_weighted_loss",
                "accumulation_cost",
            ],
        ),
        (
            {"batch": 544, "micro": 32, "batch_norm_layers": 0},
            ["token_weighted_loss", "accumulation_not_stale", "accumulation_cost"],
        ),
        (
            {"micro": 16, "devices": 2, "batch_norm_layers": 0},
            ["token_weighted_loss", "no_sync", "accumulation_cost"],
        ),
    ],
)
def test_what_is_not_the_same_as_a_batch_at_once_is_noted(asked: dict[str, Any], codes: list[str]) -> None:
    assert [note.code for note in plan_accumulation(**{"batch": 64, **asked}).notes] == codes
