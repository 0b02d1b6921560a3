"""A device's counters by a fake NVML, the meter that reads them, and the environment and the peak memory of a trial."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import psutil
import pytest
import torch

from bssearch.records import DeviceUse, MemoryBasis
from bssearch.training import nvml
from bssearch.training.environment import cudnn_version, describe_environment, library_versions, workload_revision
from bssearch.training.memory import (
    SAMPLING_SECONDS,
    DeviceMemoryMeter,
    PeakMemoryMeter,
    ResidentMemoryMeter,
    SampledMemoryMeter,
    is_out_of_memory,
    peak_memory_meter,
    unused_memory,
)
from bssearch.training.nvml import DeviceMeter
from bssearch.training.process_times import MPS_SERVER
from tests.factories import not_none
from tests.training import toys
from tests.training.fake_nvml import CUDA, REASONS, FakeNvml
from tests.training.toys import CPU, FakeTime, Toy, on_cpu


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml()
    found.install(monkeypatch)
    return found


def answers(device: torch.device) -> list[object]:
    return [
        nvml.other_processes(device),
        nvml.throttle_reasons(device),
        nvml.total_energy_joules(device),
        nvml.clock_mhz(device),
    ]


UNKNOWN: list[object] = [None] * 4


def segment(meter: DeviceMeter, fake: FakeNvml, time: FakeTime, *, joules: int, seconds: float) -> None:
    """Let a device use energy in a train segment, and other energy before the segment."""
    assert fake.millijoules is not None
    fake.millijoules += 7_000
    meter.begin()
    fake.millijoules += 1000 * joules
    time.pass_by(seconds)
    meter.end()


@pytest.mark.parametrize(
    ("device", "lacks"),
    [
        (CPU, {}),
        (CUDA, {"has_driver": False}),
        (
            CUDA,
            {
                "reasons": None,
                "millijoules": None,
                "megahertz": None,
                "lists_processes": False,
                "processes": {"GPU-0": [1]},
            },
        ),
        (torch.device("cuda:1"), {}),
    ],
    ids=["a CPU", "no driver", "not supported", "a device that NVML does not know"],
)
def test_unknown_answers_are_none(fake: FakeNvml, device: torch.device, lacks: dict[str, Any]) -> None:
    vars(fake).update(lacks)
    assert answers(device) == UNKNOWN


def test_without_the_library_every_answer_is_none(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert answers(CUDA) == UNKNOWN


def test_functions_that_an_old_library_lacks_give_none(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older libraries have ``ThrottleReasons``."""
    monkeypatch.delattr(sys.modules["pynvml"], "nvmlDeviceGetCurrentClocksEventReasons")
    assert nvml.throttle_reasons(CUDA) is None
    assert nvml.clock_mhz(CUDA) == 1980.0
    meter = DeviceMeter(CUDA)
    meter.sample()
    assert meter.stop().mean_clock_mhz == 1980.0


def test_a_device_is_looked_for_once_and_not_at_each_reading(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = sys.modules["pynvml"]
    find, asked = library.nvmlDeviceGetHandleByUUID, []

    def handle(uuid: str) -> str:
        asked.append(uuid)
        return str(find(uuid))

    monkeypatch.setattr(library, "nvmlDeviceGetHandleByUUID", handle)
    assert [nvml.total_energy_joules(CUDA) for _ in range(3)] == [5.0] * 3
    assert asked == ["GPU-0"]


def test_the_reasons_have_the_names_and_values_of_the_real_library() -> None:
    library = pytest.importorskip("pynvml")
    assert {name: getattr(library, f"nvmlClocksEventReason{name}") for name in REASONS} == REASONS
    assert all(hasattr(library, name) for name in nvml.SLOWDOWNS)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x000, []),
        (0x001, []),
        (0x002, []),
        (0x004, ["power cap"]),
        (0x048, ["hardware slowdown", "hardware thermal slowdown"]),
        (0x021, ["software thermal slowdown"]),
        (0x080, ["power brake"]),
        (0x110, ["sync boost group"]),
    ],
)
def test_only_causes_of_slow_computation_are_reasons(fake: FakeNvml, bits: int, words: list[str]) -> None:
    fake.reasons = bits
    assert nvml.throttle_reasons(CUDA) == words


