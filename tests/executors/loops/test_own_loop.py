"""A user's loop: mistakes, pitfalls, warnings, sampler, steps of a workload, descriptions, measurements, branches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from bssearch import Part, UsageError
from bssearch.commands.opening import program_of
from bssearch.executors.base import ExecutorSettings, Load, Program
from bssearch.executors.loaded import LoadedWorkload
from bssearch.executors.loops import measuring
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.measuring import DescribedLoop, Looked, MeasuredMemory, MeasuredNoise, TimedLoop
from bssearch.executors.loops.own_loop import READINGS_PER_MICRO_BATCH, Trial
from bssearch.executors.loops.passes import SeededSampler
from bssearch.executors.loops.pitfalls import Averages, about_ranks, trained_modules
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.executors.programs.script import LoadedScript
from bssearch.records import (
    Branch,
    Configuration,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    ParameterValue,
    StepTime,
    TrialState,
    WorkloadDescription,
)
from bssearch.records.noise_scale import FEWEST_PASSES
from bssearch.spec import TrainingSpec
from bssearch.training.contention import ContentionMeter, CorePace
from bssearch.training.probes import SEGMENT_SECONDS, STEPS, WARM_UP_STEPS
from bssearch.training.trainer import seed_everything
from tests.executors.loops.loops import (
    FORMS,
    ROWS,
    FakeLine,
    Started,
    Training,
    asked,
    assign,
    clock_of,
    memory_request,
    step_time_request,
    trained,
)
from tests.executors.test_script import single_threaded
from tests.factories import SPEC, changed, make_noise_request, make_spec, not_none
from tests.training.toys import FakeTime, batches_of, configuration, core_of_pace, on_cpu, request, run_trial


def test_evaluations_draw_random_numbers_that_the_training_does_not_miss() -> None:
    for every in (1, 3):
        first, second = (
            trained(form, asked(eval_every_steps=every, target=0.006), metric=lambda step: float(step >= 5))[1].model
            for form in ("batches", "body")
        )
        assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


@pytest.fixture
def started() -> Started:
    return Started(asked())


@pytest.fixture
def training(started: Started) -> Training:
    return Training(started.trial, started.time)


@pytest.mark.parametrize(
    ("asks", "said"), [(True, r"did not call report\(\) after step 2"), (False, "no evaluation after")]
)
def test_going_on_without_a_report_or_without_asking_is_an_error(
    asks: bool, said: str, started: Started, training: Training
) -> None:
    with pytest.raises(UsageError, match=said):
        for batch in started.trial.batches(training.loader):
            training.step(batch)
            assert not asks or started.trial.evaluation_due == (started.trial.steps == 1)
    started = Started(asked())
    assert started.trial.batch_size == 20
    started.trial.step()
    started.trial.step()
    with pytest.raises(UsageError, match="no evaluation after step 2"):
        started.trial.step()


def test_a_report_where_none_is_due_is_an_error() -> None:
    trial = Started(asked()).trial
    assert trial.batch_size == 20
    trial.step()
    with pytest.raises(UsageError, match=r"after step 1, but trial.evaluation_due was not true"):
        trial.report(accuracy=0.5)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": 1.0}, "reports loss; the study's target metric is 'accuracy'"),
        ({"accuracy": "high"}, "accuracy = 'high', which is not a number"),
        (0.9, "returned float; expected a mapping"),
        ({}, "reports no metric"),
    ],
)
def test_an_evaluation_reports_the_targets_metric_as_a_number(
    metrics: Any, message: str, started: Started, training: Training
) -> None:
    with pytest.raises(UsageError, match=message):
        next(iter(started.trial.batches(training.loader, lambda: metrics)))


def test_further_metrics_are_let_be() -> None:
    started = Started(asked(target=0.5))
    training = Training(started.trial, started.time)
    for batch in started.trial.batches(training.loader, lambda: {"accuracy": 0.7, "f1": 0.1, "note": "good"}):
        training.step(batch)
    assert started.line.outcome.final_metric == 0.7


def test_a_loop_that_goes_round_without_a_step_is_an_error() -> None:
    trial = Started(asked()).trial
    assert trial.batch_size == 20
    with pytest.raises(UsageError, match=rf"read trial\.should_stop {READINGS_PER_MICRO_BATCH} times after step 0"):
        while not trial.should_stop:
            pass


def test_an_empty_loader_and_an_exhausted_one_are_errors() -> None:
    loaders: list[Any] = [[], iter([torch.zeros(20, 3)])]
    for loader in loaders:
        trial = Started(asked(eval_every_steps=100)).trial
        assert trial.batch_size == 20
        with pytest.raises(UsageError, match="the loader of batches"):
            for _ in trial.batches(loader, lambda: {"accuracy": 0.1}):
                pass


def test_one_loop_at_a_time_and_no_step_in_its_body(started: Started, training: Training) -> None:
    for mistake in (started.trial.step, lambda: next(iter(started.trial.batches(training.loader)))):
        with pytest.raises(UsageError, match=r"in the body of batches|inside the body of batches"):
            for _ in started.trial.batches(training.loader, training.evaluate):
                mistake()


@pytest.mark.parametrize(
    ("accumulation_steps", "asks", "said"),
    [
        (1, (), r"without reading trial\.batch_size"),
        (4, ("batch_size",), r"does not read trial\.micro_batch_size"),
        (4, ("micro_batch_size",), r"does not read trial\.accumulation_steps"),
        (4, ("batch_size", "micro_batch_size"), None),
    ],
)
def test_a_script_must_ask_for_its_batch_size_and_for_what_it_accumulates(
    accumulation_steps: int, asks: tuple[str, ...], said: str | None
) -> None:
    split = {"micro_batch_size": 20 // accumulation_steps, "accumulation_steps": accumulation_steps}
    trial = Started(asked(configuration=configuration(20, **split))).trial
    for name in asks:
        assert getattr(trial, name)
    with pytest.raises(UsageError, match=said) if said else nullcontext():
        trial.step()


@pytest.mark.parametrize(
    ("batch", "warns"),
    [
        ((torch.zeros(20, 3), torch.zeros(20)), False),
        ({"ids": torch.zeros(7, 20), "mask": torch.zeros(7, 20)}, False),
        ((torch.zeros(16, 3), torch.zeros(16)), True),
        (["no", "tensor"], False),
        ((torch.zeros(()), torch.zeros(20, 3)), False),
    ],
)
def test_a_loader_of_another_batch_size_is_warned_of(batch: Any, warns: bool) -> None:
    started = Started(asked(target=0.5, eval_every_steps=1))
    assert started.trial.micro_batch_size == 20
    for _ in started.trial.batches([batch, batch], lambda: {"accuracy": started.trial.steps}):
        started.time.pass_by(1.0)
    assert any("first batch has 16 samples" in one for one in started.line.outcome.warnings) is warns


@pytest.mark.parametrize("size", [1, 7, 20, 50])
@pytest.mark.parametrize("after", [0, 1, 2, 9])
def test_the_sampler_has_the_rows_of_bssearchs_own_loop(size: int, after: int) -> None:
    sampler = SeededSampler(ROWS, size, seed=3, after_steps=after)
    own = batches_of(Part(torch.arange(ROWS), torch.zeros(ROWS)), configuration(size), on_cpu(), 3, after_steps=after)
    drawn = [row for _ in range(3) for row in sampler]
    assert drawn == torch.cat([inputs for inputs, _ in islice(own, len(drawn) // size)]).tolist()
    assert len(sampler) == ROWS - ROWS % size
    assert list(SeededSampler(ROWS, size, seed=4)) != list(SeededSampler(ROWS, size, seed=3))


def test_parameters_cannot_be_changed() -> None:
    started, _ = trained("batches", asked(target=0.001))
    with pytest.raises(TypeError):
        started.trial.parameters["depth"] = 3  # type: ignore[index]


PARAMETERS: dict[str, ParameterValue] = {"weight_decay": 0.1, "depth": 3, "device_name": "x"}
SEARCHED = ("batch_size", "learning_rate", "weight_decay", "depth")


def loop(reads: Callable[[Trial], object]) -> tuple[Started, Trial]:
    """Return a trial of a study that searches more than the loop may read, after its first steps."""
    started = Started(asked())
    run = TrialRun(started.request, assign(started.request, given=PARAMETERS), started.line)
    run.searched = SEARCHED
    trial = Trial(run)
    seed_everything(trial.seed)
    for _ in trial.batches(range(trial.batch_size), evaluate=lambda: {"accuracy": trial.steps / 3}):
        reads(trial)
    return started, trial


def test_a_loop_that_never_asks_for_a_learning_rate_that_is_searched_is_refused() -> None:
    with pytest.raises(UsageError, match=r"searches learning_rate, .* trial\.learning_rate"):
        loop(lambda trial: dict(trial.parameters))


@pytest.mark.parametrize(
    ("reads", "ignored"),
    [
        (lambda trial: (trial.learning_rate, trial.parameters["depth"]), ["weight_decay"]),
        (lambda trial: (trial.learning_rate, trial.parameters.get("nothing")), ["weight_decay", "depth"]),
        (lambda trial: (trial.learning_rate, "depth" in trial.parameters), ["weight_decay", "depth"]),
        (lambda trial: (trial.learning_rate, dict(trial.parameters)), []),
        (lambda trial: (trial.learning_rate, list(trial.parameters.items())), []),
    ],
)
def test_a_loop_is_warned_of_each_other_parameter_that_it_did_not_ask_for(
    reads: Callable[[Trial], object], ignored: list[str]
) -> None:
    started, trial = loop(reads)
    assert trial.steps > 1
    warnings = started.line.outcome.warnings
    assert [name for name in PARAMETERS if any(f"searches {name}," in one for one in warnings)] == ignored
    assert len([one for one in warnings if "searches" in one]) == len(ignored)


@pytest.mark.parametrize(("searched", "told"), [((), None), (("depth",), "the study searches depth, but")])
def test_what_a_loop_ignores_is_told_with_its_description(searched: tuple[str, ...], told: str | None) -> None:
    line = FakeLine()
    described = DescribedLoop(assign("describe", given=PARAMETERS), line)
    described.searched = searched
    trial = Trial(described)
    for _ in trial.batches([[0] * trial.batch_size] * 2, evaluate=lambda: {"accuracy": 0.5}):
        pass
    assert isinstance(line.replies[0], WorkloadDescription)
    notice = line.replies[0].notice
    assert notice is None if told is None else (notice is not None and told in notice)


@pytest.mark.parametrize(("rate", "is_told"), [(0.5, True), (None, False)])
def test_an_optimizer_that_does_not_have_the_trials_learning_rate_is_told(
    rate: float | None, is_told: bool, started: Started
) -> None:
    run = TrialRun(started.request, assign(started.request), started.line)
    run.searched = SEARCHED
    trial = Trial(run)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate or trial.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    trial.state(model=model, optimizer=optimizer, schedule=schedule)
    assert trial.learning_rate
    for _ in trial.batches(range(trial.batch_size), evaluate=lambda: {"accuracy": trial.steps / 3}):
        optimizer.step()
    assert any("no optimizer of trial.state has the trial's" in one for one in started.line.outcome.warnings) is is_told


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import bssearch
from bssearch.workloads.digits import Digits

trial = bssearch.current_trial(batch_size=32, learning_rate=0.05)
digits = Digits()
data = digits.load(torch.device("cpu"))
model = digits.build_model(dropout=0.2)
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate, momentum=0.9, nesterov=True)
train = TensorDataset(data.train.inputs, data.train.targets)
loader = DataLoader(
    train, batch_size=trial.micro_batch_size, sampler=trial.sampler(train), generator=torch.Generator()
)


def evaluate():
    model.eval()
    with torch.no_grad():
        metrics = digits.evaluate(model, data.validation)
    model.train()
    return metrics


optimizer.zero_grad()
for number, (inputs, targets) in enumerate(trial.batches(loader, evaluate), start=1):
    loss = digits.loss(model, inputs, targets, label_smoothing=0.0) / trial.accumulation_steps
    loss.backward()
    if number % trial.accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "seed"), [(64, 5), (32, 6)])
def test_digits_as_a_workload_and_as_a_loop_take_identical_steps_to_the_target(
    micro: int, seed: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    program = Program(default=configuration(64), metric="accuracy", script="train.py")
    settings = ExecutorSettings(workload="train.py", folder=tmp_path, device="cpu", program=program)
    with single_threaded(), closing(LoadedScript(Load(settings=settings, slot=0))) as script:
        check_equals_workload(script, micro, seed)


def check_equals_workload(script: LoadedScript, micro: int, seed: int, rounding: float = 0.0) -> None:
    """Assert that a script's trial has the steps and metrics of the workload `digits`."""
    at = Configuration(
        batch_size=64, micro_batch_size=micro, accumulation_steps=64 // micro, learning_rate=0.05, dropout=0.2
    )
    wanted = changed(request(at, target=0.95, seed=seed, eval_every_steps=7), train_seconds_limit=60.0)
    settings = ExecutorSettings(workload="digits", device="cpu", training=TrainingSpec(measure_noise=False))
    workload = LoadedWorkload(Load(settings=settings, slot=0))
    there: list[Observation] = []
    here: list[Observation] = []
    with_workload = run_trial(workload.trial(wanted, stop=lambda: None), there.append)
    with_script = script.run(wanted, here.append, stop=lambda: None)
    assert with_script.state is with_workload.state is TrialState.REACHED, with_script.reason
    assert with_script.steps_to_target == with_workload.steps_to_target
    assert [one.step for one in here] == [one.step for one in there] and len(here) > 3
    assert [one.metric for one in here] == pytest.approx([one.metric for one in there], abs=rounding, rel=0.0)


