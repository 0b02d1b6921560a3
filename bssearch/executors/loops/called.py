"""Trials in the user's thread, while the search runs in another thread."""

import math
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch

from bssearch.executors.base import Assign, Command, ExecutorSettings, Load, Loaded, Program, Reply, Work
from bssearch.executors.devices import device_of, uuid_of
from bssearch.executors.loops.measuring import Looked, end_work, work_of
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.executors.process import Death, Inbox, WorkerHandle
from bssearch.executors.slots import KILLED, Slot, SlotExecutor, SlotState
from bssearch.records import MemoryRequest, NoiseRequest, StepTimeRequest, TrialRequest, TrialState, TrialStop
from bssearch.training.trainer import seed_everything

TICK_SECONDS = 0.05  # seconds between checks for an interrupt


class Piece:
    """A trial, measurement or description that the user's code runs."""

    def __init__(self, assign: Assign, threads: int, send: Callable[[Reply], None]) -> None:
        self.assign = assign
        self.send = send
        self._threads = threads
        self._threads_before = threads
        self.stop: tuple[TrialState, str] | None = None
        self.is_dropped = False
        self.trial: Trial | None = None
        self._work: TrialRun | Looked | None = None

    def begin(self) -> Trial:
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._work = work_of(self.assign, self)
        self.trial = Trial(self._work)
        seed_everything(self.trial.seed)
        return self.trial

    def end(self, error: BaseException | None = None) -> None:
        """Report the end or the ``error`` of the user's code."""
        assert self._work is not None and self.trial is not None, "the piece has not begun"
        self.let_go()
        end_work(self._work, self.assign, self, error, self.trial.close)

    def let_go(self) -> None:
        torch.set_num_threads(self._threads_before)
        if self._work is not None:
            self._work.close()

    def progressed(self) -> None:
        pass  # no hang timeout applies

    def asked_to_stop(self) -> tuple[TrialState, str] | None:
        return self.stop


class CalledWorker(WorkerHandle):
    """A user's thread as a worker, which takes each job as a `Piece`."""

    _piece: Piece | None = None
    _has_ended = False

    def __init__(
        self, slot: Slot, inbox: Inbox, loaded: Loaded, take: Callable[[Work, Callable[[Reply], None]], Piece]
    ) -> None:
        super().__init__(slot.index, slot.log, inbox)
        self._loaded = loaded
        self._take = take

    def send(self, command: Command) -> None:
        match command:
            case Load():
                self.reply(self._loaded)
            case "describe" | StepTimeRequest() | MemoryRequest() | NoiseRequest() | TrialRequest():
                self._piece = self._take(command, self.reply)
            case TrialStop() if self._piece is not None:
                self._piece.stop = command.state, command.reason

    def has_exited(self) -> bool:
        return self._has_ended

    def write_stack(self) -> None:
        pass  # no hang timeout applies

    def kill(self) -> None:
        """Cancel the piece and ignore its later replies."""
        if self._piece is not None:
            self._piece.stop, self._piece.is_dropped = KILLED, True
        if not self._has_ended:
            self._has_ended = True
            self.reply(None)

    def bury(self) -> Death:
        return Death(0, verdict=KILLED)


class CalledExecutor(SlotExecutor):
    """An `Executor` for a user's function, in one slot."""

    slots_apart = False
    job_seconds = math.inf

    def __init__(self, program: Program, device: str, threads: int, revision: str, allow_busy: bool) -> None:
        device = str(device_of(device, 0, allow_busy)[0])
        super().__init__(
            ExecutorSettings(workload="", program=program, device=device, threads=threads, hang_seconds=math.inf)
        )
        self._loaded = Loaded(device=device, device_uuid=uuid_of(device), revision=revision)
        self._assign = partial(Assign, program=program, device=device, revision=revision)
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._interrupted, self._has_left = threading.Event(), threading.Event()

    def next_piece(self) -> Piece | None:
        """Wait for work. Returns None after the search's end."""
        while not self._has_left.is_set():
            with suppress(queue.Empty):
                piece = self._pieces.get(timeout=TICK_SECONDS)  # the limit lets Ctrl-C end the wait
                if not piece.is_dropped:
                    return piece
        return None

    def interrupt(self) -> None:
        self._interrupted.set()

    def leave(self) -> None:
        self._has_left.set()

    def close(self) -> None:
        """Cancel the work and release resources. A late interrupt has no effect."""
        self.kill()
        super().close()

    def _started(self, slot: Slot, environment: Mapping[str, str]) -> WorkerHandle:
        return CalledWorker(slot, self._inbox, self._loaded, self._given_out)

    def _given_out(self, work: Work, post: Callable[[Reply], None]) -> Piece:
        piece = Piece(self._assign(work=work), self._settings.threads, post)
        self._pieces.put(piece)
        return piece

    def _pump(self, timeout: float) -> None:
        if self._interrupted.is_set() and self._slots[0].state is not SlotState.CONDEMNED:
            self._interrupted.clear()
            raise KeyboardInterrupt
        super()._pump(timeout)
