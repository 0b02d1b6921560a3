"""Any program as training: real programs that succeed or fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bssearch.errors import LaunchError, UsageError, WorkloadError
from bssearch.executors.base import Load, Program
from bssearch.executors.programs import command_process
from bssearch.executors.programs.command import LARGEST_FILE, LoadedCommand
from bssearch.executors.programs.command_process import CommandProcess, SilenceLimit
from bssearch.executors.slots import LocalExecutor
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    SecondsBasis,
    StepTime,
    StepTimeRequest,
    TrialState,
)
from tests import waiting
from tests.documents import OWN_TRAINING
from tests.executors.line_workload import outcomes, wait_for
from tests.executors.own_command import (
    BEGINS,
    DEFAULT,
    LEAVES,
    NAP,
    REACHES,
    loaded,
    napping,
    python,
    request,
    run,
    script,
    settings,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a command leaves is found on Linux")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail if a test leaves a process or a descriptor."""
    before = open_descriptors()
    yield
    assert napping() == []
    assert open_descriptors() <= before


EXPRESSIONS = {"step": r"step (\d+)", "accuracy": r"acc=([0-9.]+)"}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_json_lines_on_stdout_and_in_the_pipe_are_a_trial(tmp_path: Path) -> None:
    outcome, observed = run(loaded(tmp_path, REACHES))
    assert (outcome.state, outcome.seconds_basis) == (TrialState.REACHED, SecondsBasis.WALL)
    assert [one.step for one in observed] == [0, 10]
    piped = """echo '{"step": 5, "accuracy": 0.4, "seconds": 2}' > $BSSEARCH_REPORT
        echo '{"step": 9, "accuracy": 0.95, "seconds": 4}' > $BSSEARCH_REPORT"""
    outcome, _ = run(loaded(tmp_path, piped))
    assert (outcome.state, outcome.seconds_basis) == (TrialState.REACHED, SecondsBasis.REPORTED)
    assert outcome.first_hit_seconds == 4


def test_a_log_is_read_by_its_expressions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "echo acc=0.5; echo step 5; echo well >&2; echo 'step 9 acc=0.95'; SLEEP"
    outcome, observed = run(loaded(tmp_path, script, EXPRESSIONS))
    assert outcome.state is TrialState.REACHED and [one.metric for one in observed] == [0.5, 0.95]
    assert capfd.readouterr().out == "acc=0.5\nstep 5\nwell\nstep 9 acc=0.95\n"


@pytest.mark.parametrize(("code", "state"), [(0, TrialState.REACHED), (1, TrialState.FAILED)])
def test_the_last_line_of_a_program_that_ended_well_needs_no_line_end(
    code: int, state: TrialState, tmp_path: Path
) -> None:
    """The last line of a program that failed may be cut off."""
    ends = f"""printf '{{"step": 10, "accuracy": 0.95}}'; exit {code}"""
    assert run(loaded(tmp_path, BEGINS + ends))[0].state is state
    if code == 0:
        assert "accuracy" in loaded(tmp_path, ends).describe().metrics
    assert run(loaded(tmp_path, BEGINS + ends.replace("; exit", " > $BSSEARCH_REPORT; exit")))[0].state is state


@pytest.mark.parametrize("where", ["", " > $BSSEARCH_REPORT"])
@pytest.mark.parametrize(
    ("later", "named"),
    [
        ('{"step": "1,0x0", "accuracy": 0.5}', "step = "),
        ('{"step": 1,000, "accuracy": 0.5}', '"step": 1,000'),
        ('{"step": 1000, "accuracy": "0,5"}', "accuracy = "),
    ],
)
def test_a_json_line_that_cannot_be_read_any_more_fails_its_trial(
    later: str, named: str, where: str, tmp_path: Path
) -> None:
    outcome, observed = run(loaded(tmp_path, f"{BEGINS}echo '{later}'{where}; SLEEP"))
    assert outcome.state is TrialState.FAILED and named in outcome.reason
    assert where or [one.step for one in observed] == [0], "the pipe may be read before what is printed"


@pytest.mark.parametrize(
    ("later", "state", "named"),
    [
        ("step 1,000 acc=0.95", TrialState.REACHED, "accuracy"),
        ("step 1,0x0 acc=0.95", TrialState.FAILED, "report.step found '1,0x0', not a number"),
        ("step 1000 acc=0,95", TrialState.FAILED, "report.accuracy found '0,95', not a number"),
    ],
)
def test_a_log_whose_reports_change_is_read_or_fails_its_trial(
    later: str, state: TrialState, named: str, tmp_path: Path
) -> None:
    expressions = {"step": r"step (\S+)", "accuracy": r"acc=(\S+)"}
    outcome, observed = run(loaded(tmp_path, f"echo step 0 acc=0.1; echo step 980 acc=0.5; echo {later}", expressions))
    assert outcome.state is state and named in outcome.reason
    assert [one.step for one in observed] == [0, 980, *([1000] if state is TrialState.REACHED else [])]


