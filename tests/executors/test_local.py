"""Trials in real worker processes: what goes well, and every way in which it does not."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bssearch.errors import LaunchError, WorkloadError
from bssearch.executors.slots import LocalExecutor, SlotState
from bssearch.records import StepTimeRequest, TrialEnded, TrialObserved, TrialState, TrialStop
from tests.executors.line_workload import (
    opened,
    outcomes,
    request_endless_trial,
    request_trial,
    run_to_the_end,
    wait_for,
    worker_pids,
)
from tests.factories import changed, not_none


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """Yield an executor for the tests that leave its worker alive."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BSSEARCH_DB_URL", "postgresql://me:secret-word@host/db")
        patch.setenv("BSSEARCH_DB_URL_FILE", "/run/secret-word")
        patch.setenv("PGPASSWORD", "secret-word")
        patch.setenv("OMP_NUM_THREADS", "7")
        patch.setenv("HARMLESS", "kept")
        with opened(
            folder,
            log_folder=folder / "logs",
            environment={"GIVEN": "by the driver"},
            report=str(folder / "environment.json"),
        ) as executor:
            executor.describe()
            yield executor


@pytest.mark.slow
def test_logs_that_nobody_asked_to_keep_do_not_grow_and_still_tell_of_a_death(tmp_path: Path) -> None:
    deadly = StepTimeRequest(configuration=request_trial(1, "segfault").plan.configuration)
    with opened(tmp_path, at=2) as executor:
        for number in (1, 2):
            executor.submit(request_endless_trial(number, "print", seconds=0.2))
            ended = wait_for(executor, lambda events: any(isinstance(event, TrialEnded) for event in events))
            assert ["from a child" in event.log for event in ended if isinstance(event, TrialEnded)] == [True]
            assert executor._slots[0].log.read_text() == ""
        with pytest.raises(LaunchError, match="worker killed by SIGSEGV") as death:
            executor.measure_step_time(deadly)
        assert "Segmentation fault" in str(death.value) and "in misbehave" in str(death.value)


@pytest.mark.parametrize(
    ("behaviour", "reason", "line"),
    [
        ("raise", "RuntimeError: the user's own mistake (", 'raise RuntimeError("the user\'s own mistake")'),
        ("sys.exit", "SystemExit: enough (", 'sys.exit("enough")'),
    ],
)
def test_an_exception_fails_the_trial_and_the_worker_lives_on(
    behaviour: str, reason: str, line: str, shared: LocalExecutor
) -> None:
    before = worker_pids(shared)
    outcome, observed = run_to_the_end(shared, request_endless_trial(3, behaviour))
    assert outcome.state is TrialState.FAILED
    assert outcome.reason.startswith(reason) and "line.py:" in outcome.reason and line in outcome.reason
    assert outcome.traceback is not None and "Traceback" in outcome.traceback and line in outcome.traceback
    assert outcome.steps == observed[-1].observation.step > 0
    assert outcome.final_metric == observed[-1].observation.metric
    assert run_to_the_end(shared, request_trial(4))[0].state is TrialState.REACHED
    assert worker_pids(shared) == before


def test_a_worker_knows_no_database_and_the_number_of_its_threads_and_exempts_torch_from_collection(
    shared: LocalExecutor,
) -> None:
    run_to_the_end(shared, request_endless_trial(9, "environment", seconds=0.2))
    reported = json.loads((shared._slots[0].log.parents[1] / "environment.json").read_text())
    environment = reported["environment"]
    assert reported["collects"] and reported["exempt_objects"] > 100_000
    assert "secret-word" not in json.dumps(environment)
    assert environment["HARMLESS"] == "kept"
    assert environment["GIVEN"] == "by the driver"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_events_wait_no_longer_than_asked(shared: LocalExecutor) -> None:
    before = time.monotonic()
    assert shared.events(0.3) == []
    assert 0.25 < time.monotonic() - before < 0.6


@pytest.mark.slow
def test_workers_that_die_are_told_once_and_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.describe()
        before = time.monotonic()
        outcome, observed = run_to_the_end(executor, request_endless_trial(1, "fork_and_segfault"))
        assert time.monotonic() - before < 10.0, "the forked child holds the pipe open"
        assert outcome.state is TrialState.FAILED
        assert outcome.reason == "worker killed by SIGSEGV (signal 11)"
        assert outcome.traceback is not None
        assert "Segmentation fault" in outcome.traceback and "in misbehave" in outcome.traceback
        last = observed[-1].observation
        assert (outcome.steps, outcome.samples, outcome.train_seconds) == (
            last.step,
            last.samples,
            last.train_seconds,
        )
        assert outcome.final_metric == last.metric and outcome.wall_seconds > 0
        assert outcome.best_metric == max(event.observation.metric for event in observed)

        outcome, _ = run_to_the_end(executor, request_trial(2))
        assert outcome.state is TrialState.REACHED
        worker = not_none(executor._slots[0].worker)
        os.kill(worker.pid, signal.SIGKILL)  # while it is idle
        while not worker.has_exited():
            time.sleep(0.01)

        executor.submit(request_endless_trial(3))
        wait_for(executor, lambda events: len(events) >= 3)
        (pid,) = worker_pids(executor)
        os.kill(pid, signal.SIGKILL)
        outcome = outcomes(wait_for(executor, lambda events: 3 in outcomes(events)))[3]
        assert outcome.state is TrialState.FAILED
        assert outcome.reason == "worker killed by SIGKILL (signal 9), from outside"


