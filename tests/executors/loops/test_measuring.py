"""A loop that is looked at: what it is, how long its steps take, whether a micro-batch fits, and what it lacks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bssearch.errors import UsageError
from bssearch.executors.loops import measuring
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.measuring import DescribedLoop, Looked, MeasuredMemory, TimedLoop
from bssearch.executors.loops.own_loop import LoopTrial
from bssearch.records import MemoryUse, StepTime, WorkloadDescription
from bssearch.training.contention import ContentionMeter, CorePace
from bssearch.training.probes import SEGMENT_SECONDS, STEPS, WARM_UP_STEPS
from tests.executors.loops.loops import FORMS, FakeLine, Training, assign, clock_of, memory_request, step_time_request
from tests.training.toys import FakeTime, configuration, core_of_pace

every_form = pytest.mark.parametrize("form", FORMS)


def looked(kind: str, fake: FakeTime, line: FakeLine) -> Looked:
    if kind == "describe":
        return DescribedLoop(assign("describe"), line)
    if kind == "memory":
        return MeasuredMemory(assign(memory_request()), line)
    request = step_time_request(trial_train_seconds=400.0, seconds_limit=20.0)
    return TimedLoop(request, assign(request), line, clock=clock_of(fake))


def answer(kind: str, form: str, **settings: Any) -> tuple[Any, Training]:
    """Return what a loop answers, and its training."""
    fake, line = FakeTime(), FakeLine()
    trial = LoopTrial(looked(kind, fake, line), now=lambda: fake.seconds)
    training = Training(trial, fake, **settings)
    training.go(form)
    (reply,) = line.replies
    return reply, training


@every_form
def test_a_loop_is_described_by_its_first_evaluation_and_a_step(form: str) -> None:
    reply, training = answer("describe", form, metric=lambda step: math.nan if step == 0 else 0.5)
    assert isinstance(reply, WorkloadDescription)
    assert set(reply.metrics) == {"accuracy"}
    assert reply.model.initial_metrics == {"accuracy": None}
    assert reply.environment.workload_revision == "abc"
    assert training.taken == 1


@every_form
def test_steps_are_timed_between_evaluations_and_without_them(form: str) -> None:
    slow = {1: 31.0, 2: 9.0}
    reply, training = answer("step-time", form, step_seconds=lambda step: slow.get(step, 2.0))
    assert isinstance(reply, StepTime)
    assert reply.step_seconds == pytest.approx(2.0)
    assert reply.evaluation_seconds == pytest.approx(100.0)
    assert reply.steps_timed == training.taken - WARM_UP_STEPS
    assert reply.settled


@pytest.mark.slow
@every_form
def test_short_steps_are_timed_in_rows_each_step_once(form: str) -> None:
    reply, training = answer("step-time", form, step_seconds=lambda step: SEGMENT_SECONDS / 50)
    assert reply.step_seconds == pytest.approx(SEGMENT_SECONDS / 50)
    assert reply.steps_timed == training.taken - WARM_UP_STEPS


def timed_on(core: CorePace, monkeypatch: pytest.MonkeyPatch) -> StepTime:
    """Return what is told of steps of two seconds, of which each fourth takes nine."""
    monkeypatch.setattr(measuring, "CorePace", lambda: core)
    monkeypatch.setattr(measuring, "contention_meter", lambda device, threads, core: ContentionMeter(device, threads))
    reply, _ = answer("step-time", "while", step_seconds=lambda step: 2.0 if (step - WARM_UP_STEPS) % 4 != 3 else 9.0)
    assert isinstance(reply, StepTime)
    return reply


def test_steps_on_a_slow_core_are_left_out_unless_there_is_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    at_times = timed_on(core_of_pace(1.0, 1.0, 1.0, 1.7), monkeypatch)
    assert (at_times.step_seconds, at_times.step_seconds_high) == pytest.approx((2.0, 2.0))
    assert "the core was slow" not in (at_times.reason or "")
    always = timed_on(core_of_pace(1.0, *[1.7] * 999), monkeypatch)
    assert always.step_seconds == pytest.approx(2.0)
    assert always.contended and "the core was slow in" in (always.reason or "")


@every_form
def test_a_micro_batch_fits_after_three_steps_and_an_evaluation(form: str) -> None:
    reply, training = answer("memory", form)
    assert isinstance(reply, MemoryUse) and reply.fits
    assert (training.taken, training.evaluated) == (STEPS, [STEPS])


@pytest.mark.parametrize("kind", ["memory", "step-time"])
def test_memory_that_runs_out_is_an_answer(kind: str) -> None:
    line = FakeLine()
    loop = looked(kind, FakeTime(), line)
    LoopTrial(loop)
    loop.begin()
    assert not loop.failed(ValueError("no")) and loop.failed(MemoryError("full"))
    (reply,) = line.replies
    said: Any = reply
    assert said.fits is False if kind == "memory" else said.out_of_memory


@pytest.mark.parametrize("kind", ["describe", "memory", "step-time"])
def test_a_loop_that_lacks_something_is_told_what(kind: str) -> None:
    fake = FakeTime()
    trial = LoopTrial(looked(kind, fake, FakeLine()), now=lambda: fake.seconds)
    training = Training(trial, fake)
    with pytest.raises(UsageError, match="no evaluation after step"):
        for batch in trial.batches(training.loader):
            training.step(batch)
    loop = looked(kind, fake, FakeLine())
    with pytest.raises(UsageError, match="the loop"):
        loop.looped(2)


def alone(form: str = "while", **settings: Any) -> Training:
    fake = FakeTime()
    trial = LoopTrial(Alone(configuration(), 3, {"depth": 2}, **settings), now=lambda: fake.seconds)
    return Training(trial, fake)


@pytest.mark.parametrize("form", ["batches", "body"])
def test_alone_a_loop_trains_its_epochs_and_evaluates_as_it_says(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    training = alone(evaluate_every=4)
    training.go(form, epochs=3)
    assert training.taken == 6
    assert training.evaluated[:1] == [4]
    told = capsys.readouterr()
    assert told.out == "" and "step 4: accuracy 0.004" in told.err
    assert ("test: accuracy 0.006" in told.err) is (form == "batches")
    quiet = alone()
    quiet.go(form, epochs=1)
    assert (quiet.taken, dict(quiet.trial.parameters)) == (2, {"depth": 2})
    assert quiet.evaluated == ([2, 2] if form == "batches" else []), "after its pass, and the test part"


def test_alone_a_loop_without_epochs_ends_after_its_steps() -> None:
    training = alone(steps=6, evaluate_every=3)
    training.go("while")
    assert (training.taken, training.evaluated) == (6, [3, 6, 6]), "the last one is of the test part"
    training = alone(steps=5, evaluate_every=3)
    training.go("while")
    assert (training.taken, training.evaluated) == (5, [3, 5])
    with pytest.raises(UsageError, match=r"steps=0\): must be >= 1"):
        alone(steps=0)
