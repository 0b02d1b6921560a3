"""Common behaviour of all executors. A new executor is one more entry in `EXECUTORS`."""

import gc
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bssearch import LaunchError, UsageError, WorkloadError
from bssearch.executors.base import Executor, ExecutorSettings, make_executor
from bssearch.executors.inline import PYTHON_THRESHOLDS, InlineExecutor
from bssearch.records import (
    MemoryRequest,
    NoiseRequest,
    Observation,
    StepTimeRequest,
    TrialEnded,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
)
from bssearch.spec import StudySpec, TrainingSpec
from tests.executors.fake import FakeExecutor
from tests.executors.line_workload import (
    BEHAVIOURS,
    outcomes,
    request_endless_trial,
    request_trial,
    run_and_stop,
    run_to_the_end,
    wait_for,
    write_workload,
)
from tests.factories import changed, make_spec


def opened(kind: str, folder: Path) -> AbstractContextManager[Executor]:
    """Return a context with an executor that runs or plays the line workload."""
    write_workload(folder)
    settings = ExecutorSettings(workload="line.py:Line", folder=folder, device="cpu", hang_seconds=60.0)
    return closing(FakeExecutor(play_line) if kind == "fake" else make_executor(kind, settings))


MISHAPS = {"raise": RuntimeError("the user's own mistake"), "out_of_memory": MemoryError("no more of it")}


def play_line(request: TrialRequest) -> Iterator[Observation | TrialOutcome]:
    """Play the line workload: a curve that rises with the learning rate, and a mishap at step 40."""
    configuration = request.plan.configuration
    behaviour = BEHAVIOURS[round(100 * configuration.dropout)]
    for step in itertools.count(0, request.plan.eval_every_steps):
        if step >= 40:
            if behaviour in MISHAPS:
                raise MISHAPS[behaviour]
            if behaviour == "diverge":
                yield TrialOutcome(state=TrialState.DIVERGED, reason="the training loss is not finite")
            if behaviour == "say" and step == 40:
                print("said by the workload")
        yield Observation(
            step=step,
            samples=step * configuration.batch_size,
            train_seconds=0.001 * step,
            metric=1.0 - math.exp(-configuration.learning_rate * step),
            loss=None if step == 0 else 0.5,
            learning_rate=configuration.learning_rate,
        )


EXECUTORS = ["local", "inline", "ray", "fake"]

SLOW = {"ray"}
"""Their start takes many seconds."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in EXECUTORS]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def executor(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Yield an executor for the tests that leave it idle and well."""
    with opened(kind, tmp_path_factory.mktemp("line")) as made:
        yield made


def request_learning_trial(number: int, behaviour: str = "learn", *, seconds: float) -> TrialRequest:
    """Return a request that learns, but whose target is out of reach."""
    return request_trial(number, behaviour, seconds=seconds, target=2.0)


@pytest.mark.slow
def test_the_workload_is_described(executor: Executor) -> None:
    description = executor.describe()
    assert (description.train_samples, description.validation_samples, description.test_samples) == (64, 16, 16)
    assert list(description.metrics) == ["score"]
    assert (description.metrics["score"].chance, description.environment.device_type) == (0.0, "cpu")
    assert description.environment.workload_revision is not None
    assert (description.model.parameters, description.model.batch_norm_layers) == (5, 0)
    assert description.model.initial_metrics.keys() == {"score"}
    assert description.tokens_per_sample is None


def test_a_trial_that_reaches_its_target_tells_each_evaluation_and_its_end_once(executor: Executor) -> None:
    request = request_trial(1)
    outcome, observations = run_to_the_end(executor, request)
    assert outcome.state is TrialState.REACHED
    assert [one.step for one in observations] == list(range(0, outcome.steps + 1, 2))
    assert [one.metric >= 0.9 for one in observations] == [False] * (len(observations) - 1) + [True]
    assert (outcome.final_metric, outcome.first_hit_step) == (observations[-1].metric, outcome.steps)
    assert outcome.last_miss_step == observations[-2].step
    assert outcome.steps_to_target is not None and outcome.last_miss_step < outcome.steps_to_target <= outcome.steps
    assert outcome.time_to_target_s is not None and outcome.time_to_target_s <= observations[-1].train_seconds


