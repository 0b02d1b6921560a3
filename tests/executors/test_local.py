"""Trials in real worker processes: their memory, environment, ranks and end, and every way to fail."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bssearch import Launch, LaunchError, WorkloadError
from bssearch.commands.opening import opened as opened_study
from bssearch.commands.probes import next_size, probe_memory
from bssearch.executors.base import LONGEST_LINE_BYTES, Executor, ExecutorSettings, LineSplitter
from bssearch.executors.process import SECRETS, Inbox, WorkerProcess, allocator_environment, worker_environment
from bssearch.executors.slots import LocalExecutor, SlotState
from bssearch.records import (
    MemoryRequest,
    Observation,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
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
from tests.factories import changed, make_spec, not_none
from tests.waiting import PATIENCE_S


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
            ended = wait_for(executor, outcomes)
            assert ["from a child" in event.log for event in ended if isinstance(event, TrialEnded)] == [True]
            assert executor._slots[0].log.read_text() == ""
        with pytest.raises(LaunchError, match="the worker was killed by SIGSEGV") as death:
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
    assert outcome.steps == observed[-1].step > 0
    assert outcome.final_metric == observed[-1].metric
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
    assert (environment["HARMLESS"], environment["GIVEN"]) == ("kept", "by the driver")
    assert environment["OMP_NUM_THREADS"] == "1"


def kill_worker(executor: LocalExecutor) -> None:
    worker = not_none(executor._slots[0].worker)
    os.kill(worker.pid, signal.SIGKILL)
    while not worker.has_exited():
        time.sleep(0.01)


@pytest.mark.slow
def test_workers_that_die_are_told_once_and_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.describe()
        before = time.monotonic()
        outcome, observed = run_to_the_end(executor, request_endless_trial(1, "fork_and_segfault"))
        assert time.monotonic() - before < 10.0, "the forked child holds the pipe open"
        assert (outcome.state, outcome.reason) == (TrialState.FAILED, "the worker was killed by SIGSEGV (signal 11)")
        assert outcome.traceback is not None
        assert "Segmentation fault" in outcome.traceback and "in misbehave" in outcome.traceback
        last = observed[-1]
        assert (outcome.steps, outcome.samples, outcome.train_seconds) == (
            last.step,
            last.samples,
            last.train_seconds,
        )
        assert outcome.final_metric == last.metric and outcome.wall_seconds > 0
        assert outcome.best_metric == max(one.metric for one in observed)

        assert run_to_the_end(executor, request_trial(2))[0].state is TrialState.REACHED
        kill_worker(executor)  # while it is idle
        executor.submit(request_endless_trial(3))
        wait_for(executor, lambda events: len(events) >= 3)
        (pid,) = worker_pids(executor)
        os.kill(pid, signal.SIGKILL)
        outcome = outcomes(wait_for(executor, outcomes))[3]
        assert outcome.state is TrialState.FAILED
        assert outcome.reason == "the worker was killed by SIGKILL (signal 9) from another program"


@pytest.mark.slow
def test_a_worker_that_finds_other_code_than_the_first_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        revision = executor.describe().environment.workload_revision
        code = tmp_path / "line.py"
        code.write_text(code.read_text() + "# changed\n")
        assert executor.describe().environment.workload_revision == revision, "what is loaded is as it was"
        assert run_to_the_end(executor, request_trial(1))[0].state is TrialState.REACHED
        kill_worker(executor)
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
        assert outcome.state is TrialState.FAILED and outcome.reason.startswith("hang: no training progress for ")
        assert outcome.traceback is not None and "in misbehave" in outcome.traceback

        outcome, _ = run_to_the_end(executor, request_endless_trial(3, "hold_lock"))
        assert outcome.state is TrialState.FAILED and outcome.reason.startswith("hang: ")


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
        ended = outcomes(executor.events(0.0))
        assert [ended[number].state for number in (3, 4)] == [TrialState.CANCELLED] * 2
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
        assert {slot.state for slot in executor._slots} == {SlotState.TRAINING, SlotState.READY}
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
        with pytest.raises(LaunchError, match=r"slot 0: the worker was killed by SIGSEGV \(signal 11\)") as died:
            executor.submit(request_trial(1))
        assert "Segmentation fault" in str(died.value) and "in load" in str(died.value)
        assert worker_pids(executor) == []

        code.write_text(good)
        assert run_to_the_end(executor, request_trial(1))[0].state is TrialState.REACHED


def lifeline(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run some lines with the module `bssearch.executors.process` in a new process."""
    text = "import ctypes, os\nfrom bssearch.executors.process import *\n" + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_the_kernel_is_asked_to_kill_a_worker_with_its_driver() -> None:
    asked = "die_with_parent(os.getppid())\nfound = ctypes.c_int()\n"
    get_pdeathsig = "assert ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0) == 0\nprint(found.value)"
    ended = lifeline(asked + get_pdeathsig)
    assert (ended.returncode, ended.stdout) == (0, f"{int(signal.SIGKILL)}\n"), ended.stderr