@pytest.mark.slow
def test_a_worker_that_finds_other_code_than_the_first_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        revision = executor.describe().environment.workload_revision
        code = tmp_path / "line.py"
        code.write_text(code.read_text() + "# changed\n")
        assert executor.describe().environment.workload_revision == revision, "what is loaded is as it was"
        assert run_to_the_end(executor, request_trial(1))[0].state is TrialState.REACHED
        worker = not_none(executor._slots[0].worker)
        os.kill(worker.pid, signal.SIGKILL)
        while not worker.has_exited():
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(WorkloadError, match=f"'line.py:Line' has changed since the run began .{revision} → "):
                executor.submit(request_trial(2))
        code.write_text(code.read_text().removesuffix("# changed\n"))
        assert run_to_the_end(executor, request_trial(2))[0].state is TrialState.REACHED


@pytest.mark.slow
def test_a_hang_is_killed_and_a_long_trial_that_makes_progress_is_not(tmp_path: Path) -> None:
    with opened(tmp_path, hang_seconds=2.5) as executor:
        long = changed(request_endless_trial(1, seconds=5.0), eval_every_steps=10**9)
        assert run_to_the_end(executor, long)[0].state is TrialState.EXHAUSTED

        before = time.monotonic()
        outcome, _ = run_to_the_end(executor, request_endless_trial(2, "hang"))
        assert time.monotonic() - before < 7.0
        assert outcome.state is TrialState.FAILED
        assert outcome.reason.startswith("hang: no training progress for ")
        assert outcome.traceback is not None and "in misbehave" in outcome.traceback

        outcome, _ = run_to_the_end(executor, request_endless_trial(3, "hold_lock"))
        assert outcome.state is TrialState.FAILED
        assert outcome.reason.startswith("hang: ")


@pytest.mark.slow
def test_trials_that_share_a_device_are_contended_and_a_kill_cancels_them_at_once_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    process = psutil.Process()
    before = process.num_fds(), threading.active_count()
    children = {child.pid for child in process.children()}
    with opened(tmp_path, slots=2) as executor:
        executor.submit(request_endless_trial(1))
        executor.submit(request_trial(2))
        events = wait_for(executor, lambda events: 2 in outcomes(events))
        executor.stop(TrialStop(1, TrialState.CANCELLED, "enough"))
        events += wait_for(executor, lambda events: 1 in outcomes(events))
        ended = outcomes(events)
        assert ended[1].contended and ended[2].contended
        assert {event.number for event in events if isinstance(event, TrialObserved)} == {1, 2}
        assert not any(executor._trials_on(("", "cpu")))

        executor.submit(request_endless_trial(3, "hang"))
        executor.submit(request_endless_trial(4))
        wait_for(executor, lambda events: {event.number for event in events} == {3, 4})
        asked = time.monotonic()
        executor.kill()
        assert time.monotonic() - asked < 2.0
        assert {child.pid for child in process.children()} == children
        states = {number: outcome.state for number, outcome in outcomes(executor.events(0.0)).items()}
        assert states == {3: TrialState.CANCELLED, 4: TrialState.CANCELLED}
    assert (process.num_fds(), threading.active_count()) == before
    assert {child.pid for child in process.children()} == children, "a zombie"


SLOW_IN_THE_SECOND_SLOT = """
import os, pathlib, time
first = pathlib.Path({first!r})
if pathlib.Path(os.readlink("/proc/self/fd/2")).name == "slot-1.log":
    while not first.exists():
        time.sleep(0.01)
    time.sleep(1.0)
first.touch()
"""


@pytest.mark.slow
def test_no_trial_begins_while_another_slots_worker_still_loads(tmp_path: Path) -> None:
    with opened(tmp_path, slots=2) as executor:
        code = tmp_path / "line.py"
        code.write_text(SLOW_IN_THE_SECOND_SLOT.format(first=str(tmp_path / "first")) + code.read_text())
        executor.submit(request_trial(1))
        states = {slot.state for slot in executor._slots}
        assert states == {SlotState.TRAINING, SlotState.READY}
        assert outcomes(wait_for(executor, lambda events: 1 in outcomes(events)))[1].state is TrialState.REACHED


@pytest.mark.slow
def test_a_load_that_fails_shows_the_users_line_and_can_be_mended(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        code = tmp_path / "line.py"
        good = code.read_text()
        code.write_text("import torch\nimport no_such_module\n")
        with pytest.raises(WorkloadError, match=r"line\.py:2: import no_such_module") as refused:
            executor.describe()
        assert "No module named 'no_such_module'" in str(refused.value)
        assert worker_pids(executor) == []

        code.write_text(good.replace('if self.fault == "load segfaults"', "if True"))
        with pytest.raises(LaunchError, match=r"slot 0: worker killed by SIGSEGV \(signal 11\)") as died:
            executor.submit(request_trial(1))
        assert "Segmentation fault" in str(died.value) and "in load" in str(died.value)
        assert worker_pids(executor) == []

        code.write_text(good)
        assert run_to_the_end(executor, request_trial(1))[0].state is TrialState.REACHED