def test_the_same_request_twice_takes_the_same_steps(executor: Executor) -> None:
    first, second = (run_to_the_end(executor, request_trial(number))[0] for number in (1, 2))
    assert (first.steps_to_target, first.final_metric) == (second.steps_to_target, second.final_metric)


def test_the_test_part_is_evaluated_where_it_is_asked_for(executor: Executor) -> None:
    asked = [changed(request_trial(1), tested=test) for test in (True, False)]
    first, second = (run_to_the_end(executor, request)[0].test_metric for request in asked)
    assert first is not None and second is None


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.EXHAUSTED])
def test_the_limit_ends_a_trial_in_the_state_that_it_asks_for(state: TrialState, executor: Executor) -> None:
    request = changed(request_learning_trial(1, seconds=0.05), limit_state=state)
    outcome, observed = run_to_the_end(executor, request)
    last = observed[-1]
    assert (outcome.state, outcome.time_to_target_s) == (state, None)
    assert outcome.train_seconds >= 0.05 and outcome.steps >= last.step
    assert (outcome.last_miss_step, outcome.final_metric) == (last.step, last.metric)


def test_a_failure_of_the_workload_fails_the_trial_and_no_other(executor: Executor) -> None:
    outcome, observed = run_to_the_end(executor, request_endless_trial(1, "raise"))
    assert outcome.state is TrialState.FAILED
    assert outcome.reason.startswith("RuntimeError: the user's own mistake (")
    assert outcome.traceback is not None and "RuntimeError" in outcome.traceback
    assert (outcome.steps, outcome.final_metric) == (observed[-1].step, observed[-1].metric)
    assert run_to_the_end(executor, request_trial(2))[0].state is TrialState.REACHED


@pytest.mark.parametrize(("behaviour", "state"), [("out_of_memory", TrialState.OOM), ("diverge", TrialState.DIVERGED)])
def test_what_goes_wrong_with_a_configuration_is_its_state(
    behaviour: str, state: TrialState, executor: Executor
) -> None:
    outcome, observed = run_to_the_end(executor, request_endless_trial(1, behaviour))
    assert (outcome.state, outcome.time_to_target_s) == (state, None)
    assert outcome.final_metric == observed[-1].metric


@pytest.mark.slow
def test_what_a_trial_prints_comes_with_its_end_and_is_its_own(executor: Executor) -> None:
    logs = []
    for behaviour in ("say", "learn", "say"):
        executor.submit(request_learning_trial(1, behaviour, seconds=0.15))
        ended = wait_for(executor, lambda events: 1 in outcomes(events))
        logs += [event.log for event in ended if isinstance(event, TrialEnded)]
    assert [log.strip() for log in logs] == ["said by the workload", "", "said by the workload"]


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.CANCELLED])
def test_a_stop_ends_the_trial_in_the_state_that_it_asks_for(state: TrialState, executor: Executor) -> None:
    executor.stop(TrialStop(77, state, "no such trial"))
    outcome, observations = run_and_stop(executor, request_endless_trial(1), state, after=3)
    assert (outcome.state, outcome.reason, outcome.time_to_target_s) == (state, "as asked", None)
    assert (outcome.final_metric, outcome.last_miss_step) == (observations[-1].metric, observations[-1].step)
    assert outcome.steps >= observations[-1].step and outcome.train_seconds >= observations[-1].train_seconds
    executor.stop(TrialStop(1, state, "it is over"))
    assert run_to_the_end(executor, request_trial(1))[0].state is TrialState.REACHED


def test_a_stop_right_after_the_submission_counts(executor: Executor) -> None:
    executor.submit(request_endless_trial(1))
    executor.stop(TrialStop(1, TrialState.CANCELLED, "changed my mind"))
    outcome = outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))[1]
    assert (outcome.state, outcome.reason) == (TrialState.CANCELLED, "changed my mind")


