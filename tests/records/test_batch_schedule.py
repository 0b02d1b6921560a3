"""Batch schedules as a configuration holds them, the stages that a trial ran, and rules of scaling."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bssearch.errors import UsageError
from bssearch.records import (
    LARGEST_DROPOUT,
    Configuration,
    LearningRateRule,
    Observation,
    TrialRecord,
    TrialState,
    is_said_to_need_warmup,
    learning_rate_factor,
    sqrt_dropout,
    sqrt_weight_decay,
    timescale_weight_decay,
)
from bssearch.records.batch_schedule import (
    BatchSchedule,
    RunStage,
    Stage,
    batch_schedule_of,
    constant_configurations,
    growing,
    run_stages,
    with_batch_schedule,
)
from bssearch.training.batches import Growth
from tests.factories import make_trial, with_outcome

BASE = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1, parameters={"schedule": "constant"})


def milestones(*stages: tuple[int, ...], rule: LearningRateRule = LearningRateRule.SQRT) -> BatchSchedule:
    """Return a schedule of (samples, batch size) or (samples, batch size, micro-batch size)."""
    return BatchSchedule(
        name="milestones", stages=tuple(Stage(one[0], one[1], one[-1]) for one in stages), rate_rule=rule
    )


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
    configuration = with_batch_schedule(BASE, BY_NOISE)
    assert configuration.parameters["batch_stages"] == "64/32 128"
    assert batch_schedule_of(configuration) == BY_NOISE


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
        ({"stages": "8192:64 9000:16"}, "batch 16 must be larger than 64, the batch before"),
        ({"stages": "8192:32"}, "batch 32 must be larger than 32, the batch before"),
        ({"stages": "31:64"}, "batch 64 begins after 31 samples; use at least 32 samples, one step after batch 32"),
        (
            {"stages": "8192:64 8255:128"},
            "batch 128 begins after 8255 samples; use at least 8256 samples, one step after batch 64",
        ),
        ({"stages": "8192:64/48"}, "batch 64 must be a multiple of its micro-batch 48"),
        ({"stages": "8192:64/0"}, "batch 64 must be a multiple of its micro-batch 0"),
        ({"stages": "8192:64", "batch_schedule": "wild"}, "batch_schedule = 'wild' must be one of geometric, linear"),
        ({"stages": "8192:64", "batch_rate_rule": None}, "batch_rate_rule = None must be one of linear, sqrt, none"),
        ({"stages": "64", "batch_schedule": "noise_scale"}, "batch_noise_share = None must be a finite number > 0"),
        (
            {"stages": "64", "batch_schedule": "noise_scale", "batch_noise_share": 0},
            "batch_noise_share = 0 must be a finite number > 0",
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
    stages, start = [], 0
    for size in sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=6))):
        stages.append((start, size, draw(st.sampled_from([one for one in range(1, size + 1) if size % one == 0]))))
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


SIZES = st.integers(min_value=1, max_value=2**20)
RATES = st.floats(min_value=1e-6, max_value=10.0)


def test_rates_follow_the_papers_own_numbers() -> None:
    # Goyal et al. 2017: 0.1 at 256 is 3.2 at 8,192.
    assert 0.1 * learning_rate_factor(LearningRateRule.LINEAR, 8192, 256) == pytest.approx(3.2)
    assert learning_rate_factor(LearningRateRule.SQRT, 8192, 256) == pytest.approx(math.sqrt(32))
    assert learning_rate_factor(LearningRateRule.NONE, 8192, 256) == 1


def test_a_warmup_is_said_to_be_needed_from_eight_times_the_batch_on() -> None:
    assert not is_said_to_need_warmup(255, 32)
    assert is_said_to_need_warmup(256, 32)


@given(SIZES, SIZES, RATES, RATES, RATES)
def test_the_timescale_in_epochs_is_what_it_was(
    batch: int, reference: int, decay: float, old: float, new: float
) -> None:
    assert batch / (new * timescale_weight_decay(decay, batch / reference, old / new)) == pytest.approx(
        reference / (old * decay)
    )


@given(SIZES, SIZES, RATES)
def test_weight_decay_by_the_root_is_the_timescale_where_the_rate_grows_by_the_root(
    batch: int, reference: int, decay: float
) -> None:
    rate = 0.1 * learning_rate_factor(LearningRateRule.SQRT, batch, reference)
    assert sqrt_weight_decay(decay, batch / reference) == pytest.approx(
        timescale_weight_decay(decay, batch / reference, 0.1 / rate)
    )


def test_dropout_by_the_root_stays_below_one() -> None:
    assert sqrt_dropout(0.1, 128, 32) == pytest.approx(0.2)
    assert sqrt_dropout(0.1, 32, 128) == pytest.approx(0.05)
    assert sqrt_dropout(0.5, 4096, 32) == LARGEST_DROPOUT < 1


BY_NOISE = BatchSchedule(
    name="noise_scale",
    stages=(Stage(0, 32, 32), Stage(0, 64, 32), Stage(0, 128, 128)),
    rate_rule=LearningRateRule.LINEAR,
    noise_share=1.0,
)


def ran(configuration: Configuration, points: list[tuple[int, int, float]]) -> tuple[TrialRecord, list[Observation]]:
    """Return a trial that ended at the last of some points, and evaluations at those before it."""
    steps, samples, seconds = points[-1]
    trial = make_trial(1, configuration=configuration, state=TrialState.CAPPED, seconds=seconds, samples=samples)
    trial = with_outcome(trial, steps=steps)
    curve = [
        Observation(step=one, samples=seen, train_seconds=at, metric=0.5, loss=None, learning_rate=0.1)
        for one, seen, at in points[:-1]
    ]
    return trial, curve


def told(stages: list[RunStage]) -> list[tuple[Any, ...]]:
    return [(one.start_samples, one.batch_size, one.steps, one.samples, one.train_seconds) for one in stages]


def test_a_change_between_two_evaluations_lies_on_their_line() -> None:
    configuration = with_batch_schedule(BASE, milestones((0, 32), (90, 64, 16), (400, 128)))
    # Three steps of 32 to 96, five of 64 to 416, two of 128 to 672; an evaluation at 160 has one of 64 in it.
    found = run_stages(*ran(configuration, [(0, 0, 0.0), (4, 160, 1.6), (8, 416, 3.2), (10, 672, 4.0)]))
    assert told(found) == [
        (0, 32, 3, 96, pytest.approx(0.96)),
        (96, 64, 5, 320, pytest.approx(2.24)),
        (416, 128, 2, 256, pytest.approx(0.8)),
    ]
    assert [one.micro_batch_size for one in found] == [32, 16, 128]
    assert [one.learning_rate for one in found] == pytest.approx([0.1, 0.1 * 2**0.5, 0.2])


def test_sizes_that_the_trial_decided_are_the_samples_over_the_steps() -> None:
    configuration = with_batch_schedule(BASE, BY_NOISE)
    found = run_stages(*ran(configuration, [(0, 0, 0.0), (3, 96, 0.3), (5, 160, 0.5), (7, 416, 0.9), (9, 672, 1.4)]))
    # It grew past 64 at once, at the evaluation of 160 samples.
    assert told(found) == [(0, 32, 5, 160, pytest.approx(0.5)), (160, 128, 4, 512, pytest.approx(0.9))]
    assert [one.learning_rate for one in found] == pytest.approx([0.1, 0.4])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 60), st.integers(1, 9))
def test_the_stages_are_those_of_the_loop(gaps: list[int], steps: int, every: int) -> None:
    sizes = [32 * 2**place for place in range(len(gaps) + 1)]
    starts = [0]
    for gap, size in zip(gaps, sizes, strict=False):
        starts.append(starts[-1] + size + gap)
    configuration = with_batch_schedule(BASE, milestones(*zip(starts, sizes, strict=True)))
    growth, points, expected = Growth(configuration, 10**6), [(0, 0, 0.0)], dict[int, int]()
    for step in range(1, steps + 1):
        size = growth.stage.batch_size
        expected[size] = expected.get(size, 0) + 1
        growth.stepped()
        if step % every == 0 or step == steps:
            points.append((step, growth.samples, float(growth.samples)))
    found = run_stages(*ran(configuration, points))
    assert {one.batch_size: one.steps for one in found} == expected
    assert sum(one.samples for one in found) == growth.samples
    assert all(one.train_seconds == pytest.approx(one.samples) for one in found)
    assert all(after.start_samples == one.start_samples + one.samples for one, after in pairwise(found))


def test_what_came_after_the_last_evaluation_is_counted_by_the_clock_of_the_evaluations() -> None:
    trial, curve = ran(
        with_batch_schedule(BASE, milestones((0, 32), (90, 64))), [(0, 0, 0.0), (3, 96, 0.3), (5, 224, 9.0)]
    )
    shared = with_outcome(trial, undelayed_train_seconds=0.7)
    assert told(run_stages(trial, curve))[1] == (96, 64, 2, 128, pytest.approx(8.7))
    assert told(run_stages(shared, curve))[1] == (96, 64, 2, 128, pytest.approx(0.4)), "without the waits for a CPU"


def test_a_trial_that_stays_or_took_no_step_has_no_stages() -> None:
    assert run_stages(*ran(BASE, [(0, 0, 0.0), (4, 128, 1.0)])) == []
    growing = with_batch_schedule(BASE, milestones((0, 32), (90, 64)))
    assert run_stages(make_trial(1, configuration=growing, state=TrialState.RUNNING), []) == []
