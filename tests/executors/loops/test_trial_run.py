"""A loop that trains a trial: its clock, its evaluations, its end and its pauses."""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bssearch.errors import CheckpointError, TrialStopped, UsageError
from bssearch.executors.base import Program
from bssearch.executors.loops.called import CalledExecutor
from bssearch.executors.loops.measuring import end_work
from bssearch.executors.loops.trial_run import WARM_UP_STEPS, LoopClock, TrialRun
from bssearch.records import COULD_NOT_PAUSE, Configuration, Observation, TrialEnded, TrialOutcome, TrialState
from bssearch.training.advisor import _Halves
from tests.executors.line_workload import request_trial
from tests.executors.loops.loops import FORMS, Started, Training, asked, assign, clock_of, trained
from tests.factories import changed, not_none
from tests.training.toys import FakeTime, configuration

every_form = pytest.mark.parametrize("form", FORMS)


def timeless(observations: list[Observation]) -> list[Observation]:
    return [replace(one, train_seconds=0.0) for one in observations]


@every_form
def test_a_trial_ends_where_the_target_is_reached_and_evaluations_are_off_the_clock(form: str) -> None:
    started, training = trained(form, asked(target=0.005))
    outcome = started.line.outcome
    assert outcome.state is TrialState.REACHED
    assert [one.step for one in started.line.observations] == [0, 2, 4, 6]
    assert [one.train_seconds for one in started.line.observations] == [0, 0, 4, 6], "a bound in the first steps"
    assert (outcome.steps, outcome.samples, outcome.train_seconds) == (6, 120, 6)
    assert (outcome.evaluation_seconds, outcome.other_seconds, outcome.wall_seconds) == (400, 0, 406)
    assert outcome.steps_to_target == 5 and outcome.time_to_target_s == pytest.approx(5)
    assert training.evaluated == [0, 2, 4, 6]


@every_form
def test_the_excess_of_the_first_steps_is_warm_up(form: str) -> None:
    seconds = {1: 31.0, 2: 11.0}
    started, _ = trained(form, asked(target=0.009), step_seconds=lambda step: seconds.get(step, 1.0))
    outcome = started.line.outcome
    assert (outcome.train_seconds, outcome.warmup_seconds) == (10, 40)
    assert started.line.observations[-1].train_seconds == 10


def test_waits_for_data_are_train_seconds_and_told_where_batches_is_the_loop() -> None:
    started = Started(asked(target=0.005))
    training = Training(started.trial, started.time)
    loader = training.loader

    class Slow:
        def __iter__(self) -> Any:
            for batch in loader:
                started.time.pass_by(3.0)
                yield batch

    training.loader = Slow()  # type: ignore[assignment]
    training.go("batches")
    started.run.finish()
    assert (started.line.outcome.data_seconds, started.line.outcome.train_seconds) == (18, 24)
    assert trained("while", asked(target=0.005))[0].line.outcome.data_seconds is None


@every_form
def test_a_trial_ends_at_its_limit_between_evaluations(form: str) -> None:
    started, _ = trained(form, asked(train_seconds_limit=6.5, limit_state=TrialState.CAPPED, eval_every_steps=4))
    outcome = started.line.outcome
    assert (outcome.state, outcome.steps, outcome.last_miss_step) == (TrialState.CAPPED, 7, 4)


@every_form
def test_a_stop_that_comes_where_an_evaluation_is_due_takes_effect_after_it(form: str) -> None:
    started = Started(asked()).stop_at(4, TrialState.PRUNED)
    Training(started.trial, started.time).go(form)
    assert (started.line.outcome.state, started.line.outcome.reason) == (TrialState.PRUNED, "as the test says")
    assert (started.line.outcome.steps, started.line.observations[-1].step) == (4, 4)


@every_form
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_metric_that_is_not_finite_ends_the_trial_as_diverged(form: str, value: float) -> None:
    started, _ = trained(form, asked(), metric=lambda step: value if step > 1 else 0.1)
    assert started.line.outcome.state is TrialState.DIVERGED
    assert "accuracy" in started.line.outcome.reason
    assert len(started.line.observations) == 1