def test_a_paused_trial_goes_on_after_its_last_observation(executor: Executor, tmp_path: Path) -> None:
    request = changed(request_endless_trial(1), checkpoint=str(tmp_path / "trial"), eval_every_steps=50)
    paused, first = run_and_stop(executor, request, TrialState.PAUSED, after=3)
    assert (paused.state, paused.reason) == (TrialState.PAUSED, "as asked")
    assert (tmp_path / "trial").is_file()
    again, second = run_and_stop(executor, changed(request, resumes=True), TrialState.PAUSED, after=2)
    outcome, third = run_and_stop(executor, changed(request, resumes=True), TrialState.PRUNED, after=1)
    assert [one.step for one in (*first, *second, *third)] == list(range(0, 50 * len(first + second + third), 50))
    seconds = [one.train_seconds for one in (*first, *second, *third)]
    assert seconds == sorted(seconds)
    assert paused.steps < again.steps <= outcome.steps
    assert paused.train_seconds < again.train_seconds <= outcome.train_seconds


def test_a_trial_that_cannot_be_saved_is_pruned(executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    for checkpoint in (None, str(tmp_path / "a_file" / "trial")):
        request = replace(request_endless_trial(1), checkpoint=checkpoint)
        outcome, _ = run_and_stop(executor, request, TrialState.PAUSED, after=2)
        assert outcome.state is TrialState.PRUNED
        assert outcome.reason.startswith("as asked" if checkpoint is None else "as asked; could not be paused: ")


def test_a_trial_whose_checkpoint_is_gone_fails(executor: Executor, tmp_path: Path) -> None:
    request = changed(request_endless_trial(1), checkpoint=str(tmp_path / "gone"), resumes=True)
    outcome, observed = run_to_the_end(executor, request)
    assert (outcome.state, observed) == (TrialState.FAILED, [])
    assert f"cannot resume from the checkpoint {tmp_path / 'gone'}" in outcome.reason


def test_a_full_house_and_a_measurement_beside_a_trial_are_the_callers_mistakes(executor: Executor) -> None:
    configuration = request_trial(1).plan.configuration
    executor.submit(request_endless_trial(1))
    with pytest.raises(ValueError, match="no slot is free for trial 2"):
        executor.submit(request_trial(2))
    with pytest.raises(ValueError, match="cannot measure while trial"):
        executor.measure_step_time(StepTimeRequest(configuration=configuration))
    with pytest.raises(ValueError, match="cannot measure while trial"):
        executor.measure_memory(MemoryRequest(configuration=configuration))
    executor.stop(TrialStop(1, TrialState.CANCELLED, "enough"))
    wait_for(executor, lambda events: 1 in outcomes(events))


def test_steps_are_timed(executor: Executor) -> None:
    request = StepTimeRequest(configuration=request_trial(1).plan.configuration, seconds_limit=0.1)
    step_time = executor.measure_step_time(request)
    assert (step_time.batch_size, step_time.micro_batch_size, step_time.out_of_memory) == (8, 8, False)
    assert step_time.step_seconds is not None and step_time.step_seconds > 0
    assert step_time.evaluation_seconds is not None and step_time.evaluation_seconds > 0


def test_the_noise_scale_is_measured(executor: Executor) -> None:
    trial = request_trial(1)
    request = NoiseRequest(
        configuration=trial.plan.configuration,
        seed=1,
        target=trial.target,
        train_seconds_limit=0.2,
        noise_seconds_limit=0.1,
        eval_every_steps=2,
    )
    measured = executor.measure_noise(request)
    assert (measured.batch_size, measured.micro_batch_size) == (8, 8)


def test_a_kill_cancels_what_runs(executor: Executor) -> None:
    executor.submit(request_endless_trial(1))
    wait_for(executor, lambda events: len(events) >= 2)
    executor.kill()
    assert outcomes(executor.events(0.0))[1].state is TrialState.CANCELLED


@pytest.mark.slow
def test_a_micro_batch_that_fits_is_found_to(executor: Executor) -> None:
    use = executor.measure_memory(MemoryRequest(configuration=request_trial(1).plan.configuration))
    assert (use.micro_batch_size, use.fits, use.reason) == (8, True, None)


@pytest.mark.slow
def test_a_trial_after_a_kill_is_cancelled_by_a_close_and_a_second_close_does_nothing(
    kind: str, tmp_path: Path
) -> None:
    with opened(kind, tmp_path) as executor:
        executor.kill()
        executor.submit(request_endless_trial(2))
        executor.close()
        assert outcomes(executor.events(0.0))[2].state is TrialState.CANCELLED
        executor.close()
        assert executor.events(0.0) == []


# In this process ------------------------------------------------------------------------------------------------------


def settings_of(folder: Path, **changes: Any) -> ExecutorSettings:
    write_workload(folder)
    return ExecutorSettings(workload="line.py:Line", folder=folder, device="cpu", **changes)


@contextmanager
def inline(folder: Path, **changes: Any) -> Iterator[InlineExecutor]:
    with closing(InlineExecutor(settings_of(folder, **changes))) as executor:
        yield executor


def put_into_loss(folder: Path, code: str) -> None:
    """Let the workload run a line of code in its step ``at``, by default step 40."""
    path = folder / "line.py"
    path.write_text(path.read_text().replace("            self.misbehave()", f"            {code}"))


@pytest.mark.slow
def test_where_torch_compile_fails_the_study_is_eager_and_each_trial_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", Mock(side_effect=ImportError("no module named inductor")))
    with inline(tmp_path, training=TrainingSpec(compile="max-autotune")) as executor:
        found = executor.describe()
        outcome, _ = run_to_the_end(executor, request_trial(1))
    assert found.environment.compile_mode == "none"
    assert found.notice is not None and "no module named inductor" in found.notice
    assert outcome.state is TrialState.REACHED and found.notice in outcome.warnings


def test_a_breakpoint_stops_in_the_workloads_own_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_in: list[tuple[str, int]] = []
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: stopped_in.append((sys._getframe(1).f_code.co_name, os.getpid()))
    )
    with inline(tmp_path, workload_settings={"at": 5}) as executor:
        put_into_loss(tmp_path, "breakpoint()")
        outcome, _ = run_to_the_end(executor, request_trial(1))
    assert stopped_in == [("loss", os.getpid())]
    assert outcome.state is TrialState.REACHED


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "__import__('bdb').BdbQuit"])
def test_an_interrupt_in_the_workload_ends_the_trial_as_cancelled_and_is_raised(error: str, tmp_path: Path) -> None:
    with inline(tmp_path) as executor:
        put_into_loss(tmp_path, f"raise {error}")
        executor.submit(request_endless_trial(1))
        with pytest.raises(KeyboardInterrupt):
            wait_for(executor, lambda events: 1 in outcomes(events))
        [ended] = [event for event in executor.events(0.0) if isinstance(event, TrialEnded)]
    assert (ended.number, ended.outcome.state) == (1, TrialState.CANCELLED)
    assert ended.outcome.steps > 0


