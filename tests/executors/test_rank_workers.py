"""Trials of several ranks in real worker processes: their steps, their ends, and their failures."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bssearch.executors.base import Executor
from bssearch.executors.slots import LocalExecutor
from bssearch.records import (
    MemoryRequest,
    Observation,
    StepTimeRequest,
    TrialRequest,
    TrialState,
)
from tests.executors.line_workload import (
    opened,
    outcomes,
    request_endless_trial,
    request_trial,
    run_and_stop,
    run_to_the_end,
    wait_for,
    worker_pids,
)
from tests.factories import changed, not_none
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Yield an executor for the tests that leave its worker alive."""
    with opened(tmp_path_factory.mktemp("shared")) as executor:
        yield executor


def on_ranks(request: TrialRequest, size: int) -> TrialRequest:
    configuration = request.plan.configuration
    micro = configuration.micro_batch_size // size
    return changed(request, configuration=replace(configuration, world_size=size, micro_batch_size=micro))


def curve(executor: Executor, request: TrialRequest) -> tuple[TrialState, list[tuple[int, float, float | None]]]:
    outcome, seen = run_to_the_end(executor, request)
    assert outcome.traceback is None, outcome.traceback
    return outcome.state, [(one.step, one.metric, one.loss) for one in seen]


def test_ranks_learn_as_one_process_does_and_one_worker_serves_any_number(shared: Executor) -> None:
    alone_state, alone = curve(shared, request_trial(1))
    assert alone_state is TrialState.REACHED
    for number, size in enumerate((2, 4, 2, 1), 2):
        state, seen = curve(shared, on_ranks(request_trial(number), size))
        assert state is alone_state
        assert [step for step, _, _ in seen] == [step for step, _, _ in alone]
        for (_, metric, loss), (_, metric_alone, loss_alone) in zip(seen, alone, strict=True):
            assert metric == pytest.approx(metric_alone, abs=1e-6)
            assert loss == (None if loss_alone is None else pytest.approx(loss_alone, rel=1e-5))


def ranks_of(executor: LocalExecutor) -> list[psutil.Process]:
    """Return the living rank processes of the executor's workers."""
    children = [child for pid in worker_pids(executor) for child in psutil.Process(pid).children()]
    return [child for child in children if "bssearch.executors.rank_workers" in child.cmdline()]


def test_a_rank_that_is_killed_ends_its_trial_and_is_started_anew_for_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.submit(on_ranks(request_endless_trial(1), 4))
        wait_for(executor, lambda events: len(events) >= 3)
        ranks = ranks_of(executor)
        assert len(ranks) == 3
        ranks[-1].kill()
        outcome = outcomes(wait_for(executor, outcomes))[1]
        assert outcome.state is TrialState.FAILED
        assert outcome.reason == "rank 3 killed by SIGKILL (signal 9) from another program"
        assert psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []
        outcome, _ = run_to_the_end(executor, on_ranks(request_trial(3), 2))
        assert outcome.state is TrialState.REACHED
        (rank,) = ranks_of(executor)
        rank.kill()  # while it is idle
        rank.wait(PATIENCE_S)
        assert run_to_the_end(executor, on_ranks(request_trial(4), 2))[0].state is TrialState.REACHED


