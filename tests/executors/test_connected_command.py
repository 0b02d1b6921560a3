"""Commands that ask for their trial over a socket: plain programs, and the ranks of torchrun."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bssearch.errors import WorkloadError
from bssearch.executors.base import Load, Program
from bssearch.executors.programs.command import LoadedCommand
from bssearch.executors.programs.command_process import SilenceLimit
from bssearch.records import Configuration, StepTime, StepTimeRequest, TrialState
from tests.executors.own_command import BEGINS, DEFAULT, loaded, request, run, settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a command leaves is found on Linux")

ASKS = """
import sys, time
import bssearch
trial = bssearch.current_trial(batch_size=64, learning_rate=1.0)
"""
LOOP = """
print(trial.batch_size, trial.learning_rate, flush=True)
for _ in trial.batches([0], evaluate=lambda: {"accuracy": trial.steps / 10}):
    time.sleep(0.001)
"""


def program(folder: Path, code: str, *words: str) -> LoadedCommand:
    (folder / "train.py").write_text(code)
    return loaded(folder, [*(words or (sys.executable,)), "train.py"])


@pytest.mark.slow
def test_a_program_that_asks_needs_no_place_and_no_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = program(tmp_path, ASKS + LOOP)
    described = command.describe()
    assert described.model.initial_metrics == {"accuracy": 0.0}
    assert described.environment.workload_revision == command.revision
    outcome, observed = run(command)
    assert (outcome.state, outcome.seconds_basis) == (TrialState.REACHED, None)
    assert [one.step for one in observed] == [0, 2, 4, 6, 8, 10] and 0.008 < outcome.train_seconds < 5
    assert "8 0.05" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LOOP + "    if trial.steps == 3: sys.exit(3)", "the command exited with code 3 after 3 steps"),
        (LOOP.replace("time.sleep(0.001)", "1 / 0"), "ZeroDivisionError: division by zero ("),
        ("trial = bssearch.current_trial(batch_size=1, learning_rate=1)", "current_trial() is called twice"),
    ],
)
def test_what_fails_after_it_has_asked_is_a_failed_trial(code: str, said: str, tmp_path: Path) -> None:
    outcome, _ = run(program(tmp_path, ASKS + code))
    assert outcome.state is TrialState.FAILED and said in str(outcome.reason)


@pytest.mark.slow
def test_a_program_that_has_reported_cannot_ask_and_needs_its_places(tmp_path: Path) -> None:
    report = """import time; print('{"step": 0, "accuracy": 0.1}', flush=True); time.sleep(1)"""
    outcome, _ = run(program(tmp_path, report + ASKS))
    assert outcome.state is TrialState.FAILED and "LaunchError: no search listens at " in str(outcome.traceback)
    plain = settings(tmp_path, ["bash", "-c", BEGINS + "echo {batch_size}"])
    assert plain.program is not None
    lacks = replace(plain, program=replace(plain.program, searched=("batch_size", "learning_rate")))
    with pytest.raises(WorkloadError, match=r"learning_rate is searched, and .* not take \{learning_rate\}"):
        LoadedCommand(Load(settings=lacks, slot=0)).describe()


@pytest.mark.slow
def test_a_program_that_asks_and_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoneOnceItAsked(SilenceLimit):
        """Lets a program take its time to import torch, on a machine however busy, and no more than that."""

        def stop(self) -> None:
            self.seconds = 1.0
            super().stop()

    monkeypatch.setattr("bssearch.executors.programs.command.SilenceLimit", NoneOnceItAsked)
    (tmp_path / "train.py").write_text(ASKS + "time.sleep(1000)")
    with pytest.raises(WorkloadError, match=r"said nothing for 1 s after it had asked"):
        loaded(tmp_path, [sys.executable, "train.py"], hang_seconds=300).describe()


RANKS = """
import torch
from torch import distributed
import bssearch

distributed.init_process_group("gloo")
trial = bssearch.current_trial(batch_size=64, learning_rate=1.0)
rank, rows = distributed.get_rank(), torch.arange(100.0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
seen = torch.zeros(())
loader = torch.utils.data.DataLoader(rows, batch_size=trial.micro_batch_size, sampler=trial.sampler(rows))
first = None
for batch in trial.batches(loader, evaluate=lambda: {"accuracy": trial.steps / 10 if rank == 0 else 99.0}):
    first = batch.tolist() if first is None else first
    loss = (model(batch[:, None] / 100) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weight = model.module.weight.item()
print(f"rank {rank}: {trial.batch_size} {trial.micro_batch_size} {trial.steps} {weight:.6f} {first}", flush=True)
distributed.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def last_words(printed: str) -> list[list[str]]:
    """Return what the ranks print at their end: batch size, micro-batch size, steps, a weight, and the first rows."""
    lines = sorted(line for line in printed.splitlines() if line.startswith("rank "))
    return [line.split(maxsplit=6)[2:] for line in lines]


@pytest.mark.slow
def test_two_ranks_train_one_trial_and_stop_at_the_same_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = program(tmp_path, RANKS, *TORCHRUN)
    assert command.describe().model.initial_metrics == {"accuracy": 0.0}
    answer = command.measure(StepTimeRequest(configuration=DEFAULT, seconds_limit=0.2))
    assert isinstance(answer, StepTime)
    assert answer.step_seconds is not None and 0 < answer.step_seconds < 1
    capfd.readouterr()
    outcome, observed = run(command)
    assert (outcome.state, outcome.steps, outcome.seconds_basis) == (TrialState.REACHED, 10, None)
    assert [one.metric for one in observed] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    first, second = last_words(capfd.readouterr().out)
    assert first[:4] == second[:4] and first[:3] == ["8", "4", "10"]
    assert set(first[4].strip("[]").split(", ")).isdisjoint(second[4].strip("[]").split(", "))
    limited = request(seconds=0.05, eval_every_steps=300, configuration=replace(DEFAULT, learning_rate=0.0001))
    outcome, _ = run(command, replace(limited, target=replace(limited.target, value=1000.0)))
    assert outcome.state is TrialState.EXHAUSTED and outcome.steps % 300 == 0 and outcome.steps > 0
    assert [one[2] for one in last_words(capfd.readouterr().out)] == [str(outcome.steps)] * 2
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_ranks_that_cannot_share_a_micro_batch_say_so(tmp_path: Path) -> None:
    odd = Configuration(batch_size=6, micro_batch_size=3, accumulation_steps=2, learning_rate=0.1)
    outcome, _ = run(program(tmp_path, RANKS, *TORCHRUN), request(configuration=odd))
    assert outcome.state is TrialState.FAILED
    assert "batch_size = 6 must be a multiple of 4: it takes 2 micro-batches a step, each shared by 2 ranks" in str(
        outcome.reason
    )


def processes_of(folder: Path) -> list[int]:
    """Return the processes of this machine that work in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.cwd() == str(folder):
                found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_command_with_a_log_that_is_read_may_ask_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS + LOOP)
    read = Program(
        default=DEFAULT,
        metric="accuracy",
        command=(sys.executable, "train.py"),
        report={"step": "step ([0-9]+)", "accuracy": "acc=(.*)"},
    )
    plain = settings(tmp_path, ["true"])
    assert LoadedCommand(Load(settings=replace(plain, program=read), slot=0)).describe().metrics.keys() == {"accuracy"}