def test_a_loss_that_is_not_finite_ends_the_trial_as_diverged() -> None:
    started = Started(asked())
    assert started.trial.batch_size == 20
    while not started.trial.should_stop:
        if started.trial.evaluation_due:
            started.trial.report(loss=math.nan if started.trial.steps else 1.0, accuracy=0.1)
        else:
            started.trial.step()
    assert started.line.outcome.state is TrialState.DIVERGED and "loss" in started.line.outcome.reason


@every_form
def test_memory_that_runs_out_is_an_end_and_other_errors_are_the_scripts(form: str) -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise MemoryError("no more")

    started = Started(asked())
    with pytest.raises(MemoryError) as raised:
        Training(started.trial, started.time, step_fails=fail).go(form)
    assert started.run.ran_out_of_memory(raised.value)
    assert started.line.outcome.state is TrialState.OOM and "no more" in started.line.outcome.reason
    other = Started(asked())
    end_work(other.run, assign(other.request), other.line, ValueError("something else"), other.trial.close)
    assert other.line.outcome.state is TrialState.FAILED and "something else" in other.line.outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize(("form", "accumulation"), [("batches", 1), ("body", 5)])
@pytest.mark.parametrize("order", [{"sampler": True}, {}, {"own_generator": True}])
@pytest.mark.parametrize("stops", [[3], [4, 7], [6], [1, 2, 3]])
def test_a_trial_goes_on_bit_by_bit_where_it_was_paused(
    form: str, order: dict[str, Any], accumulation: int, stops: list[int], tmp_path: Path
) -> None:
    """A pass is two steps of twenty of fifty rows, or with accumulation ten micro-batches and a half step over."""
    at = configuration(20, micro_batch_size=20 // accumulation, accumulation_steps=accumulation)
    whole = asked(tmp_path, configuration=at, target=0.013, eval_every_steps=2)
    reference = Started(whole)
    expected = Training(reference.trial, reference.time, **order).go(form)
    seen: list[Observation] = []
    train_seconds: list[float] = []
    for stop in [*stops, None]:
        part = Started(changed(whole, resumes=bool(seen or train_seconds))).stop_at(stop)
        weights = Training(part.trial, part.time, **order).go(form)
        part.run.finish()
        assert part.line.outcome.state is (TrialState.REACHED if stop is None else TrialState.PAUSED)
        seen += part.line.observations
        train_seconds.append(part.line.outcome.train_seconds)
    reference.run.finish()
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert timeless(seen) == timeless(reference.line.observations)
    outcome = part.line.outcome
    assert outcome.steps_to_target == reference.line.outcome.steps_to_target
    assert outcome.train_seconds == pytest.approx(reference.line.outcome.train_seconds)
    assert outcome.wall_seconds == pytest.approx(
        outcome.train_seconds + outcome.evaluation_seconds + outcome.warmup_seconds + outcome.other_seconds, abs=1e-6
    )


@pytest.mark.parametrize("stop_at", [3, 4])
def test_a_trial_is_paused_once_all_of_a_loops_body_is_done(stop_at: int, tmp_path: Path) -> None:
    """A scheduler may step after the report of an evaluation, which is due after each second step."""
    scheduled = []
    for part in (1, 2):
        request = changed(asked(tmp_path, train_seconds_limit=9.5), resumes=part == 2)
        started = Started(request).stop_at(stop_at if part == 1 else None)
        training = Training(started.trial, started.time, keeps_state=False)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.9)
        started.trial.state(model=training.model, optimizer=training.optimizer, scheduler=scheduler)
        for batch in started.trial.batches(training.loader):
            training.step(batch)
            if started.trial.evaluation_due:
                started.trial.report(**training.evaluate())
            scheduler.step()
        started.run.finish()
        assert started.line.outcome.state is (TrialState.PAUSED if part == 1 else TrialState.EXHAUSTED)
        scheduled.append((started.line.outcome.steps, scheduler.last_epoch))
    assert scheduled == [(stop_at, stop_at), (10, 10)]