def test_a_rank_that_dies_while_the_first_is_busy_elsewhere_ends_the_trial(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        code = tmp_path / "line.py"
        code.write_text(code.read_text().replace("    def evaluate(", SLOW_EVALUATION))
        executor.submit(on_ranks(request_endless_trial(1), 2))
        while not (tmp_path / "evaluating").exists():
            executor.events(0.1)
        ranks_of(executor)[0].kill()
        assert (
            outcomes(wait_for(executor, outcomes))[1].reason
            == "rank 1 killed by SIGKILL (signal 9) from another program"
        )


SLOW_EVALUATION = """    def evaluate(self, model, part):
        if self.calls > 10:
            open(os.path.join(os.path.dirname(__file__), "evaluating"), "w").close()
            time.sleep(1000)
        return self.quick(model, part)

    def quick("""


@pytest.mark.parametrize(
    ("behaviour", "state", "reason"),
    [
        (
            "out_of_memory",
            TrialState.OOM,
            "out of memory, micro-batch 4, batch size 8, learning rate 0.001, step 39: rank 1: MemoryError",
        ),
        ("raise", TrialState.FAILED, "rank 1: RuntimeError: the user's own mistake"),
        ("segfault", TrialState.FAILED, "rank 1 killed by SIGSEGV (signal 11)"),
        ("exit", TrialState.FAILED, "rank 1 exited with code 3"),
    ],
)
def test_the_outcome_says_what_happened_to_a_rank(
    sparing: LocalExecutor, behaviour: str, state: TrialState, reason: str
) -> None:
    ranks = [rank.pid for rank in ranks_of(sparing)]
    outcome, observed = run_to_the_end(sparing, on_ranks(request_endless_trial(1, behaviour), 2))
    assert outcome.state is state
    assert outcome.reason.startswith(reason)
    assert outcome.final_metric == observed[-1].metric
    assert not any(map(psutil.pid_exists, ranks))
    assert run_to_the_end(sparing, on_ranks(request_trial(2), 2))[0].state is TrialState.REACHED


@pytest.fixture(scope="module")
def sparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """Yield an executor whose trials misbehave on all ranks but the first."""
    with opened(tmp_path_factory.mktemp("sparing"), spares_first=True) as executor:
        yield executor


def test_memory_that_runs_out_on_a_rank_is_an_answer(tmp_path: Path) -> None:
    with opened(tmp_path, spares_first=True, at=2) as executor:
        configuration = on_ranks(request_trial(1, "out_of_memory"), 2).plan.configuration
        assert executor.measure_step_time(StepTimeRequest(configuration=configuration)).out_of_memory
        used = executor.measure_memory(MemoryRequest(configuration=configuration))
        assert not used.fits and used.reason is not None
        assert used.reason.startswith("rank 1: MemoryError: no more of it")


def test_step_times_are_measured_on_ranks(shared: LocalExecutor) -> None:
    configuration = on_ranks(request_trial(1), 2).plan.configuration
    found = shared.measure_step_time(StepTimeRequest(configuration=configuration, seconds_limit=0.5))
    assert found.step_seconds is not None and found.step_seconds > 0


def test_a_rank_that_dies_at_its_start_is_told_with_its_exit(tmp_path: Path) -> None:
    with opened(tmp_path, fault="rank dies at start") as executor:
        outcome, _ = run_to_the_end(executor, on_ranks(request_trial(1), 2))
        assert (outcome.state, outcome.reason) == (TrialState.FAILED, "rank 1 exited with code 3")
        assert run_to_the_end(executor, request_trial(2))[0].state is TrialState.REACHED


def test_a_rank_that_hangs_is_killed_with_its_worker(tmp_path: Path) -> None:
    with opened(tmp_path, spares_first=True, hang_seconds=4.0) as executor:
        executor.submit(on_ranks(request_endless_trial(1, "hang"), 2))
        wait_for(executor, lambda events: events)
        ranks = ranks_of(executor)
        assert outcomes(wait_for(executor, outcomes))[1].reason.startswith("hang: no training progress for ")
        assert len(ranks) == 1 and psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []


def test_no_rank_survives_its_worker(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.submit(on_ranks(request_endless_trial(1), 4))
        wait_for(executor, lambda events: len(events) >= 3)
        ranks = ranks_of(executor)
        (pid,) = worker_pids(executor)
        os.kill(pid, signal.SIGKILL)
        assert (
            outcomes(wait_for(executor, outcomes))[1].reason
            == "worker killed by SIGKILL (signal 9) from another program"
        )
        assert len(ranks) == 3 and psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []


DRIVER = """
import sys
from pathlib import Path
from tests.executors.line_workload import opened, request_endless_trial
from tests.executors.test_rank_workers import on_ranks, ranks_of, wait_for, worker_pids

with opened(Path(sys.argv[1])) as executor:
    executor.submit(on_ranks(request_endless_trial(1), 2))
    wait_for(executor, lambda events: len(events) >= 3)
    print(*worker_pids(executor), *(rank.pid for rank in ranks_of(executor)), flush=True)
    wait_for(executor, lambda events: False)
"""


def test_no_rank_survives_the_driver(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with driver:
        family = [psutil.Process(int(pid)) for pid in not_none(driver.stdout).readline().split()]
        driver.kill()
    assert len(family) == 2 and psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


def test_a_paused_trial_resumes_bit_for_bit_on_its_ranks(shared: LocalExecutor, tmp_path: Path) -> None:
    request = on_ranks(request_endless_trial(1), 2)
    request = changed(request, checkpoint=str(tmp_path / "trial"), eval_every_steps=50)
    parts: list[Observation] = []
    for resumes, state in ((False, TrialState.PAUSED), (True, TrialState.PAUSED), (True, TrialState.CANCELLED)):
        outcome, observations = run_and_stop(shared, changed(request, resumes=resumes), state, after=2)
        assert (outcome.state, outcome.reason) == (state, "as asked")
        parts += observations
    _, whole = run_and_stop(shared, request, TrialState.CANCELLED, after=len(parts))
    assert [(one.step, one.metric, one.loss) for one in parts] == [
        (one.step, one.metric, one.loss) for one in whole[: len(parts)]
    ]