def test_a_program_gets_the_values_of_its_trial_and_no_shell(tmp_path: Path) -> None:
    code = """import json, sys, os
json.dump(sys.argv[1:], open("told.json", "w"))
print(json.dumps({"step": 0, "accuracy": 0.95}), file=open(os.environ["BSSEARCH_REPORT"], "w"))"""
    split = "{batch_size}/{micro_batch_size}x{accumulation_steps}"
    places = ["--lr={learning_rate}", split, "{seed}", "{evaluate_every}", "{threads}{device}", "{}", "$HOME; {seed!r}"]
    command = loaded(tmp_path, [*python(code), *places])
    configuration = Configuration(batch_size=16, micro_batch_size=8, accumulation_steps=2, learning_rate=1e-5)
    run(command, request(configuration=configuration, seed=7, eval_every_steps=3))
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == ["--lr=1e-05", "16/8x2", "7", "3", "1cpu", "{}", "$HOME; {seed!r}"]
    with pytest.raises(UsageError, match=r"command: unknown placeholder \{size\}; choose from accumulation_steps, "):
        run(loaded(tmp_path, "true {size}"))
    outcome, _ = run(loaded(tmp_path, BEGINS + "true {batch_size}; SLEEP"), request(configuration=configuration))
    assert outcome.state is TrialState.FAILED
    assert "takes 2 micro-batches per step, but the command has fewer than two of" in str(outcome.reason)
    parameters = {"batch_schedule": "milestones", "batch_stages": "64:32", "batch_rate_rule": "sqrt"}
    growing = replace(configuration, accumulation_steps=1, micro_batch_size=16, parameters=parameters)
    outcome, _ = run(loaded(tmp_path, BEGINS + "true {batch_size}; SLEEP"), request(configuration=growing))
    assert outcome.state is TrialState.FAILED
    assert "batch_schedule = 'milestones': the batch size of a command cannot grow" in str(outcome.reason)


def test_a_command_that_is_not_there_or_cannot_be_started_is_named(tmp_path: Path) -> None:
    for words in (["no-such-program"], [""], [str(tmp_path)]):
        with pytest.raises(WorkloadError, match="does not run: ") as caught:
            run(loaded(tmp_path, words))
        assert repr(words[0]) in caught.value.message
    with pytest.raises(LaunchError, match=r"does not start: .*Argument list too long"):
        run(loaded(tmp_path, ["true", *["x" * 100_000] * 50]))