def test_a_kill_from_within_a_step_ends_the_trial_in_that_step(tmp_path: Path) -> None:
    with inline(tmp_path) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "breakpointhook", executor.kill)  # as a signal handler would
        put_into_loss(tmp_path, "breakpoint()")
        executor.submit(request_endless_trial(1))
        outcome = outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))[1]
    assert (outcome.state, outcome.steps) == (TrialState.CANCELLED, 40)


def test_the_settings_of_the_process_are_a_workers_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings() -> tuple[Any, ...]:
        return os.environ.get("GIVEN"), os.environ["KEPT"], torch.get_num_threads(), gc.get_threshold()

    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("GIVEN", raising=False)
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(2)
    gc.set_threshold(123_456, *thresholds[1:])
    with inline(tmp_path, environment={"GIVEN": "now", "KEPT": "now"}, threads=1) as executor:
        executor.describe()
        during = settings()
    after = settings()
    torch.set_num_threads(threads)
    gc.set_threshold(*thresholds)
    assert during == ("now", "now", 1, PYTHON_THRESHOLDS)
    assert after == (None, "before", 2, (123_456, *thresholds[1:]))


@pytest.mark.slow
def test_prints_reach_the_terminal_and_the_log_that_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with inline(tmp_path, log_folder=tmp_path / "logs") as executor:
        run_to_the_end(executor, request_endless_trial(1, "say", seconds=0.15))
    printed = capsys.readouterr()
    assert "said by the workload" in printed.err
    assert printed.out == "", "stdout is for data"
    assert "said by the workload" in (tmp_path / "logs" / "slot-0.log").read_text()


