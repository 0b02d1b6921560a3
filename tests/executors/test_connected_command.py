"""Commands that ask for their trial over a socket: plain programs, and the ranks of torchrun."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.base import Load, Program
from bssearch.executors.programs.command import LoadedCommand
from bssearch.executors.programs.command_process import SilenceLimit
from bssearch.records import TrialState
from tests.documents import OWN_TRAINING
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


def program(folder: Path, code: str, *words: str, devices: int = 1) -> LoadedCommand:
    (folder / "train.py").write_text(code)
    plain = settings(folder, [*(words or (sys.executable,)), "train.py"])
    return LoadedCommand(Load(settings=replace(plain, devices=(devices,)), slot=0))


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
        ("trial = bssearch.current_trial(batch_size=1, learning_rate=1)", "call current_trial() once"),
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
    with pytest.raises(WorkloadError, match=r"learning_rate is searched, but .* not take \{learning_rate\}"):
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
    with pytest.raises(WorkloadError, match=r"was silent for 1 s after its call"):
        loaded(tmp_path, [sys.executable, "train.py"], hang_seconds=300).describe()


TWO = DEFAULT.on_devices(2, 2)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={devices}")


@pytest.mark.slow
def test_the_ranks_of_torchrun_train_one_trial(tmp_path: Path) -> None:
    code = (OWN_TRAINING / "ranks.py").read_text(encoding="utf-8")
    outcome, observed = run(program(tmp_path, code, *TORCHRUN, devices=2), request(configuration=TWO))
    assert outcome.state is TrialState.REACHED, outcome.reason
    assert outcome.samples == 8 * outcome.steps and observed[-1].metric >= 0.9
    assert not any(works_in(process, tmp_path) for process in psutil.process_iter())


@pytest.mark.slow
def test_the_ranks_of_torchrun_measure_the_gradient_noise_near_the_target(tmp_path: Path) -> None:
    code = (OWN_TRAINING / "ranks.py").read_text(encoding="utf-8")
    near = "return {'accuracy': 0.89 if 0 < trial.steps < 90 else trial.steps / 100}"
    code = code.replace("    with torch.no_grad():", f"    {near}\n    with torch.no_grad():")
    outcome, _ = run(program(tmp_path, code, *TORCHRUN, devices=2), request(configuration=TWO))
    assert (outcome.state, outcome.steps) == (TrialState.REACHED, 90)
    assert outcome.noise.passes and outcome.noise.trace is not None


def test_a_command_whose_ranks_are_not_the_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torchrun starts 2 processes, but executor\.devices = 1") as raised:
        program(tmp_path, LOOP, "torchrun", "--nproc_per_node", "2")
    assert "executor.devices: 2" in str(raised.value.hint)
    without = program(tmp_path, LOOP, devices=2)
    with pytest.raises(UsageError, match=r"2 devices, but the command has no placeholder \{devices\}"):
        without.check_places(TWO)
    places = ["{devices}", "{batch_size}", "{accumulation_steps}"]
    program(tmp_path, LOOP, "mpirun", "-n", *places, devices=2).check_places(TWO)


def works_in(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        return process.pid != os.getpid() and process.cwd() == str(folder)
    return False


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
