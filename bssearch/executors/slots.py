"""Slots, and executors that run a worker in each slot."""

import os
import queue
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from bssearch.errors import BSSearchError, LaunchError, require
from bssearch.executors.base import (
    Answer,
    Event,
    ExecutorSettings,
    Load,
    Loaded,
    Measurement,
    Refused,
    Reply,
    check_threads,
)
from bssearch.executors.gpus import VISIBLE, Gpus
from bssearch.executors.process import (
    Inbox,
    WorkerHandle,
    WorkerProcess,
    allocator_environment,
    printed,
    tail,
    words_of_no_memory,
)
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)


class LogFolder:
    """A folder with one log per slot, temporary by default."""

    def __init__(self, folder: Path | None) -> None:
        self.is_kept = folder is not None
        self._temporary = ExitStack()
        self._folder = folder or Path(
            self._temporary.enter_context(
                tempfile.TemporaryDirectory(prefix="bssearch-logs-", ignore_cleanup_errors=True)
            )
        )
        self._folder.mkdir(parents=True, exist_ok=True)

    def file_of(self, slot: int) -> Path:
        return self._folder / f"slot-{slot}.log"

    def close(self) -> None:
        self._temporary.close()


@dataclass(slots=True)
class RunningTrial:
    """A running trial, whose output begins at byte ``log_start`` of the log."""

    request: TrialRequest
    log_start: int = 0
    device: str | None = None
    device_uuid: str | None = None
    started: float = field(default_factory=time.monotonic)
    contended: bool = False
    observations: list[Observation] = field(default_factory=list)

    def finished(self, outcome: TrialOutcome) -> TrialOutcome:
        """Fill in an outcome's contention, device, wall seconds and evaluations."""
        outcome = replace(
            outcome,
            contended=outcome.contended or self.contended,
            device=outcome.device or self.device,
            device_uuid=outcome.device_uuid or self.device_uuid,
            wall_seconds=outcome.wall_seconds or time.monotonic() - self.started,
        )
        if self.observations and outcome.final_metric is None:
            target, last = self.request.target, self.observations[-1]
            best = max((one.metric for one in self.observations), key=target.gain)
            outcome = replace(
                outcome,
                steps=last.step,
                samples=last.samples,
                train_seconds=last.train_seconds,
                final_metric=last.metric,
                best_metric=best,
            )
            if not target.is_met_by(best):
                outcome = replace(outcome, last_miss_step=last.step, last_miss_seconds=last.train_seconds)
        return outcome


T = TypeVar("T")

Place = tuple[str, str]  # (machine, device): trials in the same place slow each other


class SlotState(Enum):
    """The state of a slot's worker."""

    EMPTY = auto()  # no worker
    LOADING = auto()
    READY = auto()
    ANSWERING = auto()  # the worker describes or measures
    TRAINING = auto()
    REFUSED = auto()  # the last request failed, see `Slot.failure`
    CONDEMNED = auto()  # bssearch killed the worker, which has not yet ended


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request. ``is_lost`` says whether Ray lost the worker's actor."""

    error: BSSearchError
    out_of_memory: bool = False
    is_lost: bool = False


