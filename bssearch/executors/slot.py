"""One slot of the local executor: the states of its worker, and what is known of the work it was given.

::

    EMPTY ── start ──→ LOADING ── Loaded ──→ READY ── ask ──→ ANSWERING ── the answer ──→ READY
                          │                    │                  │
                          └── Refused ──→ REFUSED ←── Refused ────┘
                                               │
                                             READY ── run ──→ TRAINING ── TrialEnded ──→ READY

From every state but EMPTY `condemn` leads to CONDEMNED, where the worker has been killed, and `bury` to EMPTY, where
its end has been told. What a worker said before its end is taken in until then, nothing is heard of it afterwards.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from bssearch.errors import BSSearchError, LaunchError
from bssearch.executors.base import Ended, Event, Observed
from bssearch.executors.failures import judge_exit, kernel_memory_kills, printed, tail, words_of_no_memory
from bssearch.executors.messages import (
    Describe,
    Described,
    Load,
    Loaded,
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
from bssearch.executors.running_trial import RunningTrial
from bssearch.records import Configuration, TrialOutcome, TrialRequest, TrialState

Answer = Described | StepTimeMeasured | MemoryMeasured | NoiseMeasured


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
    """Why a worker could not do what it was asked, and whether for want of memory."""

    error: BSSearchError
    out_of_memory: bool


@dataclass(frozen=True, slots=True)
class _JobStart:
    """Where the log and the kernel's count of kills stood when a worker got the job that it may have died of."""

    log: int
    kernel_kills: int | None = field(default_factory=kernel_memory_kills)


class Slot:
    """A slot and its worker. ``log`` is emptied after each trial unless ``keeps_log``, lest it fill the disk.

    ``timed`` is what the worker has timed the steps of.
    """

    def __init__(self, index: int, log: Path, *, keeps_log: bool) -> None:
        self.index = index
        self.log = log
        self.state = SlotState.EMPTY
        self.worker: WorkerProcess | None = None
        self.device: str | None = None
        self.device_uuid: str | None = None
        self.answer: Answer | None = None
        self.timed: list[Configuration] = []
        self.failure: Failure | None = None
        self.trial: RunningTrial | None = None
        self._keeps_log = keeps_log
        self._verdict: tuple[TrialState, str] | None = None
        self._job = _JobStart(0)

    def start(self, worker: WorkerProcess, load: Load) -> None:
        """EMPTY → LOADING: have a new worker load the workload."""
        self._move(SlotState.LOADING, SlotState.EMPTY)
        self.worker, self.failure, self.answer, self._verdict = worker, None, None, None
        self.timed = []
        self._job = _JobStart(worker.log_start)
        worker.send(load)

    def ask(self, command: Describe | MeasureStepTime | MeasureMemory | MeasureNoise) -> None:
        """READY → ANSWERING: have the worker describe the workload or measure something."""
        self._move(SlotState.ANSWERING, SlotState.READY)
        self.answer = None
        if not isinstance(command, Describe):
            self._job = _JobStart(self.log.stat().st_size)
        self._living.send(command)

    def run(self, request: TrialRequest) -> RunningTrial:
        """READY → TRAINING: have the worker run a trial."""
        self._move(SlotState.TRAINING, SlotState.READY)
        self.trial = RunningTrial(request, self.log.stat().st_size, self.device, self.device_uuid)
        self._living.send(Run(request=request))
        return self.trial

    def stop(self, stop: Stop) -> None:
        """Pass a stop on to the worker where it runs that trial."""
        if self.worker and self.trial and self.trial.request.number == stop.number:
            self.worker.send(stop)

    def take(self, reply: Reply) -> Event | None:
        """Take in what the worker said; return the event that follows for a trial."""
        match reply:
            case Loaded():
                self.device, self.device_uuid = reply.device, reply.device_uuid
                self._has_done(SlotState.LOADING)
            case Described() | StepTimeMeasured() | MemoryMeasured() | NoiseMeasured():
                self.answer = reply
                self._has_done(SlotState.ANSWERING)
            case Refused():
                self.failure = Failure(reply.as_error(), reply.out_of_memory)
                if self.state is not SlotState.CONDEMNED:
                    self._move(SlotState.REFUSED, SlotState.LOADING, SlotState.ANSWERING)
            case TrialObserved() if self.trial is not None:
                self.trial.observe(reply.observation)
                return Observed(reply.number, reply.observation)
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
        if self.worker is None:
            return
        if self.state is not SlotState.CONDEMNED:
            self.state, self._verdict = SlotState.CONDEMNED, (state, reason)
            if stack:
                self.worker.write_stack()
        self.worker.kill()

    def bury(self) -> Ended | None:
        """→ EMPTY: reap a worker whose end was told; return the end of the trial that it ran."""
        worker = self._living
        return_code = worker.bury()
        self.worker = self.device = self.answer = None
        self.state = SlotState.EMPTY
        if self.trial is not None:
            start = self.trial.log_start
            died = judge_exit(return_code, self.trial.kernel_kills, words_of_no_memory(self.log, start))
            state, reason = self._verdict or died
            return self._end_trial(TrialOutcome(state=state, reason=reason, traceback=tail(self.log, start) or None))
        if self.failure is None:
            died = judge_exit(return_code, self._job.kernel_kills, words_of_no_memory(self.log, self._job.log))
            state, reason = self._verdict or died
            words = tail(self.log, worker.log_start)
            error = LaunchError(f"slot {self.index}: {reason}" + (f"\n{words}" if words else ""))
            self.failure = Failure(error, out_of_memory=state is TrialState.OOM)
        return None

    @property
    def _living(self) -> WorkerProcess:
        assert self.worker is not None, f"a slot that is {self.state.name} has no worker"
        return self.worker

    def _move(self, to: SlotState, *allowed: SlotState) -> None:
        assert self.state in allowed, f"slot {self.index} is {self.state.name}, not ready to be {to.name}"
        self.state = to

    def _has_done(self, job: SlotState) -> None:
        """Be READY after a job, but where the worker has been condemned meanwhile."""
        if self.state is job:
            self.state = SlotState.READY

    def _end_trial(self, outcome: TrialOutcome) -> Ended | None:
        trial, self.trial = self.trial, None
        if trial is None:
            return None
        log = printed(self.log, trial.log_start)
        if not self._keeps_log:
            self._empty_log()
        return Ended(trial.request.number, trial.finished(outcome), log)

    def _empty_log(self) -> None:
        """Forget what is in the log; the worker goes on at its new end."""
        os.truncate(self.log, 0)
        if self.worker is not None:
            self.worker.log_start = 0
            self._job = _JobStart(0, self._job.kernel_kills)