def test_a_worker_whose_driver_died_before_it_could_ask_ends_at_once_with_its_group() -> None:
    alone = "die_with_parent(os.getppid() + 1)\nprint('lives on')"
    led = lifeline(alone, start_new_session=True)
    assert (led.returncode, led.stdout) == (-signal.SIGKILL, "")
    among_others = lifeline(alone)
    assert (among_others.returncode, among_others.stdout) == (1, ""), "the others of the group are not its own"


def test_the_watcher_kills_the_group_when_the_drivers_end_of_the_pipe_closes_and_not_before() -> None:
    watched = "read, write = os.pipe()\nwatcher = Watcher(read)\n"
    closed = lifeline(f"{watched}os.close(write)\nimport time\ntime.sleep(60)", start_new_session=True)
    assert closed.returncode == -signal.SIGKILL
    dismissed = lifeline(f"{watched}watcher.dismiss()\nos.close(write)\nprint('lives on')", start_new_session=True)
    assert (dismissed.returncode, dismissed.stdout) == (0, "lives on\n"), dismissed.stderr


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", {}, ":4096:8"),  # repeatable sums on a GPU need this value
        ("CUBLAS_WORKSPACE_CONFIG", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8"),
        ("CUDA_DEVICE_ORDER", {}, "PCI_BUS_ID"),  # nvidia-smi's numbers, from which the driver chooses
        ("BSSEARCH_CHECKPOINT_DIR", {"BSSEARCH_CHECKPOINT_DIR": "sftp://ada:secret@host/x"}, None),
        ("BSSEARCH_CHECKPOINT_DIR", {"BSSEARCH_CHECKPOINT_DIR": "/scratch/ada"}, "/scratch/ada"),
        ("OMP_NUM_THREADS", {"OMP_NUM_THREADS": "7"}, "2"),
        ("PGPASSWORD", {"PGPASSWORD": "secret"}, None),
        ("HOME", {"HOME": "/home"}, "/home"),
    ],
)
def test_a_worker_has_the_drivers_environment_without_secrets(
    name: str, given: dict[str, str], found: str | None
) -> None:
    assert worker_environment(given, threads=2).get(name) == found


@contextmanager
def started(folder: Path) -> Iterator[WorkerProcess]:
    """Yield a worker process that has only just been started; kill and bury it in the end."""
    inbox: Inbox = queue.SimpleQueue()
    (folder / "log").write_text("from before\n")
    made = WorkerProcess(slot=3, threads=1, log=folder / "log", inbox=inbox, environment={})
    try:
        yield made
    finally:
        death = made.bury()
    assert death.return_code == -signal.SIGKILL
    assert inbox.get(timeout=10) == (made, None)


def test_the_id_of_a_worker_stays_its_own_until_it_is_buried(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        assert not worker.has_exited()
        worker.kill()
        while not worker.has_exited():
            os.sched_yield()
        assert psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(worker.pid)
    assert worker.has_exited()


def test_a_worker_leads_a_group_of_its_own_and_appends_to_its_log(tmp_path: Path) -> None:
    with started(tmp_path) as worker:
        assert os.getpgid(worker.pid) == os.getsid(worker.pid) == worker.pid
        assert (worker.slot, worker.log_start) == (3, len("from before\n"))
        assert worker.log.read_text().startswith("from before\n")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is kept from other processes")
@pytest.mark.parametrize("secret", ["BSSEARCH_DB_URL", "PGPASSWORD", "BSSEARCH_CHECKPOINT_DIR", None])
def test_a_driver_with_secrets_is_closed_to_other_processes_of_its_user(secret: str | None) -> None:
    code = "import ctypes; from bssearch.executors.process import hide_secrets; hide_secrets(); "
    code += "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
    if secret is not None:
        environment[secret] = "postgresql://me:secret@host/db"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("1" if secret is None else "0")


def test_a_message_has_a_longest_length() -> None:
    lines = LineSplitter()
    with pytest.raises(ValueError, match="a line has more than"):
        for _ in range(LONGEST_LINE_BYTES // 2**20 + 2):
            lines.feed(bytes(2**20))


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, {}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        *(({f"PYTORCH_{kind}ALLOC_CONF": "max_split_size_mb:64"}, {}) for kind in ("", "CUDA_", "HIP_")),
    ],
)
def test_segments_grow_unless_the_user_has_set_the_allocator_or_a_mig_slice_trains(
    environment: dict[str, str], added: dict[str, str]
) -> None:
    assert allocator_environment(environment) == added


