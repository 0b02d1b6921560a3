"""Messages between worker and user program."""

from __future__ import annotations

import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, Self

from bssearch.errors import UsageError
from bssearch.executors.base import (
    CHUNK_BYTES,
    Answer,
    AskStop,
    Assign,
    LineSplitter,
    Load,
    Measured,
    Measurement,
    Refused,
    Reply,
    Work,
    decode_reply,
    encode,
)
from bssearch.executors.loaded import device_of
from bssearch.executors.process import judge_exit, no_noise_scale
from bssearch.records import (
    NoiseRequest,
    Observation,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)

TICK_SECONDS = 0.05  # between checks for a stop request; small compared with a trial

LEAVE_SECONDS = 30.0  # for a program's clean-up after its trial, before it is killed


class ProgramProcess(Protocol):
    """A program at work."""

    @property
    def line(self) -> socket.socket:
        """Our end of its socket."""

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    def kill(self) -> None:
        """Kill the process group."""


class Conversation:
    """Exchange of messages about one piece of work.

    Attributes:
        reply: the final reply; ``take`` gets all other replies.
        overstayed: killed because it ran on after its trial.
    """

    def __init__(
        self,
        process: ProgramProcess,
        stop: AskStop,
        take: Callable[[Reply], None],
        kernel_kills: int | None,
        leave_seconds: float = LEAVE_SECONDS,
    ) -> None:
        self.reply: TrialEnded | Refused | Answer | None = None
        self.exit_code = 0
        self.overstayed = False
        self.kernel_kills = kernel_kills
        self._process = process
        self._stop = stop
        self._take = take
        self._leave_seconds = leave_seconds
        self._lines = LineSplitter()
        self._has_stopped = False
        self._ended_at: float | None = None

    def hold(self, assign: Assign) -> Self:
        """Exchange messages until the program exits; kill it on an error.

        Raises `UsageError` for an invalid message.
        """
        try:
            self._hold(assign)
            return self
        except BaseException:
            self._process.kill()
            while self._process.exit_code() is None:
                time.sleep(TICK_SECONDS)
            raise

    def _hold(self, assign: Assign) -> None:
        self._send(assign)
        number = assign.work.number if isinstance(assign.work, TrialRequest) else 0
        is_open = True
        while True:
            asked = self._stop()
            if asked is not None and not self._has_stopped:
                self._has_stopped = True
                self._send(TrialStop(number=number, state=asked[0], reason=asked[1]))
            code = self._process.exit_code()
            if is_open and select.select([self._process.line], [], [], 0.0 if code is not None else TICK_SECONDS)[0]:
                is_open = self._hear()
                continue
            if code is not None:
                self.exit_code = code
                return
            if not is_open:
                time.sleep(TICK_SECONDS)
            if self._ended_at is not None and time.monotonic() - self._ended_at > self._leave_seconds:
                self.overstayed = True
                self._process.kill()

    def _hear(self) -> bool:
        try:
            chunk = self._process.line.recv(CHUNK_BYTES)
        except ConnectionResetError:
            return False
        try:
            for line in self._lines.feed(chunk):
                reply = decode_reply(line)
                if isinstance(reply, TrialEnded | Refused | Answer):
                    self.reply, self._ended_at = reply, time.monotonic()
                else:
                    self._take(reply)
        except ValueError as error:
            raise UsageError(f"the program sent an invalid message: {str(error).splitlines()[0]}") from error
        return bool(chunk)

    def _send(self, command: Assign | TrialStop) -> None:
        try:
            self._process.line.sendall(encode(command))
        except (BrokenPipeError, ConnectionResetError):
            return  # Its end is told by its exit code.


class LoadedProgram(ABC):
    """A user's program on a device."""

    revision: str

    def __init__(self, load: Load) -> None:
        settings = load.settings
        assert settings.program is not None, "a worker loads a program if there is one"
        self._program, self._folder = settings.program, settings.folder
        self.memory_limit_bytes = settings.memory_limit_bytes
        device, present = device_of(settings.device, load.slot, settings.allow_busy)
        self.device, self.devices = str(device), load.devices or present

    def assigned(self, work: Work) -> Assign:
        """Message that assigns work."""
        return Assign(
            work=work,
            program=self._program,
            device=self.device,
            revision=self.revision,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def describe(self) -> WorkloadDescription:
        """Describe the program; raise `WorkloadError` on failure."""
        answer = self._answer("describe")
        assert isinstance(answer, WorkloadDescription), "a program describes itself unless it refuses"
        return answer

    def measure(self, request: Measurement) -> Measured:
        """Measure; raise `WorkloadError` on failure."""
        if isinstance(request, NoiseRequest):
            raise no_noise_scale("a program of your own")
        answer = self._answer(request)
        assert not isinstance(answer, WorkloadDescription), "a measurement is not a description"
        return answer

    @abstractmethod
    def _answer(self, work: Work) -> Answer: ...


def answer_in(found: Conversation) -> Answer | None:
    """The answer, if any; raises reported errors."""
    if isinstance(found.reply, Refused):
        raise found.reply.as_error()
    assert not isinstance(found.reply, TrialEnded), "no trial was asked for"
    return found.reply


def relaying(on_progress: Callable[[], None], on_observation: Callable[[Observation], None]) -> Callable[[Reply], None]:
    """Handler of a running trial's replies."""

    def take(reply: Reply) -> None:
        on_progress()
        if isinstance(reply, TrialObserved):
            on_observation(reply.observation)

    return take


def stopped(asked: tuple[TrialState, str]) -> TrialOutcome:
    """Outcome of a trial ended as ``asked``, without a checkpoint."""
    state, reason = asked
    return TrialOutcome(state=TrialState.PRUNED if state is TrialState.PAUSED else state, reason=reason)


def with_end(
    outcome: TrialOutcome, found: Conversation, program: str, leave_seconds: float = LEAVE_SECONDS
) -> TrialOutcome:
    """Add a warning if the program then failed or was killed."""
    if found.overstayed:
        warning = f"{program} was killed: it still ran {leave_seconds:g} s after its trial had ended"
    elif found.exit_code != 0 and outcome.state is not TrialState.FAILED and outcome.state is not TrialState.OOM:
        reason = judge_exit(found.exit_code, None)[1].replace("worker", program, 1)
        warning = f"{program} failed after its trial had ended: {reason}"
    else:
        return outcome
    return replace(outcome, warnings=(*outcome.warnings, warning))