@pytest.mark.parametrize(
    ("script", "state", "said"),
    [
        (BEGINS + "exit 1", TrialState.FAILED, "the command exited with code 1 after step 0"),
        (BEGINS + "kill -SEGV $$", TrialState.FAILED, "the command was killed by SIGSEGV (signal 11) after step 0"),
        ("echo 'torch.OutOfMemoryError: CUDA out of memory.'; exit 1", TrialState.OOM, "CUDA out of memory"),
        (BEGINS, TrialState.EXHAUSTED, "the command ended at step 0"),
        ("echo hello", TrialState.FAILED, "the command ended without a report of accuracy"),
        ("""echo '{"step": 5, "loss": 1}'""", TrialState.FAILED, "without a report of accuracy"),
        (
            BEGINS + """echo '{"step": -3}'; SLEEP""",
            TrialState.FAILED,
            "reports step -3: a step must be a",
        ),
        (BEGINS + BEGINS + "SLEEP", TrialState.FAILED, "step 0 after step 0: steps must rise"),
        (
            """for i in 1 2 3 4 5 6 7; do echo '{"step": '$i', "seconds": 0.001}'; sleep 0.01; done; SLEEP""",
            TrialState.FAILED,
            "; count the seconds from the start of training, over all epochs",
        ),
        (
            BEGINS + """echo '{"step": 1, "accuracy": NaN}'; SLEEP""",
            TrialState.DIVERGED,
            "accuracy = nan is not finite",
        ),
        (BEGINS + "yes > $BSSEARCH_REPORT & exit 0", TrialState.EXHAUSTED, "the command ended at step 0"),
        (BEGINS + "rm $BSSEARCH_REPORT; exec >&- 2>&-; sleep 0.2", TrialState.EXHAUSTED, "the command ended at"),
    ],
)
def test_every_end_of_a_program_is_one_of_its_trial(script: str, state: TrialState, said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    outcome, _ = run(loaded(tmp_path, script))
    assert outcome.state is state and said in outcome.reason
    assert "Traceback" not in str(outcome.traceback)
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("ignores", ["", "trap '' TERM; "])
def test_what_a_program_started_ends_with_it(ignores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_process, "TERMINATE_SECONDS", 0.3)
    left = ignores + LEAVES + REACHES + "while true; do sleep 0.1; done"
    assert run(loaded(tmp_path, left))[0].state is TrialState.REACHED
    assert napping() == []
    gone, _ = run(loaded(tmp_path, ignores + LEAVES + BEGINS + "exit 3"))
    assert gone.reason == "the command exited with code 3 after step 0"
    assert napping() == []


def test_a_program_may_save_something_when_it_is_asked_to_end(tmp_path: Path) -> None:
    script = "trap 'touch saved; exit 0' TERM; touch ready; " + BEGINS + "while true; do sleep 0.05; done"
    ready, enough = tmp_path / "ready", (TrialState.CANCELLED, "enough")
    stopped, _ = run(loaded(tmp_path, script), stop=lambda: enough if ready.exists() else None)
    assert (stopped.state, stopped.reason) == (TrialState.CANCELLED, "enough")
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_orphans_that_end_meanwhile_are_reaped_meanwhile(tmp_path: Path) -> None:
    script = BEGINS + "for i in 1 2 3 4 5 6 7 8; do (setsid true &); done; sleep 0.5; " + REACHES.partition("; ")[2]
    zombies: list[int] = []

    def look() -> None:
        zombies.append([one.status() for one in psutil.Process().children()].count(psutil.STATUS_ZOMBIE))

    outcome, _ = run(loaded(tmp_path, script), stop=look)
    assert outcome.state is TrialState.REACHED and zombies[-1] <= 1, "the program itself"


@pytest.mark.slow
def test_a_hundred_megabytes_of_prints_are_logged_to_a_bound(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_process, "MOST_LOGGED_BYTES", 10_000)
    outcome, _ = run(loaded(tmp_path, BEGINS + "head -c 100000000 /dev/zero; echo; " + REACHES.partition("; ")[2]))
    assert outcome.state is TrialState.REACHED
    printed = capfd.readouterr().out
    assert len(printed) < 11_000 and printed.endswith("\n(further output is left out)\n")


def test_a_program_ends_where_its_reports_are_no_longer_read(tmp_path: Path) -> None:
    command = loaded(tmp_path, LEAVES + BEGINS + "SLEEP")
    with pytest.raises(ZeroDivisionError):
        for _ in command._until_it_ends(command.started(DEFAULT, seed=0, evaluate_every=1, threads=1)):
            divmod(1, 0)
    with pytest.raises(ZeroDivisionError), CommandProcess(["sleep", NAP], tmp_path, {}) as process:
        assert process.goes_on()
        divmod(1, 0)
    assert process.end() == process.end() == -signal.SIGTERM
    assert napping() == []


def test_a_command_is_described_by_what_it_reports_of_the_default(tmp_path: Path) -> None:
    said = """echo '{"step": 0, "loss": 3, "error": 0.5}'; echo '{"step": 1, "accuracy": 0.2}'; SLEEP"""
    found = loaded(tmp_path, said).describe()
    assert set(found.metrics) == {"error", "accuracy"} and found.train_samples is None
    assert found.model.initial_metrics == {"error": 0.5}, "that of accuracy was trained"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo oh no; exit 1", "the command exited with code 1; the program printed:\noh no"),
        ("exit 1", "the command exited with code 1; the program printed no text"),
        (
            "echo done",
            'the command ended without a report: let the command print lines such as {"step": 100, "accuracy"',
        ),
        ("""echo '{"step": 1, "error": 2}'""", "the command reports error; the study's target metric is 'accuracy'"),
        ("echo wait; SLEEP", "the command made no report for 0.5 s: let the command print"),
        (
            """i=0; while true; do echo '{"step": '$((i++))', "e'$i'": 2}'; sleep 0.01; done""",
            "the command reports e1, e",
        ),
        ("""echo '{"step": 1e99}'""", "the command reports step 1e+99"),
    ],
)
def test_what_keeps_a_command_from_being_described_is_said(script: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, script, hang_seconds=0.5 if "sleep" in script.lower() else 60.0).describe()
    assert said in caught.value.message and len(caught.value.message) < 500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Step 1 acc=0.5'",
            "report.step: step (\\d+) found no number in any line; correct the regular expression",
        ),
        (
            "while true; do echo Step 1 acc=0.5; sleep 0.01; done",
            "makes no report: report.step: step (\\d+) found",
        ),
        (
            "i=0; while true; do echo step $((i++)) ACC=0.5; sleep 0.01; done",
            "no metric within 1 s; the study's target metric is",
        ),
    ],
)
def test_an_expression_that_finds_nothing_in_a_log_is_told_soon(script: str, said: str, tmp_path: Path) -> None:
    command = loaded(tmp_path, script + "; : {evaluate_every}", EXPRESSIONS, hang_seconds=10.0)
    began = time.monotonic()
    with pytest.raises(WorkloadError) as caught:
        command.describe()
    assert time.monotonic() - began < 9.0, "long before it would count as hung"
    assert said in caught.value.message and "the program printed:" in caught.value.message
    assert ("report.accuracy: " in caught.value.message) is ("ACC" in script)


