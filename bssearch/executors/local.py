"""Runs trials on this machine: one long-lived worker process per slot."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bssearch.errors import BSSearchError, LaunchError
from bssearch.executors.base import Ended, Event, Observed
from bssearch.executors.failures import judge_exit, kernel_memory_kills, printed, tail, words_of_no_memory
from bssearch.executors.messages import (
    Describe,
    Described,
    Exit,
    Heartbeat,
    Load,
    Loaded,
    Measured,
    MeasureMemory,
    MeasureNoise,
    MeasureStepTime,
    MemoryMeasured,
    NoiseMeasured,
    Refused,
    Reply,
    Run,
    StepTimeMeasured,
    Stop,
    TrialEnded,
    TrialObserved,
)
from bssearch.executors.process import WorkerProcess
from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    StepTime,
    StepTimeRequest,
    TrainingSettings,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)

T = TypeVar("T")

JOB_SECONDS = 3600.0
"""A worker that loads the workload, or times steps, for longer than this is taken to hang."""

_CLOSE_SECONDS = 3.0
_KILL_SECONDS = 5.0
_TICK_SECONDS = 0.2


@dataclass(slots=True)
class _Trial:
    """A running trial, and what is known of it should its worker die."""

    request: TrialRequest
    log_start: int
    started: float = field(default_factory=time.monotonic)
    kernel_kills: int | None = field(default_factory=kernel_memory_kills)
    contended: bool = False
    last: Observation | None = None
    best_metric: float | None = None

    def observe(self, observation: Observation) -> None:
        gain = self.request.target.gain
        if self.best_metric is None or gain(observation.metric) > gain(self.best_metric):
            self.best_metric = observation.metric
        self.last = observation

    def finished(self, outcome: TrialOutcome) -> TrialOutcome:
        """Return the outcome with what the driver knows: contention, and what a failed trial had reached."""
        outcome = replace(outcome, contended=outcome.contended or self.contended)
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


@dataclass(slots=True)
class _Slot:
    """One slot: its worker, if it has one, and the answers to what that was asked last."""

    index: int
    log: Path
    worker: WorkerProcess | None = None
    description: WorkloadDescription | None = None
    device: str | None = None
    measured: Measured | None = None
    error: BSSearchError | None = None
    out_of_memory: bool = False
    """Whether ``error`` is for want of memory."""
    job_log_start: int = 0
    job_kernel_kills: int | None = None
    """Where the log and the kernel's count stood when the worker got the job that it may have died of."""
    trial: _Trial | None = None
    verdict: tuple[TrialState, str] | None = None
    """Why we killed the worker, where we did."""


