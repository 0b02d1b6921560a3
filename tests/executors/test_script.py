"""Users' scripts in real processes: success, and every way to fail."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.base import ExecutorSettings, Load, Program
from bssearch.executors.loops import script_host
from bssearch.executors.process import THREAD_VARIABLES
from bssearch.executors.programs import command_process
from bssearch.executors.programs.script import LoadedScript
from bssearch.executors.slots import LocalExecutor
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    Observation,
    StepTime,
    StepTimeRequest,
    Target,
    TrialOutcome,
    TrialRequest,
    TrialState,
)
from tests.documents import OWN_TRAINING
from tests.executors.line_workload import outcomes, wait_for
from tests.factories import changed, make_request, not_none
from tests.waiting import wait_until_gone

SCRIPT = """
import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import bssearch

FOLDER = Path(__file__).parent
behaviour = (FOLDER / "behaviour").read_text()
if behaviour == "exit":
    sys.exit(1)
if behaviour == "no trial":
    sys.exit()
if behaviour == "garbage":
    print("{" * 1_000_000)
    os.write(1, b"\\\\x00\\\\xff" * 1000)
trial = bssearch.current_trial(batch_size=4, learning_rate=0.1, depth=1)
if behaviour == "twice":
    bssearch.current_trial(batch_size=4, learning_rate=0.1)
if behaviour == "picky" and trial.batch_size % 4:
    raise ValueError(f"{trial.batch_size} is no multiple of 4")
if behaviour == "grandchild":
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (FOLDER / "grandchild").write_text(str(child.pid))
size = trial.micro_batch_size
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1 if behaviour == "own rate" else trial.learning_rate)
loader = [] if behaviour == "empty" else [torch.ones(size, 1)] * 3
evaluations = 0


def evaluate():
    global evaluations
    evaluations += 1
    if behaviour == "nan" and trial.steps:
        return {"score": float("nan")}
    if behaviour == "sometimes" and evaluations == 3:
        return {"loss": 1.0}
    return {"score": weight.item(), "other": 1.0}


def step(batch):
    if behaviour == "raise" and trial.steps == 3:
        raise RuntimeError("the user's own mistake")
    if behaviour == "closes" and trial.steps == 4:
        trial.close()
        raise RuntimeError("after the early end")
    if behaviour == "memory" and trial.steps == 3:
        raise MemoryError("no more of it")
    if behaviour == "slow":
        time.sleep(0.01)
    optimizer.zero_grad()
    (1 - weight * batch).square().mean().backward()
    optimizer.step()


if behaviour == "never steps":
    while not trial.should_stop:
        pass
if behaviour == "swallows":
    while True:
        try:
            step(loader[0])
            trial.step()
            if trial.evaluation_due:
                trial.report(**evaluate())
        except bssearch.TrialStopped:
            time.sleep(0.01)
for batch in trial.batches(loader, None if behaviour == "never evaluates" else evaluate):
    step(batch)
if behaviour == "leaves":
    kept, log = tempfile.TemporaryDirectory(dir=FOLDER, prefix="kept"), (FOLDER / "log").open("w")
    log.write("the last line")
    atexit.register((FOLDER / "exited").touch)
    threading.Thread(target=lambda: time.sleep(0.2) or (FOLDER / "waited").touch()).start()
if behaviour == "fails late":
    raise RuntimeError("after the end")