@pytest.mark.slow
def test_a_log_may_be_silent_before_its_training(tmp_path: Path) -> None:
    command = loaded(
        tmp_path, f"sleep 1; {'echo loading; ' * 15}echo step 0 acc=0.1; SLEEP", EXPRESSIONS, hang_seconds=5
    )
    assert set(command.describe().metrics) == {"accuracy"}


def timed(command: LoadedCommand) -> StepTime:
    asked = StepTimeRequest(configuration=DEFAULT, threads=1, trial_train_seconds=10.0, seconds_limit=1.0)
    measured = command.measure(asked)
    assert isinstance(measured, StepTime)
    return measured


@pytest.mark.slow
def test_steps_are_timed_by_the_programs_seconds_or_by_two_runs_that_evaluate_differently(tmp_path: Path) -> None:
    loop = """import itertools, time
for step in itertools.count():
    if step % {evaluate_every} == 0:
        time.sleep(EVALUATION)
        print('{"step": %d, "accuracy": 0.1, "seconds": %.9f}' % (step, 0.25 * step))
    time.sleep(0.002)
"""
    own = timed(loaded(tmp_path, python(loop.replace("EVALUATION", "0"))))
    assert own.step_seconds == pytest.approx(0.25) and own.evaluation_seconds == 0.0
    by_wall = loop.replace("EVALUATION", "0.02").replace(', "seconds": %.9f', "").replace("(step, 0.25 * step)", "step")
    wall = timed(loaded(tmp_path, python(by_wall)))
    assert wall.step_seconds is not None and wall.evaluation_seconds is not None
    assert wall.evaluation_seconds > 2 * wall.step_seconds > 0.0


def noise_request(configuration: Configuration, *, train_seconds_limit: float, eval_every_steps: int) -> NoiseRequest:
    return NoiseRequest(
        configuration=configuration,
        seed=0,
        target=request().target,
        train_seconds_limit=train_seconds_limit,
        noise_seconds_limit=1.0,
        eval_every_steps=eval_every_steps,
    )


def test_what_cannot_be_measured_of_a_command_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="batch size 8: the command ended after 1 report, too few to time a step"):
        timed(loaded(tmp_path, BEGINS))
    noise = noise_request(DEFAULT, train_seconds_limit=1.0, eval_every_steps=1)
    with pytest.raises(WorkloadError, match="of a command that only reports"):
        loaded(tmp_path, BEGINS).measure(noise)


def test_a_program_without_memory_does_not_fit(tmp_path: Path) -> None:
    asked = MemoryRequest(configuration=DEFAULT, threads=1)
    words = script("echo 'RESOURCE_EXHAUSTED: Out of memory'; exit 1")
    with closing(LocalExecutor(settings(tmp_path, words))) as executor:
        assert executor.measure_step_time(StepTimeRequest(configuration=DEFAULT, threads=1)).out_of_memory
        assert not executor.measure_memory(asked).fits
    fits = loaded(tmp_path, """for i in 1 2 3; do echo '{"step": '$i'}'; done; SLEEP""")
    measured = fits.measure(asked)
    assert isinstance(measured, MemoryUse) and measured.fits


def test_a_command_is_known_by_the_files_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("one")
    (tmp_path / "my.cfg").write_text("one")
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    words = ["/bin/bash", "train.sh", "--config=my.cfg", "data.bin", "{seed}"]
    load = Load(settings=settings(tmp_path, words), slot=0)
    known = LoadedCommand(load).revision
    assert LoadedCommand(replace(load, revision=known)).revision == known
    for changed in ("train.sh", "my.cfg"):
        (tmp_path / changed).write_text("two")
        with pytest.raises(WorkloadError, match="a file that the command names has changed since the run began"):
            LoadedCommand(replace(load, revision=known))
        (tmp_path / changed).write_text("one")


