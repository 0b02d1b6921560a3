"""Trials in this very process: what a debugger needs, and what is left behind."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bssearch.commands.launch import Launch
from bssearch.commands.run import run_study
from bssearch.commands.trials import trials_frame
from bssearch.errors import LaunchError, SpecError, UsageError, WorkloadError
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.inline import PYTHON_THRESHOLDS, InlineExecutor
from bssearch.records import StepTimeRequest, TrialEnded, TrialState
from bssearch.spec import StudySpec
from bssearch.spec.parts import TrainingSpec
from tests.executors.line_workload import (
    outcomes,
    request_endless_trial,
    request_trial,
    run_to_the_end,
    wait_for,
    write_workload,
)
from tests.factories import make_spec


def settings_of(folder: Path, **changes: Any) -> ExecutorSettings:
    write_workload(folder)
    return ExecutorSettings(workload="line.py:Line", folder=folder, device="cpu", **changes)


@contextmanager
def inline(folder: Path, **changes: Any) -> Iterator[InlineExecutor]:
    with closing(InlineExecutor(settings_of(folder, **changes))) as executor:
        yield executor


def put_into_loss(folder: Path, code: str) -> None:
    """Have the workload run a line of code in one of its steps, the fortieth unless it is told another."""
    path = folder / "line.py"
    path.write_text(path.read_text().replace("            self.misbehave()", f"            {code}"))


@pytest.mark.slow
def test_where_torch_compile_fails_the_study_is_eager_and_each_trial_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **options: object) -> None:
        raise ImportError("no module named inductor")

    monkeypatch.setattr(torch, "compile", fails)
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


def test_the_environment_and_the_threads_are_set_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("GIVEN", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with inline(tmp_path, environment={"GIVEN": "now", "KEPT": "now"}, threads=1) as executor:
        executor.describe()
        assert (os.environ["GIVEN"], os.environ["KEPT"], torch.get_num_threads()) == ("now", "now", 1)
    assert ("GIVEN" in os.environ, os.environ["KEPT"], torch.get_num_threads()) == (False, "before", 2)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_prints_reach_the_terminal_and_the_log_that_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with inline(tmp_path, log_folder=tmp_path / "logs") as executor:
        run_to_the_end(executor, request_endless_trial(1, "say", seconds=0.15))
    printed = capsys.readouterr()
    assert "said by the workload" in printed.err
    assert printed.out == "", "stdout is for data"
    assert "said by the workload" in (tmp_path / "logs" / "slot-0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "say",
    [
        "__import__('os').write(1, b'said by the workload')",
        "__import__('subprocess').run(['echo', 'said by the workload'])",
        "__import__('ctypes').CDLL(None).puts(b'said by the workload')",
        "__import__('sys').__stdout__.write('said by the workload')",
    ],
    ids=["descriptor", "child process", "C library", "the stream of before"],
)
def test_nothing_that_the_workload_writes_goes_to_stdout_by_whatever_way(say: str, tmp_path: Path) -> None:
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
    put_into_loss(tmp_path, say)
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
    assert "said by the workload" in done.stderr


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
    with inline(tmp_path, memory_limit_bytes=2**31) as executor, pytest.raises(LaunchError, match="memory limit"):
        executor.describe()


def test_a_workload_that_does_not_load_is_raised_with_the_users_line(tmp_path: Path) -> None:
    with inline(tmp_path, workload_settings={"fault": "load raises"}) as executor:
        with pytest.raises(WorkloadError, match="does not load: ValueError: no such table") as caught:
            executor.describe()
        assert caught.value.__cause__ is not None


def test_a_measurement_that_fails_is_raised_with_the_users_line(tmp_path: Path) -> None:
    with inline(tmp_path, workload_settings={"at": 2}) as executor:
        mistaken = StepTimeRequest(configuration=request_trial(1, "raise").plan.configuration)
        with pytest.raises(WorkloadError, match="RuntimeError: the user's own mistake") as caught:
            executor.measure_step_time(mistaken)
        assert "batch size 8" in str(caught.value) and "line.py:" in str(caught.value)


def test_a_spec_names_its_executor_which_is_no_part_of_the_question() -> None:
    default, named = make_spec(), make_spec(executor={"name": "inline"})
    assert (default.executor.name, named.executor.name) == ("local", "inline")
    assert default.question_hash == named.question_hash
    with pytest.raises(ValueError, match="must be one of local, inline"):
        StudySpec.model_validate({**default.model_dump(), "executor": {"name": "cloud"}})


def test_garbage_of_the_training_is_collected_as_in_a_worker(tmp_path: Path) -> None:
    before = gc.get_threshold()
    gc.set_threshold(123_456)
    try:
        with inline(tmp_path) as executor:
            executor.describe()
            assert gc.get_threshold() == PYTHON_THRESHOLDS
        assert gc.get_threshold()[0] == 123_456
    finally:
        gc.set_threshold(*before)


@pytest.mark.slow
def test_a_study_runs_inline(tmp_path: Path) -> None:
    write_workload(tmp_path)
    spec = make_spec(
        workload="line.py:Line",
        target={"metric": "score", "value": 0.9, "goal": "maximize"},
        space={"batch_size": {"low": 8, "high": 16}, "learning_rate": 0.05},
        default={"batch_size": 8, "learning_rate": 0.05},
        confirm={"runs": 0},
        budget={"trials": 3, "trial_train_seconds": 2.0},
        executor={"name": "inline", "device": "cpu"},
    )
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert {batch.batch_size for batch in run_study(spec, Launch(db=url, folder=tmp_path)).batches} == {8, 16}
    assert "reached" in set(trials_frame(spec.name, db=url)["state"])
    with pytest.raises((UsageError, SpecError), match="slots = 2"):
        run_study(make_spec(executor={"name": "inline", "slots": 2}), Launch(db=url, folder=tmp_path))
