"""The fake executor beyond the contract: its clock, its scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from bssearch.curves import first_crossing
from bssearch.executors.base import Event, Observed
from bssearch.records import (
    MemoryRequest,
    Observation,
    StepTimeRequest,
    Target,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from tests.executors.fake import FakeExecutor
from tests.executors.line_workload import outcomes, request_trial, run_to_the_end
from tests.factories import make_curve

CURVES: Mapping[int, list[Observation]] = {
    1: make_curve((0.0, 0.1), (4.0, 0.5), (8.0, 0.95)),
    2: make_curve((0.0, 0.2), (1.0, 0.4), (2.0, 0.6), (3.0, 0.8)),
}


def play(request: TrialRequest) -> Iterator[Observation | TrialOutcome]:
    yield from CURVES[request.number]


def test_an_event_a_call_that_of_the_trial_which_is_due_first() -> None:
    executor = FakeExecutor(play, slots=2)
    for number in CURVES:
        executor.submit(request_trial(number))
    told: list[tuple[int, float]] = []
    events: list[Event] = []
    while len(outcomes(events)) < 2:
        [event] = executor.events(60.0)
        events.append(event)
        told.append((event.number, executor.seconds))
    assert told == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 3), (1, 4), (1, 8), (1, 8)]
    assert outcomes(events)[2].state is TrialState.EXHAUSTED


def test_a_trial_begins_when_it_is_submitted() -> None:
    executor = FakeExecutor(play)
    run_to_the_end(executor, request_trial(1))
    executor.submit(request_trial(2))
    executor.events(0.0)
    executor.events(0.0)
    assert executor.seconds == 9.0
    assert [request.number for request in executor.requests] == [1, 2]


def test_the_crossing_is_that_of_the_curve() -> None:
    outcome, _ = run_to_the_end(FakeExecutor(play), request_trial(1))
    found = first_crossing(CURVES[1], Target(metric="score", value=0.9))
    assert found is not None and outcome.state is TrialState.REACHED
    assert (outcome.time_to_target_s, outcome.steps_to_target) == (found.train_seconds, found.steps)
    assert (outcome.wall_seconds, outcome.train_seconds) == (8.0, 8.0)


def test_the_limit_lies_between_two_observations() -> None:
    capped = replace(request_trial(1), train_seconds_limit=5.0, limit_state=TrialState.CAPPED)
    outcome, observed = run_to_the_end(FakeExecutor(play), capped)
    assert (outcome.state, outcome.train_seconds, len(observed)) == (TrialState.CAPPED, 5.0, 2)
    assert (outcome.last_miss_seconds, outcome.final_metric) == (4.0, 0.5)


@pytest.mark.parametrize("state", [TrialState.OOM, TrialState.DIVERGED, TrialState.LOST])
def test_an_end_can_be_scripted(state: TrialState) -> None:
    def script(request: TrialRequest) -> Iterator[Observation | TrialOutcome]:
        yield CURVES[1][0]
        yield CURVES[1][1]
        yield TrialOutcome(state=state, reason="as written")

    outcome, observed = run_to_the_end(FakeExecutor(script), request_trial(1))
    assert (outcome.state, outcome.reason, outcome.train_seconds) == (state, "as written", 4.0)
    assert [event.observation for event in observed if isinstance(event, Observed)] == CURVES[1][:2]


def test_step_times_and_memory_are_those_given() -> None:
    executor = FakeExecutor(play, step_times={8: 0.5, 16: None}, largest_micro_batch=32)
    configuration = request_trial(1).configuration
    sizes = [replace(configuration, batch_size=size, micro_batch_size=size) for size in (8, 16, 32, 64)]
    timed = [executor.measure_step_time(StepTimeRequest(configuration=size)) for size in sizes]
    assert [one.step_seconds for one in timed] == [0.5, None, FakeExecutor.STEP_SECONDS, None]
    assert [one.out_of_memory for one in timed] == [False, True, False, True]
    assert [executor.measure_memory(MemoryRequest(configuration=size)).fits for size in sizes] == [True] * 3 + [False]
