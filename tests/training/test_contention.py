"""Other work on a CPU and a GPU, the pace of the core, and the host-bound share, with a fake CUDA device."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bssearch.executors.base import decode_reply, encode
from bssearch.records import StepTime, StepTimeRequest, TrialEnded
from bssearch.settings import BOARD_PROCESS
from bssearch.training import contention, nvml, probes
from bssearch.training.clock import RUN_AHEAD, CudaClock
from bssearch.training.computation import Computation
from bssearch.training.contention import (
    REMEMBERED,
    Contention,
    ContentionMeter,
    CorePace,
    CpuUse,
    ReferenceKernel,
    cpu_crowd,
    cpu_use,
)
from bssearch.training.probes import measure_step_time
from bssearch.training.trainer import Trainer
from tests.factories import not_none
from tests.training.toys import CPU, FakeTime, Run, Toy, configuration, core_of_pace, on_cpu, request, toy_data

DEVICE = torch.device("cuda", 0)


@dataclass
class FakeCuda:
    """A device that runs kernels in order; with ``depth`` kernels in its queue, the host waits inside a launch."""

    time: FakeTime = field(default_factory=FakeTime)
    busy_until: float = 0.0
    depth: int = 1000
    _pending: deque[float] = field(default_factory=deque)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions of `torch.cuda` that a clock calls."""
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait_until(self.busy_until))

    def clock(self) -> CudaClock:
        """Return a clock of the device."""
        return CudaClock(DEVICE, now=lambda: self.time.seconds)

    def wait_until(self, moment: float) -> None:
        """Let the host wait."""
        self.time.pass_by(max(0.0, moment - self.time.seconds))

    def launch(self, host_seconds: float, device_seconds: float, launches: int = 1) -> None:
        """Launch kernels that together take ``host_seconds`` and ``device_seconds``."""
        for _ in range(launches):
            self.time.pass_by(host_seconds / launches)
            while self._pending and self._pending[0] <= self.time.seconds:
                self._pending.popleft()
            if len(self._pending) >= self.depth:
                self.wait_until(self._pending.popleft())
            self.busy_until = max(self.busy_until, self.time.seconds) + device_seconds / launches
            self._pending.append(self.busy_until)


@dataclass
class FakeEvent:
    """An event that is done when all earlier kernels are done."""

    cuda: FakeCuda
    done_at: float = 0.0

    def record(self, stream: object) -> None:
        """Record the event behind all launched kernels."""
        self.done_at = max(self.cuda.busy_until, self.cuda.time.seconds)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self.cuda.wait_until(self.done_at)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (end.done_at - self.done_at)


NOTHING = CpuUse(wall=0, busy=0, ours=0, parent=0, cpus=2)

SPIN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"


def used(cpus: int, *, others: float, ours: float = 1.0, parent: float = 0.0, seconds: float = 10.0) -> CpuUse:
    """Return the use after ``seconds``; the other numbers are the CPUs that were busy on average."""
    return CpuUse(
        wall=seconds,
        busy=(others + ours + parent) * seconds,
        ours=ours * seconds,
        parent=parent * seconds,
        cpus=cpus,
    )


def started(device: str = "cpu", core: CorePace | None = None, uses: Iterable[CpuUse] = ()) -> ContentionMeter:
    """Return a started meter that reads the given CPU uses in turn, then none."""
    readings = iter(uses)
    meter = ContentionMeter(torch.device(device), 1, core, read_cpu=lambda: next(readings, None))
    meter.start()
    return meter


@pytest.mark.parametrize(
    ("cpus", "threads", "used_by", "crowded"),
    [
        (2, 1, {"others": 0.0, "parent": 0.9}, False),
        (8, 1, {"others": 1.0, "ours": 1.0}, False),
        (8, 1, {"others": 1.0, "ours": 5.0}, True),
        (2, 1, {"others": 1.0, "seconds": 0.02}, False),  # a tick of each CPU
        (2, 1, {"others": 1.0, "seconds": 0.05}, True),
        (2, 1, {"others": 0.0}, False),
        (2, 1, {"others": 0.15}, False),
        (2, 1, {"others": 0.5}, True),
        (2, 1, {"others": 1.0}, True),
        (4, 1, {"others": 1.0}, False),
        (4, 1, {"others": 3.0}, True),
        (4, 4, {"others": 1.0}, True),
        (64, 1, {"others": 1.0}, False),
        (64, 1, {"others": 40.0}, True),
        (64, 64, {"others": 0.1}, False),
        (64, 64, {"others": 1.0}, True),
    ],
)
def test_others_crowd_us_if_the_cpus_fill_up(cpus: int, threads: int, used_by: dict[str, float], crowded: bool) -> None:
    assert (cpu_crowd(NOTHING, used(cpus, **used_by), threads) is not None) is crowded


