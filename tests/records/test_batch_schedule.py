"""Batch schedules as a configuration holds them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.errors import UsageError
from bssearch.records import Configuration
from bssearch.records.batch_schedule import (
    BatchSchedule,
    Stage,
    batch_schedule_of,
    constant_configurations,
    growing,
    with_batch_schedule,
)
from bssearch.records.scaling import LearningRateRule

BASE = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters={"schedule": "constant"})


def milestones(*stages: tuple[int, ...], rule: LearningRateRule = LearningRateRule.SQRT) -> BatchSchedule:
    """Return a schedule of (samples, batch size) or (samples, batch size, micro-batch size)."""
    made = tuple(Stage(one[0], one[1], one[-1]) for one in stages)
    return BatchSchedule(name="milestones", stages=made, rate_rule=rule)


def given_text(stages: str, **changes: Any) -> Configuration:
    parameters = {"batch_schedule": "milestones", "batch_stages": stages, "batch_rate_rule": "sqrt", **changes}
    return Configuration(
        batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters={**BASE.parameters, **parameters}
    )


def test_a_schedule_stands_in_a_configuration_and_is_read_from_it() -> None:
    schedule = milestones((0, 32), (8192, 64), (16384, 256, 64))
    configuration = with_batch_schedule(BASE, schedule)
    assert configuration.parameters == {
        "schedule": "constant",
        "batch_schedule": "milestones",
        "batch_stages": "8192:64 16384:256/64",
        "batch_rate_rule": "sqrt",
    }
    assert batch_schedule_of(configuration) == schedule and configuration.grows
    assert batch_schedule_of(BASE) is None and not BASE.grows
    assert configuration.key != BASE.key


def test_one_that_is_measured_says_no_samples() -> None:
    schedule = BatchSchedule(
        name="noise_scale",
        stages=(Stage(0, 32, 32), Stage(0, 64, 64), Stage(0, 256, 64)),
        rate_rule=LearningRateRule.NONE,
        noise_share=0.5,
    )
    configuration = with_batch_schedule(BASE, schedule)
    assert configuration.parameters["batch_stages"] == "64 256/64"
    assert batch_schedule_of(configuration) == schedule


def test_how_a_batch_is_split_makes_no_other_training() -> None:
    whole, split, later = (given_text(text) for text in ("8192:64", "8192:64/16", "8193:64"))
    assert whole.trains_like(split) and not whole.trains_like(later) and not whole.trains_like(BASE)


def test_the_constant_configurations_of_the_stages_have_their_rates() -> None:
    found = constant_configurations(given_text("8192:64 16384:128/32"))
    assert [(one.batch_size, one.micro_batch_size, one.accumulation_steps) for one in found] == [
        (32, 32, 1),
        (64, 64, 1),
        (128, 32, 4),
    ]
    assert [one.learning_rate for one in found] == pytest.approx([0.1, 0.1 * math.sqrt(2), 0.2])
    assert all(one.parameters == BASE.parameters for one in found)
    assert constant_configurations(BASE) == [BASE]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stages": ""}, "batch_stages = '' must name 1 to 63 changes"),
        ({"stages": "64"}, "'64' must be SAMPLES:SIZE"),
        ({"stages": "8192:x"}, "'8192:x' must be SAMPLES:SIZE or SAMPLES:SIZE/MICRO_BATCH_SIZE"),
        ({"stages": f"{10**15}:64"}, "'1000000000000000:64' must be SAMPLES:SIZE"),
        ({"stages": f"8192:{'9' * 5000}"}, "must be SAMPLES:SIZE"),
        ({"stages": "٨١٩٢:64"}, "'٨١٩٢:64' must be SAMPLES:SIZE"),
        ({"stages": "8192:64 9000:16"}, "batch 16 after 64: a batch may only grow"),
        ({"stages": "8192:32"}, "batch 32 after 32: a batch may only grow"),
        ({"stages": "31:64"}, "batch 64 begins after 31 samples; it must be >= 32, one step of batch 32"),
        (
            {"stages": "8192:64 8255:128"},
            "batch 128 begins after 8255 samples; it must be >= 8256, one step of batch 64",
        ),
        ({"stages": "8192:64/48"}, "batch 64 is not made of micro-batches of 48"),
        ({"stages": "8192:64/0"}, "batch 64 is not made of micro-batches of 0"),
        ({"stages": "8192:64", "batch_schedule": "wild"}, "batch_schedule = 'wild' must be one of geometric, linear"),
        ({"stages": "8192:64", "batch_rate_rule": None}, "batch_rate_rule = None must be one of linear, sqrt, none"),
        ({"stages": "64", "batch_schedule": "noise_scale"}, "batch_noise_share = None must be a number > 0"),
        (
            {"stages": "64", "batch_schedule": "noise_scale", "batch_noise_share": 0},
            "batch_noise_share = 0 must be a number > 0",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected.replace("(", r"\(")):
        batch_schedule_of(given_text(**changes))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("geometric", [(2000, 64), (3000, 128), (4000, 256)]),
        ("linear", [(1429, 64), (2286, 128), (4000, 256)]),
    ],
)
def test_a_size_begins_where_the_line_reaches_it(name: Any, expected: list[tuple[int, int]]) -> None:
    assert growing(name, (32, 64, 128, 256), 1000, 4000) == expected


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    sizes = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=6)))
    stages, start = [], 0
    for size in sizes:
        divisors = [one for one in range(1, size + 1) if size % one == 0]
        stages.append((start, size, draw(st.sampled_from(divisors))))
        start += size + draw(st.integers(0, 500))
    return milestones(*stages)


@given(schedules(), st.integers(0, 300))
def test_steps_and_samples_by_stage_are_those_of_walking(schedule: BatchSchedule, steps: int) -> None:
    samples, taken = 0, dict.fromkeys(schedule.stages, 0)
    for _ in range(steps):
        stage = next(one for one in reversed(schedule.stages) if one.start_samples <= samples)
        taken[stage] += 1
        samples += stage.batch_size
    assert schedule.steps_by_stage(steps) == [(stage, count) for stage, count in taken.items() if count]
    assert schedule.samples_after(steps) == samples
