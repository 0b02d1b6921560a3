"""Trials in a user's thread; the search runs in another thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from bssearch.executors.base import Assign, Event, Program, Refused, Reply, Work
from bssearch.executors.devices import device_of, uuid_of
from bssearch.executors.loops.measuring import Looked, end_work, work_of
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.executors.process import no_noise_scale
from bssearch.executors.slots import RunningTrial
from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
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
from bssearch.training.trainer import seed_everything

TICK_SECONDS = 0.05  # seconds between checks for an interrupt

T = TypeVar("T")


class Piece:
    """A trial, measurement or description that the user's code runs."""

    def __init__(self, assign: Assign, threads: int, post: Callable[[Piece, Reply], None]) -> None:
        self.assign = assign
        self._threads = threads
        self._threads_before = threads
        self.stop: tuple[TrialState, str] | None = None
        self.is_dropped = False
        self.trial: Trial | None = None
        self._work: TrialRun | Looked | None = None
        self._post = post

    def begin(self) -> Trial:
        """Set threads and seed; return the trial."""
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        program = self.assign.program
        self._work = work_of(self.assign, self)
        self.trial = Trial(self._work, searched=program.searched, needs_samples=program.needs_samples)
        seed_everything(self.trial.seed)
        return self.trial

    def end(self, error: BaseException | None = None) -> None:
        """Report that the user's code completed, or its error."""
        assert self._work is not None and self.trial is not None, "a piece begins before the piece ends"
        self.let_go()
        end_work(self._work, self.assign, self, error, self.trial.close)

    def let_go(self) -> None:
        """Restore the thread count; stop measuring."""
        torch.set_num_threads(self._threads_before)
        if self._work is not None:
            self._work.close()

    def send(self, reply: Reply) -> None:
        """Send a reply, unless this piece is dropped."""
        if not self.is_dropped:
            self._post(self, reply)

    def progressed(self) -> None:
        """Do nothing: no hang timeout applies."""

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        """See `Line.asked_to_stop`."""
        return self.stop


class CalledExecutor:
    """`Executor` for a user's function, one piece at a time."""

    slots = 1
    slots_apart = False

    def __init__(self, program: Program, device: str, threads: int, revision: str, allow_busy: bool = False) -> None:
        self._program = program
        self._threads = threads
        self._device = str(device_of(device, 0, allow_busy)[0])
        self._revision = revision
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[Piece, Reply]] = queue.SimpleQueue()
        self._trial: tuple[Piece, RunningTrial] | None = None
        self._events: list[Event] = []
        self._interrupted, self._has_left = threading.Event(), threading.Event()

    def next_piece(self) -> Piece | None:
        """Wait for work; None once the search has ended."""
        while not self._has_left.is_set():
            with suppress(queue.Empty):
                return self._pieces.get(timeout=TICK_SECONDS)  # the limit lets Ctrl-C end the wait
        return None

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the search's thread, like a second Ctrl-C."""
        self._interrupted.set()

    def leave(self) -> None:
        """Tell the user's thread to end."""
        self._has_left.set()

    def describe(self) -> WorkloadDescription:
        """See `Executor.describe`."""
        return self._ask("describe", WorkloadDescription)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """See `Executor.measure_step_time`."""
        return self._ask(request, StepTime)

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        """Test in this process whether a micro-batch fits."""
        return self._ask(request, MemoryUse)

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Raise `WorkloadError`: only workloads have noise scales."""
        raise no_noise_scale("a loop")

    def submit(self, request: TrialRequest) -> None:
        """See `Executor.submit`."""
        if self._trial is not None:
            raise ValueError(f"no slot is free for trial {request.number}: trial {self._trial[1].request.number} runs")
        piece = self._piece(request)
        self._trial = piece, RunningTrial(request, device=self._device, device_uuid=uuid_of(self._device))
        self._pieces.put(piece)

    def stop(self, stop: TrialStop) -> None:
        """See `Executor.stop`."""
        if self._trial is not None and self._trial[1].request.number == stop.number:
            self._trial[0].stop = stop.state, stop.reason

    def events(self, timeout: float) -> list[Event]:
        """See `Executor.events`."""
        deadline = time.monotonic() + timeout
        while not self._events:
            self._raise_if_interrupted()
            left = deadline - time.monotonic()
            try:
                self._take(*self._replies.get(timeout=max(0.0, min(left, TICK_SECONDS))))
            except queue.Empty:
                if left <= 0:
                    break
        while not self._replies.empty():
            self._take(*self._replies.get())
        events, self._events = self._events, []
        return events

    def kill(self) -> None:
        """Cancel the trial; ignore its later replies."""
        if self._trial is None:
            return
        (piece, running), self._trial = self._trial, None
        piece.stop, piece.is_dropped = (TrialState.CANCELLED, "killed: the run was stopped"), True
        outcome = running.finished(TrialOutcome(state=TrialState.CANCELLED, reason="killed: the run was stopped"))
        self._events.append(TrialEnded(running.request.number, outcome))

    close = kill

    def _piece(self, work: Work) -> Piece:
        return Piece(
            Assign(work=work, program=self._program, device=self._device, revision=self._revision),
            self._threads,
            lambda piece, reply: self._replies.put((piece, reply)),
        )

    def _ask(self, work: Work, kind: type[T]) -> T:
        if self._trial is not None:
            raise ValueError("cannot measure while a trial runs")
        piece = self._piece(work)
        self._pieces.put(piece)
        while True:
            self._raise_if_interrupted()
            try:
                origin, reply = self._replies.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if origin is not piece:
                continue
            if isinstance(reply, Refused):
                raise reply.as_error()
            assert isinstance(reply, kind), "each kind of work has its own kind of answer"
            return reply

    def _take(self, piece: Piece, reply: Reply) -> None:
        if self._trial is None or piece is not self._trial[0]:
            return
        running = self._trial[1]
        if isinstance(reply, TrialObserved):
            running.observe(reply.observation)
            self._events.append(reply)
        elif isinstance(reply, TrialEnded):
            self._trial = None
            self._events.append(TrialEnded(reply.number, running.finished(reply.outcome)))

    def _raise_if_interrupted(self) -> None:
        if self._interrupted.is_set():
            self._interrupted.clear()
            raise KeyboardInterrupt