class Slot:
    """A slot and its worker. Unless ``keeps_log`` is set, the end of a trial empties the log."""

    def __init__(self, index: int, log: Path, *, keeps_log: bool) -> None:
        self.index = index
        self.log = log
        self.state = SlotState.EMPTY
        self.worker: WorkerHandle | None = None
        self.device: str | None = None
        self.device_uuid: str | None = None
        self.answer: Answer | None = None
        self.timed: list[Configuration] = []
        self.failure: Failure | None = None
        self.trial: RunningTrial | None = None
        self.world_size = 1
        """The number of the worker's devices."""
        self._keeps_log = keeps_log
        self._verdict: tuple[TrialState, str] | None = None
        self._job_log = 0  # log position in bytes when the worker got its last job

    def start(self, worker: WorkerHandle, load: Load) -> None:
        self._move(SlotState.LOADING, SlotState.EMPTY)
        self.worker, self.failure, self.answer, self._verdict = worker, None, None, None
        self.timed = []
        self._job_log = worker.log_start
        worker.send(load)

    def ask(self, command: Literal["describe"] | Measurement) -> None:
        self._move(SlotState.ANSWERING, SlotState.READY)
        self.answer = None
        if command != "describe":
            self._job_log = self.log.stat().st_size
        self._living.send(command)

    def run(self, request: TrialRequest) -> RunningTrial:
        self._move(SlotState.TRAINING, SlotState.READY)
        self.trial = RunningTrial(request, self.log.stat().st_size, self.device, self.device_uuid)
        self._living.send(request)
        return self.trial

    def take(self, reply: Reply) -> Event | None:
        """Process a reply, and return the trial event, if any."""
        match reply:
            case Loaded():
                self.device, self.device_uuid = reply.device, reply.device_uuid
                self._has_done(SlotState.LOADING)
            case WorkloadDescription() | StepTime() | MemoryUse() | NoiseMeasurement():
                self.answer = reply
                self._has_done(SlotState.ANSWERING)
            case Refused():
                self.failure = Failure(reply.as_error(), reply.out_of_memory)
                if self.state is not SlotState.CONDEMNED:
                    self._move(SlotState.REFUSED, SlotState.LOADING, SlotState.ANSWERING)
            case TrialObserved() if self.trial is not None:
                self.trial.observations.append(reply.observation)
                return reply
            case TrialEnded():
                self._has_done(SlotState.TRAINING)
                ended = self._end_trial(reply.outcome)
                if reply.broken:
                    self.condemn(TrialState.FAILED, f"bssearch killed the worker, because {self.device} failed")
                return ended
        return None

    def end_if_hung(self, hang_seconds: float) -> None:
        """Kill a training worker after ``hang_seconds`` without progress."""
        if self.state is SlotState.TRAINING and self.trial is not None:
            silence = time.monotonic() - max(self._living.last_heard, self.trial.started)
            if silence > hang_seconds:
                self.condemn(
                    TrialState.FAILED,
                    f"hang: no training progress for {silence:.0f} s; if steps take longer, raise "
                    f"executor.hang_seconds above {hang_seconds:g}",
                    stack=True,
                )

    def condemn(self, state: TrialState, reason: str, *, stack: bool = False) -> None:
        """Kill the worker and end the trial in ``state``.

        A second call keeps the first reason. If ``stack`` is set, log the worker's stack first.
        """
        worker = self.worker  # because another thread may bury the worker
        if worker is None:
            return
        if self.state is not SlotState.CONDEMNED:
            self.state, self._verdict = SlotState.CONDEMNED, (state, reason)
            if stack:
                worker.write_stack()
        worker.kill()

    def bury(self) -> TrialEnded | None:
        """Release a dead worker, and end the worker's trial or set ``failure``."""
        worker = self._living
        death = worker.bury()
        self.worker = self.answer = None
        self.state = SlotState.EMPTY
        start = self._job_log if self.trial is None else self.trial.log_start
        state, reason = self._verdict or death.judged(words_of_no_memory(self.log, start))
        if self.trial is not None:
            return self._end_trial(TrialOutcome(state=state, reason=reason, traceback=tail(self.log, start) or None))
        if self.failure is None:
            error = LaunchError(f"slot {self.index}: {reason}\n{tail(self.log, worker.log_start)}".rstrip("\n"))
            self.failure = Failure(error, state is TrialState.OOM, state is TrialState.LOST)
        return None

    @property
    def lacks_memory(self) -> bool:
        return self.failure is not None and self.failure.out_of_memory

    @property
    def place(self) -> Place | None:
        """The worker's machine and device, or None if unknown."""
        return (self.worker.place, self.device_uuid or self.device) if self.worker and self.device else None

    @property
    def _living(self) -> WorkerHandle:
        assert self.worker is not None, f"slot {self.index} has no worker in the state {self.state.name}"
        return self.worker

    def _move(self, to: SlotState, *allowed: SlotState) -> None:
        assert self.state in allowed, f"slot {self.index} cannot change from {self.state.name} to {to.name}"
        self.state = to

    def _has_done(self, job: SlotState) -> None:
        if self.state is job:
            self.state = SlotState.READY

    def _end_trial(self, outcome: TrialOutcome) -> TrialEnded | None:
        trial, self.trial = self.trial, None
        if trial is None:
            return None
        log = printed(self.log, trial.log_start)
        if not self._keeps_log:
            os.truncate(self.log, 0)
            if self.worker is not None:
                self.worker.log_start = 0
                self._job_log = 0
        return TrialEnded(trial.request.number, trial.finished(outcome), log)


Job = tuple[Slot, Literal["describe"] | Measurement]

JOB_SECONDS = 3600.0  # time limit for loading or measuring, because slow network disks need minutes

COMPILE_SECONDS = 1800.0  # least hang timeout while compiling, because large models take over ten minutes

KILLED = TrialState.CANCELLED, "killed: the run ended"