def test_without_the_kernels_account_there_is_no_contention(tmp_path: Path) -> None:
    assert cpu_use(tmp_path / "stat") is None
    assert started().stop() == Contention(False)


def test_only_the_cpus_that_are_ours_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  999 999 999 999 999 999 999 999 0 0\n"
        "cpu0 100 20 30 1000 500 4 5 6 77 7\n"
        "cpu1 200 0 0 1000 0 0 0 0 0 0\n"
        "cpu10 4000 0 0 0 0 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(contention, "_TICK_SECONDS", 0.01)
    use = not_none(cpu_use(stat))
    assert use.cpus == 2
    assert use.busy == pytest.approx((100 + 20 + 30 + 4 + 5 + 6 + 200) / 100)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the kernel keeps no account of its CPUs")
def test_a_child_is_ours_while_it_runs_and_after_it_has_ended() -> None:
    before, our_own = cpu_use(), time.process_time()
    assert before is not None
    with subprocess.Popen([sys.executable, "-c", SPIN.format(seconds=60)]) as child:
        try:
            running, counted, until = before, 0.0, time.monotonic() + 30
            while counted <= 0.1:  # far above the ticks of ten milliseconds in which the kernel counts
                assert time.monotonic() < until, "the child's seconds are not counted"
                time.sleep(0.05)
                running = cpu_use() or before
                counted = running.ours - before.ours - (time.process_time() - our_own)
        finally:
            child.kill()
    assert not_none(cpu_use()).ours >= running.ours


def test_another_process_and_a_slowed_clock_on_the_gpu_are_contention_and_a_power_cap_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contention, "other_processes", lambda device: [(41, "python")])
    monkeypatch.setattr(contention, "throttle_reasons", lambda device: ["power cap", "thermal limit"])
    assert started("cuda").stop() == Contention(
        True, "process 41 (python) uses the device; the device slows down: thermal limit"
    )


@pytest.fixture
def quiet_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace NVML by an idle GPU; return its used memory and the share of this process, in GiB."""
    gib = {"used": 10, "ours": 9}
    monkeypatch.setattr(contention, "other_processes", lambda device: [])
    monkeypatch.setattr(contention, "computing_processes", lambda device, since: [])
    monkeypatch.setattr(contention, "throttle_reasons", lambda device: [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((80 - gib["used"]) * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gib["ours"] * 2**30)
    return gib


def test_a_process_that_used_the_gpu_between_two_evaluations_counts(
    quiet_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, looks = started("cuda"), iter([[], [(41, "python")], []])
    monkeypatch.setattr(contention, "other_processes", lambda device: next(looks))
    computed = iter([[], [], [(42, "java")]])
    monkeypatch.setattr(contention, "computing_processes", lambda device, since: next(computed))
    meter.look()
    meter.look()
    assert meter.stop().reason == "process 41 (python) uses the device; process 42 (java) uses the device"


def test_memory_that_others_take_meanwhile_is_contention_and_that_of_our_tensors_is_not(
    quiet_gpu: dict[str, int],
) -> None:
    meter = started("cuda")
    quiet_gpu |= {"used": 60, "ours": 59}
    meter.look()
    assert meter.stop() == Contention(False)
    quiet_gpu["used"] = 75
    meter.look()
    quiet_gpu["used"] = 60
    assert meter.stop() == Contention(True, "memory outside PyTorch's allocator grew by 15 GiB during the trial")


def test_unknown_processes_of_a_gpu_are_a_warning(quiet_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert started("cuda").stop().warnings == []
    monkeypatch.setattr(contention, "other_processes", lambda device: None)
    found = started("cuda").stop()
    assert not found.contended and found.warnings == [contention.UNKNOWN]
    meter = started("cuda")
    quiet_gpu["used"] += 2
    assert meter.stop().warnings == ["contended: memory outside PyTorch's allocator grew by 2 GiB during the trial"]


def test_use_by_others_during_a_pause_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds before the pause and ten seconds after it count, and the pause does not."""
    monkeypatch.setattr(contention, "other_drivers", list)
    crowded, idle = used(2, others=2.0), used(2, others=0.0)
    for parts, expected in (((crowded, idle), 1.0), ((crowded, crowded), 2.0), ((idle, idle), None)):
        state = None
        for part in parts:
            meter = started(uses=[NOTHING, part, part])
            if state is not None:
                meter.restore(json.loads(json.dumps(state)))
            state = meter.state()
        found = meter.stop()
        assert found.contended is (expected is not None)
        if expected is not None:
            assert found.reason == f"other processes used {expected:.1f} of 2 CPUs"