WAYS = (
    "__import__('os').write(1, b'by a descriptor')",
    "__import__('subprocess').run(['echo', 'by a child process'])",
    "__import__('ctypes').CDLL(None).puts(b'by the C library')",
    "__import__('sys').__stdout__.write('by the stream of before')",
)


@pytest.mark.slow
def test_nothing_that_the_workload_writes_goes_to_stdout_by_whatever_way(tmp_path: Path) -> None:
    put_program = tmp_path / "program.py"
    put_program.write_text(
        "from contextlib import closing\n"
        "from pathlib import Path\n"
        "from bssearch.executors.base import ExecutorSettings\n"
        "from bssearch.executors.inline import InlineExecutor\n"
        "from tests.executors.line_workload import request_trial, run_to_the_end\n"
        "settings = ExecutorSettings(workload='line.py:Line', folder=Path('.'), device='cpu',\n"
        "                            workload_settings={'at': 2})\n"
        "print('before')\n"
        "with closing(InlineExecutor(settings)) as executor:\n"
        "    outcome, _ = run_to_the_end(executor, request_trial(1))\n"
        "print(outcome.state.value)\n"
    )
    write_workload(tmp_path)
    put_into_loss(tmp_path, "; ".join(WAYS))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, put_program.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "before\nreached\n"
    ways = ("a descriptor", "a child process", "the C library", "the stream of before")
    assert [way for way in ways if f"by {way}" not in done.stderr] == []


def test_the_traceback_of_a_trial_that_failed_is_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with inline(tmp_path, log_folder=tmp_path / "logs", workload_settings={"at": 2}) as executor:
        outcome, _ = run_to_the_end(executor, request_trial(1, "raise"))
    assert outcome.state is TrialState.FAILED
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "slot-0.log").read_text(), outcome.traceback or ""):
        assert text.startswith("Traceback") and "the user's own mistake" in text.splitlines()[-1]


def test_what_a_process_of_its_own_gives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"executor\.slots = 2 must be 1"):
        InlineExecutor(settings_of(tmp_path, slots=2))
    with pytest.raises(UsageError, match=r"executor\.devices = 4 must be 1"):
        InlineExecutor(settings_of(tmp_path, devices=(1, 4)))
    with pytest.raises(UsageError, match=r"executor\.threads × executor\.devices = 8192 must be <="):
        make_executor("local", settings_of(tmp_path, devices=(4096,), threads=2))
    with (
        inline(tmp_path, memory_limit_bytes=2**31) as executor,
        pytest.raises(LaunchError, match="memory_limit_gib = 2 must be unset"),
    ):
        executor.describe()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fault": "load raises"}, "does not load: ValueError: no such table .*line.py:"),
        ({"at": 2}, "batch size 8 failed: RuntimeError: the user's own mistake .*line.py:"),
    ],
    ids=["load", "measurement"],
)
def test_a_failure_is_raised_with_the_users_line(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    mistaken = StepTimeRequest(configuration=request_trial(1, "raise").plan.configuration)
    with inline(tmp_path, workload_settings=settings) as executor, pytest.raises(WorkloadError, match=said) as caught:
        executor.measure_step_time(mistaken)
    assert caught.value.__cause__ is not None


def test_a_spec_names_its_executor_which_is_no_part_of_the_question() -> None:
    default, named = make_spec(), make_spec(executor={"name": "inline"})
    assert (default.executor.name, named.executor.name) == ("local", "inline")
    assert default.question_hash == named.question_hash
    with pytest.raises(ValueError, match="must be one of local, inline"):
        StudySpec.model_validate({**default.model_dump(), "executor": {"name": "cloud"}})
