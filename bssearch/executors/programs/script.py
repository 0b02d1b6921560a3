"""A script of the user's own, loaded in a worker: described, measured and trained in processes that it starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bssearch.errors import WorkloadError
from bssearch.executors.base import Program
from bssearch.executors.conversation import (
    LEAVE_SECONDS,
    Conversation,
    Work,
    answer_in,
    converse,
    relaying,
    stopped,
    with_end,
)
from bssearch.executors.failures import code_has_changed, judge_exit, kernel_memory_kills, no_noise_scale
from bssearch.executors.messages import (
    Assign,
    Describe,
    Described,
    Load,
    Measured,
    MeasureMemory,
    MeasureNoise,
    MeasureStepTime,
    Reply,
    Run,
    TrialEnded,
)
from bssearch.executors.programs.script_process import ScriptServer
from bssearch.records import MAKE_TRAINER, Observation, TrialOutcome, TrialRequest, TrialState, WorkloadDescription

if TYPE_CHECKING:
    from bssearch.training.loop import Stop as AskStop

THE_SCRIPT = "the script"
"""What a script is called in what is said of it."""


class LoadedScript:
    """A script on a device, for a worker as `bssearch.executors.loaded.LoadedWorkload` is.

    It goes on for at most ``leave_seconds`` after its trial has ended. Raises `WorkloadError` where the script is
    not there, or has changed since the run began, and `LaunchError`.
    """

    def __init__(self, load: Load, *, leave_seconds: float = LEAVE_SECONDS) -> None:
        from bssearch.executors.devices import device_of

        assert load.program is not None, "a worker loads a program where there is one"
        self._program = load.program
        self.memory_limit_bytes = load.memory_limit_bytes
        device, present = device_of(load.device, load.slot, load.allow_busy)
        self.device, self.devices = str(device), load.devices or present
        named = str(Path(load.folder) / str(load.program.script))
        self._script = Path(named.removesuffix(MAKE_TRAINER))
        self.leave_seconds = leave_seconds
        self.revision = load.revision or self._revision_now()
        self._refuse_changed()
        self._server = ScriptServer(named, load.program.arguments)

    def close(self) -> None:
        """End the process that starts the script."""
        self._server.close()

    def describe(self) -> WorkloadDescription:
        """Return what the script offers: it is evaluated, and takes a step. Raises `WorkloadError`."""
        from bssearch.training.environment import git_state

        answer = self._ask(Describe())
        assert isinstance(answer, Described), "a program describes itself where it does not refuse"
        found = answer.description
        revision, is_dirty = git_state(self._script.resolve())
        return replace(
            found,
            environment=replace(found.environment, git_revision=revision, git_dirty=is_dirty),
            notice="; ".join(filter(None, (self._server.notice, found.notice))) or None,
        )

    def measure(self, command: MeasureStepTime | MeasureMemory | MeasureNoise) -> Measured:
        """Measure what is asked; raise `WorkloadError` where the script fails, and for a gradient noise scale."""
        if isinstance(command, MeasureNoise):
            raise no_noise_scale("a program of your own")
        answer = self._ask(command)
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
        stop: AskStop = lambda: None,
        take: Callable[[Reply], None] = lambda reply: None,
    ) -> Conversation:
        """Have the script do a piece of work; ``take`` gets each of its replies.

        Raises `LaunchError`, and `WorkloadError` where the script has changed: each piece of work reads it anew.
        """
        self._refuse_changed()
        assign = Assign.of(
            self._program,
            work,
            device=self.device,
            revision=self.revision,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        kills = kernel_memory_kills()
        process = self._server.start()
        with closing(process.line):
            return converse(process, assign, stop, take, kills, self.leave_seconds)

    def _revision_now(self) -> str:
        try:
            return revision_of(self._script, self._program)
        except OSError as error:
            raise WorkloadError(f"no file {self._script}: {error.strerror}") from error

    def _refuse_changed(self) -> None:
        now = self._revision_now()
        if now != self.revision:
            raise code_has_changed(f"the script {self._script}", self.revision, now)

    def _ask(self, work: Describe | MeasureStepTime | MeasureMemory) -> Described | Measured:
        found = self.converse(work)
        answer = answer_in(found)
        if answer is None:
            state, reason = judge_exit(found.exit_code, found.kernel_kills)
            if state is TrialState.OOM:
                raise MemoryError(_of_the_script(reason))
            raise WorkloadError(f"the script ended without an answer: {_of_the_script(reason)}")
        return answer


class ScriptTrial:
    """One trial of a script."""

    def __init__(
        self, program: LoadedScript, request: TrialRequest, stop: AskStop, on_progress: Callable[[], None]
    ) -> None:
        self._program = program
        self._request = request
        self._stop = stop
        self._on_progress = on_progress

    def run(self, on_observation: Callable[[Observation], None]) -> TrialOutcome:
        """Run to the end, whichever it is; raise `LaunchError` where the script cannot be started."""
        take = relaying(self._on_progress, on_observation)
        found = self._program.converse(Run(request=self._request), self._stop, take)
        asked = self._stop()
        if isinstance(found.reply, TrialEnded):
            return with_end(found.reply.outcome, found, THE_SCRIPT, self._program.leave_seconds)
        if asked is not None:
            return stopped(asked)
        state, reason = judge_exit(found.exit_code, found.kernel_kills)
        return TrialOutcome(state=state, reason=_of_the_script(reason))


def revision_of(script: Path, program: Program) -> str:
    """Return 12 hex digits of the SHA-256 of a script and its arguments."""
    told = hashlib.sha256(script.read_bytes())
    if program.arguments:
        told.update("\0".join(program.arguments).encode())
    return told.hexdigest()[:12]


def _of_the_script(reason: str) -> str:
    return reason.replace("worker", THE_SCRIPT, 1)
