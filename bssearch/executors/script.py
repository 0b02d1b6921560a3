"""A program of the user's own, loaded in a worker: described, measured and trained in processes that it starts."""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.base import Program
from bssearch.executors.failures import judge_exit, kernel_memory_kills
from bssearch.executors.messages import (
    Assign,
    Describe,
    Described,
    Lines,
    Load,
    Measured,
    MeasureMemory,
    MeasureNoise,
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
from bssearch.executors.script_process import ScriptProcess, ScriptServer
from bssearch.records import Configuration, Observation, TrialOutcome, TrialRequest, TrialState, WorkloadDescription

if TYPE_CHECKING:
    from bssearch.training.loop import Stop as AskStop

TICK_SECONDS = 0.05
"""How often it is looked at whether a program is to stop: a choice, small beside a trial."""

LEAVE_SECONDS = 30.0
"""How long a program may go on after its trial has ended, to clean up, before it is killed: a choice."""

_CHUNK_BYTES = 1 << 16

Work = Describe | MeasureStepTime | MeasureMemory | Run


@dataclass(frozen=True, slots=True)
class Conversation:
    """What came of a piece of work: the last reply (None: none that ends it), and how the program ended."""

    reply: Reply | None
    exit_code: int
    kernel_kills: int | None
    overstayed: bool


class LoadedScript:
    """A program on a device, for a worker as `bssearch.executors.loaded.LoadedWorkload` is.

    A script goes on for at most ``leave_seconds`` after its trial has ended. Raises `WorkloadError` where the script is
    not there, or has changed since the run began, and `LaunchError`.
    """

    def __init__(self, load: Load, *, leave_seconds: float = LEAVE_SECONDS) -> None:
        from bssearch.executors.devices import choose_device

        assert load.program is not None, "a worker loads a program where there is one"
        self._program = load.program
        self.memory_limit_bytes = load.memory_limit_bytes
        self.device = str(choose_device(load.device, load.slot, load.allow_busy))
        self._script = Path(load.folder) / str(load.program.script)
        self.leave_seconds = leave_seconds
        self.revision = load.revision or self._revision_now()
        self._refuse_changed()
        self._server = ScriptServer(str(self._script), load.program.arguments)

    def close(self) -> None:
        """End the process that starts the script."""
        self._server.close()

    def describe(self) -> WorkloadDescription:
        """Return what the program offers: it is evaluated, and takes a step. Raises `WorkloadError`."""
        answer = self._ask(Describe(), self._program.default)
        assert isinstance(answer, Described), "a program describes itself where it does not refuse"
        return replace(answer.description, notice=self._server.notice)

    def measure(self, command: MeasureStepTime | MeasureMemory | MeasureNoise) -> Measured:
        """Measure what is asked; raise `WorkloadError` where the program fails, and for a gradient noise scale."""
        if isinstance(command, MeasureNoise):
            raise WorkloadError(
                "the gradient noise scale is measured of a workload: a program of your own keeps its loss to itself"
            )
        answer = self._ask(command, command.request.configuration)
        assert not isinstance(answer, Described), "what is measured is no description"
        return answer

    def trial(
        self, request: TrialRequest, *, stop: AskStop, on_progress: Callable[[], None] = lambda: None
    ) -> ScriptTrial:
        """Return a trial to run; ``stop`` is asked again and again, ``on_progress`` called where there is some."""
        return ScriptTrial(self, request, stop, on_progress)

    def converse(
        self,
        work: Work,
        configuration: Configuration,
        stop: AskStop = lambda: None,
        take: Callable[[Reply], None] = lambda reply: None,
    ) -> Conversation:
        """Have the program do a piece of work; ``take`` gets each of its replies.

        Raises `LaunchError`, and `WorkloadError` where the script has changed: each piece of work reads it anew.
        """
        self._refuse_changed()
        assign = Assign(
            work=work,
            configuration=configuration,
            parameters=self._program.parameters(configuration),
            metric=self._program.metric,
            device=self.device,
            revision=self.revision,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        kills = kernel_memory_kills()
        process = self._server.start()
        with closing(process.line):
            number = work.request.number if isinstance(work, Run) else 0
            talk = _Talk(process, number, stop, take, self.leave_seconds)
            talk.hold(assign)
            return Conversation(talk.last, talk.exit_code, kills, talk.overstayed)

    def _revision_now(self) -> str:
        try:
            return revision_of(self._script, self._program)
        except OSError as error:
            raise WorkloadError(f"no file {self._script}: {error.strerror}") from error

    def _refuse_changed(self) -> None:
        now = self._revision_now()
        if now != self.revision:
            raise WorkloadError(
                f"the script {self._script} has changed since the run began ({self.revision} → {now}): "
                "what it trains now does not compare with the trials before",
                hint="undo the change and run it again, or give the study another name; "
                "`run --allow-changed-workload` where the change does not matter",
            )

    def _ask(
        self, work: Describe | MeasureStepTime | MeasureMemory, configuration: Configuration
    ) -> Described | Measured:
        found = self.converse(work, configuration)
        if isinstance(found.reply, Refused):
            raise found.reply.as_error()
        if found.reply is None:
            state, reason = judge_exit(found.exit_code, found.kernel_kills)
            if state is TrialState.OOM:
                raise MemoryError(_of_the_script(reason))
            raise WorkloadError(f"the script ended without an answer: {_of_the_script(reason)}")
        assert not isinstance(found.reply, TrialEnded), "no trial was asked for"
        return found.reply  # type: ignore[return-value]


class ScriptTrial:
    """One trial of a program."""

    def __init__(
        self, program: LoadedScript, request: TrialRequest, stop: AskStop, on_progress: Callable[[], None]
    ) -> None:
        self._program = program
        self._request = request
        self._stop = stop
        self._on_progress = on_progress

    def run(self, on_observation: Callable[[Observation], None]) -> TrialOutcome:
        """Run to the end, whichever it is; raise `LaunchError` where the program cannot be started."""

        def take(reply: Reply) -> None:
            self._on_progress()
            if isinstance(reply, TrialObserved):
                on_observation(reply.observation)

        found = self._program.converse(Run(request=self._request), self._request.configuration, self._stop, take)
        asked = self._stop()
        if isinstance(found.reply, TrialEnded):
            return _with_end(found.reply.outcome, found, self._program.leave_seconds)
        if asked is not None:
            return TrialOutcome(
                state=asked[0] if asked[0] is not TrialState.PAUSED else TrialState.PRUNED, reason=asked[1]
            )
        state, reason = judge_exit(found.exit_code, found.kernel_kills)
        return TrialOutcome(state=state, reason=_of_the_script(reason))


class _Talk:
    """The talk with a program at work: its replies as they come, a stop where one is asked for."""

    def __init__(
        self,
        process: ScriptProcess,
        number: int,
        stop: AskStop,
        take: Callable[[Reply], None],
        leave_seconds: float,
    ) -> None:
        self.last: Reply | None = None
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


def revision_of(script: Path, program: Program) -> str:
    """Return 12 hex digits of the SHA-256 of a script and its arguments."""
    told = hashlib.sha256(script.read_bytes())
    if program.arguments:
        told.update("\0".join(program.arguments).encode())
    return told.hexdigest()[:12]


def _with_end(outcome: TrialOutcome, found: Conversation, leave_seconds: float) -> TrialOutcome:
    """Return an outcome with what came after it: a script that failed, or did not leave."""
    if found.overstayed:
        warning = f"the script was killed: it still ran {leave_seconds:g} s after its trial had ended"
    elif found.exit_code != 0 and outcome.state is not TrialState.FAILED and outcome.state is not TrialState.OOM:
        warning = f"the script failed after its trial had ended: {_of_the_script(judge_exit(found.exit_code, None)[1])}"
    else:
        return outcome
    return replace(outcome, warnings=(*outcome.warnings, warning))


def _of_the_script(reason: str) -> str:
    return reason.replace("worker", "the script", 1)
