"""The talk with a program of the user's own at work: what is asked of it over its line, and what it replies."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from bssearch.errors import UsageError
from bssearch.executors.failures import judge_exit
from bssearch.executors.messages import (
    Assign,
    Describe,
    Described,
    Lines,
    Measured,
    MeasureMemory,
    MeasureStepTime,
    Refused,
    Reply,
    Run,
    Stop,
    TrialEnded,
    TrialObserved,
    decode_reply,
    encode,
)
from bssearch.records import Observation, TrialOutcome, TrialState

if TYPE_CHECKING:
    from bssearch.training.loop import Stop as AskStop

TICK_SECONDS = 0.05
"""How often it is looked at whether a program is to stop: a choice, small beside a trial."""

LEAVE_SECONDS = 30.0
"""How long a program may go on after its trial has ended, to clean up, before it is killed: a choice."""

_CHUNK_BYTES = 1 << 16

Work = Describe | MeasureStepTime | MeasureMemory | Run


class ProgramProcess(Protocol):
    """A program at one piece of work; ``line`` is our end of its line."""

    @property
    def line(self) -> socket.socket:
        """Return our end of its line."""
        ...

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal."""
        ...

    def kill(self) -> None:
        """Kill the program and all of its group."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """What came of a piece of work: the last reply (None: none that ends it), and how the program ended."""

    reply: TrialEnded | Refused | Described | Measured | None
    exit_code: int
    kernel_kills: int | None
    overstayed: bool


class Talk:
    """The talk with a program at work: its replies as they come, a stop where one is asked for."""

    def __init__(
        self,
        process: ProgramProcess,
        number: int,
        stop: AskStop,
        take: Callable[[Reply], None],
        leave_seconds: float,
    ) -> None:
        self.last: TrialEnded | Refused | Described | Measured | None = None
        self.exit_code = 0
        self.overstayed = False
        self._process = process
        self._number = number
        self._stop = stop
        self._take = take
        self._leave_seconds = leave_seconds
        self._lines = Lines()
        self._has_stopped = False
        self._ended_at: float | None = None

    def hold(self, assign: Assign) -> None:
        """Talk until the program has ended and all that it said is taken in; where that fails, end it."""
        try:
            self._hold(assign)
        except BaseException:
            self._process.kill()
            while self._process.exit_code() is None:
                time.sleep(TICK_SECONDS)
            raise

    def _hold(self, assign: Assign) -> None:
        self._send(assign)
        is_open = True
        while True:
            self._stop_where_asked()
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
        """Take in what the program says; return whether its line is open."""
        try:
            chunk = self._process.line.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            return False
        try:
            for line in self._lines.feed(chunk):
                reply = decode_reply(line)
                if isinstance(reply, TrialEnded | Refused | Described | Measured):
                    self.last, self._ended_at = reply, time.monotonic()
                else:
                    self._take(reply)
        except ValueError as error:
            raise UsageError(
                f"what the program says on its line is no message: {str(error).splitlines()[0]}"
            ) from error
        return bool(chunk)

    def _stop_where_asked(self) -> None:
        asked = self._stop()
        if asked is not None and not self._has_stopped:
            self._has_stopped = True
            self._send(Stop(number=self._number, state=asked[0], reason=asked[1]))

    def _send(self, command: Assign | Stop) -> None:
        try:
            self._process.line.sendall(encode(command))
        except (BrokenPipeError, ConnectionResetError):
            return  # Its end is told by its exit code.


def converse(
    process: ProgramProcess,
    assign: Assign,
    stop: AskStop,
    take: Callable[[Reply], None],
    kernel_kills: int | None,
    leave_seconds: float = LEAVE_SECONDS,
) -> Conversation:
    """Have a program do what it is assigned, and wait until it has ended; ``take`` gets each of its replies.

    ``kernel_kills`` is what `kernel_memory_kills` was when it began. Raises `UsageError` where it says what is no
    message.
    """
    number = assign.work.request.number if isinstance(assign.work, Run) else 0
    talk = Talk(process, number, stop, take, leave_seconds)
    talk.hold(assign)
    return Conversation(talk.last, talk.exit_code, kernel_kills, talk.overstayed)


def answer_in(found: Conversation) -> Described | Measured | None:
    """Return a program's answer, None where it ended without one; raise the error that it answered with."""
    if isinstance(found.reply, Refused):
        raise found.reply.as_error()
    assert not isinstance(found.reply, TrialEnded), "no trial was asked for"
    return found.reply


def relaying(on_progress: Callable[[], None], on_observation: Callable[[Observation], None]) -> Callable[[Reply], None]:
    """Return what takes a trial's replies while it runs."""

    def take(reply: Reply) -> None:
        on_progress()
        if isinstance(reply, TrialObserved):
            on_observation(reply.observation)

    return take


def stopped(asked: tuple[TrialState, str]) -> TrialOutcome:
    """Return the outcome of a trial that ended as it was ``asked``, without a word: nothing of it was saved."""
    state, reason = asked
    return TrialOutcome(state=TrialState.PRUNED if state is TrialState.PAUSED else state, reason=reason)


def with_end(
    outcome: TrialOutcome, found: Conversation, program: str, leave_seconds: float = LEAVE_SECONDS
) -> TrialOutcome:
    """Return an outcome with what came after it: a ``program``, as it is called, that failed, or did not leave."""
    if found.overstayed:
        warning = f"{program} was killed: it still ran {leave_seconds:g} s after its trial had ended"
    elif found.exit_code != 0 and outcome.state is not TrialState.FAILED and outcome.state is not TrialState.OOM:
        reason = judge_exit(found.exit_code, None)[1].replace("worker", program, 1)
        warning = f"{program} failed after its trial had ended: {reason}"
    else:
        return outcome
    return replace(outcome, warnings=(*outcome.warnings, warning))
