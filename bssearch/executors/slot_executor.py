"""What all executors with workers in slots do alike, wherever the workers run: one long-lived worker per slot."""

from __future__ import annotations

import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bssearch.errors import BSSearchError, LaunchError
from bssearch.executors.base import Event, ExecutorSettings
from bssearch.executors.driven_worker import Inbox, Worker
from bssearch.executors.log_folder import LogFolder
from bssearch.executors.messages import (
    Describe,
    Described,
    Exit,
    Load,
    Loaded,
    MeasureMemory,
    MeasureNoise,
    MeasureStepTime,
    MemoryMeasured,
    NoiseMeasured,
    Reply,
    StepTimeMeasured,
    Stop,
)
from bssearch.executors.process import allocator_environment
from bssearch.executors.running_trial import RunningTrial
from bssearch.executors.slot import Answer, Place, Slot, SlotState
from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    StepTime,
    StepTimeRequest,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)

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
        self._settings = settings
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
        return Load.of(settings, slot.index, revision=self._revision, devices=self._devices)

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has a device of its own, as far as the workers that have started have said."""
        places = [slot.place for slot in self._slots if slot.place is not None]
        return self._has_gpus and self.slots <= (self._devices or 0) and len({*places}) == len(places)

    def describe(self) -> WorkloadDescription:
        """Load the workload and return what it offers; raise `WorkloadError` or `LaunchError`."""
        answer = self._ask(Describe())
        assert isinstance(answer, Described)
        notices = [answer.description.notice, self._about_idle_devices()]
        return replace(answer.description, notice="; ".join(filter(None, notices)) or None)

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
                slot.ask(MeasureStepTime(request=request))
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
        assert isinstance(slot.answer, StepTimeMeasured)
        slot.timed.append(request.configuration)
        return slot.answer.step_time

    def measure_memory(self, request: MemoryRequest, *, reserve: bool = False) -> MemoryUse:
        """Find out in a process of its own whether a micro-batch size fits; not while a trial runs.

        With ``reserve`` it must leave free what `bssearch.probes.memory` keeps in reserve. The process is new and ends
        with the answer. Its death for want of memory (`judge_exit`) is an answer: it does not fit; any other raises
        `LaunchError`.
        """
        self._refuse_while_a_trial_runs()
        self._discard(self._slots[0])
        try:
            answer = self._measure(MeasureMemory(request=request, reserve=reserve))
        except LaunchError as error:
            if not self._ran_out_of_memory:
                raise
            reason = str(error).splitlines()[0]
            micro = request.configuration.micro_batch_size
            return MemoryUse(micro_batch_size=micro, fits=False, peak_memory_bytes=None, reason=reason)
        finally:
            self._discard(self._slots[0])
        assert isinstance(answer, MemoryMeasured)
        return answer.memory

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target while no trial runs."""
        answer = self._measure(MeasureNoise(request=request))
        assert isinstance(answer, NoiseMeasured)
        return answer.measurement

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

    def _measure(self, command: MeasureMemory | MeasureNoise) -> Answer:
        self._refuse_while_a_trial_runs()
        return self._ask(command)

    def _ask(self, command: Describe | MeasureMemory | MeasureNoise) -> Answer:
        """Return the answer of the first slot's worker; raise `LaunchError` if it dies of it, else what it says."""
        slot = self._slots[0]
        self._make_ready(slot)
        slot.ask(command)
        self._wait_until_ready(slot)
        assert slot.answer is not None, "a worker is ready once it has answered"
        return slot.answer

    @property
    def _ran_out_of_memory(self) -> bool:
        failure = self._slots[0].failure
        return failure is not None and failure.out_of_memory

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

    def stop(self, number: int, state: TrialState, reason: str) -> None:
        """Ask a running trial to end in ``state``; it does within one step. Unknown numbers are ignored."""
        for slot in self._slots:
            slot.stop(Stop(number=number, state=state, reason=reason))

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
                slot.worker.send(Exit())
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