class LocalExecutor:
    """Runs trials in ``slots`` worker processes on this machine; see `bssearch.executors.base.Executor`.

    ``device`` is ``auto`` (slots take turns over the CUDA devices, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``; one
    that another program computes on is refused unless ``allow_busy``. ``training`` says how steps are computed,
    ``memory_limit_bytes`` pretends a smaller device. A trial whose worker shows no training progress for
    ``hang_seconds`` is killed. ``environment`` is added to the workers' environment variables. What they write to
    stdout and stderr comes with the end of the trial; where ``log_folder`` is given it is all kept there, one file per
    slot, else forgotten once it has come.

    Call it from one thread, and from one that outlives it: the kernel ends the workers with the thread that
    started them.
    """

    def __init__(
        self,
        workload: str,
        workload_settings: Mapping[str, Any],
        folder: Path,
        *,
        slots: int = 1,
        threads: int = 1,
        device: str = "auto",
        hang_seconds: float = 300.0,
        training: TrainingSettings | None = None,
        memory_limit_bytes: int | None = None,
        allow_busy: bool = False,
        environment: Mapping[str, str] | None = None,
        log_folder: Path | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots} must be at least 1")
        self.slots = slots
        self._workload = workload
        self._workload_settings = dict(workload_settings)
        self._folder = folder.resolve()
        self._threads = threads
        self._device = device
        self._hang_seconds = hang_seconds
        self._training = training or TrainingSettings()
        self._memory_limit_bytes = memory_limit_bytes
        self._allow_busy = allow_busy
        self._environment = dict(environment or {})
        self._temporary = None
        if log_folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="bssearch-logs-", ignore_cleanup_errors=True)
            log_folder = Path(self._temporary.name)
        log_folder.mkdir(parents=True, exist_ok=True)
        self._slots = [_Slot(index, log_folder / f"slot-{index}.log") for index in range(slots)]
        self._inbox: queue.SimpleQueue[tuple[WorkerProcess, Reply | None]] = queue.SimpleQueue()
        self._events: list[Event] = []

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has a device of its own, as far as the workers that have started have said."""
        devices = [slot.device for slot in self._slots]
        return None not in devices and "cpu" not in devices and len(set(devices)) == len(devices)

    def describe(self) -> WorkloadDescription:
        """Load the workload and return what it offers; raise `WorkloadError` or `LaunchError`."""
        slot = self._slots[0]
        worker = self._make_ready(slot)
        slot.description = None
        worker.send(Describe())
        return self._await(slot, lambda: slot.description)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time isolated steps while no trial runs; raise `LaunchError` if the worker dies of it.

        Where it died for want of memory (`judge_exit`) that is the answer. Raises `WorkloadError` where the user's code
        does.
        """
        try:
            answer = self._measure(MeasureStepTime(request=request))
        except LaunchError:
            if not self._slots[0].out_of_memory:
                raise
            return StepTime.where_memory_ran_out(request.configuration)
        assert isinstance(answer, StepTimeMeasured)
        return answer.step_time

    def measure_memory(self, request: MemoryRequest, *, reserve: bool = False) -> MemoryUse:
        """Find out in a process of its own whether a micro-batch size fits; not while a trial runs.

        With ``reserve`` it must leave free what `bssearch.probes.memory` keeps in reserve. The process is new and ends
        with the answer. Where it died for want of memory (`judge_exit`) that is the answer; otherwise its death
        raises `LaunchError`.
        """
        self._refuse_while_a_trial_runs()
        self._discard(self._slots[0])
        try:
            answer = self._measure(MeasureMemory(request=request, reserve=reserve))
        except LaunchError as error:
            if not self._slots[0].out_of_memory:
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

    def _measure(self, command: MeasureStepTime | MeasureMemory | MeasureNoise) -> Measured:
        """Have the first slot's worker measure; raise `LaunchError` if it dies of it, `WorkloadError` as it says."""
        self._refuse_while_a_trial_runs()
        slot = self._slots[0]
        worker = self._make_ready(slot)
        slot.measured = None
        slot.job_log_start, slot.job_kernel_kills = slot.log.stat().st_size, kernel_memory_kills()
        worker.send(command)
        answer = self._await(slot, lambda: slot.measured)
        assert isinstance(answer, StepTimeMeasured | MemoryMeasured | NoiseMeasured)
        return answer

    def _refuse_while_a_trial_runs(self) -> None:
        if any(slot.trial for slot in self._slots):
            raise ValueError("nothing is measured while a trial runs")

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot; raise `LaunchError` if no worker can be started.

        The first submission starts the workers of all slots: they load side by side, and not beside trials.
        """
        self._pump(0.0)
        running = [slot.trial.request.number for slot in self._slots if slot.trial]
        if len(running) == self.slots:
            raise ValueError(f"no slot is free for trial {request.number}: {running} are running")
        if request.number in running:
            raise ValueError(f"trial {request.number} is running already")
        for slot in self._slots:
            if slot.worker is None:
                self._start(slot)
        slot = min(
            (slot for slot in self._slots if not slot.trial),
            key=lambda slot: (len(self._trials_on(slot.device)), slot.index),
        )
        worker = self._make_ready(slot)
        trial = _Trial(request, log_start=slot.log.stat().st_size)
        for neighbour in self._trials_on(slot.device):
            neighbour.contended = trial.contended = True
        slot.trial = trial
        worker.send(Run(request=request))

    def stop(self, number: int, state: TrialState, reason: str) -> None:
        """Ask a running trial to end in ``state``; it does within one step. Unknown numbers are ignored."""
        for slot in self._slots:
            if slot.worker and slot.trial and slot.trial.request.number == number:
                slot.worker.send(Stop(number=number, state=state, reason=reason))

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
            if slot.worker:
                slot.verdict = slot.verdict or (TrialState.CANCELLED, "killed: the run was stopped")
                slot.worker.kill()
        self._wait_for_burials(_KILL_SECONDS)

    def close(self) -> None:
        """Let the workers go in peace; kill those that do not. Running trials end as cancelled."""
        for slot in self._slots:
            if slot.worker:
                slot.worker.send(Exit())
        self._wait_for_burials(_CLOSE_SECONDS)
        self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _wait_for_burials(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(slot.worker for slot in self._slots) and time.monotonic() < deadline:
            self._pump(_TICK_SECONDS)

    def _trials_on(self, device: str | None) -> list[_Trial]:
        return [slot.trial for slot in self._slots if slot.trial and slot.device == device]

    def _start(self, slot: _Slot) -> None:
        try:
            worker = WorkerProcess(
                slot=slot.index,
                threads=self._threads,
                log=slot.log,
                inbox=self._inbox,
                environment=self._environment,
            )
        except OSError as error:
            raise LaunchError(f"the worker of slot {slot.index} cannot be started: {error}") from error
        slot.worker, slot.error, slot.verdict, slot.out_of_memory = worker, None, None, False
        slot.job_log_start, slot.job_kernel_kills = worker.log_start, kernel_memory_kills()
        worker.send(
            Load(
                workload=self._workload,
                workload_settings=self._workload_settings,
                folder=str(self._folder),
                device=self._device,
                slot=slot.index,
                threads=self._threads,
                training=self._training,
                memory_limit_bytes=self._memory_limit_bytes,
                allow_busy=self._allow_busy,
            )
        )

    def _make_ready(self, slot: _Slot) -> WorkerProcess:
        """Return the slot's worker with the workload loaded, started anew where the last one has died."""
        while slot.worker is not None and (slot.verdict or slot.worker.has_exited()):
            self._pump(_TICK_SECONDS)
        if slot.worker is None:
            self._start(slot)
        self._await(slot, lambda: slot.device)
        assert slot.worker is not None, "only a living worker has loaded its workload"
        return slot.worker

    def _await(self, slot: _Slot, answer: Callable[[], T | None]) -> T:
        """Wait for the worker's answer; raise the error that it, its death or its silence is."""
        deadline = time.monotonic() + JOB_SECONDS
        while (found := answer()) is None:
            if slot.error is not None:
                self._discard(slot)
                raise slot.error
            if slot.worker and not slot.verdict and time.monotonic() > deadline:
                slot.verdict = TrialState.FAILED, f"worker killed: no answer for {JOB_SECONDS:.0f} s"
                slot.worker.write_stack()
                slot.worker.kill()
            self._pump(_TICK_SECONDS)
        return found

    def _discard(self, slot: _Slot) -> None:
        """Kill a worker that answered with an error: user code half loaded is nothing to go on from."""
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
            if slot.worker and slot.trial and not slot.verdict:
                silence = time.monotonic() - max(slot.worker.last_heard, slot.trial.started)
                if silence > self._hang_seconds:
                    slot.verdict = (
                        TrialState.FAILED,
                        f"hang: no training progress for {silence:.0f} s; worker killed",
                    )
                    slot.worker.write_stack()
                    slot.worker.kill()

    def _take(self, worker: WorkerProcess, reply: Reply | None) -> None:
        slot = self._slots[worker.slot]
        match reply:
            case Loaded():
                slot.device = reply.device
            case Described():
                slot.description = reply.description
            case Refused():
                slot.error, slot.out_of_memory = reply.as_error(), reply.out_of_memory
            case StepTimeMeasured() | MemoryMeasured() | NoiseMeasured():
                slot.measured = reply
            case TrialObserved():
                if slot.trial is not None:
                    slot.trial.observe(reply.observation)
                    self._events.append(Observed(reply.number, reply.observation))
            case TrialEnded():
                self._end_trial(slot, reply.outcome)
                if reply.broken:
                    slot.verdict = TrialState.FAILED, "worker killed: its device failed"
                    worker.kill()
            case None:
                self._bury(slot, worker)
            case Heartbeat():
                pass

    def _end_trial(self, slot: _Slot, outcome: TrialOutcome) -> None:
        if slot.trial is not None:
            log = printed(slot.log, slot.trial.log_start)
            self._events.append(Ended(slot.trial.request.number, slot.trial.finished(outcome), log))
            slot.trial = None
            if self._temporary is not None:
                self._empty_log(slot)

    def _empty_log(self, slot: _Slot) -> None:
        """Forget what is in the log, lest a long study fill the disk; the worker goes on at its new end."""
        os.truncate(slot.log, 0)
        if slot.worker is not None:
            slot.worker.log_start = slot.job_log_start = 0

    def _bury(self, slot: _Slot, worker: WorkerProcess) -> None:
        """Close the books on a dead worker: all that it said has been taken in before."""
        return_code = worker.bury()
        slot.worker = slot.device = slot.description = None
        if slot.trial is not None:
            start = slot.trial.log_start
            died = judge_exit(return_code, slot.trial.kernel_kills, words_of_no_memory(slot.log, start))
            state, reason = slot.verdict or died
            words = tail(slot.log, start)
            self._end_trial(slot, TrialOutcome(state=state, reason=reason, traceback=words or None))
        elif slot.error is None:
            last_words = words_of_no_memory(slot.log, slot.job_log_start)
            state, reason = slot.verdict or judge_exit(return_code, slot.job_kernel_kills, last_words)
            slot.out_of_memory = state is TrialState.OOM
            words = tail(slot.log, worker.log_start)
            slot.error = LaunchError(f"slot {slot.index}: {reason}" + (f"\n{words}" if words else ""))