# Pitfalls -------------------------------------------------------------------------------------------------------------


DATA = TensorDataset(torch.randn(64, 4))


def warnings_of(train: Any, **changes: Any) -> list[str]:
    """Warnings of a trial of four steps of 16 samples in micro-batches of 8, trained by a function."""
    sizes = {"batch_size": 16, "micro_batch_size": 8, "accumulation_steps": 2, **changes}
    started = Started(asked(configuration=configuration(**sizes))).stop_at(4)
    train(started.trial)
    started.run.finish()
    return [one for one in started.line.outcome.warnings if not one.startswith("contended")]


def pitfall_loop(trial: Trial, *, norm: bool = False, averages_at: str | None = None, shuffle: bool = True) -> None:
    """Train a small network; its average of weights follows each step or each micro-batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
    average = AveragedModel(model)
    state = {"model": model, "optimizer": optimizer}
    trial.state(**state, **({"average": average} if averages_at else {}))
    loader = DataLoader(DATA, batch_size=trial.micro_batch_size, shuffle=shuffle)
    for number, (rows,) in enumerate(trial.batches(loader, evaluate=lambda: {"accuracy": 0.5}), start=1):
        (model(rows).sum() / trial.accumulation_steps).backward()
        is_whole = number % trial.accumulation_steps == 0
        if is_whole:
            optimizer.step()
            optimizer.zero_grad()
        if averages_at == "micro-batch" or (averages_at == "step" and is_whole):
            average.update_parameters(model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"norm": True}, "batch normalisation"),
        ({"averages_at": "micro-batch"}, "average of trial.state changes between"),
        ({"shuffle": False}, "does not shuffle"),
        ({"averages_at": "step"}, None),
        ({}, None),
    ],
)
def test_a_loop_is_warned_of_what_distorts_a_comparison(settings: dict[str, Any], said: str | None) -> None:
    found = warnings_of(lambda trial: pitfall_loop(trial, **settings))
    assert found == [] if said is None else any(said in one for one in found)


def test_batch_normalisation_of_ranks_is_to_be_synchronised() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    (alone,) = about_ranks([nn.Sequential(model, nn.SyncBatchNorm(4))])
    assert alone.startswith("1 batch normalisation layer")
    assert about_ranks([nn.SyncBatchNorm.convert_sync_batchnorm(model)]) == []  # type: ignore[no-untyped-call]
    assert about_ranks([nn.Linear(4, 4)]) == []


def test_only_trained_modules_count_and_each_once() -> None:
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner)
    assert trained_modules({"inner": inner, "outer": outer, "number": 3}) == [outer]
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    assert trained_modules({"model": outer, "average": AveragedModel(outer), "optimizer": optimizer}) == [outer]


class Kept:
    """An object with a state."""

    def __init__(self, values: Any, *, copies: bool = False) -> None:
        self.values, self._copies = values, copies

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone() if self._copies else self.values}


@pytest.mark.parametrize(
    ("kept", "change", "is_told"),
    [
        (Kept(torch.zeros(2)), lambda kept: kept.values.add_(1), True),
        (Kept(torch.zeros(2)), lambda kept: setattr(kept, "values", torch.ones(2)), True),
        (Kept(torch.zeros(2)), lambda kept: None, False),
        (Kept(torch.zeros(2), copies=True), lambda kept: None, False),
        (Kept(torch.zeros(2).to_sparse()), lambda kept: None, False),
        (nn.BatchNorm1d(4), lambda norm: norm(torch.randn(8, 4)), False),
        (Kept(torch.inference_mode()(torch.zeros)(2)), lambda kept: None, False),
    ],
)
def test_an_average_is_told_by_its_tensors_alone(kept: Any, change: Any, is_told: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    averages = Averages({"optimizer": optimizer, "kept": kept})
    averages.step_begins()
    change(kept)
    assert (averages.changed() is not None) is is_told


@pytest.mark.parametrize(("averages_at", "is_told"), [("micro-batch", True), ("step", False)])
def test_a_study_that_accumulates_is_told_of_a_wrong_average_before_it_trains(averages_at: str, is_told: bool) -> None:
    space = {**SPEC["space"], "max_micro_batch_size": 32}
    program = not_none(program_of(make_spec(space=space, workload="train.py", workload_settings={})))
    assert (program.default.batch_size, program.default.accumulation_steps) == (32, 2)
    line = FakeLine()
    pitfall_loop(Trial(DescribedLoop(assign("describe", at=program.default), line)), averages_at=averages_at)
    (described,) = line.replies
    assert isinstance(described, WorkloadDescription)
    assert ("average of trial.state changes" in (described.notice or "")) == is_told


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_description_says_whether_the_first_step_has_the_whole_rate(factor: float) -> None:
    line = FakeLine()
    trial = Trial(DescribedLoop(assign("describe"), line))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate * factor)
    trial.state(model=model, optimizer=optimizer)
    loader = DataLoader(DATA, batch_size=trial.micro_batch_size, shuffle=True)
    for (rows,) in trial.batches(loader, evaluate=lambda: {"accuracy": 0.5}):
        model(rows).sum().backward()
        optimizer.step()
    (described,) = line.replies
    assert isinstance(described, WorkloadDescription)
    assert described.starts_at_peak == (factor == 1.0)


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
    with pytest.raises(UsageError, match=r"evaluate\(\) returned float"):
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