"""
AT = Configuration(batch_size=4, micro_batch_size=4, learning_rate=0.05)
REQUEST = make_request(
    number=1,
    configuration=AT,
    seed=1,
    target=Target(metric="score", value=0.9),
    train_seconds_limit=30.0,
    limit_state=TrialState.EXHAUSTED,
    eval_every_steps=2,
)
NEVER = replace(REQUEST, target=Target(metric="score", value=2.0))
PROGRAM = Program(default=AT, metric="score", script="train.py", searched=("batch_size", "learning_rate"))


@dataclass
class Script:
    """A script with its behaviour; the tests share its server."""

    folder: Path
    loaded: LoadedScript

    def behaves(self, behaviour: str) -> None:
        (self.folder / "behaviour").write_text(behaviour)

    def run(self, behaviour: str = "", request: TrialRequest = REQUEST) -> tuple[TrialOutcome, list[Observation]]:
        self.behaves(behaviour)
        seen: list[Observation] = []
        return self.loaded.run(request, seen.append, stop=lambda: None), seen


def load_of(folder: Path, **changes: Any) -> Load:
    settings = ExecutorSettings(
        workload="train.py", folder=folder, device="cpu", program=changes.pop("program", PROGRAM)
    )
    return Load(settings=settings, slot=0, **changes)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Set a worker's environment for new processes: libraries start no threads."""
    with pytest.MonkeyPatch.context() as patch:
        for name in THREAD_VARIABLES:
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    with single_threaded(), closing(LoadedScript(load_of(folder))) as loaded:
        assert loaded._server.notice is None, "torch alone is safe to fork"
        yield Script(folder, loaded)


def test_a_trial_reaches_its_target_again_and_again_alike(script: Script) -> None:
    first, seen = script.run()
    again, seen_again = script.run("garbage")
    for outcome in (first, again):
        assert outcome.state is TrialState.REACHED, outcome.reason
        assert outcome.steps == 22 and outcome.samples == 88
    assert [(one.step, one.metric) for one in seen] == [(one.step, one.metric) for one in seen_again]
    assert seen[0].step == 0


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("exit", "exited with code 1"),
        ("no trial", "ended without calling current_trial"),
        ("twice", "call current_trial() once"),
        ("raise", "RuntimeError: the user's own mistake ("),
        ("sometimes", "the evaluation reports loss; the study's target metric is 'score'"),
        ("never evaluates", "no evaluation after step 2"),
        ("never steps", "without trial.step()"),
        ("empty", "the loader of batches() is empty"),
    ],
)
def test_a_mistake_of_the_script_fails_its_trial_in_words_and_the_next_one_runs(
    behaviour: str, reason: str, script: Script
) -> None:
    outcome, _ = script.run(behaviour)
    assert outcome.state is TrialState.FAILED
    assert reason in outcome.reason
    assert outcome.traceback is not None


@pytest.mark.parametrize(("behaviour", "state"), [("nan", TrialState.DIVERGED), ("memory", TrialState.OOM)])
def test_what_is_no_mistake_is_an_end_of_its_own(behaviour: str, state: TrialState, script: Script) -> None:
    assert script.run(behaviour)[0].state is state


