"""A user's program: the process, its output and its messages."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol, Self

import psutil

from bssearch.errors import LaunchError, UsageError, WorkloadError, require
from bssearch.executors.base import (
    CHUNK_BYTES,
    TRIAL_VARIABLE,
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
from bssearch.executors.process import (
    Watcher,
    become_subreaper,
    die_with_parent,
    end_descendants,
    has_exited,
    judge_command,
    kernel_memory_kills,
    report_folder_prefix,
)
from bssearch.executors.programs.reports import Report, ReportReader
from bssearch.records import (
    Observation,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)

TICK_SECONDS = 0.05  # seconds between checks for a stop request, far below a trial's time

LEAVE_SECONDS = 30.0  # seconds for a program's clean-up after its trial


class ProgramProcess(Protocol):
    """A running program."""

    @property
    def line(self) -> socket.socket:
        """The worker's end of the program's socket."""

    def exit_code(self) -> int | None:
        """Return the exit code, negative if a signal ended the program, or None while the program runs."""

    def kill(self) -> object: ...


@dataclass(slots=True)
class Conversation:
    """The messages between a worker and a program about one piece of work.

    Attributes:
        reply: the final reply. ``take`` gets all other replies.
        overstayed: whether bssearch killed the program after the trial.
    """

    process: ProgramProcess
    stop: AskStop
    take: Callable[[Reply], None]
    kernel_kills: int | None
    reply: TrialEnded | Refused | Answer | None = None
    exit_code: int = 0
    overstayed: bool = False
    _lines: LineSplitter = field(default_factory=LineSplitter)
    _has_stopped: bool = False
    _ended_at: float | None = None

    def hold(self, assign: Assign) -> Self:
        """Exchange messages until the program exits. An error kills the program."""
        try:
            self._hold(assign)
            return self
        except BaseException:
            self.process.kill()
            while self.process.exit_code() is None:
                time.sleep(TICK_SECONDS)
            raise

    def _hold(self, assign: Assign) -> None:
        self._send(assign)
        number = assign.work.number if isinstance(assign.work, TrialRequest) else 0
        is_open = True
        while True:
            asked = self.stop()
            if asked is not None and not self._has_stopped:
                self._has_stopped = True
                self._send(TrialStop(number=number, state=asked[0], reason=asked[1]))
            code = self.process.exit_code()
            if is_open and select.select([self.process.line], [], [], 0.0 if code is not None else TICK_SECONDS)[0]:
                is_open = self._hear()
                continue
            if code is not None:
                self.exit_code = code
                return
            if not is_open:
                time.sleep(TICK_SECONDS)
            if self._ended_at is not None and time.monotonic() - self._ended_at > LEAVE_SECONDS:
                self.overstayed = True
                self.process.kill()

    def _hear(self) -> bool:
        try:
            chunk = self.process.line.recv(CHUNK_BYTES)
        except ConnectionResetError:
            return False
        try:
            for line in self._lines.feed(chunk):
                reply = decode_reply(line)
                if isinstance(reply, TrialEnded | Refused | Answer):
                    self.reply, self._ended_at = reply, time.monotonic()
                else:
                    self.take(reply)
        except ValueError as error:
            raise UsageError(
                f"the program sent an invalid message: {str(error).splitlines()[0]}",
                hint="let the program use the same version of bssearch as the search",
            ) from error
        return bool(chunk)

    def _send(self, command: Assign | TrialStop) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # The exit code shows the program's end.
            self.process.line.sendall(encode(command))


class LoadedProgram(ABC):
    """A user's program."""

    revision: str

    def __init__(self, load: Load) -> None:
        from bssearch.executors.devices import device_of, memory_limit_of_slot

        settings = load.settings
        assert settings.program is not None, "the settings of this worker have no program"
        self._program, self._folder = settings.program, settings.folder
        device, present = device_of(settings.device, load.slot, settings.allow_busy)
        self.device, self.devices = str(device), load.devices or present
        self.memory_limit_bytes = memory_limit_of_slot(
            device, load.slot, settings.least_slots, self.devices, settings.memory_limit_bytes
        )

    def assigned(self, work: Work) -> Assign:
        return Assign(
            work=work,
            program=self._program,
            device=self.device,
            revision=self.revision,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def describe(self) -> WorkloadDescription:
        answer = self._answer("describe")
        assert isinstance(answer, WorkloadDescription), "the program did not answer with a description"
        return answer

    def measure(self, request: Measurement) -> Measured:
        answer = self._answer(request)
        assert not isinstance(answer, WorkloadDescription), "the program answered a measurement with a description"
        return answer

    @abstractmethod
    def _answer(self, work: Work) -> Answer: ...


def answer_in(found: Conversation) -> Answer | None:
    """Return the program's answer, if any. Raises the program's error."""
    if isinstance(found.reply, Refused):
        raise found.reply.as_error()
    assert not isinstance(found.reply, TrialEnded), "the program answered with TrialEnded, but ran no trial"
    return found.reply


def relaying(on_progress: Callable[[], None], on_observation: Callable[[Observation], None]) -> Callable[[Reply], None]:
    def take(reply: Reply) -> None:
        on_progress()
        if isinstance(reply, TrialObserved):
            on_observation(reply.observation)

    return take


@dataclass(slots=True)
class SilenceLimit:
    """The longest allowed time without a reply, in ``seconds``. ``last`` is the time of the last reply."""

    seconds: float
    last: float

    def is_over(self) -> bool:
        return time.monotonic() - self.last > self.seconds

    def take(self, reply: Reply) -> None:
        self.last = time.monotonic()

    def stop(self) -> None:
        require(
            not self.is_over(),
            f"the command called current_trial(), but then sent no message for {self.seconds:g} s",
            hint="raise executor.hang_seconds if a step or evaluation takes longer",
            error=WorkloadError,
        )


def failure_of(state: TrialState, reason: str) -> WorkloadError:
    """Return an error with the ``reason``, and with a `MemoryError` as cause if memory ran out."""
    error = WorkloadError(reason)
    error.__cause__ = MemoryError(reason) if state is TrialState.OOM else None
    return error


def outcome_of(
    found: Conversation, request: TrialRequest, asked: tuple[TrialState, str] | None, failed: TrialOutcome, program: str
) -> TrialOutcome:
    """Return a connected program's outcome: the last reply, else ``asked``, else ``failed``.

    If the program exits with an error before any limit or stop, an `EXHAUSTED` trial takes the state of ``failed``.
    Without a last reply, the trial is pruned instead of paused, because no checkpoint exists.
    """
    if not isinstance(found.reply, TrialEnded):
        if asked is None:
            return failed
        state, reason = asked
        return TrialOutcome(state=TrialState.PRUNED if state is TrialState.PAUSED else state, reason=reason)
    outcome = found.reply.outcome
    left_early = outcome.state is TrialState.EXHAUSTED and outcome.train_seconds <= request.plan.train_seconds_limit
    if found.overstayed:
        warning = (
            f"bssearch killed {program}, which still ran {LEAVE_SECONDS:g} s after its trial had ended; end the "
            "program with the trial"
        )
    elif found.exit_code == 0 or outcome.state in {TrialState.FAILED, TrialState.OOM}:
        return outcome
    elif left_early and asked is None:
        reason = f"{failed.reason} after step {outcome.steps}"
        return replace(outcome, state=failed.state, reason=reason, traceback=failed.traceback)
    else:
        warning = f"{program} failed after its trial had ended: {failed.reason}"
    return replace(outcome, warnings=(*outcome.warnings, warning))


REPORT_VARIABLE = "BSSEARCH_REPORT"  # path of the pipe for JSON lines

TERMINATE_SECONDS = 5.0  # seconds between SIGTERM and SIGKILL

KILL_SECONDS = 10.0  # seconds after SIGKILL, because a process in disk I/O needs several seconds

MOST_LOGGED_BYTES = 2**24

LAST_LINES = 10  # lines shown in errors

_TAIL_BYTES = 1 << 14

_MOST_CHUNKS_LEFT = 16  # far above a pipe's 64 KiB (pipe(7))


class CommandProcess(AbstractContextManager["CommandProcess"]):
    """Runs a program. The end of the ``with`` block ends the program and all descendants."""

    def __init__(
        self, command: Sequence[str], folder: Path, expressions: Mapping[str, str], metric: str | None = None
    ) -> None:
        become_subreaper()
        self._before = set(psutil.Process().children(recursive=True))
        self._logged = 0
        self._tail = b""
        self._has_left = False
        self._code: int | None = None
        self._first_reports: Iterator[Report] | None = None
        self._line: socket.socket | None = None
        self.began, self.kernel_kills = time.monotonic(), kernel_memory_kills()
        with ExitStack() as kept:
            try:
                pipe = self._open_pipe(kept)
                self._process = subprocess.Popen(
                    list(command),
                    cwd=folder,
                    env={
                        "PYTHONUNBUFFERED": "1",
                        **os.environ,
                        REPORT_VARIABLE: str(pipe),
                        TRIAL_VARIABLE: str(pipe.with_name("trial")),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    process_group=0,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
                assert self._process.stdout is not None, "the program's stdout is not a pipe"
                kept.callback(self._process.stdout.close)
                kept.callback(self._process.kill)
                read, write = os.pipe()
                kept.callback(os.close, write)
                self._watcher = Watcher(read, self._process.pid)
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
                raise WorkloadError(
                    f"command: {command[0]!r} does not run: {error.strerror}",
                    hint="correct `command:` in the spec, or install the program",
                ) from error
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise LaunchError(f"command: {command[0]!r} does not start: {error}") from error
            self._kept = kept.pop_all()
        self._stdout = self._process.stdout.fileno()
        self.log_reader, self._pipe_reader = ReportReader(expressions, metric), ReportReader({}, metric)
        self._readers = {self._pipe: self._pipe_reader, self._stdout: self.log_reader}

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def last_lines(self) -> str:
        return self._tail.decode(errors="replace")

    @property
    def has_reported(self) -> bool:
        """True if the program has reported instead of connecting, and the reports are unread."""
        return self._first_reports is not None

    @property
    def shown_lines(self) -> str:
        lines = [line[:500] for line in self.last_lines.splitlines() if line.strip()][-LAST_LINES:]
        return "; the program printed:\n" + "\n".join(lines) if lines else "; the program printed no text"

    def failure(self, code: int) -> WorkloadError:
        state, reason = judge_command(code, self.kernel_kills, self.last_lines)
        return failure_of(state, reason if state is TrialState.OOM else f"{reason}{self.shown_lines}")

    @property
    def line(self) -> socket.socket:
        assert self._line is not None, "the program has not connected"
        return self._line

    def connects(self, is_over: Callable[[], bool]) -> bool:
        """Wait until the program connects or reports. Returns True if the program connects.

        Returns False if the program reports first or exits, or if ``is_over()`` is true. Later connections fail.
        """
        while self._line is None and self._first_reports is None and self.goes_on() and not is_over():
            reports = self.reports(TICK_SECONDS)
            if (first := next(reports, None)) is not None:
                self._first_reports = chain([first], reports)
        self._door.close()
        return self._line is not None

    def exit_code(self) -> int | None:
        """Log the program's output and return the exit code, or None while the program runs."""
        if self._code is not None:
            return self._code
        self.log()
        return None if self.goes_on() else self.end()

    def goes_on(self) -> bool:
        """True while the program runs or has unread output."""
        self._reap_orphans()
        if not has_exited(self._process):
            return True
        self._end_what_is_left()  # output of descendants would hide the exit
        return self._first_reports is not None or bool(select.select(self._sources, [], [], 0.0)[0])

    def reports(self, seconds: float) -> Iterator[Report]:
        """Wait up to ``seconds`` for output, and yield the reports in the output."""
        first, self._first_reports = self._first_reports, None
        if first is not None:
            yield from first
            return
        for descriptor, chunk in self._chunks(seconds):
            yield from self._readers[descriptor].feed(chunk)

    def last_reports(self) -> Iterator[Report]:
        """Yield the reports of unterminated last lines."""
        yield from self._pipe_reader.feed(b"\n")
        yield from self.log_reader.feed(b"\n")

    def end(self) -> int:
        """End the program by SIGTERM, then SIGKILL. Returns the exit code. Idempotent."""
        if self._code is None:
            try:
                if not has_exited(self._process):
                    self._signal(signal.SIGTERM)
                deadline = time.monotonic() + TERMINATE_SECONDS
                while not has_exited(self._process) and time.monotonic() < deadline:
                    list(self._chunks(TICK_SECONDS))
            finally:
                self._end_what_is_left()
                self._code = self._process.wait()
                self.log()
                self._kept.close()
        return self._code

    kill = end

    def _open_pipe(self, kept: ExitStack) -> Path:
        folder = kept.enter_context(
            tempfile.TemporaryDirectory(prefix=report_folder_prefix(os.getpid()), ignore_cleanup_errors=True)
        )
        pipe = Path(folder) / "report"
        os.mkfifo(pipe, 0o600)
        # Also open for writing, so that reads never see end-of-file when the program closes the pipe.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        kept.callback(os.close, self._pipe)
        self._door = kept.enter_context(socket.socket(socket.AF_UNIX))
        try:
            self._door.bind(str(pipe.with_name("trial")))
            self._door.listen(1)
        except OSError:  # a path above 108 bytes (Linux, unix(7))
            self._door.close()
        return pipe

    def _chunks(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        for descriptor in select.select(self._sources, [], [], seconds)[0]:
            if not isinstance(descriptor, int):
                self._line = self._kept.enter_context(self._door.accept()[0])
                self._door.close()  # only one program may connect
                continue
            chunk = os.read(descriptor, CHUNK_BYTES)
            if not chunk:
                del self._readers[descriptor]
                continue
            if descriptor == self._stdout:
                self._log(chunk)
            yield descriptor, chunk

    @property
    def _sources(self) -> list[int | socket.socket]:
        return [*self._readers, *([self._door] if self._door.fileno() >= 0 else [])]

    def _log(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        left = MOST_LOGGED_BYTES - self._logged
        self._logged += len(chunk)
        if left > 0:
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), chunk[:left])
            if len(chunk) > left:
                os.write(sys.stdout.fileno(), b"\n(further output is left out)\n")

    def log(self) -> None:
        for _ in range(_MOST_CHUNKS_LEFT):
            if not list(self._chunks(0.0)):
                return

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _end_what_is_left(self) -> None:
        # The group id stays valid until the worker reaps the program.
        if self._has_left:
            return
        self._has_left = True
        self._signal(signal.SIGKILL)
        self._watcher.dismiss()
        end_descendants(self._process.pid, self._before, KILL_SECONDS)

    def _reap_orphans(self) -> None:
        # Orphans of a long trial would fill the process table.
        own = {self._process.pid, self._watcher.pid, *(one.pid for one in self._before)}
        with suppress(ChildProcessError):
            while hasattr(os, "waitid"):
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)