def test_the_time_before_the_first_step_and_after_the_last_is_in_the_books_of_a_trial_in_parts(tmp_path: Path) -> None:
    whole = asked(tmp_path, target=0.013)
    for stop in (3, None):
        started = Started(changed(whole, resumes=stop is None)).stop_at(stop)
        started.time.pass_by(50.0)
        Training(started.trial, started.time).go("batches")
        started.run.finish()
    outcome = started.line.outcome
    assert outcome.other_seconds == pytest.approx(100)
    assert outcome.wall_seconds == pytest.approx(outcome.train_seconds + outcome.evaluation_seconds + 100)


def test_without_state_a_trial_is_stopped_and_says_so_and_without_a_file_too(tmp_path: Path) -> None:
    started, _ = trained("batches", asked(tmp_path), stop_at=3, keeps_state=False)
    outcome = started.line.outcome
    assert outcome.state is TrialState.PRUNED
    assert COULD_NOT_PAUSE in outcome.reason and "trial.state" in outcome.reason
    assert trained("batches", asked(), stop_at=3)[0].line.outcome.state is TrialState.PRUNED


def test_a_state_that_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    class Custom:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [{"thing": Path("x")}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing was saved")

    started = Started(asked(tmp_path)).stop_at(3)
    training = Training(started.trial, started.time, keeps_state=False)
    started.trial.state(model=training.model, own=Custom())
    training.go("batches")
    assert started.line.outcome.state is TrialState.PRUNED
    assert COULD_NOT_PAUSE in started.line.outcome.reason
    assert not (tmp_path / "trial").exists()


def test_a_trial_that_is_to_go_on_needs_its_state_and_its_file(tmp_path: Path) -> None:
    resumed = changed(asked(tmp_path), resumes=True)
    with pytest.raises(CheckpointError, match=r"trial\.state"):
        trained("batches", resumed, keeps_state=False)
    with pytest.raises(CheckpointError, match="does not exist"):
        trained("batches", resumed)


@pytest.mark.parametrize(("sampler", "message"), [(True, "before sampler"), (False, r"state\(\) twice")])
def test_state_takes_what_has_a_state_once_and_in_time(sampler: bool, message: str) -> None:
    started = Started(asked())
    with pytest.raises(UsageError, match=r"state\(thing=...\): int lacks"):
        started.trial.state(thing=3)
    training = Training(started.trial, started.time, sampler=sampler)
    with pytest.raises(UsageError, match=message):
        started.trial.state(model=training.model)


def test_a_loop_that_ends_by_itself_exhausts_its_trial_and_needs_a_step_and_an_evaluation() -> None:
    def looped(*, steps: int, every: int) -> TrialOutcome:
        started = Started(asked(eval_every_steps=every))
        with started.trial as trial:
            for _ in range(steps):
                trial.step(trial.batch_size)
                if trial.evaluation_due:
                    trial.report(accuracy=0.5)
        return started.line.outcome

    outcome = looped(steps=3, every=1)
    assert (outcome.state, outcome.steps, outcome.final_metric) == (TrialState.EXHAUSTED, 3, 0.5)
    with pytest.raises(UsageError, match="before its first step"):
        looped(steps=0, every=1)
    with pytest.raises(UsageError, match="step 3 without an evaluation"):
        looped(steps=3, every=100)


def test_a_loop_that_goes_on_after_the_end_is_stopped_and_with_lets_it_through() -> None:
    started = Started(asked(target=0.1))
    with started.trial as trial:
        assert trial.batch_size == 20 and trial.evaluation_due
        trial.report(accuracy=0.5)
        assert [trial.should_stop, trial.evaluation_due] == [True, False]
        trial.report(accuracy=0.5)
        trial.step()
    assert started.line.outcome.state is TrialState.REACHED
    with pytest.raises(TrialStopped):
        started.trial.step()


@pytest.mark.parametrize("form", ["batches", "while"])
@pytest.mark.parametrize(
    ("evaluates_test", "target", "stop_at", "tested"),
    [(True, 0.005, None, 0.006), (False, 0.005, None, None), (True, 2.0, 3, None)],
)
def test_the_test_part_is_evaluated_once_where_it_is_asked_for_and_the_trial_ended_well(
    form: str, evaluates_test: bool, target: float, stop_at: int | None, tested: float | None
) -> None:
    request = changed(asked(target=target), tested=evaluates_test)
    started, training = trained(form, request, stop_at=stop_at)
    assert started.line.outcome.test_metric == tested
    assert len(training.evaluated) == len(started.line.observations) + (tested is not None)
    ledgers = started.line.outcome
    assert ledgers.wall_seconds == pytest.approx(
        ledgers.train_seconds + ledgers.evaluation_seconds + ledgers.warmup_seconds + ledgers.other_seconds
    )


def test_a_loop_that_tests_has_ended_wherever_it_is() -> None:
    started = Started(changed(asked(), tested=True))
    training = Training(started.trial, started.time)
    with pytest.raises(UsageError, match=r"test\(\) in the body of batches\(\)"):
        for _ in started.trial.batches(training.loader, training.evaluate):
            started.trial.test(training.evaluate)
    started = Started(changed(asked(), tested=True))
    training, trial = Training(started.trial, started.time), started.trial
    while not trial.should_stop and trial.steps < 3:
        if trial.evaluation_due:
            trial.report(**training.evaluate())
        training.step(next(iter(training.loader)))
        trial.step()
    trial.test(lambda: {"accuracy": 0.25})
    assert (started.line.outcome.state, started.line.outcome.test_metric) == (TrialState.EXHAUSTED, 0.25)


def test_a_loop_that_never_tests_ends_with_the_script() -> None:
    started = Started(changed(asked(target=0.005), tested=True))
    Training(started.trial, started.time).go("body")
    assert started.line.outcomes == []
    started.time.pass_by(20.0)
    started.run.finish()
    assert started.line.outcome.state is TrialState.REACHED
    assert (started.line.outcome.test_metric, started.line.outcome.other_seconds) == (None, 20)


def test_a_trial_that_does_not_stop_at_the_target_trains_on_to_its_limit() -> None:
    request = changed(asked(target=0.003, train_seconds_limit=8.5), stop_at_target=False)
    outcome = trained("batches", request)[0].line.outcome
    assert (outcome.state, outcome.steps, outcome.steps_to_target) == (TrialState.REACHED, 9, 3)


SPLITS = [configuration(20), configuration(20, micro_batch_size=10, accumulation_steps=2)]


@pytest.mark.parametrize("at", SPLITS, ids=["one micro-batch", "two"])
@pytest.mark.parametrize("form", FORMS)
def test_the_noise_is_measured_near_the_target_alone(form: str, at: Configuration) -> None:
    def passes(metric: float) -> int | None:
        request = asked(configuration=at, target=0.9)
        started, _ = trained(form, request, stop_at=80, metric=lambda step: metric if step else 0.0)
        return started.line.outcome.noise.passes

    assert passes(0.89)
    assert passes(0.5) is None, "far from the target"


def test_the_second_backward_pass_of_a_split_step_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(configuration=configuration(20), target=0.9, train_seconds_limit=80.5)
    started = Started(request)
    training = Training(started.trial, started.time, metric=lambda step: 0.89 if step else 0.0)
    split = _Halves._gradients
    passes = []

    def slow(*given: Any) -> Any:
        passes.append(started.time.seconds)
        started.time.pass_by(50.0)
        return split(*given)

    monkeypatch.setattr(_Halves, "_gradients", slow)
    training.go("batches")
    started.run.finish()
    outcome = started.line.outcome
    assert outcome.noise.passes and len(passes) > 1
    assert outcome.steps == pytest.approx(outcome.train_seconds) == 81
    assert outcome.other_seconds == 50.0 * len(passes)


@pytest.mark.parametrize("at", SPLITS, ids=["one micro-batch", "two"])
@pytest.mark.parametrize("form", FORMS)
def test_measuring_the_noise_changes_no_weight(form: str, at: Configuration, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(configuration=at, target=0.9)
    weights = []
    for measures in (True, False):
        if not measures:
            monkeypatch.setattr(TrialRun, "modelled", lambda self, modules, tokens: None)
        _, training = trained(form, request, stop_at=40, metric=lambda step: 0.89 if step else 0.0)
        weights.append(training.model.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


# The clock of a loop --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> FakeTime:
    return FakeTime()


@pytest.fixture
def clock(fake: FakeTime) -> LoopClock:
    """Return a clock that trains."""
    found = LoopClock(clock_of(fake), threads=1)
    found.train()
    return found


def stepped(clock: LoopClock, fake: FakeTime, *seconds: float) -> None:
    for one in seconds:
        fake.pass_by(one)
        clock.stepped()


def test_seconds_stand_still_until_the_excess_of_the_first_steps_is_known_and_never_run_backwards(
    fake: FakeTime, clock: LoopClock
) -> None:
    told = []
    for seconds in (50.0, 9.0, 2.0, 2.0, 2.0, 6.0, 1.0):
        stepped(clock, fake, seconds)
        told.append(clock.train_seconds())
    assert told[:WARM_UP_STEPS] == [0, 0, 0]
    assert told[3] == 8 and told == sorted(told)
    assert clock.excess == pytest.approx(48 + 7)
    assert clock.train_seconds() == pytest.approx(72 - 55)


def test_a_hit_in_the_first_steps_has_its_seconds(fake: FakeTime, clock: LoopClock) -> None:
    stepped(clock, fake, 5.0, 2.0)
    assert clock.train_seconds(is_hit=True) == 4


def test_the_first_steps_of_each_process_are_warm_up(fake: FakeTime, clock: LoopClock) -> None:
    stepped(clock, fake, 11.0, *[1.0] * 5)
    second = LoopClock(clock_of(fake), threads=1)
    second.restore(clock.state())
    second.train()
    assert second.train_seconds() == 0
    stepped(second, fake, 21.0, *[1.0] * 5)
    assert second.excess == 30
    assert second.state() == {"excess": 30.0, "told": 0.0}


def test_waits_for_a_cpu_in_the_first_steps_are_no_excess(fake: FakeTime, clock: LoopClock) -> None:
    for waited in (0.0, 30.0, 50.0):
        fake.waited_seconds += waited
        stepped(clock, fake, 2.0 + waited)
    assert clock.excess == 0
    assert clock.train_seconds(is_hit=True) == 6


# Killed pieces --------------------------------------------------------------------------------------------------------


@pytest.fixture
def executor() -> Iterator[CalledExecutor]:
    program = Program(default=request_trial(1).plan.configuration, metric="score")
    with closing(CalledExecutor(program, "cpu", 1, "", allow_busy=False)) as made:
        yield made


def test_a_killed_piece_is_not_given_out(executor: CalledExecutor) -> None:
    executor.submit(request_trial(1))
    executor.kill()
    assert [one.outcome.state for one in executor.events(0.0) if isinstance(one, TrialEnded)] == [TrialState.CANCELLED]
    executor.submit(request_trial(2))
    assert getattr(not_none(executor.next_piece()).assign.work, "number", None) == 2


def test_a_late_reply_of_a_killed_piece_does_not_end_the_next_trial(executor: CalledExecutor) -> None:
    executor.submit(request_trial(1))
    killed = not_none(executor.next_piece())
    executor.kill()
    executor.events(0.0)
    executor.submit(request_trial(2))
    killed.send(TrialEnded(1, TrialOutcome(state=TrialState.REACHED, reason="late")))
    assert executor.events(0.0) == []
    executor.kill()
    (ended,) = executor.events(0.0)
    assert isinstance(ended, TrialEnded) and (ended.number, ended.outcome.state) == (2, TrialState.CANCELLED)