def test_this_process_and_its_relatives_are_no_others(fake: FakeNvml) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        fake.processes = {"GPU-0": [os.getpid(), os.getppid(), child.pid]}
        assert nvml.other_processes(CUDA) == []


def test_a_program_started_beside_this_one_is_another(fake: FakeNvml) -> None:
    """A worker whose siblings are another worker and a stranger finds only the stranger."""
    with psutil.Popen(
        [sys.executable, "-c", DRIVER, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        stranger, seen = driver.stdout.readline().split(maxsplit=1)
        assert seen.strip() == f"[({stranger}, '{psutil.Process(int(stranger)).name()}')]"


# Acts as a driver: starts a stranger and two processes like its workers; one of them lists the other processes.
DRIVER = """
import subprocess, sys
ASK = '''
import os, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # takes seconds to import, and is not needed if this process is listed
from bssearch.training import nvml
nvml.listed_processes = lambda device: {os.getpid(), *map(int, sys.argv[2:])}
print(nvml.other_processes(None))
'''
WAIT = "input()"
def start(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE)
stranger, worker = start(WAIT), start(WAIT, "bssearch.executors.worker")
asked = [sys.executable, "-c", ASK, "bssearch.executors.worker", str(stranger.pid), str(worker.pid)]
print(stranger.pid, subprocess.run(asked, capture_output=True, text=True).stdout, flush=True)
input()
for child in (stranger, worker):
    child.communicate()
"""


def test_the_server_of_mps_is_no_stranger(fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_family", lambda: {os.getpid()})
    for name, strangers in ((MPS_SERVER, 0), ("another", 1)):
        (tmp_path / name).symlink_to(sys.executable)
        program = [str(tmp_path / name), "-c", "print(flush=True); input()"]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline(), "until then its name may be cut off"
            fake.processes = {"GPU-0": [process.pid]}
            assert len(nvml.other_processes(CUDA) or []) == strangers


def test_a_process_that_is_not_seen_from_here_is_left_out(fake: FakeNvml) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    fake.processes = {"GPU-0": [gone.pid]}
    assert nvml.other_processes(CUDA) == []


def test_process_ids_of_another_namespace_are_unknown(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this process holds memory but is not listed, the listed id 1 is not process 1 of this machine."""
    fake.processes = {"GPU-0": [1]}
    monkeypatch.setattr(nvml, "_family", lambda: {os.getpid()})
    assert [pid for pid, _ in nvml.other_processes(CUDA) or []] == [1]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1)
    assert nvml.other_processes(CUDA) is None


def test_a_list_that_the_driver_does_not_give_is_not_known_and_not_empty(fake: FakeNvml) -> None:
    fake.processes = {"GPU-0": [os.getpid()]}
    assert nvml.other_processes(CUDA) == []
    fake.lists_processes = False
    assert nvml.other_processes(CUDA) is None


def test_a_process_that_computed_and_left_the_list_is_found(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_family", lambda: {os.getpid()})
    monkeypatch.setattr(nvml, "_name", lambda pid: "program")
    busy, idle, other = range(os.getpid() + 1, os.getpid() + 4)
    fake.computing = {"GPU-0": {os.getpid(): 90, busy: 5, idle: 0}}
    assert [pid for pid, _ in nvml.computing_processes(CUDA, since=0.0)] == [busy], "0 per cent is not computing"
    fake.computing = {"GPU-0": {other: 90, busy: 5}}
    assert nvml.computing_processes(CUDA, since=0.0) == [], "without this process's the numbers mean nothing"


@pytest.mark.parametrize("pauses", [False, True])
def test_the_meter_has_energy_power_clock_and_every_reason_once_without_a_pause(fake: FakeNvml, pauses: bool) -> None:
    time = FakeTime()
    meter = DeviceMeter(CUDA, lambda: time.seconds)
    meter.start()
    fake.reasons = 0x4
    segment(meter, fake, time, joules=20, seconds=0.2)
    meter.sample()
    if pauses:
        state = json.loads(json.dumps(meter.state()))
        fake.millijoules, time.seconds = 900_000, 0.0
        meter = DeviceMeter(CUDA, lambda: time.seconds)
        meter.restore(state)
    fake.reasons, fake.megahertz = 0x24, 1_000
    segment(meter, fake, time, joules=40, seconds=0.3)
    meter.sample()
    assert meter.stop() == DeviceUse(
        energy_joules=60.0,
        mean_power_watts=120.0,
        mean_clock_mhz=1490.0,
        throttle_reasons="power cap, software thermal slowdown",
    )


def test_the_reasons_are_empty_without_a_slowdown_and_none_before_a_look(fake: FakeNvml) -> None:
    meter = DeviceMeter(CUDA)
    assert meter.stop().throttle_reasons is None
    meter.sample()
    assert meter.stop().throttle_reasons == ""


def test_an_energy_counter_that_has_not_moved_is_no_zero(fake: FakeNvml) -> None:
    meter, time = DeviceMeter(CUDA), FakeTime()
    segment(meter, fake, time, joules=0, seconds=0.001)
    assert meter.stop() == DeviceUse()


# The environment of a trial -------------------------------------------------------------------------------------------


def test_the_cpu_is_named_with_its_versions() -> None:
    environment = describe_environment(on_cpu())
    assert (environment.device_type, environment.torch_version) == ("cpu", torch.__version__)
    assert environment.device_name and environment.device_name != "cpu"
    assert (environment.device_memory_bytes or 0) > 2**28
    assert environment.driver_version is environment.cudnn_version is None
    assert environment.workload_revision is environment.git_revision is None
    assert environment.fingerprint.endswith("fp32 · compile none")


def test_precision_and_compile_mode_are_the_ones_in_use() -> None:
    computation = on_cpu(precision="bf16", compile="reduce-overhead")
    assert describe_environment(computation).fingerprint.endswith("bf16 · compile reduce-overhead")
    computation.fallback(RuntimeError("no C++ compiler"))
    assert describe_environment(computation).compile_mode == "none"


def test_the_memory_is_at_most_the_limit() -> None:
    whole = describe_environment(on_cpu()).device_memory_bytes or 0
    assert describe_environment(on_cpu(), memory_limit_bytes=2**20).device_memory_bytes == 2**20
    assert describe_environment(on_cpu(), memory_limit_bytes=2 * whole).device_memory_bytes == whole


@pytest.mark.parametrize(("number", "version"), [(91002, "9.10.2"), (90100, "9.1.0"), (8902, "8.9.2"), (None, None)])
def test_the_number_of_cudnn_is_decoded(
    monkeypatch: pytest.MonkeyPatch, number: int | None, version: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert cudnn_version() == version


def test_the_workloads_revision_is_the_digest_of_its_file() -> None:
    digest = hashlib.sha256(Path(toys.__file__).read_bytes()).hexdigest()[:12]
    assert describe_environment(on_cpu(), Toy()).workload_revision == digest
    assert workload_revision(toys) == digest


def test_a_workload_without_a_file_has_no_revision() -> None:
    namespace: dict[str, type] = {}
    exec("class Typed: pass", namespace)
    assert workload_revision(namespace["Typed"]()) is None
    assert workload_revision(object()) is None


class Repository:
    """A git repository with one committed workload file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet")
        self.file = folder / "mine.py"
        self.file.write_text("x = 1\n")
        self.git("add", ".")
        self.git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "One")
        self.commit = self.git("rev-parse", "HEAD")[:12]

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def module_from(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git_revision(workload: object) -> str | None:
    return describe_environment(on_cpu(), workload).git_revision


def test_a_repository_is_dirty_if_the_workload_or_any_tracked_file_differs(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    workload = module_from(repository.file)
    helper = tmp_path / "helper.py"
    helper.write_text("y = 2\n")

    def state() -> tuple[str | None, bool | None]:
        found = describe_environment(on_cpu(), workload)
        return found.git_revision, found.git_dirty

    assert state() == (repository.commit, False), "what it does not track is not looked at"
    repository.git("add", ".")
    assert state() == (repository.commit, True)
    repository.git("rm", "--quiet", "--cached", "helper.py", "mine.py")
    repository.git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "None")
    assert state() == (f"{repository.git('rev-parse', 'HEAD')[:12]}+", True), "the workload is not in it"
    assert describe_environment(on_cpu()).git_dirty is None


def test_the_libraries_are_dependencies_of_bssearch_and_imports_of_the_workload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("timm", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: f"{name}-1")
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    found = library_versions()
    assert {"bssearch bssearch-1", "numpy numpy-1", "sqlalchemy sqlalchemy-1", "timm timm-1"} <= set(found)
    assert not any(one.startswith("transformers") for one in found)
    assert list(found) == sorted(found)
    assert describe_environment(on_cpu()).library_versions["timm"] == "timm-1"


def test_a_file_that_was_never_committed_differs_and_one_that_is_ignored_has_no_revision(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    new = tmp_path / "new.py"
    new.write_text("x = 3\n")
    assert git_revision(module_from(new)) == f"{repository.commit}+"
    (tmp_path / ".gitignore").write_text("installed/\n")
    (tmp_path / "installed").mkdir()
    installed = tmp_path / "installed" / "package.py"
    installed.write_text("x = 3\n")
    assert git_revision(module_from(installed)) is None


def test_without_a_repository_a_commit_or_git_there_is_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    workload = module_from(file)
    assert git_revision(workload) is None
    subprocess.run(["git", "-C", str(tmp_path), "init", "--quiet"], check=True)
    assert git_revision(workload) is None
    commit = Repository(tmp_path).commit  # makes the repository
    assert git_revision(workload) == commit
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(workload) is None


def test_a_class_of_a_notebook_has_a_revision_of_its_own_source(tmp_path: Path) -> None:
    def revision(number: int, body: str) -> str | None:
        cell = tmp_path / f"cell{number}.py"
        cell.write_text(f"class Task:\n    def loss(self):\n        return {body}\nx = {number}\n")
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(cell.read_text(), str(cell), "exec"), names)
        return workload_revision(names["Task"]())

    assert revision(1, "1") == revision(2, "1") != revision(3, "2")
    assert revision(1, "1") is not None
    assert workload_revision(type("Task", (), {"__module__": "__main__"})()) is None


# Peak memory ----------------------------------------------------------------------------------------------------------


MIB = 2**20
OVERHEAD_KIB = 0.75
"""Memory of a tensor beside its elements, in the heap and in Python: about 700 bytes."""

Meter = type[ResidentMemoryMeter | SampledMemoryMeter]
KINDS: list[Meter] = [ResidentMemoryMeter, SampledMemoryMeter]

P = ParamSpec("P")
T = TypeVar("T")


def in_a_process_of_its_own(measure: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new process like a worker, because other tests leave and free memory in this process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, *args, **kwargs).result()


def hold(mebibytes: int, *, block_kib: int = 1024) -> None:
    """Take memory in blocks, touch all blocks for longer than a sample takes, and free them."""
    blocks = [torch.ones(block_kib * 1024, dtype=torch.uint8) for _ in range(mebibytes * 1024 // block_kib)]
    time.sleep(5 * SAMPLING_SECONDS)
    del blocks


def peak_mebibytes(meter: PeakMemoryMeter, mebibytes: int, *, block_kib: int = 1024) -> float:
    """Return the peak of a trial that holds ``mebibytes``."""
    meter.start()
    hold(mebibytes, block_kib=block_kib)
    return not_none(meter.peak_bytes()) / MIB


SIZES = (64, 64, 8, 40)
"""Mebibytes of consecutive trials."""


def peaks_of_trials(kind: Meter, block_kib: int) -> list[float]:
    found = []
    for mebibytes in SIZES:
        meter = kind()
        found.append(peak_mebibytes(meter, mebibytes, block_kib=block_kib))
        meter.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block_kib"), [(ResidentMemoryMeter, 4), (SampledMemoryMeter, 4), (SampledMemoryMeter, 1024)]
)
def test_each_trial_has_its_own_peak_whatever_ran_before(kind: Meter, block_kib: int) -> None:
    """Freed small blocks stay in the heap, and an equal second trial would reuse them unseen."""
    found = in_a_process_of_its_own(peaks_of_trials, kind, block_kib)
    a_block = 1 + OVERHEAD_KIB / block_kib
    assert found == pytest.approx([size * a_block for size in SIZES], abs=16 if block_kib < 1024 else 2)


def peak_before_and_after_a_restart(kind: Meter) -> tuple[int | None, float]:
    """Return a meter's peak before its start, and (in MiB) after a restart with 16 MiB kept and 64 MiB freed."""
    meter = kind()
    unstarted = meter.peak_bytes()
    meter.start()
    kept = torch.ones(16 * MIB, dtype=torch.uint8)
    hold(64, block_kib=64 * 1024)  # a separate mapping, returned to the system when freed
    meter.restart()
    peak = not_none(meter.peak_bytes())
    meter.close()
    assert kept.all()
    return unstarted, peak / MIB


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_before_a_restart_does_not_count(kind: Meter) -> None:
    unstarted, peak = in_a_process_of_its_own(peak_before_and_after_a_restart, kind)
    assert unstarted is None, "it has not started"
    assert peak == pytest.approx(16, abs=4), "it counts from where it started"


def test_without_a_resettable_mark_the_resident_set_is_sampled(tmp_path: Path) -> None:
    assert peak_memory_meter(CPU).basis is MemoryBasis.RESIDENT
    assert peak_memory_meter(CPU, tmp_path).basis is MemoryBasis.RESIDENT_SAMPLED  # a folder: writing to it fails
    assert peak_memory_meter(torch.device("cuda")).basis is DeviceMemoryMeter.basis is MemoryBasis.DEVICE


def test_the_thread_that_samples_ends_with_the_trial() -> None:
    meter = SampledMemoryMeter()
    meter.start()
    assert meter._thread.is_alive()
    meter.close()
    meter._thread.join(timeout=5)
    assert not meter._thread.is_alive()


EDGE = "FIND was unable to find an engine to execute this computation"
NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize("text", [EDGE, f"GET was {EDGE[9:]}", NO_HANDLE])
@pytest.mark.parametrize(("free", "is_one"), [(2**28, True), (2**35, False)])
def test_messages_of_libraries_on_a_full_device_are_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, text: str, free: int, is_one: bool
) -> None:
    assert not is_out_of_memory(RuntimeError(text)), "on the CPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**37))
    assert is_out_of_memory(RuntimeError(text)) is is_one


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1154',
    ],
)
def test_a_failed_allocation_is_out_of_memory_on_any_device(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text)) and not is_out_of_memory(ValueError(text))


@pytest.mark.parametrize(("reserved_gib", "said"), [(40, False), (55, False), (57, True)])
def test_much_unused_memory_of_the_gpus_allocator_is_a_warning(
    reserved_gib: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, gib = torch.device("cuda:1"), 2**30
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda asked: reserved_gib * gib if asked == device else 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda asked: SimpleNamespace(total_memory=80 * gib))
    sentence = unused_memory(device, 40 * gib)
    assert (sentence is not None) == said
    if sentence is not None:
        assert "57 GiB of the device's 80 GiB for 40 GiB" in sentence
    assert unused_memory(CPU, 40 * gib) is None
