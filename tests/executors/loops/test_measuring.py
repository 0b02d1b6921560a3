"""Descriptions and measurements of a loop, runs without a search, and branches."""

import math
import time
from typing import Any, cast

import pytest
import torch
from torch import nn

from bssearch import Trial, UsageError
from bssearch.executors.loops import measuring
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.measuring import DescribedLoop, Looked, MeasuredMemory, MeasuredNoise, TimedLoop
from bssearch.records import (
    Branch,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    StepTime,
    TrialState,
    WorkloadDescription,
)
from bssearch.records.noise_scale import FEWEST_PASSES
from bssearch.training.contention import ContentionMeter, CorePace
from bssearch.training.probes import SEGMENT_SECONDS, STEPS, WARM_UP_STEPS
from tests.executors.loops.loops import (
    FORMS,
    FakeLine,
    Started,
    Training,
    asked,
    assign,
    clock_of,
    memory_request,
    step_time_request,
)
from tests.factories import make_noise_request
from tests.training.toys import FakeTime, configuration, core_of_pace

every_form = pytest.mark.parametrize("form", FORMS)


LOOKS = ["describe", "step-time", "memory"]


def looked(kind: str, fake: FakeTime, line: FakeLine) -> Looked:
    if kind == "describe":
        return DescribedLoop(assign("describe"), line)
    if kind == "memory":
        return MeasuredMemory(assign(memory_request()), line)
    request = step_time_request(trial_train_seconds=400.0, seconds_limit=20.0)
    return TimedLoop(request, assign(request), line, clock=clock_of(fake))


def answer(kind: str, form: str, **settings: Any) -> tuple[Any, Training]:
    """Return the answer of a loop, and its training."""
    fake, line = FakeTime(), FakeLine()
    trial = Trial(looked(kind, fake, line), now=lambda: fake.seconds)
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
    """Return the step time of steps that take 2 s, and every fourth 9 s."""
    monkeypatch.setattr(measuring, "CorePace", lambda: core)
    monkeypatch.setattr(measuring, "contention_meter", lambda device, threads, *_: ContentionMeter(device, threads))
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
    Trial(loop)
    loop.begin()
    assert loop.ran_out_of_memory(MemoryError("full"))
    (reply,) = line.replies
    said: Any = reply
    assert said.fits is False if kind == "memory" else said.out_of_memory


@pytest.mark.parametrize("kind", LOOKS)
def test_a_loop_that_lacks_something_is_told_what(kind: str) -> None:
    fake = FakeTime()
    trial = Trial(looked(kind, fake, FakeLine()), now=lambda: fake.seconds)
    training = Training(trial, fake)
    with pytest.raises(UsageError, match="no evaluation after step"):
        for batch in trial.batches(training.loader):
            training.step(batch)
    loop = looked(kind, fake, FakeLine())
    with pytest.raises(UsageError, match="the loop"):
        loop.looped(2)


def alone(form: str = "while", **settings: Any) -> Training:
    fake = FakeTime()
    trial = Trial(Alone(configuration(), 3, {"depth": 2}, **settings), now=lambda: fake.seconds)
    return Training(trial, fake)


def test_alone_an_evaluation_must_be_a_mapping() -> None:
    training, metrics = alone(evaluate_every=1), cast(Any, 0.5)
    with pytest.raises(UsageError, match=r"evaluate\(\) returned a float"):
        for batch in training.trial.batches(training.loader, lambda: metrics):
            training.step(batch)