def test_slow_looks_before_a_pause_count() -> None:
    before = started(core=core_of_pace(1.0, 1.0, 1.7, 1.7))
    for _ in range(4):
        before.look()
    after = started(core=core_of_pace(9.0))
    after.restore(before.state())
    assert after.stop().reason == "the core was slow in 2 of 4 timings"
    for _ in range(5):
        after.look()
    assert after.stop() == Contention(False), "2 of 9 are less than a quarter"


ANOTHER_DRIVER = """
import subprocess, sys
waits = "import sys; print('up', flush=True); sys.stdin.read()"
host = "bssearch.executors.loops.script_host"
serves = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}, {host!r}])"
subprocess.run([sys.executable, "-c", serves, "bssearch.executors.worker"])
"""


def test_another_driver_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        return not_none(started(uses=[NOTHING, used(2, others=2.0)]).stop().reason)

    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER_DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as driver:
        assert not_none(driver.stdout).readline() == b"up\n"
        assert str(driver.pid) not in reason(), "a process that we started"
        monkeypatch.setattr(nvml, "_family", lambda: {os.getpid()})
        said = reason()
        assert "bssearch driver" in said and str(driver.pid) in said
        worker = psutil.Process(driver.pid).children()[0].pid
        assert nvml.other_drivers() == [driver.pid], "the worker is the parent of a script's process"
        assert "bssearch driver" in str(nvml._name(worker))
        assert "bssearch" not in str(nvml._name(os.getpid()))


SIBLINGS = """
import subprocess, sys
worker = "bssearch.executors.worker"
spin = "import os; ours = os.getppid()\\nwhile os.getppid() == ours: pass"  # ends with its parent, killed or not
busy = subprocess.Popen([sys.executable, "-c", spin, worker])
try:
    subprocess.run([sys.executable, "-c", sys.argv[1], worker], check=True)
finally:
    busy.kill()
    busy.wait()
"""
LOOKS = """
import time
from bssearch.training.contention import cpu_use, cpu_use_of_siblings
alone, together = cpu_use().ours, cpu_use_of_siblings().ours
while cpu_use_of_siblings().ours - together < 0.3:
    time.sleep(0.05)
print(cpu_use().ours - alone < 0.15)
"""