@pytest.mark.slow
def test_a_script_that_fails_or_stays_after_its_end_has_reached_its_target_all_the_same(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, _ = script.run("fails late")
    assert failed.state is TrialState.REACHED
    assert "failed after its trial had ended" in failed.warnings[-1]
    monkeypatch.setattr(command_process, "LEAVE_SECONDS", 0.5)
    stayed, _ = script.run("swallows")
    assert stayed.state is TrialState.REACHED
    assert (
        stayed.warnings[-1]
        == "bssearch killed the script, which still ran 0.5 s after its trial had ended; end the program with the trial"
    )


def test_a_script_that_fails_after_an_early_end_has_failed(script: Script) -> None:
    outcome, _ = script.run("closes")
    assert (outcome.state, outcome.reason) == (TrialState.FAILED, "the script exited with code 1 after step 4")
    assert outcome.final_metric is not None


def test_a_script_ends_as_an_interpreter_does(script: Script) -> None:
    outcome, _ = script.run("leaves")
    assert outcome.state is TrialState.REACHED and not [one for one in outcome.warnings if "script" in one]
    assert (script.folder / "log").read_text() == "the last line"
    assert (script.folder / "exited").exists() and (script.folder / "waited").exists()
    assert not list(script.folder.glob("kept*"))


def test_a_server_that_cannot_fork_spares_its_own_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(script_host, "end_descendants", ended.append)
    for name in ("become_subreaper", "outlive_parent"):
        monkeypatch.setattr(script_host, name, lambda: None)
    monkeypatch.setattr(script_host, "_forked", Mock(side_effect=BlockingIOError("no more processes")))
    worker, server = socket.socketpair()
    with worker, server:
        socket.send_fds(worker, [b"1"], [os.open(os.devnull, os.O_RDONLY)])
        with pytest.raises(BlockingIOError):
            script_host.serve(server, "train.py", [], None)
    assert ended == []


def test_what_a_script_has_started_ends_with_its_trial_in_whichever_session(script: Script) -> None:
    assert script.run("grandchild")[0].state is TrialState.REACHED
    wait_until_gone(int((script.folder / "grandchild").read_text()))


def test_a_script_is_described_and_measured(script: Script) -> None:
    script.behaves("")
    found = script.loaded.describe()
    assert set(found.metrics) == {"score", "other"} and found.notice is None
    assert found.model.initial_metrics == {"score": 0.0, "other": 1.0}
    timed = script.loaded.measure(StepTimeRequest(configuration=AT, seconds_limit=0.05))
    assert isinstance(timed, StepTime) and timed.step_seconds is not None
    fits = script.loaded.measure(MemoryRequest(configuration=AT))
    assert isinstance(fits, MemoryUse) and fits.fits


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        *((one, ".") for one in ("exit", "no trial", "raise", "never evaluates", "never steps", "empty")),
        ("picky", "6 is no multiple of 4"),
    ],
)
def test_a_script_that_cannot_be_measured_is_an_error_of_the_workload(
    behaviour: str, said: str, script: Script
) -> None:
    script.behaves(behaviour)
    at = replace(AT, batch_size=6, micro_batch_size=6)
    with pytest.raises(WorkloadError, match=said):
        script.loaded.measure(StepTimeRequest(configuration=at, seconds_limit=0.05))


def test_a_script_that_ignores_the_learning_rate_that_is_searched_is_refused(script: Script) -> None:
    script.behaves("own rate")
    with pytest.raises(WorkloadError, match=r"searches learning_rate, .* trial\.learning_rate"):
        script.loaded.describe()


def test_a_stop_ends_a_trial_and_a_line_that_says_nonsense_is_no_trial(script: Script) -> None:
    script.behaves("slow")
    seen: list[Observation] = []
    asked = TrialState.PRUNED, "far behind"
    outcome = script.loaded.run(NEVER, seen.append, stop=lambda: asked if len(seen) > 2 else None)
    assert (outcome.state, outcome.reason) == asked
    assert outcome.steps < 1000

    fails = Mock(side_effect=UsageError("the driver is gone"))
    with pytest.raises(UsageError, match="the driver is gone"):
        script.loaded.run(NEVER, fails, stop=lambda: None)
    assert script.run()[0].state is TrialState.REACHED, "its end was waited for"


RANKS = (OWN_TRAINING / "ranks.py").read_text(encoding="utf-8")
BODY = "    with trial.no_sync(model):"
DIES = """    if trial.rank == 1 and trial.steps == 4 and os.path.exists(f"{__file__}.dies"):
        os._exit(3)
"""
WHOLE = Configuration(batch_size=16, micro_batch_size=4, accumulation_steps=4, learning_rate=0.1)


