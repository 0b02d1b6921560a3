"""The slots of an executor, wherever their workers run: what is known of each, and how all of them are driven."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Literal, TypeVar

from bssearch.errors import BSSearchError, LaunchError
from bssearch.executors.base import Event, ExecutorSettings, check_threads
from bssearch.executors.failures import printed, tail, words_of_no_memory
from bssearch.executors.messages import Answer, Load, Loaded, Measurement, Refused, Reply
from bssearch.executors.process import Inbox, Worker, WorkerProcess, allocator_environment
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
    """A folder of logs, one file per slot; without a ``folder`` it is a temporary one, and nothing of it is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.is_kept = folder is not None
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="bssearch-logs-", ignore_cleanup_errors=True)
            folder = Path(self._temporary.name)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def file_of(self, slot: int) -> Path:
        """Return the log of a slot."""
        return self._folder / f"slot-{slot}.log"

    def close(self) -> None:
        """Remove a temporary folder; a second time does nothing."""
        if self._temporary is not None:
            self._temporary.cleanup()


@dataclass(slots=True)
class RunningTrial:
    """A trial in a slot: its last observation, its best metric, and where the slot's log stood when it began.

    ``device`` and ``device_uuid`` are those of the slot.
    """

    request: TrialRequest
    log_start: int = 0
    device: str | None = None
    device_uuid: str | None = None
    started: float = field(default_factory=time.monotonic)
    contended: bool = False
    last: Observation | None = None
    best_metric: float | None = None

    def observe(self, observation: Observation) -> None:
        """Take in an evaluation."""
        gain = self.request.target.gain
        if self.best_metric is None or gain(observation.metric) > gain(self.best_metric):
            self.best_metric = observation.metric
        self.last = observation

    def finished(self, outcome: TrialOutcome) -> TrialOutcome:
        """Return the outcome with what is known here: contention, the device, and how far a failed trial had come."""
        outcome = replace(
            outcome,
            contended=outcome.contended or self.contended,
            device=outcome.device or self.device,
            device_uuid=outcome.device_uuid or self.device_uuid,
        )
        if self.last is not None and outcome.final_metric is None:
            outcome = replace(
                outcome,
                steps=self.last.step,
                samples=self.last.samples,
                train_seconds=self.last.train_seconds,
                final_metric=self.last.metric,
                best_metric=self.best_metric,
            )
            if self.best_metric is not None and not self.request.target.is_met_by(self.best_metric):
                outcome = replace(outcome, last_miss_step=self.last.step, last_miss_seconds=self.last.train_seconds)
        if outcome.wall_seconds == 0.0:
            outcome = replace(outcome, wall_seconds=time.monotonic() - self.started)
        return outcome


T = TypeVar("T")

Place = tuple[str, str]
"""A machine, as `Worker.place` names it, and one of its devices: trials there at once slow each other down."""


class SlotState(Enum):
    """Where a slot stands."""

    EMPTY = auto()
    """No worker: none was started yet, or the last one has ended."""
    LOADING = auto()
    """The worker loads the workload."""
    READY = auto()
    """The worker has loaded, or done its last job."""
    ANSWERING = auto()
    """The worker describes the workload or measures something."""
    TRAINING = auto()
    """The worker runs a trial."""
    REFUSED = auto()
    """The worker could not load, describe or measure; `Slot.failure` says why."""
    CONDEMNED = auto()
    """The worker was killed from here; its end has not been told yet."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker could not do what it was asked: whether for want of memory, or because its machine is gone."""

    error: BSSearchError
    out_of_memory: bool = False
    is_lost: bool = False