_CLOSE_SECONDS = 3.0  # seconds for workers to end a step and exit

_KILL_SECONDS = 5.0  # seconds to reap killed workers, because disk waits take seconds

_TICK_SECONDS = 0.2  # poll interval in seconds, far below `ExecutorSettings.hang_seconds`


class SlotExecutor(ABC):
    """An `Executor` with one worker per slot.

    Call the executor from one thread. If ``slots`` is ``auto``, the executor has one slot until a worker has loaded.
    """

    job_seconds = JOB_SECONDS

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = replace(settings, folder=settings.folder.resolve())
        self._logs = LogFolder(settings.log_folder)
        self._slots: list[Slot] = []
        self._add_slots(settings.least_slots)
        self._inbox: Inbox = queue.SimpleQueue()
        self._events: list[Event] = []
        self._revision: str | None = None
        self._devices: int | None = None
        self._has_gpus = False
        self._leased: Gpus | None = None

    @abstractmethod
    def _started(self, slot: Slot, environment: Mapping[str, str]) -> WorkerHandle:
        pass

    def _load_of(self, slot: Slot) -> Load:
        # A slot keeps its device.
        return Load(
            settings=replace(self._settings, device=slot.device or self._settings.device),
            slot=slot.index,
            revision=self._revision,
            devices=self._devices,
        )

    @property
    def slots_apart(self) -> bool:
        if not self._has_gpus:
            # a user's loop may use more threads
            return self._settings.program is None and self.slots * self._settings.threads <= usable_cores()
        places = [slot.place for slot in self._slots if slot.place is not None]
        return self.slots <= (self._devices or 0) and len({*places}) == len(places)

    def describe(self) -> WorkloadDescription:
        found = self._ask("describe", WorkloadDescription)
        require(
            not self._has_gpus or self._settings.devices[-1] <= (self._devices or 1),
            f"executor.devices = {self._settings.devices[-1]} must be <= {self._devices}, the number of free GPUs",
            hint="set executor.devices lower, or wait until other programs free GPUs",
            error=LaunchError,
        )
        return replace(found, notice="; ".join(filter(None, [found.notice, self._about_idle_devices()])) or None)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        return self.measure_step_times([request])[0]

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        return self._ask_all([*zip(self._slots, requests, strict=False)], StepTime)

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        found = self._ask_all([(slot, request) for slot in self._slots], StepTime)
        names = [slot.device_uuid or slot.device or f"of slot {slot.index}" for slot in self._slots]
        return dict(zip(names, found, strict=True))

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        self._refuse_while_a_trial_runs()
        self._discard(self._slots[0])
        try:
            return self._ask(request, MemoryUse)
        except BSSearchError as error:
            if not self._slots[0].lacks_memory:
                raise
            micro, reason = request.configuration.micro_batch_size, str(error).splitlines()[0]
            return MemoryUse(micro_batch_size=micro, fits=False, peak_memory_bytes=None, reason=reason)
        finally:
            self._discard(self._slots[0])

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        return self._ask(request, NoiseMeasurement)

    def _ask(self, command: Literal["describe"] | Measurement, kind: type[T]) -> T:
        return self._ask_all([(self._slots[0], command)], kind)[0]

    def _ask_all(self, jobs: Sequence[Job], kind: type[T]) -> list[T]:
        self._refuse_while_a_trial_runs()
        found = self._again(lambda: self._answers(jobs))
        return [one for one in found if isinstance(one, kind)]

    def _again(self, work: Callable[[], T]) -> T:
        return work()

    def _answers(self, jobs: Sequence[Job]) -> list[Answer]:
        for slot, command in jobs:
            if command != "describe":
                self._give_devices(slot, command.configuration.world_size)
            # A repetition needs a new process, because cuDNN chooses kernels once per process and shape.
            if self._has_gpus and isinstance(command, StepTimeRequest) and command.configuration in slot.timed:
                self._discard(slot)
            self._start(slot)
        try:
            for slot, _ in jobs:
                self._make_ready(slot)
            self._wait_for_loading()
            for slot, command in jobs:
                slot.ask(command)
            return [self._answer(slot, command) for slot, command in jobs]
        except BSSearchError:
            for slot, _ in jobs:
                if slot.state is SlotState.ANSWERING:
                    self._discard(slot)
            raise

    def _answer(self, slot: Slot, command: Literal["describe"] | Measurement) -> Answer:
        try:
            self._wait_until_ready(slot)
        except BSSearchError:
            if isinstance(command, StepTimeRequest) and slot.lacks_memory:
                return StepTime.where_memory_ran_out(command.configuration)
            raise
        assert slot.answer is not None, f"slot {slot.index} is ready without an answer"
        if isinstance(command, StepTimeRequest):
            slot.timed.append(command.configuration)
        return slot.answer

    def _about_idle_devices(self) -> str | None:
        devices, per_slot = self._devices or 1, self._settings.devices[0]
        most = devices // per_slot
        words = f"{self.slots * per_slot} of {devices} devices run trials; set executor.slots = auto for {most} slots"
        return words if self.slots < most and self._settings.program is None else None

    def _add_slots(self, count: int) -> None:
        for index in range(len(self._slots), count):
            self._slots.append(Slot(index, self._logs.file_of(index), keeps_log=self._logs.is_kept))
            self._slots[-1].world_size = self._settings.devices[0]
        self.slots = len(self._slots)

    @property
    def _running(self) -> list[int]:
        return [slot.trial.request.number for slot in self._slots if slot.trial]

    def _refuse_while_a_trial_runs(self) -> None:
        if self._running:
            raise ValueError(f"cannot measure while trials {self._running} run; wait for the end of all trials")

    def submit(self, request: TrialRequest) -> None:
        self._pump(0.0)
        running = self._running
        if len(running) == self.slots:
            raise ValueError(
                f"no slot is free for trial {request.number}: slots are busy with trials {running}; "
                "wait for the end of a trial"
            )
        world_size = request.plan.configuration.world_size
        if world_size == self._settings.devices[0]:
            self._start_all()
        if not running:  # loading would slow running trials
            self._wait_for_loading()
        slot = min(
            (slot for slot in self._slots if not slot.trial),
            key=lambda slot: (len(self._trials_on(slot.place)), slot.index),
        )
        self._give_devices(slot, world_size)
        self._make_ready(slot)
        neighbours = self._trials_on(slot.place)
        trial = slot.run(request)
        for neighbour in neighbours:
            neighbour.contended = trial.contended = True

    def stop(self, stop: TrialStop) -> None:
        for slot in self._slots:
            if slot.worker and slot.trial and slot.trial.request.number == stop.number:
                slot.worker.send(stop)

    def events(self, timeout: float) -> list[Event]:
        deadline = time.monotonic() + timeout
        self._pump(0.0)
        while not self._events and (left := deadline - time.monotonic()) > 0:
            self._pump(min(left, _TICK_SECONDS))
        events, self._events = self._events, []
        return events

    def kill(self) -> None:
        for slot in self._slots:
            slot.condemn(*KILLED)
        self._wait_for_burials(_KILL_SECONDS)

    def close(self) -> None:
        for slot in self._slots:
            if slot.worker:
                slot.worker.send("exit")
        self._wait_for_burials(_CLOSE_SECONDS)
        self.kill()
        self._logs.close()

    def _wait_for_burials(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(slot.worker for slot in self._slots) and time.monotonic() < deadline:
            self._pump(_TICK_SECONDS)

    def _trials_on(self, place: Place | None) -> list[RunningTrial]:
        return [slot.trial for slot in self._slots if slot.trial and slot.place == place]

    def _wait_for_loading(self) -> None:
        for slot in self._slots:
            if slot.state is SlotState.LOADING:
                self._wait_until_ready(slot)

    def _give_devices(self, slot: Slot, world_size: int) -> None:
        # A worker sees only the GPUs of its start.
        if slot.world_size == world_size:
            return
        if self._has_gpus:
            for one in self._slots:
                if one is slot or not one.trial:
                    self._discard(one)
                    if self._leased is not None:
                        self._leased.give_back(one.index)
        slot.world_size = world_size

    def _start_all(self) -> None:
        for slot in self._slots:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        if slot.state is SlotState.EMPTY:
            slot.start(self._started(slot, self._worker_environment()), self._load_of(slot))

    def _worker_environment(self) -> dict[str, str]:
        # User programs configure their own allocator.
        given = self._settings.environment
        return (allocator_environment({**os.environ, **given}) if self._settings.program is None else {}) | dict(given)

    def _make_ready(self, slot: Slot) -> None:
        while slot.worker is not None and (slot.state is SlotState.CONDEMNED or slot.worker.has_exited()):
            self._pump(_TICK_SECONDS)
        self._start(slot)
        self._wait_until_ready(slot)

    def _wait_until_ready(self, slot: Slot) -> None:
        deadline = time.monotonic() + self.job_seconds
        while slot.state is not SlotState.READY:
            if slot.failure is not None:
                self._discard(slot)
                raise slot.failure.error
            if time.monotonic() > deadline:
                slot.condemn(
                    TrialState.FAILED,
                    f"bssearch killed the worker after {self.job_seconds:.0f} s without an answer",
                    stack=True,
                )
            self._pump(_TICK_SECONDS)

    def _discard(self, slot: Slot) -> None:
        if slot.worker is not None:
            slot.worker.kill()
        while slot.worker is not None:
            self._pump(_TICK_SECONDS)

    def _pump(self, timeout: float) -> None:
        with suppress(queue.Empty):
            self._take(*self._inbox.get(block=timeout > 0, timeout=timeout or None))
            while True:
                self._take(*self._inbox.get_nowait())
        for slot in self._slots:
            compiles = self._settings.training.compile != "none" and (slot.trial is None or not slot.trial.observations)
            slot.end_if_hung(max(self._settings.hang_seconds, COMPILE_SECONDS if compiles else 0.0))

    def _take(self, worker: WorkerHandle, reply: Reply | None) -> None:
        slot = next((one for one in self._slots if one.worker is worker), None)
        if slot is None:  # a killed worker has no slot
            return
        if isinstance(reply, Loaded):
            self._revision = self._revision or reply.revision
            if self._devices is None:
                self._devices, self._has_gpus = reply.devices, reply.device != "cpu"
                if self._settings.slots == "auto":
                    uses_cpu, world_size = not self._has_gpus and self._settings.program is None, slot.world_size
                    on_cpu = cpu_slots(self._settings.threads * world_size)
                    self._add_slots(on_cpu if uses_cpu else max(1, reply.devices // world_size))
        event = slot.bury() if reply is None else slot.take(reply)
        if event is not None:
            self._events.append(event)


# The most automatic slots on a CPU, because more slots would share caches and memory bandwidth.
MOST_CPU_SLOTS = 4

# Memory of a CPU worker: 0.4 GiB for torch, 0.6 GiB for data and training.
WORKER_BYTES = 2**30

CONTROL_GROUP = Path("/sys/fs/cgroup")

# NVIDIA's, AMD's and WSL's drivers.
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def may_have_gpus() -> bool:
    return any(Path(name).exists() for name in GPU_FILES)


def cpu_slots(threads: int) -> int:
    """Return the number of ``auto`` slots on the CPU: 1 to `MOST_CPU_SLOTS`, limited by cores and memory."""
    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no control group, or no limit: "max"
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, limit - used)
    return max(1, min(MOST_CPU_SLOTS, usable_cores() // threads, available // WORKER_BYTES))


def usable_cores() -> int:
    """Count the physical cores that affinity and the control group's quota allow this process."""
    logical = psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    cores = allowed * (psutil.cpu_count(logical=False) or logical) // logical
    with suppress(OSError, ValueError):  # no control group, or no quota: "max"
        quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


class LocalExecutor(SlotExecutor):
    """An `Executor` with worker processes on this machine.

    The calling thread must outlive the executor; see `WorkerProcess`.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self._is_on_cpu = settings.device == "cpu" or not may_have_gpus()
        check_threads(settings, settings.devices[-1] if self._is_on_cpu else 1)
        if settings.slots == "auto" and self._is_on_cpu and settings.program is None:
            settings = replace(settings, slots=cpu_slots(settings.threads * settings.devices[0]))
        super().__init__(settings)
        self._leased = (
            None if self._is_on_cpu else Gpus.found(settings.device, os.environ, allow_busy=settings.allow_busy)
        )

    def describe(self) -> WorkloadDescription:
        if self._is_on_cpu:
            self._start_all()
        return super().describe()

    def close(self) -> None:
        super().close()
        if self._leased is not None:
            self._leased.close()

    def _load_of(self, slot: Slot) -> Load:
        load, gpus = super()._load_of(slot), self._leased
        if gpus is None:
            return load
        return replace(load, settings=replace(load.settings, device="cuda:0"), devices=self._devices or gpus.usable())

    def _started(self, slot: Slot, environment: Mapping[str, str]) -> WorkerHandle:
        if self._leased is not None:
            environment = {**environment, VISIBLE: ",".join(self._leased.of_slot(slot.index, slot.world_size))}
        try:
            return WorkerProcess(
                slot=slot.index,
                threads=self._settings.threads,
                log=slot.log,
                inbox=self._inbox,
                environment=environment,
            )
        except OSError as error:
            raise LaunchError(
                f"the worker of slot {slot.index} does not start: {error}",
                hint="end other programs on this machine, or lower executor.slots",
            ) from error
