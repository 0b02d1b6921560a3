"""What a trial is said to have run in each stage is what it ran."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bssearch.records import Configuration, Observation, TrialRecord, TrialState
from bssearch.records.batch_schedule import BatchSchedule, RunStage, Stage, run_stages, with_batch_schedule
from bssearch.records.scaling import LearningRateRule
from bssearch.training.batches import Growth
from tests.factories import make_trial, with_outcome
from tests.records.test_batch_schedule import BASE, milestones

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
    points = [(0, 0, 0.0), (3, 96, 0.3), (5, 160, 0.5), (7, 416, 0.9), (9, 672, 1.4)]
    found = run_stages(*ran(configuration, points))
    # It grew past 64 at once, at the evaluation of 160 samples.
    assert told(found) == [(0, 32, 5, 160, pytest.approx(0.5)), (160, 128, 4, 512, pytest.approx(0.9))]
    assert [one.learning_rate for one in found] == pytest.approx([0.1, 0.4])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 60), st.integers(1, 9))
def test_the_stages_are_those_of_the_loop(gaps: list[int], steps: int, every: int) -> None:
    sizes = [32 * 2**place for place in range(len(gaps) + 1)]
    starts = [0]
    for gap, size in zip(gaps, sizes, strict=False):
        starts.append(starts[-1] + size + gap)
    schedule = milestones(*zip(starts, sizes, strict=True))
    configuration = with_batch_schedule(BASE, schedule)
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
    configuration = with_batch_schedule(BASE, milestones((0, 32), (90, 64)))
    trial, curve = ran(configuration, [(0, 0, 0.0), (3, 96, 0.3), (5, 224, 9.0)])
    shared = with_outcome(trial, undelayed_train_seconds=0.7)
    assert told(run_stages(trial, curve))[1] == (96, 64, 2, 128, pytest.approx(8.7))
    assert told(run_stages(shared, curve))[1] == (96, 64, 2, 128, pytest.approx(0.4)), "without the waits for a CPU"


def test_a_trial_that_stays_or_took_no_step_has_no_stages() -> None:
    assert run_stages(*ran(BASE, [(0, 0, 0.0), (4, 128, 1.0)])) == []
    growing = with_batch_schedule(BASE, milestones((0, 32), (90, 64)))
    assert run_stages(make_trial(1, configuration=growing, state=TrialState.RUNNING), []) == []