@pytest.mark.slow
def test_two_ranks_of_a_script_train_as_one_and_a_lost_rank_ends_the_trial(tmp_path: Path) -> None:
    assert RANKS.count(BODY) == 1
    (tmp_path / "train.py").write_text(RANKS.replace(BODY, DIES + BODY))
    halved = WHOLE.on_devices(2, 4)
    program = replace(PROGRAM, default=halved, metric="accuracy")
    plain = changed(REQUEST, target=Target(metric="accuracy", value=0.9))
    with single_threaded(), closing(LoadedScript(load_of(tmp_path, program=program))) as loaded:
        script = Script(tmp_path, loaded)
        whole, course = script.run(request=changed(plain, configuration=WHOLE))
        outcome, observed = script.run(request=changed(plain, configuration=halved))
        assert outcome.state is whole.state is TrialState.REACHED, outcome.reason
        assert [(one.step, one.samples, one.metric) for one in observed] == [
            (one.step, one.samples, one.metric) for one in course
        ]
        (tmp_path / "train.py.dies").touch()
        lost, _ = script.run(request=changed(plain, configuration=halved))
        assert lost.state is TrialState.FAILED
        assert psutil.Process(loaded._server._process.pid).children(recursive=True) == []


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "learning_rate"), [("lightning_loop", 0.1), ("trainer_loop", 3e-3)])
def test_a_trainer_trains_on_two_ranks(loop: str, learning_rate: float, tmp_path: Path) -> None:
    code = (OWN_TRAINING / f"{loop}.py").read_text(encoding="utf-8")
    code = code.replace('accelerator="cpu"', 'accelerator="cpu", devices=trial.world_size')
    group = 'from torch import distributed\n\ndistributed.init_process_group("gloo")\n'
    (tmp_path / "train.py").write_text(group + code)
    halved = replace(WHOLE.on_devices(2, 4), learning_rate=learning_rate)
    program = replace(PROGRAM, default=halved, metric="accuracy")
    request = changed(REQUEST, configuration=halved, target=Target(metric="accuracy", value=0.85))
    with single_threaded(), closing(LoadedScript(load_of(tmp_path, program=program))) as loaded:
        outcome, observed = Script(tmp_path, loaded).run(request=request)
    assert outcome.state is TrialState.REACHED, outcome.reason
    assert outcome.samples == 16 * outcome.steps and [one.step for one in observed[:3]] == [0, 2, 4]


@pytest.mark.slow
def test_a_server_that_has_died_is_started_anew(script: Script) -> None:
    script.loaded._server._process.kill()
    script.loaded._server._process.wait()
    assert script.run()[0].state is TrialState.REACHED


def test_a_script_that_is_not_there_or_changes_during_the_run_is_refused(script: Script, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read the script"):
        LoadedScript(load_of(tmp_path))
    with pytest.raises(WorkloadError, match="has changed since the run began"):
        LoadedScript(load_of(script.folder, revision="0" * 12))
    path = script.folder / "train.py"
    path.write_text(SCRIPT + "# changed\n")
    try:
        with pytest.raises(WorkloadError, match="has changed since the run began"):
            script.run()
    finally:
        path.write_text(SCRIPT)
    assert script.run()[0].state is TrialState.REACHED


@pytest.mark.slow
def test_a_script_whose_imports_start_threads_is_started_anew_for_each_trial_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with single_threaded(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "2")
        with closing(LoadedScript(load_of(tmp_path))) as loaded:
            assert "imports start other threads (1)" in str(loaded._server.notice)
            outcome, _ = Script(tmp_path, loaded).run("grandchild")
    assert outcome.state is TrialState.REACHED
    wait_until_gone(int((tmp_path / "grandchild").read_text()))


@pytest.fixture
def executor(script: Script) -> Iterator[LocalExecutor]:
    settings = ExecutorSettings(workload="train.py", folder=script.folder, device="cpu", program=PROGRAM)
    with closing(LocalExecutor(settings)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "sigkill"])
def test_nothing_is_left_of_a_worker_that_ends_in_a_trial(how: str, script: Script, executor: LocalExecutor) -> None:
    script.behaves("grandchild")
    (script.folder / "grandchild").unlink(missing_ok=True)
    executor.submit(NEVER)
    wait_for(executor, lambda events: len(events) > 2)
    worker = not_none(executor._slots[0].worker)
    children = psutil.Process(worker.pid).children(recursive=True)
    below = [*(one.pid for one in children), int((script.folder / "grandchild").read_text())]
    assert len(set(below)) >= 4, "the server, the script, its child, and the worker's shell"
    if how == "sigkill":
        os.kill(worker.pid, signal.SIGKILL)
    else:
        executor.kill()
    state = outcomes(wait_for(executor, outcomes))[1].state
    assert state is (TrialState.FAILED if how == "sigkill" else TrialState.CANCELLED)
    for pid in below:
        wait_until_gone(pid)