MIB = 2**20
LIMIT = 2**31
PER_SAMPLE = 280 * MIB
SAMPLES = 8

WORKLOAD = f"""
import torch

from bssearch.records import MetricInfo
from bssearch.workloads.data import Data, Part


class Hungry:
    metrics = {{"score": MetricInfo(low=0.0, high=1.0, chance=0.0)}}

    def load(self, device):
        part = Part(torch.ones({SAMPLES}, 1), torch.ones({SAMPLES}, 1))
        return Data(part, part, part)

    def build_model(self, *, dropout):
        return torch.nn.Linear(1, 1)

    def loss(self, model, inputs, targets, *, label_smoothing):
        held = torch.empty(len(inputs) * {PER_SAMPLE}, dtype=torch.uint8)
        return torch.nn.functional.mse_loss(model(inputs), targets) + 0 * held[0]

    def evaluate(self, model, part):
        return {{"score": 0.5}}
"""

KEEPS_SMALL_BLOCKS = """
        self.kept = []
        for _ in range(3):  # once such a block is freed, glibc takes the next blocks from the heap
            torch.empty(20 * 2**20, dtype=torch.uint8)
        large = []
        for _ in range(64):
            large.append(torch.empty(20 * 2**20, dtype=torch.uint8))
            self.kept.append(torch.empty(2000, dtype=torch.uint8))
        del large
        held ="""


@contextmanager
def hungry(folder: Path, limit_bytes: int | None = LIMIT, *, code: str = WORKLOAD) -> Iterator[LocalExecutor]:
    """Yield an executor of a workload that takes 280 MiB a sample, out of 2 GiB."""
    (folder / "hungry.py").write_text(code)
    settings = ExecutorSettings(
        workload="hungry.py:Hungry", folder=folder, device="cpu", memory_limit_bytes=limit_bytes
    )
    with closing(LocalExecutor(settings)) as made:
        yield made


def request(size: int) -> MemoryRequest:
    configuration = request_endless_trial(1).plan.configuration
    return MemoryRequest(configuration=replace(configuration, batch_size=size, micro_batch_size=size))


@pytest.mark.slow
def test_a_death_under_a_limit_is_out_of_memory_if_its_last_words_say_so(tmp_path: Path) -> None:
    last_words = "terminate called after throwing an instance of std::bad_alloc"
    code = WORKLOAD.replace("held =", f"import os; os.write(2, b'{last_words}'); os.abort()\n        held =")
    with hungry(tmp_path, code=code) as executor:
        assert train(executor, 8).state is TrialState.OOM
        use = executor.measure_memory(request(8))
        assert not use.fits and use.reason is not None and "bad_alloc" in use.reason
    silent = code.replace(last_words, "")
    with hungry(tmp_path, code=silent) as executor, pytest.raises(LaunchError, match="SIGABRT"):
        executor.measure_memory(request(8))


@pytest.mark.slow
def test_a_worker_under_a_limit_keeps_nothing_of_the_trials_before(tmp_path: Path) -> None:
    """Otherwise blocks of 20 MiB, with small blocks between them, would leave holes in the heap."""
    code = WORKLOAD.replace("held =", KEEPS_SMALL_BLOCKS)
    with hungry(tmp_path, code=code) as executor:
        train(executor, 1, steps=3)
        [pid] = worker_pids(executor)
        data_kib = int(Path(f"/proc/{pid}/status").read_text().split("VmData:")[1].split()[0])
        assert 1024 * data_kib < LIMIT / 2, "what counts towards the limit of a process"


