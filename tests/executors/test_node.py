"""Slots and devices of a node with several GPUs, which these tests make up."""

import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bssearch.errors import LaunchError
from bssearch.executors import devices, gpus, loaded, slots as local
from bssearch.executors.base import (
    Command,
    ExecutorSettings,
    Load,
    Loaded,
    Program,
    Refused,
)
from bssearch.executors.devices import CONTEXT_BYTES, device_of, memory_limit_of_slot, uuid_of
from bssearch.executors.gpus import Gpus, visible
from bssearch.executors.loaded import LoadedWorkload
from bssearch.executors.process import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, Death, Inbox, WorkerHandle
from bssearch.executors.programs.command import LoadedCommand
from bssearch.executors.slots import COMPILE_SECONDS, LocalExecutor, Slot
from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    Observation,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialRequest,
    TrialState,
)
from bssearch.spec import TrainingSpec
from bssearch.training import nvml
from tests.executors.fake import DESCRIPTION
from tests.executors.line_workload import request_trial, write_workload
from tests.training.fake_nvml import FakeNvml

# A stand-in for the workers of a machine with GPUs: it answers at once, without computing -----------------------------


class Node:
    """A machine with some CUDA devices, perhaps 0; keeps the commands to its workers.

    ``step_seconds``: seconds of a step on each device.
    """

    def __init__(self, devices: int, step_seconds: Mapping[int, float] | None = None) -> None:
        self.devices = devices
        self.step_seconds = step_seconds or {}
        self.workers: list[ScriptedWorker] = []
        self.refuses: int | None = None
        """Number of the device that cannot time steps."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the local executor start workers here."""

        def start(**given: Any) -> ScriptedWorker:
            self.workers.append(ScriptedWorker(self, **given))
            return self.workers[-1]

        monkeypatch.setattr(local, "WorkerProcess", start)
        monkeypatch.setattr(local, "may_have_gpus", lambda: self.devices > 0)

    def told(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """Return all commands of a kind with the number of the worker, counted from the first that was started."""
        return [(at, one) for at, worker in enumerate(self.workers) for one in worker.told if isinstance(one, kind)]


class ScriptedWorker(WorkerHandle):
    """A worker of a `Node`, in place of a `WorkerProcess`; its trials never end by themselves."""

    def __init__(
        self,
        node: Node,
        *,
        slot: int,
        log: Path,
        inbox: Inbox,
        threads: int,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(slot, log, inbox)
        self.environment = environment
        self.told: list[Command] = []
        self._node = node
        self._has_ended = False

    @property
    def device(self) -> int:
        """The number of the slot's device."""
        return self.slot % max(1, self._node.devices)

    def send(self, command: Command) -> None:
        """Keep the command, and answer it."""
        self.told.append(command)
        match command:
            case Load():
                name = f"cuda:{self.device}" if self._node.devices else "cpu"
                uuid = f"GPU-{self.device}" if self._node.devices else None
                self.reply(Loaded(device=name, device_uuid=uuid, devices=max(1, self._node.devices)))
            case "describe":
                self.reply(DESCRIPTION)
            case StepTimeRequest() if self.device == self._node.refuses:
                self.reply(Refused(error="launch", message="no device"))
            case StepTimeRequest():
                one, seconds = command.configuration, self._node.step_seconds.get(self.device, 0.01)
                self.reply(
                    StepTime(
                        batch_size=one.batch_size,
                        micro_batch_size=one.micro_batch_size,
                        step_seconds=seconds,
                        evaluation_seconds=seconds,
                        steps_timed=10,
                        peak_memory_bytes=None,
                    )
                )
            case MemoryRequest():
                micro = command.configuration.micro_batch_size
                self.reply(MemoryUse(micro_batch_size=micro, fits=True, peak_memory_bytes=None))
            case "exit":
                self.kill()
            case TrialRequest():
                pass

    def has_exited(self) -> bool:
        return self._has_ended

    def write_stack(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.reply(None)

    def bury(self) -> Death:
        return Death(-signal.SIGKILL)


PROGRAM = Program(default=request_trial(1).plan.configuration, metric="score", script="train.py")


# Tests ----------------------------------------------------------------------------------------------------------------


@contextmanager
def executor_on(node: Node, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[LocalExecutor]:
    node.install(monkeypatch)
    with closing(LocalExecutor(ExecutorSettings(workload="line.py:Line", **settings))) as executor:
        yield executor


@pytest.mark.parametrize(
    ("cores", "threads", "gib", "slots"),
    [(1, 1, 64, 1), (3, 1, 64, 3), (16, 1, 64, 4), (8, 3, 64, 2), (2, 4, 64, 1), (16, 1, 2, 2), (16, 1, 0.5, 1)],
)
@pytest.mark.parametrize("of_container", [False, True])
def test_automatic_slots_of_a_cpu_have_cores_and_memory(
    cores: int,
    threads: int,
    gib: float,
    slots: int,
    of_container: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = int(gib * 2**30)
    monkeypatch.setattr(local, "CONTROL_GROUP", tmp_path)
    if of_container:
        (tmp_path / "memory.max").write_text(f"{available + 7}")
        (tmp_path / "memory.current").write_text("7")
        available = 2**40
    monkeypatch.setattr(local, "usable_cores", lambda: cores)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert local.cpu_slots(threads) == slots


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), (None, 4)])
def test_usable_cores_are_physical_allowed_and_within_the_quota(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(local, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})
    assert local.usable_cores() == cores


@pytest.mark.parametrize(("is_program", "slots"), [(False, 2), (True, 1)])
def test_workers_of_a_cpu_load_at_once_but_a_program_has_one_slot(
    is_program: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "cpu_slots", lambda threads: 2)
    monkeypatch.setattr(local, "usable_cores", lambda: 2)
    program = PROGRAM if is_program else None
    with executor_on(node := Node(0), monkeypatch, slots="auto", program=program) as executor:
        executor.describe()
        assert (executor.slots, len(node.workers), executor.slots_apart) == (slots, slots, not is_program)


@pytest.mark.parametrize(("devices", "slots"), [(1, 1), (8, 8)])
def test_auto_is_a_slot_for_each_device(devices: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with executor_on(node := Node(devices), monkeypatch, slots="auto") as executor:
        assert executor.describe().notice is None
        assert (executor.slots, executor.slots_apart) == (slots, True)
        for number in range(1, slots + 1):
            executor.submit(request_trial(number))
        assert sorted(worker.slot for worker in node.workers) == [*range(slots)]
        assert len(node.told(TrialRequest)) == slots


@pytest.mark.parametrize(("slots", "told"), [(1, "2 of 5 devices"), (2, None), ("auto", None)])
def test_slots_of_two_devices_each_use_twice_as_many_devices(
    slots: int | str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_on(Node(5), monkeypatch, slots=slots, devices=(2,)) as executor:
        notice = executor.describe().notice
    assert notice is None if told is None else told in str(notice) and "for 2 slots" in str(notice)


@pytest.mark.parametrize(("is_program", "words"), [(False, ("1 of 8 devices", "executor.slots = auto")), (True, ())])
def test_devices_that_no_slot_uses_are_told_of_unless_a_program_may_use_them(
    is_program: bool, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_on(Node(8), monkeypatch, program=PROGRAM if is_program else None) as executor:
        notice = executor.describe().notice or ""
    assert bool(notice) is not is_program and all(word in notice for word in words)


def test_slots_that_share_a_device_are_not_apart_and_know_how_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with executor_on(node := Node(2), monkeypatch, slots=3) as executor:
        assert (executor.describe().notice, executor.slots_apart) == (None, False)
        executor.submit(request_trial(1))
        assert [(load.slot, load.settings.slots) for _, load in node.told(Load)] == [(0, 3), (1, 3), (2, 3)]


def test_workers_have_segments_that_grow_and_programs_what_they_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    own = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    cases: list[tuple[Any, Any, Any]] = [(None, {}, EXPANDABLE_SEGMENTS), (None, own, own), (PROGRAM, {}, {})]
    for of, given, expected in cases:
        with executor_on(node := Node(1), monkeypatch, program=of, environment=given) as executor:
            executor.describe()
            assert node.workers[0].environment == expected


def test_a_worker_keeps_to_its_slots_share_of_the_memory_and_says_that_it_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workload(tmp_path)
    limits: list[int] = []
    for module in (loaded, devices):
        monkeypatch.setattr(module, "memory_limit_of_slot", lambda device, slot, slots, of, limit: 2**30 // slots)
    monkeypatch.setattr(loaded, "limit_memory", lambda device, limit_bytes: limits.append(limit_bytes))
    settings = ExecutorSettings(workload="line.py:Line", folder=tmp_path, device="cpu", slots=4)
    workload = LoadedWorkload(Load(settings=settings, slot=0))
    assert limits == [2**28]
    assert workload.describe().environment.device_memory_bytes == 2**28
    settings = replace(settings, program=replace(PROGRAM, script=None, command=("train",)))
    command = LoadedCommand(Load(settings=settings, slot=0))
    assert command.assigned("describe").memory_limit_bytes == 2**28


def times_of(size: int) -> StepTimeRequest:
    return StepTimeRequest(
        configuration=replace(request_trial(1).plan.configuration, batch_size=size, micro_batch_size=size)
    )


@pytest.mark.parametrize(("devices", "workers"), [(1, [0, 1, 2]), (0, [0, 0, 0])])
def test_a_gpu_draws_its_kernels_anew_for_each_visit_to_a_batch_size(
    devices: int, workers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU one worker makes all visits."""
    with executor_on(node := Node(devices), monkeypatch) as executor:
        executor.describe()
        for _ in range(3):
            for size in (8, 16, 32):
                executor.measure_step_time(times_of(size))
    assert [(worker, asked.configuration.batch_size) for worker, asked in node.told(StepTimeRequest)] == [
        (worker, size) for worker in workers for size in (8, 16, 32)
    ]


def test_a_slot_stays_on_its_device_whichever_devices_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with executor_on(node := Node(2), monkeypatch, slots="auto") as executor:
        executor.describe()
        for _ in range(2):
            executor.measure_step_times([times_of(8), times_of(16)])
        loads = [(load.slot, load.settings.device, load.devices) for _, load in node.told(Load)]
    assert loads == [(0, "auto", None), (1, "auto", 2), (0, "cuda:0", 2), (1, "cuda:1", 2)]


@pytest.mark.parametrize(("compile_mode", "hangs_after"), [("none", 300.0), ("default", COMPILE_SECONDS)])
def test_before_its_first_evaluation_a_model_may_be_compiled_for_longer_than_a_trial_may_hang(
    compile_mode: Any, hangs_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingSpec(compile=compile_mode)
    with executor_on(node := Node(1), monkeypatch, training=training) as executor:
        executor.submit(request_trial(1))
        (worker,) = node.workers
        assert states_after(executor, worker, hangs_after - 1) == []
        assert states_after(executor, worker, hangs_after + 1) == [TrialState.FAILED]

        executor.submit(request_trial(2))
        worker = node.workers[-1]
        seen = Observation(step=1, samples=8, train_seconds=0.1, metric=0.1, loss=None, learning_rate=0.1)
        worker.reply(TrialObserved(number=2, observation=seen))
        executor.events(0.0)
        assert states_after(executor, worker, 299.0) == []
        assert states_after(executor, worker, 301.0) == [TrialState.FAILED]


def states_after(executor: LocalExecutor, worker: ScriptedWorker, silence: float) -> list[TrialState]:
    """Return the end states of trials after the only worker was silent for some seconds."""
    worker.last_heard = time.monotonic() - silence
    trial = executor._slots[0].trial
    assert trial is not None
    trial.started = worker.last_heard
    executor._pump(0.0)
    return [event.outcome.state for event in executor.events(0.0) if isinstance(event, TrialEnded)]


def test_a_trial_is_told_with_the_gpu_of_its_slot_though_the_worker_died(monkeypatch: pytest.MonkeyPatch) -> None:
    with executor_on(node := Node(2), monkeypatch, slots="auto") as executor:
        executor.submit(request_trial(1))
        executor.submit(request_trial(2))
        node.workers[1].kill()
        (ended,) = executor.events(10.0)
    assert isinstance(ended, TrialEnded) and ended.number == 2
    assert (ended.outcome.state, ended.outcome.device, ended.outcome.device_uuid) == ("failed", "cuda:1", "GPU-1")


def test_the_devices_of_a_node_time_steps_at_once_each_visit_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (8, 16, 32)
    with executor_on(node := Node(3, {2: 0.02}), monkeypatch, slots="auto") as executor:
        executor.describe()
        for _ in range(2):
            found = executor.measure_step_times([times_of(size) for size in sizes])
            assert [one.batch_size for one in found] == [*sizes]
            assert [one.step_seconds for one in found] == [0.01, 0.01, 0.02]
        by_device = executor.step_times_by_device(times_of(256))
    assert {device: one.step_seconds for device, one in by_device.items()} == {
        "GPU-0": 0.01,
        "GPU-1": 0.01,
        "GPU-2": 0.02,
    }
    timed = [(node.workers[at].slot, asked.configuration.batch_size) for at, asked in node.told(StepTimeRequest)]
    assert len(node.workers) == 6, "two for each device"
    assert sorted(timed)[:3] == [(0, 8), (0, 8), (0, 256)]


def test_where_one_device_cannot_time_the_others_are_ended_and_can_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with executor_on(node := Node(2), monkeypatch, slots="auto") as executor:
        executor.describe()
        node.refuses = 1
        with pytest.raises(LaunchError, match="no device"):
            executor.measure_step_times([times_of(8), times_of(16)])
        node.refuses = None
        assert [one.batch_size for one in executor.measure_step_times([times_of(8), times_of(16)])] == [8, 16]


Machine = Callable[..., list[torch.device]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make up CUDA devices and the programs on them; return the list of the devices that were made current."""

    def build(devices: int, busy: dict[int, list[tuple[int, str]]] | None = None) -> list[torch.device]:
        current: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        others = {torch.device("cuda", index): programs for index, programs in (busy or {}).items()}
        monkeypatch.setattr("bssearch.executors.devices.other_processes", lambda device: others.get(device, []))
        return current

    return build


ONE = [(4711, "python3")]
TWO = [(12, "ollama"), (34, "train.py")]


@pytest.mark.parametrize(
    ("devices", "busy", "wanted", "allow_busy", "taken"),
    [
        (0, {}, "auto", False, [None] * 4),
        (0, {}, "cpu", False, [None] * 4),
        (2, {}, "auto", False, [0, 1, 0, 1]),
        (2, {}, "cuda", False, [0, 1, 0, 1]),
        (3, {1: ONE}, "auto", False, [0, 2, 0, 2]),
        (2, {0: ONE, 1: TWO}, "auto", True, [0, 1, 0, 1]),
        (2, {0: ONE, 1: TWO}, "cuda:1", True, [1] * 4),
        (2, {0: ONE}, "auto", True, [1] * 4),
    ],
)
def test_slots_take_turns_on_the_idle_devices_and_on_busy_ones_only_if_that_is_allowed(
    machine: Machine, devices: int, busy: Any, wanted: str, allow_busy: bool, taken: list[int | None]
) -> None:
    current = machine(devices, busy)
    assert [device_of(wanted, slot, allow_busy=allow_busy)[0].index for slot in range(4)] == taken
    assert [device.index for device in current] == [index for index in taken if index is not None]


@pytest.mark.parametrize(
    ("devices", "busy", "wanted", "said"),
    [
        (0, {}, "cuda", "no device 'cuda'; this machine has cpu$"),
        (0, {}, "cuda:0", "no device 'cuda:0'; this machine has cpu$"),
        (2, {}, "cuda:2", "no device 'cuda:2'; this machine has cpu, cuda:0, cuda:1$"),
        (2, {1: TWO}, "cuda:1", r"cuda:1 by process 12 \(ollama\), process 34 \(train.py\)"),
        (2, {0: ONE, 1: TWO}, "auto", r"cuda:0 by process 4711 \(python3\); cuda:1 by process 12"),
    ],
)
def test_a_device_that_is_not_there_or_busy_is_refused_by_name(
    machine: Machine, devices: int, busy: Any, wanted: str, said: str
) -> None:
    machine(devices, busy)
    with pytest.raises(LaunchError, match=said) as raised:
        device_of(wanted, slot=0)
    assert raised.value.exit_code == 6
    assert ("--allow-busy" in (raised.value.hint or "")) is bool(busy)


def test_a_gpu_and_a_part_of_one_are_told_apart_by_uuid_and_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(processes={"GPU-0": [], "MIG-1": []}).install(monkeypatch)
    assert [uuid_of(name) for name in ("cuda:0", "cuda:1", "cpu")] == ["GPU-0", "MIG-1", None]
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert uuid_of("cuda:0") == "GPU-0", "without NVML it is torch's"


CUDA, GIB = torch.device("cuda:0"), 2**30


@pytest.mark.parametrize(
    ("slot", "slots", "devices", "limit", "expected"),
    [
        (0, 1, 1, None, None),
        (0, 8, 8, None, None),
        (1, 3, 2, None, None),  # two slots share the first device
        (0, 2, 1, None, 40 * GIB - CONTEXT_BYTES),
        (0, 3, 2, None, 40 * GIB - CONTEXT_BYTES),
        (0, 8, 2, None, 20 * GIB - CONTEXT_BYTES),
        (0, 2, 1, 10 * GIB, 10 * GIB),
        (0, 2, 1, 60 * GIB, 40 * GIB - CONTEXT_BYTES),
    ],
)
def test_slots_that_share_a_gpu_have_equal_shares_of_its_memory(
    slot: int, slots: int, devices: int, limit: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    assert memory_limit_of_slot(CUDA, slot, slots, devices, limit) == expected
    assert memory_limit_of_slot(torch.device("cpu"), slot, slots, devices, limit) == limit


# The GPUs of a node ---------------------------------------------------------------------------------------------------


NAMES = [f"GPU-{index}a5b-test-{os.getpid()}" for index in range(8)]
WHOLE = "".join(f"GPU {index}: NVIDIA H200 (UUID: {name})\n" for index, name in enumerate(NAMES))
SLICED = (
    "GPU 0: NVIDIA H200 (UUID: GPU-0)\n"
    "  MIG 1g.18gb     Device  0: (UUID: MIG-a)\n"
    "  MIG 1g.18gb     Device  1: (UUID: MIG-b)\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-1)\n"
)


@pytest.mark.parametrize(
    ("listed", "chosen", "uuids"),
    [
        (WHOLE, None, NAMES),
        (WHOLE, "2,0", [NAMES[2], NAMES[0]]),
        (WHOLE, NAMES[5], [NAMES[5]]),
        (WHOLE, "", []),
        (WHOLE, "99", []),
        (SLICED, None, ["MIG-a", "MIG-b", "GPU-1"]),
        (SLICED, "MIG-b", ["MIG-b"]),
        (SLICED, "1", ["GPU-1"]),
        ("", None, []),
    ],
    ids=["all", "two", "one", "none", "unknown", "slices", "slice", "unsliced", "no GPU"],
)
def test_what_the_environment_shows_of_a_node_is_used(listed: str, chosen: str | None, uuids: list[str]) -> None:
    assert visible(listed, chosen) == uuids


class TestSharing:
    @pytest.fixture(autouse=True)
    def _idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "_smi", lambda *arguments: "")

    def test_each_slot_has_its_own_and_keeps_them(self) -> None:
        with closing(Gpus(NAMES[:4])) as node:
            assert [node.of_slot(slot, 1) for slot in range(3)] == [[name] for name in NAMES[:3]]
            assert node.of_slot(0, 1) == [NAMES[0]]

    def test_more_slots_than_gpus_share_them_evenly(self) -> None:
        with closing(Gpus(NAMES[:2])) as node:
            assert [node.of_slot(slot, 1)[0] for slot in range(5)] == [*NAMES[:2], *NAMES[:2], NAMES[0]]

    def test_another_driver_gets_the_others_until_all_are_taken(self) -> None:
        one, other = Gpus(NAMES[:4]), Gpus(NAMES[:4])
        assert one.of_slot(0, 2) == NAMES[:2]
        assert other.of_slot(0, 2) == NAMES[2:4]
        with pytest.raises(LaunchError, match="needs 1 GPU; free GPUs: 0 of 4") as refused:
            Gpus(NAMES[:4]).of_slot(0, 1)
        assert "executor.devices" not in str(refused.value.hint)
        one.close()
        assert other.of_slot(1, 1) == NAMES[:1]
        other.close()

    def test_a_refused_driver_holds_nothing(self) -> None:
        with closing(Gpus(NAMES[:4])) as one:
            one.of_slot(0, 3)
            with pytest.raises(LaunchError, match="needs 2 GPUs; free GPUs: 1 of 4"):
                Gpus(NAMES[:4]).of_slot(0, 2)
            assert one.of_slot(1, 1) == [NAMES[3]]

    def test_gpus_of_other_programs_and_drivers_are_not_usable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other, accepting = Gpus(NAMES[:4]), Gpus(NAMES[:4]), Gpus(NAMES[:4], allow_busy=True)
        one.of_slot(0, 1)
        monkeypatch.setattr(gpus, "_smi", lambda *arguments: f"{NAMES[1]}, 4194304, train\n")
        assert [node.usable() for node in (one, other, accepting)] == [3, 2, 3]
        one.close()
        assert other.usable() == 3

    def test_slices_do_not_train_together(self) -> None:
        with pytest.raises(LaunchError, match="must be 1 on MIG slices"):
            Gpus(["MIG-a", "MIG-b"]).of_slot(0, 2)


def test_what_strangers_compute_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = (
        f"{NAMES[0]}, 1, python\n{NAMES[1]}, {os.getpid()}, python\n{NAMES[2]}, 4194304, /bin/nvidia-cuda-mps-server\n"
    )
    apps += f"{NAMES[3]}, 4194304, train, with a comma\n"
    monkeypatch.setattr(gpus, "_smi", lambda *arguments: apps)
    assert gpus.busy(NAMES[1:]) == {NAMES[3]: "process 4194304 (train, with a comma)"}
    with closing(Gpus(NAMES[1:5])) as node, closing(Gpus(NAMES[3:4], allow_busy=True)) as accepting:
        assert [node.of_slot(slot, 1) for slot in range(3)] == [[NAMES[1]], [NAMES[2]], [NAMES[4]]]
        assert accepting.of_slot(0, 1) == [NAMES[3]]


def take_and_give_back(turns: int, folder: Path) -> None:
    """Hold two of eight GPUs again and again; a second holder of a GPU would find its file."""
    for _ in range(turns):
        node = Gpus(NAMES)
        try:
            taken = node.of_slot(0, 2)
        except LaunchError:
            continue
        for uuid in taken:
            (folder / uuid).touch(exist_ok=False)
        for uuid in taken:
            (folder / uuid).unlink()
        node.close()


@pytest.mark.slow
def test_no_gpu_is_held_by_two_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_smi", lambda *arguments: "")
    fork = multiprocessing.get_context("fork")
    drivers = [fork.Process(target=take_and_give_back, args=(300, tmp_path)) for _ in range(3)]
    for one in drivers:
        one.start()
    for one in drivers:
        one.join()
    assert [one.exitcode for one in drivers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "busy", "shown", "devices"),
    [
        ({"device": "cuda:3"}, [], NAMES[3:4], 1),
        ({"devices": (2,)}, [], NAMES[:2], 8),
        ({"slots": 8}, NAMES[:1], NAMES[1:2], 7),
    ],
    ids=["one GPU", "two devices", "a busy GPU"],
)
def test_a_worker_sees_the_gpus_of_its_slot_alone(
    settings: dict[str, Any],
    busy: list[str],
    shown: list[str],
    devices: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apps = "".join(f"{name}, 4194304, train" for name in busy)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nif [ \"$1\" = -L ]; then printf '{WHOLE}'; else echo '{apps}'; fi\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("bssearch.executors.slots.may_have_gpus", lambda: True)

    def worker(**asked: Any) -> Any:
        raise OSError(f"sees {asked['environment']['CUDA_VISIBLE_DEVICES']} alone")

    monkeypatch.setattr("bssearch.executors.slots.WorkerProcess", worker)
    slot = Slot(0, tmp_path / "log", keeps_log=True)
    slot.world_size = len(shown)
    with closing(LocalExecutor(ExecutorSettings(workload="digits", **settings))) as executor:
        with pytest.raises(LaunchError, match=f"sees {','.join(shown)} alone"):
            executor._started(slot, {})
        load = executor._load_of(slot)
    assert (load.settings.device, load.devices) == ("cuda:0", devices)