@pytest.mark.slow
def test_cpu_seconds_of_the_launchers_other_children_count_as_ours() -> None:
    done = subprocess.run([sys.executable, "-c", SIBLINGS, LOOKS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


OF_OUR_DRIVER = """
import os
from bssearch.training import nvml
nvml.psutil.pids = lambda: [os.getppid(), *nvml.children_of(os.getppid())]
nvml._family = None # the relatives of all processes take tens of milliseconds
assert nvml.other_drivers() == []
"""


def test_workers_of_our_driver_are_known_without_the_whole_family() -> None:
    subprocess.run([sys.executable, "-c", SIBLINGS, OF_OUR_DRIVER], check=True, timeout=600)


BOARD = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)
end = time.process_time() + 0.5
while time.process_time() < end: pass
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts"), [(BOARD_PROCESS, True), ("another", False)])
def test_a_board_of_our_driver_is_no_contention_even_once_it_has_ended(name: str, counts: bool) -> None:
    def driver_seconds() -> float:
        return not_none(cpu_use(parents=[os.getpid()])).parent - time.process_time()

    before = driver_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BOARD.format(name=name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as board:
        not_none(board.stdout).readline()
        assert (driver_seconds() - before > 0.4) is counts
        not_none(board.stdin).close()
        os.waitid(os.P_PID, board.pid, os.WEXITED | os.WNOWAIT)
        assert (driver_seconds() - before > 0.4) is counts


def test_a_look_is_the_fastest_of_a_few_spins() -> None:
    spins = itertools.cycle([9.0, 1.0, 2.0])
    assert CorePace(spin=lambda: next(spins)).look() == 1.0


def test_a_look_is_slow_by_the_fastest_of_all_looks_even_a_later_one() -> None:
    core = core_of_pace(2.0, 1.0, 1.3)
    first, fastest, near = core.look(), core.look(), core.look()
    assert [look > core.slow_above for look in (first, fastest, near)] == [True, False, False]


def test_the_work_of_a_look_takes_a_fraction_of_a_millisecond() -> None:
    core = CorePace()
    assert 1e-6 < statistics.median(core.look() for _ in range(9)) < 1e-2


def test_computation_on_a_cpu_knows_its_core() -> None:
    assert Computation(CPU).core is not None


@pytest.mark.parametrize(
    ("looks", "slow", "contended"), [(10, 0, False), (10, 2, False), (10, 3, True), (2, 1, False), (2, 2, True)]
)
def test_a_core_that_was_slow_at_a_quarter_of_the_looks_was_shared(looks: int, slow: int, contended: bool) -> None:
    """A single slow look does not count."""
    core = core_of_pace(1.0, *[1.0] * (looks - slow), *[1.7] * slow)
    core.look()
    meter = started(core=core)
    for _ in range(looks):
        meter.look()
    found = meter.stop()
    assert found.contended is contended
    assert found.reason == (f"the core was slow in {slow} of {looks} timings" if contended else None)


def test_a_pace_that_was_not_kept_up_is_forgotten() -> None:
    core = core_of_pace(0.5, *[1.0] * REMEMBERED)
    core.look()
    later = core.look()
    assert later > core.slow_above
    for _ in range(REMEMBERED - 1):
        core.look()
    assert later <= core.slow_above


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return a device with a queue of a thousand launches."""
    found = FakeCuda()
    found.install(monkeypatch)
    return found


@pytest.fixture
def clock(cuda: FakeCuda) -> CudaClock:
    return cuda.clock()


def train(
    cuda: FakeCuda,
    clock: CudaClock,
    *,
    steps: int,
    host: float,
    device: float,
    launches: int = 10,
    before: Callable[[int], object] = lambda step: None,
) -> None:
    """Train a segment of steps that each take ``host`` and ``device`` seconds."""
    with clock.ledger("train"):
        for step in range(steps):
            before(step)
            cuda.launch(host, device, launches)
            clock.pace()


@pytest.mark.parametrize("steps", [1, 3, RUN_AHEAD - 1, 10 * RUN_AHEAD])
@pytest.mark.parametrize("host", [0.001, 0.05])
def test_with_a_slow_device_the_share_is_the_host_s_work_however_short_the_segments(
    cuda: FakeCuda, clock: CudaClock, steps: int, host: float
) -> None:
    for _ in range(3):
        train(cuda, clock, steps=steps, host=host, device=0.1)
    assert clock.host_bound_share == pytest.approx(host / 0.1, rel=0.15)


@pytest.mark.parametrize(
    ("segment", "first_wait", "later_waits", "share"),
    [
        ({"host": 0.01, "device": 0.1, "launches": 130}, 0.0, 0.0, 0.1),  # a full queue: the host waits inside launches
        ({"host": 0.01, "device": 0.1, "launches": 700}, 0.0, 0.0, 0.1),
        ({"host": 0.01, "device": 0.1}, 0.05, 0.0, 0.1),  # a long first step does not affect the others
        ({"host": 0.001, "device": 0.02}, 0.0, 0.1, 1.0),  # a wait for data is work of the host
        ({"host": 0.1, "device": 0.02}, 0.0, 0.0, 1.0),
    ],
)
def test_the_share_of_a_long_segment_separates_waits_for_the_device_from_waits_for_data(
    cuda: FakeCuda, clock: CudaClock, segment: dict[str, Any], first_wait: float, later_waits: float, share: float
) -> None:
    wait = cuda.time.pass_by
    train(cuda, clock, steps=200, before=lambda step: wait(later_waits if step else first_wait), **segment)
    assert clock.host_bound_share == pytest.approx(share, rel=0.1)


def test_a_read_of_the_device_counts_as_a_wait_only_within_a_segment(cuda: FakeCuda, clock: CudaClock) -> None:
    with clock.ledger("train"):
        cuda.launch(1.0, 3.0)
        clock.pace()
        with clock.waiting():
            cuda.wait_until(cuda.busy_until)
        cuda.launch(1.0, 1.0)
        clock.pace()
    with clock.ledger("evaluation"), clock.waiting():
        cuda.time.pass_by(100.0)
    assert clock.host_bound_share == pytest.approx(2 / 6)


def test_segments_that_end_in_an_error_are_counted(cuda: FakeCuda, clock: CudaClock) -> None:
    with pytest.raises(KeyError), clock.ledger("train"):
        cuda.launch(1.0, 3.0)
        raise KeyError
    assert clock.host_bound_share == pytest.approx(1 / 4)


def test_the_share_is_that_of_all_parts_of_a_trial_that_was_paused(cuda: FakeCuda) -> None:
    first = cuda.clock()
    assert first.host_bound_share is None
    train(cuda, first, steps=100, host=0.01, device=0.1)
    state = json.loads(json.dumps(first.state()))
    whole = cuda.clock()
    whole.restore(state)
    assert whole.host_bound_share == first.host_bound_share
    train(cuda, whole, steps=100, host=0.1, device=0.01)
    assert whole.host_bound_share == pytest.approx((100 * 0.01 + 100 * 0.1) / 20, rel=0.02)
    whole.start()
    assert whole.host_bound_share is None


@pytest.mark.slow
def test_the_share_of_a_trial_counts_the_read_of_its_first_loss_as_a_wait(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Trainer.first_step_problem

    def look(trainer: Trainer) -> str | None:
        cuda.wait_until(cuda.busy_until)
        return looked(trainer)

    monkeypatch.setattr(Trainer, "first_step_problem", look)
    toy = Toy(on_loss=lambda: cuda.launch(0.1, 0.4))
    asked = request(target=0.999, eval_every_steps=1, train_seconds_limit=0.9)
    outcome = Run(asked, toy, clock=cuda.clock()).outcome
    assert outcome.host_bound_share == pytest.approx(0.1 / 0.5)
    assert Run(asked, Toy()).outcome.host_bound_share is None
    ended = decode_reply(encode(TrialEnded(number=7, outcome=outcome)))
    assert isinstance(ended, TrialEnded) and ended.outcome.host_bound_share == outcome.host_bound_share


def test_a_step_time_has_its_share(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "clock_for", lambda device: cuda.clock())
    asked = StepTimeRequest(configuration=configuration(), seconds_limit=0.5)
    toy = Toy(on_loss=lambda: cuda.launch(0.0002, 0.001, launches=400))
    measured = measure_step_time(asked, toy, toy_data(), on_cpu())
    assert measured.step_seconds == pytest.approx(0.001, rel=0.1)
    assert measured.host_bound_share == pytest.approx(0.2, rel=0.1), "its launches fill the queue"
    sent = decode_reply(encode(measured))
    assert isinstance(sent, StepTime) and sent.host_bound_share == measured.host_bound_share


# The reference kernel -------------------------------------------------------------------------------------------------


GPU = torch.device("cuda")


@pytest.mark.parametrize(("device", "threads", "tells"), [(CPU, 1, True), (CPU, 2, False), (GPU, 1, False)])
def test_the_kernel_is_timed_only_for_one_thread_of_a_cpu(device: torch.device, threads: int, tells: bool) -> None:
    kernel = ReferenceKernel(device, threads)
    kernel.look()
    assert (kernel.seconds is not None) is tells


def test_a_look_takes_fractions_of_a_millisecond_and_the_median_counts() -> None:
    kernel = ReferenceKernel(CPU, 1, period=0.0)
    assert kernel.state() == {"looks": []}
    for _ in range(9):
        kernel.look()
    assert 1e-6 < (kernel.seconds or 0.0) < 0.05


def test_looks_that_come_too_soon_are_left_out() -> None:
    kernel = ReferenceKernel(CPU, 1, period=3600.0)
    kernel.look()
    first = kernel.seconds
    kernel.look()
    assert kernel.state() == {"looks": [first]}


def test_looks_before_a_pause_count() -> None:
    kernel = ReferenceKernel(CPU, 1, period=0.0)
    kernel.restore({"looks": [1.0, 2.0, 3.0]})
    assert kernel.seconds == 2.0
    kernel.look()
    assert kernel.seconds == pytest.approx(1.5, abs=0.01)