@pytest.mark.slow
def test_the_probes_answer_never_runs_out_in_200_steps_and_one_size_above_its_bracket_does(tmp_path: Path) -> None:
    spec = make_spec(
        workload="hungry.py:Hungry",
        target={"metric": "score", "value": 0.9, "goal": "maximize"},
        space={"batch_size": {"low": 6, "high": 8}, "learning_rate": 0.05},
        default={"batch_size": 6, "learning_rate": 0.05},
        executor={"device": "cpu", "memory_limit_gib": LIMIT / 2**30},
    )
    (tmp_path / "hungry.py").write_text(WORKLOAD)
    with opened_study(spec, Launch(db=f"sqlite:///{tmp_path / 'study.db'}", folder=tmp_path)) as study:
        found = probe_memory(study)
        assert isinstance(study.executor, LocalExecutor)
        assert worker_pids(study.executor) == [], "each size is run in a process of its own"
        assert next_size(found.uses, smallest=6, ceiling=SAMPLES) is None
        for other in (3, 5, 4):
            train(study.executor, other, steps=3)
        fits = train(study.executor, found.largest_that_fits)
        runs_out = train(study.executor, not_none(found.smallest_that_does_not) + 1)
    uses = {use.micro_batch_size: use for use in found.uses}
    assert (uses[6].fits, uses[6].reason) == (True, None)
    assert uses[6].peak_memory_bytes is not None and 100 * MIB < uses[6].peak_memory_bytes < LIMIT
    assert not uses[SAMPLES].fits and "can't allocate memory" in (uses[SAMPLES].reason or "")
    assert (fits.state, fits.steps) == (TrialState.CANCELLED, 200)
    assert runs_out.state is TrialState.OOM


def train(executor: Executor, size: int, steps: int = 200) -> TrialOutcome:
    """Train at a micro-batch size until the evaluation after some steps, or to the end."""
    trial: TrialRequest = changed(
        request_endless_trial(size, seconds=600.0), configuration=request(size).configuration, eval_every_steps=steps
    )
    executor.submit(trial)
    while True:
        for event in executor.events(1.0):
            if isinstance(event, TrialObserved) and event.observation.step == steps:
                executor.stop(TrialStop(size, TrialState.CANCELLED, "enough"))
            if isinstance(event, TrialEnded):
                return replace(event.outcome, steps=min(event.outcome.steps, steps))


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
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


@pytest.mark.slow
def test_ranks_learn_as_one_process_does_and_one_worker_serves_any_number(ranked: Executor) -> None:
    alone_state, alone = curve(ranked, request_trial(1))
    assert alone_state is TrialState.REACHED
    for number, size in enumerate((2, 4, 2, 1), 2):
        state, seen = curve(ranked, on_ranks(request_trial(number), size))
        assert state is alone_state
        assert [step for step, _, _ in seen] == [step for step, _, _ in alone]
        for (_, metric, loss), (_, metric_alone, loss_alone) in zip(seen, alone, strict=True):
            assert metric == pytest.approx(metric_alone, abs=1e-6)
            assert loss == (None if loss_alone is None else pytest.approx(loss_alone, rel=1e-5))


def ranks_of(executor: LocalExecutor) -> list[psutil.Process]:
    """Return the living rank processes of the executor's workers."""
    children = [child for pid in worker_pids(executor) for child in psutil.Process(pid).children()]
    return [child for child in children if "bssearch.executors.rank_workers" in child.cmdline()]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_its_trial_and_is_started_anew_for_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.submit(on_ranks(request_endless_trial(1), 4))
        wait_for(executor, lambda events: len(events) >= 3)
        ranks = ranks_of(executor)
        assert len(ranks) == 3
        ranks[-1].kill()
        outcome = outcomes(wait_for(executor, outcomes))[1]
        assert outcome.state is TrialState.FAILED
        assert outcome.reason == "rank 3 was killed by SIGKILL (signal 9) from another program"
        assert psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []
        outcome, _ = run_to_the_end(executor, on_ranks(request_trial(3), 2))
        assert outcome.state is TrialState.REACHED
        (rank,) = ranks_of(executor)
        rank.kill()  # while it is idle
        rank.wait(PATIENCE_S)
        assert run_to_the_end(executor, on_ranks(request_trial(4), 2))[0].state is TrialState.REACHED


@pytest.mark.slow
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
            == "rank 1 was killed by SIGKILL (signal 9) from another program"
        )