class Slot:
    """A slot and its worker. ``log`` is emptied after each trial unless ``keeps_log``, lest it fill the disk.

    ``timed`` is what the worker has timed the steps of. ``failure`` is why it could not do what it was asked.
    """

    def __init__(self, index: int, log: Path, *, keeps_log: bool) -> None:
        self.index = index
        self.log = log
        self.state = SlotState.EMPTY
        self.worker: Worker | None = None
        self.device: str | None = None
        self.device_uuid: str | None = None
        self.answer: Answer | None = None
        self.timed: list[Configuration] = []
        self.failure: Failure | None = None
        self.trial: RunningTrial | None = None
        self._keeps_log = keeps_log
        self._verdict: tuple[TrialState, str] | None = None
        self._job_log = 0
        """Where the log stood when the worker got the job that it may have died of."""

    def start(self, worker: Worker, load: Load) -> None:
        """EMPTY → LOADING: have a new worker load the workload."""
        self._move(SlotState.LOADING, SlotState.EMPTY)
        self.worker, self.failure, self.answer, self._verdict = worker, None, None, None
        self.timed = []
        self._job_log = worker.log_start
        worker.send(load)

    def ask(self, command: Literal["describe"] | Measurement) -> None:
        """READY → ANSWERING: have the worker describe the workload or measure something."""
        self._move(SlotState.ANSWERING, SlotState.READY)
        self.answer = None
        if command != "describe":
            self._job_log = self.log.stat().st_size
        self._living.send(command)

    def run(self, request: TrialRequest) -> RunningTrial:
        """READY → TRAINING: have the worker run a trial."""
        self._move(SlotState.TRAINING, SlotState.READY)
        self.trial = RunningTrial(request, self.log.stat().st_size, self.device, self.device_uuid)
        self._living.send(request)
        return self.trial

    def take(self, reply: Reply) -> Event | None:
        """Take in what the worker said; return the event that follows for a trial."""
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
                self.trial.observe(reply.observation)
                return reply
            case TrialEnded():
                self._has_done(SlotState.TRAINING)
                ended = self._end_trial(reply.outcome)
                if reply.broken:
                    self.condemn(TrialState.FAILED, "worker killed: its device failed")
                return ended
        return None

    def end_if_hung(self, hang_seconds: float) -> None:
        """Kill the worker of a trial that has made no progress for so long."""
        if self.state is SlotState.TRAINING and self.trial is not None:
            silence = time.monotonic() - max(self._living.last_heard, self.trial.started)
            if silence > hang_seconds:
                self.condemn(
                    TrialState.FAILED, f"hang: no training progress for {silence:.0f} s; worker killed", stack=True
                )

    def condemn(self, state: TrialState, reason: str, *, stack: bool = False) -> None:
        """→ CONDEMNED: kill the worker; its trial ends in ``state``. With ``stack`` it writes to the log where it is.

        Only the first reason counts. A slot without a worker stays EMPTY.
        """
        worker = self.worker  # which another thread may bury meanwhile
        if worker is None:
            return
        if self.state is not SlotState.CONDEMNED:
            self.state, self._verdict = SlotState.CONDEMNED, (state, reason)
            if stack:
                worker.write_stack()
        worker.kill()

    def bury(self) -> TrialEnded | None:
        """→ EMPTY: reap a worker whose end was told; return the end of the trial that it ran."""
        worker = self._living
        death = worker.bury()
        self.worker = self.device = self.answer = None
        self.state = SlotState.EMPTY
        if self.trial is not None:
            start = self.trial.log_start
            state, reason = self._verdict or death.judged(words_of_no_memory(self.log, start))
            return self._end_trial(TrialOutcome(state=state, reason=reason, traceback=tail(self.log, start) or None))
        if self.failure is None:
            state, reason = self._verdict or death.judged(words_of_no_memory(self.log, self._job_log))
            words = tail(self.log, worker.log_start)
            error = LaunchError(f"slot {self.index}: {reason}" + (f"\n{words}" if words else ""))
            self.failure = Failure(error, state is TrialState.OOM, state is TrialState.LOST)
        return None

    @property
    def place(self) -> Place | None:
        """Return where the slot's worker is, None until it has loaded."""
        if self.worker is None or self.device is None:
            return None
        return self.worker.place, self.device_uuid or self.device

    @property
    def _living(self) -> Worker:
        assert self.worker is not None, f"a slot that is {self.state.name} has no worker"
        return self.worker

    def _move(self, to: SlotState, *allowed: SlotState) -> None:
        assert self.state in allowed, f"slot {self.index} is {self.state.name}, not ready to be {to.name}"
        self.state = to

    def _has_done(self, job: SlotState) -> None:
        """Be READY after a job, but where the worker has been condemned meanwhile."""
        if self.state is job:
            self.state = SlotState.READY

    def _end_trial(self, outcome: TrialOutcome) -> TrialEnded | None:
        trial, self.trial = self.trial, None
        if trial is None:
            return None
        log = printed(self.log, trial.log_start)
        if not self._keeps_log:
            self._empty_log()
        return TrialEnded(trial.request.number, trial.finished(outcome), log)

    def _empty_log(self) -> None:
        """Forget what is in the log; the worker goes on at its new end."""
        os.truncate(self.log, 0)
        if self.worker is not None:
            self.worker.log_start = 0
            self._job_log = 0