@pytest.mark.slow
def test_a_trial_that_hangs_ends_with_its_worker_and_with_all_that_it_started(tmp_path: Path) -> None:
    words = script("trap '' TERM; " + LEAVES + BEGINS + "touch started; while true; do sleep 1; done")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr("tempfile.tempdir", str(temporary))
        with closing(LocalExecutor(settings(tmp_path, words, hang_seconds=1.5))) as executor:
            executor.submit(request())
            assert "hang: no training progress" in outcomes(wait_for(executor, outcomes))[1].reason
            assert (tmp_path / "started").exists()
            waiting.wait_for(lambda: not napping())
            assert not list(temporary.glob("bssearch-report-*"))


DRIVER = """
import sys, time
from pathlib import Path
from bssearch.executors.slots import LocalExecutor
from tests.executors.own_command import *
executor = LocalExecutor(settings(Path(sys.argv[1]), sys.argv[2:]))
executor.submit(request())
while not (Path(sys.argv[1]) / "started").exists():
    executor.events(0.05)
print("running", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_of_the_group_of_a_command(tmp_path: Path) -> None:
    words = script("trap '' TERM HUP; SLEEP & " + BEGINS + "touch started; SLEEP; true")
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    words = [sys.executable, "-c", DRIVER, str(tmp_path), *words]
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE) as driver:
        try:
            assert driver.stdout is not None and driver.stdout.readline() == b"running\n"
            waiting.wait_for(lambda: len(napping()) == 2)
        finally:
            driver.kill()
    waiting.wait_for(lambda: not napping())


# Commands that ask for their trials -----------------------------------------------------------------------------------


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
        (LOOP + "    if trial.steps == 3: sys.exit(3)", "the command exited with code 3 after step 3"),
        (LOOP.replace("time.sleep(0.001)", "1 / 0"), "ZeroDivisionError: division by zero ("),
    ],
)
def test_what_fails_after_it_has_asked_is_a_failed_trial(code: str, said: str, tmp_path: Path) -> None:
    outcome, _ = run(program(tmp_path, ASKS + code))
    assert outcome.state is TrialState.FAILED and said in str(outcome.reason)


@pytest.mark.slow
def test_a_program_that_has_reported_cannot_ask_and_needs_its_places(tmp_path: Path) -> None:
    report = """import time; print('{"step": 0, "accuracy": 0.1}', flush=True); time.sleep(1)"""
    outcome, _ = run(program(tmp_path, report + ASKS))
    assert outcome.state is TrialState.FAILED and "LaunchError: cannot connect to a search at " in str(
        outcome.traceback
    )
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
    with pytest.raises(WorkloadError, match=r"then sent no message for 1 s"):
        loaded(tmp_path, [sys.executable, "train.py"], hang_seconds=300).describe()


TWO = DEFAULT.on_devices(2, 2)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={devices}")


@pytest.mark.slow
def test_the_ranks_of_torchrun_train_one_trial_and_measure_the_gradient_noise_near_its_target(tmp_path: Path) -> None:
    code = (OWN_TRAINING / "ranks.py").read_text(encoding="utf-8")
    near = "return {'accuracy': 0.89 if 0 < trial.steps < 90 else trial.steps / 100}"
    code = code.replace("    with torch.no_grad():", f"    {near}\n    with torch.no_grad():")
    outcome, _ = run(program(tmp_path, code, *TORCHRUN, devices=2), request(configuration=TWO))
    assert (outcome.state, outcome.steps, outcome.samples) == (TrialState.REACHED, 90, 8 * 90)
    assert not any(works_in(process, tmp_path) for process in psutil.process_iter())
    assert outcome.noise.passes and outcome.noise.trace is not None


@pytest.mark.slow
def test_the_ranks_of_torchrun_measure_the_gradient_noise_of_a_probe(tmp_path: Path) -> None:
    command = program(tmp_path, (OWN_TRAINING / "ranks.py").read_text(encoding="utf-8"), *TORCHRUN, devices=2)
    asked = noise_request(TWO, train_seconds_limit=300.0, eval_every_steps=5)
    found = command.measure(asked)
    assert isinstance(found, NoiseMeasurement) and (found.batch_size, found.reason) == (TWO.batch_size, None)
    assert found.noise.low and found.noise.passes
    assert not any(works_in(process, tmp_path) for process in psutil.process_iter())


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