@pytest.mark.parametrize("form", ["batches", "body"])
def test_alone_a_loop_trains_its_epochs_and_evaluates_as_it_says(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    training = alone(evaluate_every=4)
    training.go(form, epochs=3)
    assert (training.taken, training.evaluated[:1]) == (6, [4])
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
    with pytest.raises(UsageError, match=r"steps = 0 must be >= 1"):
        alone(steps=0)


BRANCH = Branch(checkpoint="run.pt", samples=140, start_samples=1000)


def branched(**changes: Any) -> Started:
    """Return a trial of seven steps of twenty samples, evaluated at 0, 3, 6 and at its end."""
    return Started(asked(branch=BRANCH, eval_every_steps=3, stop_at_target=False, **changes))


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_ends_with_the_samples_of_its_branch_where_it_is_evaluated(form: str) -> None:
    started = branched()
    assert (started.trial.checkpoint, Started(asked()).trial.checkpoint) == ("run.pt", None)
    Training(started.trial, started.time, keeps_state=False).go(form)
    started.run.finish()
    assert (started.line.outcome.state, started.line.outcome.steps) == (TrialState.EXHAUSTED, 7)
    assert [one.samples for one in started.line.observations] == [0, 60, 120, 140]


def test_a_loop_that_does_not_ask_for_its_checkpoint_is_refused() -> None:
    started = branched()
    with pytest.raises(UsageError, match=r"run\.pt, but did not read trial\.checkpoint"):
        Training(started.trial, started.time, keeps_state=False).go("batches")


def saved_state(rate: float = 7.0) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the state of an optimizer that has taken a step at a rate, and its momentum."""
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict(), optimizer.state[layer.weight]["momentum_buffer"]


def test_a_loaded_optimizer_keeps_its_own_learning_rate() -> None:
    state, momentum = saved_state()
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.8)
    branched().trial.load_optimizer(optimizer, state)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.8)
    assert torch.equal(optimizer.state[layer.weight]["momentum_buffer"], momentum)
    with pytest.raises(UsageError, match=r"the state does not fit the optimizer: .* betas"):
        branched().trial.load_optimizer(torch.optim.AdamW(layer.parameters()), state)


@pytest.mark.filterwarnings("ignore")  # its own, of PyTorch
@pytest.mark.slow
class TestLightning:
    @pytest.fixture(autouse=True)
    def _lightning(self) -> None:
        pytest.importorskip("lightning")

    def test_a_module_that_has_loaded_its_weights_and_its_optimizer_is_a_branch(self) -> None:
        from tests.executors.loops.test_lightning import GIVEN, Tiny, fit

        state, _ = saved_state()
        started = branched()
        started.trial.given = GIVEN
        assert started.trial.checkpoint == "run.pt"

        def optimizers(module: Any) -> Any:
            made = torch.optim.SGD(module.parameters(), lr=GIVEN["learning_rate"], momentum=0.9)  # type: ignore[arg-type]
            started.trial.load_optimizer(made, state)
            return made

        module = fit(started.trial, started.time, module=Tiny(started.time, optimizers))
        started.run.finish()
        assert started.line.outcome.steps == 7
        assert module.rates == pytest.approx([0.02] * 7)  # the trial's, by the callback


def noise_request(**changes: Any) -> NoiseRequest:
    return make_noise_request(configuration(20), eval_every_steps=2, **changes)


@pytest.mark.parametrize("limit", [1e9, 0.0])
@every_form
def test_the_noise_of_a_loop_is_measured_at_one_point(form: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PRECISION", math.inf)
    line = FakeLine()
    request = noise_request(train_seconds_limit=limit)
    training = Training(
        Trial(MeasuredNoise(request, assign(request), line)), FakeTime(), metric=lambda step: 0.89 if step > 3 else 0.1
    )
    weights: list[torch.Tensor] = []
    training.step_fails = lambda taken: weights.append(next(training.model.parameters()).detach().clone())
    training.go(form)
    (found,) = line.replies
    assert isinstance(found, NoiseMeasurement)
    assert (found.step, found.metric) == ((4, 0.89) if limit else (0, 0.1))
    assert (found.reason is None) == bool(limit)
    assert found.noise.passes == 2 * FEWEST_PASSES
    assert all(torch.equal(one, weights[-1]) for one in weights[found.step + 1 :])


def test_the_time_before_the_first_step_does_not_count_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PRECISION", math.inf)
    line, request = FakeLine(), noise_request(train_seconds_limit=1.0)
    work = MeasuredNoise(request, assign(request), line)
    later = time.perf_counter() + 1000
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    Training(Trial(work), FakeTime(), metric=lambda step: 0.89 if step > 3 else 0.1).go("batches")
    (found,) = line.replies
    assert isinstance(found, NoiseMeasurement) and (found.step, found.reason) == (4, None)


def test_the_noise_of_a_loop_needs_its_model() -> None:
    request = noise_request()
    training = Training(
        Trial(MeasuredNoise(request, assign(request), FakeLine())),
        FakeTime(),
        metric=lambda step: 0.89 if step else 0.1,
        keeps_state=False,
    )
    with pytest.raises(UsageError, match="did not name its model"):
        training.go("batches")
