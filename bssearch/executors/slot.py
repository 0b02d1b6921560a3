"""One slot of an executor: the states of its worker, and what is known of the work it was given.

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
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from bssearch.errors import BSSearchError, LaunchError
from bssearch.executors.base import Ended, Event, Observed
from bssearch.executors.driven_worker import Worker
from bssearch.executors.failures import printed, tail, words_of_no_memory
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
from bssearch.executors.running_trial import RunningTrial
from bssearch.records import Configuration, TrialOutcome, TrialRequest, TrialState

Answer = Described | StepTimeMeasured | MemoryMeasured | NoiseMeasured

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

    def ask(self, command: Describe | MeasureStepTime | MeasureMemory | MeasureNoise) -> None:
        """READY → ANSWERING: have the worker describe the workload or measure something."""
        self._move(SlotState.ANSWERING, SlotState.READY)
        self.answer = None
        if not isinstance(command, Describe):
            self._job_log = self.log.stat().st_size
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
        worker = self.worker  # which another thread may bury meanwhile
        if worker is None:
            return
        if self.state is not SlotState.CONDEMNED:
            self.state, self._verdict = SlotState.CONDEMNED, (state, reason)
            if stack:
                worker.write_stack()
        worker.kill()

    def bury(self) -> Ended | None:
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
            self._job_log = 0