SLOW_EVALUATION = """    def evaluate(self, model, part):
        if self.calls > 10:
            open(os.path.join(os.path.dirname(__file__), "evaluating"), "w").close()
            time.sleep(1000)
        return self.quick(model, part)

    def quick("""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "state", "reason"),
    [
        (
            "out_of_memory",
            TrialState.OOM,
            "out of memory, micro-batch 4, batch size 8, learning rate 0.001, step 39: MemoryError: rank 1: Memory",
        ),
        ("raise", TrialState.FAILED, "rank 1: RuntimeError: the user's own mistake"),
        ("segfault", TrialState.FAILED, "rank 1 was killed by SIGSEGV (signal 11)"),
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


@pytest.mark.slow
def test_memory_that_runs_out_on_a_rank_is_an_answer(tmp_path: Path) -> None:
    with opened(tmp_path, spares_first=True, at=2) as executor:
        configuration = on_ranks(request_trial(1, "out_of_memory"), 2).plan.configuration
        assert executor.measure_step_time(StepTimeRequest(configuration=configuration)).out_of_memory
        used = executor.measure_memory(MemoryRequest(configuration=configuration))
        assert not used.fits and used.reason is not None
        assert used.reason.startswith("MemoryError: rank 1: MemoryError: no more of it")


@pytest.mark.slow
def test_step_times_are_measured_on_ranks(ranked: LocalExecutor) -> None:
    configuration = on_ranks(request_trial(1), 2).plan.configuration
    found = ranked.measure_step_time(StepTimeRequest(configuration=configuration, seconds_limit=0.5))
    assert found.step_seconds is not None and found.step_seconds > 0


@pytest.mark.slow
def test_a_rank_that_dies_at_its_start_is_told_with_its_exit(tmp_path: Path) -> None:
    with opened(tmp_path, fault="rank dies at start") as executor:
        outcome, _ = run_to_the_end(executor, on_ranks(request_trial(1), 2))
        assert (outcome.state, outcome.reason) == (TrialState.FAILED, "rank 1 exited with code 3")
        assert run_to_the_end(executor, request_trial(2))[0].state is TrialState.REACHED


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_with_its_worker(tmp_path: Path) -> None:
    with opened(tmp_path, spares_first=True, hang_seconds=4.0) as executor:
        executor.submit(on_ranks(request_endless_trial(1, "hang"), 2))
        wait_for(executor, lambda events: events)
        ranks = ranks_of(executor)
        assert outcomes(wait_for(executor, outcomes))[1].reason.startswith("hang: no training progress for ")
        assert len(ranks) == 1 and psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
def test_no_rank_survives_its_worker(tmp_path: Path) -> None:
    with opened(tmp_path) as executor:
        executor.submit(on_ranks(request_endless_trial(1), 4))
        wait_for(executor, lambda events: len(events) >= 3)
        ranks = ranks_of(executor)
        (pid,) = worker_pids(executor)
        os.kill(pid, signal.SIGKILL)
        assert (
            outcomes(wait_for(executor, outcomes))[1].reason
            == "the worker was killed by SIGKILL (signal 9) from another program"
        )
        assert len(ranks) == 3 and psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []


DRIVER = """
import sys
from pathlib import Path
from tests.executors.line_workload import opened, request_endless_trial
from tests.executors.test_local import on_ranks, ranks_of, wait_for, worker_pids

with opened(Path(sys.argv[1])) as executor:
    executor.submit(on_ranks(request_endless_trial(1), 2))
    wait_for(executor, lambda events: len(events) >= 3)
    print(*worker_pids(executor), *(rank.pid for rank in ranks_of(executor)), flush=True)
    wait_for(executor, lambda events: False)
"""


@pytest.mark.slow
def test_no_rank_survives_the_driver(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with driver:
        family = [psutil.Process(int(pid)) for pid in not_none(driver.stdout).readline().split()]
        driver.kill()
    assert len(family) == 2 and psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
def test_a_paused_trial_resumes_bit_for_bit_on_its_ranks(ranked: LocalExecutor, tmp_path: Path) -> None:
    request = on_ranks(request_endless_trial(1), 2)
    request = changed(request, checkpoint=str(tmp_path / "trial"), eval_every_steps=50)
    parts: list[Observation] = []
    for resumes, state in ((False, TrialState.PAUSED), (True, TrialState.PAUSED), (True, TrialState.CANCELLED)):
        outcome, observations = run_and_stop(ranked, changed(request, resumes=resumes), state, after=2)
        assert (outcome.state, outcome.reason) == (state, "as asked")
        parts += observations
    _, whole = run_and_stop(ranked, request, TrialState.CANCELLED, after=len(parts))
    assert [(one.step, one.metric, one.loss) for one in parts] == [
        (one.step, one.metric, one.loss) for one in whole[: len(parts)]
    ]