JOB_SECONDS = 3600.0
"""A worker that loads the workload, or times steps, for longer than this is taken to hang. A choice: data on a slow
network disk may take minutes, a study that waits for nothing should not take a night."""

COMPILE_SECONDS = 1800.0
"""A trial whose model is compiled is taken to hang after so long without progress before its first evaluation, where
`ExecutorSettings.hang_seconds` is less: a choice; large models are compiled for ten minutes and more."""

_CLOSE_SECONDS = 3.0
"""How long workers may take to end in peace: a choice; a step of a trial and the interpreter's own end fit in."""

_KILL_SECONDS = 5.0
"""How long killed workers may take to be reaped: a choice; one that waits for a disk takes seconds."""

_TICK_SECONDS = 0.2
"""How often hangs are looked for while nothing is heard: a choice, small beside `ExecutorSettings.hang_seconds`."""


class SlotExecutor(ABC):
    """Runs trials in workers, one in each slot; see `bssearch.executors.base.Executor`.

    What a worker writes to stdout and stderr is the log of its slot. Call the executor from one thread. A worker that
    is started later must find the workload's file as the first did: `WorkloadError` where it has changed. Where
    ``slots`` is one for each device, it is 1 before the first worker has loaded.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = replace(settings, folder=settings.folder.resolve())
        self._logs = LogFolder(settings.log_folder)
        self._slots: list[Slot] = []
        self._add_slots(settings.least_slots)
        self._inbox: Inbox = queue.SimpleQueue()
        self._events: list[Event] = []
        self._revision: str | None = None
        self._devices: int | None = None
        self._devices_of: dict[int, str] = {}
        self._has_gpus = False

    @abstractmethod
    def _started(self, slot: Slot, environment: Mapping[str, str]) -> Worker:
        """Return a new worker for a slot, with an environment beside its own; raise `LaunchError` without one."""

    def _load_of(self, slot: Slot) -> Load:
        """Return what the worker of a slot loads: a slot stays on its device, whichever others come free by now."""
        settings = replace(self._settings, device=self._devices_of.get(slot.index, self._settings.device))
        return Load(settings=settings, slot=slot.index, revision=self._revision, devices=self._devices)

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has a device of its own, as far as the workers that have started have said."""
        places = [slot.place for slot in self._slots if slot.place is not None]
        return self._has_gpus and self.slots <= (self._devices or 0) and len({*places}) == len(places)

    def describe(self) -> WorkloadDescription:
        """Load the workload and return what it offers; raise `WorkloadError` or `LaunchError`."""
        found = self._ask("describe", WorkloadDescription)
        notices = [found.notice, self._about_idle_devices()]
        return replace(found, notice="; ".join(filter(None, notices)) or None)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time isolated steps while no trial runs; raise `LaunchError` if the worker dies of it.

        A worker that died for want of memory (`judge_exit`) is an answer: out of memory. Raises `WorkloadError` where
        the user's code does. On a GPU a configuration that is timed again is timed in a new process: cuDNN chooses a
        kernel once for each process and shape, so that times of one process share its choices.
        """
        (found,) = self._times([(self._slots[0], request)])
        return found

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        """Time as `measure_step_time` does, as many at once as there are slots, each on a slot of its own."""
        waves = [requests[first : first + self.slots] for first in range(0, len(requests), self.slots)]
        return [one for wave in waves for one in self._times([*zip(self._slots, wave, strict=False)])]

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        """Time one configuration as `measure_step_time` does, in all slots at once; return the times by device."""
        found = self._times([(slot, request) for slot in self._slots])
        names = [slot.device_uuid or slot.device or f"of slot {slot.index}" for slot in self._slots]
        return dict(zip(names, found, strict=True))

    def _times(self, jobs: Sequence[tuple[Slot, StepTimeRequest]]) -> list[StepTime]:
        """Time steps in several slots at once; see `measure_step_time`."""
        return self._again(lambda: self._timed(jobs))

    def _again(self, work: Callable[[], T]) -> T:
        """Do work of the slots; an executor whose workers may be lost with their machine does lost work again."""
        return work()

    def _timed(self, jobs: Sequence[tuple[Slot, StepTimeRequest]]) -> list[StepTime]:
        self._refuse_while_a_trial_runs()
        for slot, request in jobs:
            if self._has_gpus and request.configuration in slot.timed:
                self._discard(slot)
        for slot, _ in jobs:
            if slot.state is SlotState.EMPTY:
                self._start(slot)
        try:
            for slot, _ in jobs:
                self._make_ready(slot)
            for slot, request in jobs:
                slot.ask(request)
            return [self._time_of(slot, request) for slot, request in jobs]
        except BSSearchError:
            for slot, _ in jobs:
                if slot.state is SlotState.ANSWERING:
                    self._discard(slot)
            raise

    def _time_of(self, slot: Slot, request: StepTimeRequest) -> StepTime:
        """Wait for what a slot was asked to time."""
        try:
            self._wait_until_ready(slot)
        except LaunchError:
            if slot.failure is None or not slot.failure.out_of_memory:
                raise
            return StepTime.where_memory_ran_out(request.configuration)
        assert isinstance(slot.answer, StepTime)
        slot.timed.append(request.configuration)
        return slot.answer

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        """Find out in a process of its own whether a micro-batch size fits; not while a trial runs.

        The process is new and ends with the answer. Its death for want of memory (`judge_exit`) is an answer; any other
        raises `LaunchError`.
        """
        self._refuse_while_a_trial_runs()
        self._discard(self._slots[0])
        try:
            return self._ask(request, MemoryUse)
        except LaunchError as error:
            failure = self._slots[0].failure
            if failure is None or not failure.out_of_memory:
                raise
            reason = str(error).splitlines()[0]
            micro = request.configuration.micro_batch_size
            return MemoryUse(micro_batch_size=micro, fits=False, peak_memory_bytes=None, reason=reason)
        finally:
            self._discard(self._slots[0])

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target while no trial runs."""
        self._refuse_while_a_trial_runs()
        return self._ask(request, NoiseMeasurement)

    def _about_idle_devices(self) -> str | None:
        """Return that devices have nothing to do; None also for a program, which may use several for one trial."""
        devices = self._devices or 1
        if self.slots >= devices or self._settings.program is not None:
            return None
        return f"{self.slots} of {devices} devices run trials: executor.slots = auto gives each device a slot"

    def _add_slots(self, count: int) -> None:
        """Have so many slots in all, those that are new without a worker."""
        for index in range(len(self._slots), count):
            self._slots.append(Slot(index, self._logs.file_of(index), keeps_log=self._logs.is_kept))
        self.slots = len(self._slots)

    def _ask(self, command: Literal["describe"] | Measurement, kind: type[T]) -> T:
        """Return the answer of the first slot's worker; raise `LaunchError` if it dies of it, else what it says."""
        slot = self._slots[0]

        def ask() -> T:
            self._make_ready(slot)
            slot.ask(command)
            self._wait_until_ready(slot)
            assert isinstance(slot.answer, kind), "a worker is ready once it has answered"
            return slot.answer

        return self._again(ask)

    def _refuse_while_a_trial_runs(self) -> None:
        if any(slot.trial for slot in self._slots):
            raise ValueError("nothing is measured while a trial runs")

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot; raise `LaunchError` if no worker can be started.

        The first submission starts the workers of all slots and waits for all: they load side by side, and not beside
        a trial, whose steps would take longer for it.
        """
        self._pump(0.0)
        running = [slot.trial.request.number for slot in self._slots if slot.trial]
        if len(running) == self.slots:
            raise ValueError(f"no slot is free for trial {request.number}: {running} are running")
        if request.number in running:
            raise ValueError(f"trial {request.number} is running already")
        for slot in self._slots:
            if slot.state is SlotState.EMPTY:
                self._start(slot)
        if not running:
            for slot in self._slots:
                if slot.state is SlotState.LOADING:
                    self._wait_until_ready(slot)
        slot = min(
            (slot for slot in self._slots if not slot.trial),
            key=lambda slot: (len(self._trials_on(slot.place)), slot.index),
        )
        self._make_ready(slot)
        neighbours = self._trials_on(slot.place)
        trial = slot.run(request)
        for neighbour in neighbours:
            neighbour.contended = trial.contended = True

    def stop(self, stop: TrialStop) -> None:
        """Ask a running trial to end in a state; it does within one step. Unknown numbers are ignored."""
        for slot in self._slots:
            if slot.worker and slot.trial and slot.trial.request.number == stop.number:
                slot.worker.send(stop)

    def events(self, timeout: float) -> list[Event]:
        """Return what has happened since the last call, waiting up to ``timeout`` seconds for the first."""
        deadline = time.monotonic() + timeout
        self._pump(0.0)
        while not self._events and (left := deadline - time.monotonic()) > 0:
            self._pump(min(left, _TICK_SECONDS))
        events, self._events = self._events, []
        return events

    def kill(self) -> None:
        """End every worker at once, without waiting for its trial; running trials end as cancelled."""
        for slot in self._slots:
            slot.condemn(TrialState.CANCELLED, "killed: the run was stopped")
        self._wait_for_burials(_KILL_SECONDS)

    def close(self) -> None:
        """Let the workers go in peace; kill those that do not. Running trials end as cancelled."""
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

    def _start(self, slot: Slot) -> None:
        slot.start(self._started(slot, self._worker_environment()), self._load_of(slot))

    def _worker_environment(self) -> dict[str, str]:
        """Return what is added to the environment: a program of the user's own has its allocator as it sets it."""
        given = self._settings.environment
        trains = self._settings.program is None
        return (allocator_environment({**os.environ, **given}) if trains else {}) | dict(given)

    def _make_ready(self, slot: Slot) -> None:
        """Have the slot's worker loaded, and started anew where the last one has died."""
        while slot.worker is not None and (slot.state is SlotState.CONDEMNED or slot.worker.has_exited()):
            self._pump(_TICK_SECONDS)
        if slot.state is SlotState.EMPTY:
            self._start(slot)
        self._wait_until_ready(slot)

    def _wait_until_ready(self, slot: Slot) -> None:
        """Wait until the worker has done what it was asked; raise the error that it, its death or its silence is."""
        deadline = time.monotonic() + JOB_SECONDS
        while slot.state is not SlotState.READY:
            if slot.failure is not None:
                self._discard(slot)
                raise slot.failure.error
            if time.monotonic() > deadline:
                slot.condemn(TrialState.FAILED, f"worker killed: no answer for {JOB_SECONDS:.0f} s", stack=True)
            self._pump(_TICK_SECONDS)

    def _discard(self, slot: Slot) -> None:
        """End a worker that answered with an error: user code half loaded is nothing to go on from."""
        if slot.worker is not None:
            slot.worker.kill()
        while slot.worker is not None:
            self._pump(_TICK_SECONDS)

    def _pump(self, timeout: float) -> None:
        """Take in what the workers said, waiting up to ``timeout`` seconds for the first; look for hangs."""
        try:
            self._take(*self._inbox.get(block=timeout > 0, timeout=timeout or None))
            while True:
                self._take(*self._inbox.get_nowait())
        except queue.Empty:
            pass
        for slot in self._slots:
            slot.end_if_hung(self._hang_seconds(slot))

    def _hang_seconds(self, slot: Slot) -> float:
        """Return for how long a trial may make no progress: until its first evaluation its model may be compiled."""
        settings = self._settings
        compiles = settings.training.compile != "none" and (slot.trial is None or slot.trial.last is None)
        return max(settings.hang_seconds, COMPILE_SECONDS if compiles else 0.0)

    def _take(self, worker: Worker, reply: Reply | None) -> None:
        slot = next(one for one in self._slots if one.index == worker.slot)
        if isinstance(reply, Loaded):
            self._revision = self._revision or reply.revision
            self._devices_of[worker.slot] = reply.device
            if self._devices is None:
                self._devices, self._has_gpus = reply.devices, reply.device != "cpu"
                self._add_slots(reply.devices if self._settings.slots == "auto" else 0)
        event = slot.bury() if reply is None else slot.take(reply)
        if event is not None:
            self._events.append(event)


# Runs trials on this machine: one long-lived worker process per slot.


class LocalExecutor(SlotExecutor):
    """Runs trials in worker processes on this machine; see `bssearch.executors.base.Executor`.

    Call the executor from one thread, and from one that outlives it: the kernel ends the workers with the thread that
    started them. Raises `UsageError` for more threads than there are CPUs.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        check_threads(settings)
        super().__init__(settings)

    def _started(self, slot: Slot, environment: Mapping[str, str]) -> Worker:
        """Return a new worker process for a slot."""
        try:
            return WorkerProcess(
                slot=slot.index,
                threads=self._settings.threads,
                log=slot.log,
                inbox=self._inbox,
                environment=environment,
            )
        except OSError as error:
            raise LaunchError(f"the worker of slot {slot.index} cannot be started: {error}") from error
