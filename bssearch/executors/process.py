"""Local worker processes, which end with their driver, even after SIGKILL.

* ``PR_SET_PDEATHSIG`` (Linux) kills the worker even if a thread holds the interpreter's lock.
* A thread kills the process group when the driver's command pipe closes.
* A shell in the group kills the group, data loaders included, when the driver's lifeline pipe closes.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import psutil

from bssearch.errors import BSSearchError, WorkloadError, remedy_of, require
from bssearch.executors.base import CHUNK_BYTES, Command, LineSplitter, Reply, decode_reply, encode
from bssearch.records import TrialState, TrialStop
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_VARIABLE, is_url
from bssearch.training.process_times import found_in

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 40  # log lines shown for a dead worker

_LOG_BYTES = 48 * 1024  # stored output per trial, below the limit of stored texts

_WORDS_OF_NO_MEMORY = (
    "std::bad_alloc",  # C++, before the program aborts
    "Cannot allocate memory",  # strerror(ENOMEM)
    "libgomp: Out of memory",
    "MemoryError",  # Python, in a thread or at the start
)

_WORDS_OF_PROGRAMS = (
    *_WORDS_OF_NO_MEMORY,
    "CUDA out of memory",  # PyTorch
    "CUDA_ERROR_OUT_OF_MEMORY",  # the CUDA driver
    "RESOURCE_EXHAUSTED",  # TensorFlow and JAX
)

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_SHIPPED_WORKLOADS = _PACKAGE + "workloads" + os.sep
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe_exception(error: BaseException) -> str:
    """Return ``ExceptionType: message (file:line: code)``, at the innermost frame in user code, or else in any code.

    A `BSSearchError` gives only its message.
    """
    if isinstance(error, BSSearchError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text += remedy_of(error)
    if "more than 1 value per channel" in text:  # torch's words for batch normalisation over one value
        text += "; the layer got one sample: use drop_last=True, or another batch size"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [
        frame
        for frame in frames
        if frame.filename.startswith(_SHIPPED_WORKLOADS) or not frame.filename.startswith(("<", _PACKAGE, *LIBRARIES))
    ] or frames
    return f"{text} ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else text


def describe_exit(return_code: int, who: str = "the worker") -> str:
    """Describe an exit code. Negative codes are signals."""
    if return_code >= 0:
        return f"{who} exited with code {return_code}"
    name = signal.Signals(-return_code).name if -return_code in {*signal.Signals} else "a signal"
    return f"{who} was killed by {name} (signal {-return_code})"


@dataclass(frozen=True, slots=True)
class Death:
    """The ``return_code`` and cause of a worker's death.

    ``killed_by_kernel`` says whether the OOM killer acted, or is None if unknown. If ``verdict`` is set, `judged`
    ignores the other fields.
    """

    return_code: int
    killed_by_kernel: bool | None = None
    verdict: tuple[TrialState, str] | None = None

    @classmethod
    def since(cls, kernel_kills_before: int | None, return_code: int) -> Self:
        """Return a local process's death, given an earlier count of `kernel_memory_kills`."""
        kills = kernel_memory_kills()
        return cls(return_code, None if kernel_kills_before is None or kills is None else kills > kernel_kills_before)

    def judged(self, last_words: str | None = None, who: str = "the worker") -> tuple[TrialState, str]:
        """Return the trial's state and reason. ``last_words`` is a logged allocation failure."""
        if self.verdict is not None:
            return self.verdict
        reason = describe_exit(self.return_code, who)
        if self.return_code == -signal.SIGKILL and self.killed_by_kernel is not None:
            return (
                (TrialState.OOM, f"{reason} from the kernel, because host memory ran out")
                if self.killed_by_kernel
                else (TrialState.FAILED, f"{reason} from another program")
            )
        if last_words is not None and self.return_code not in (0, -signal.SIGKILL):
            return TrialState.OOM, f"{reason}, out of memory: {last_words}"
        return TrialState.FAILED, reason


def judge_exit(
    return_code: int, kernel_kills_before: int | None, last_words: str | None = None, *, who: str = "the worker"
) -> tuple[TrialState, str]:
    return Death.since(kernel_kills_before, return_code).judged(last_words, who)


def judge_command(code: int, kernel_kills_before: int | None, printed: str) -> tuple[TrialState, str]:
    """Return a trial's state and reason after a command's exit. Shells report a signal as 128 plus its number."""
    code = -signal.SIGKILL if code == 128 + signal.SIGKILL else code
    return judge_exit(code, kernel_kills_before, _last_line_with(_WORDS_OF_PROGRAMS, printed), who="the command")


def check_unchanged(what: str, before: str | None, now: str | None) -> None:
    """Raise `WorkloadError` if the revision ``now`` differs from ``before``, unless ``before`` is None."""
    require(
        before in {None, now},
        f"{what} has changed since the run began ({before} → {now or 'no file'}), so earlier and later trials may "
        "differ",
        hint="undo the change and run again, rename the study, or use "
        "`run --allow-changed-workload` if the change has no effect",
        error=WorkloadError,
    )


def kernel_memory_kills() -> int | None:
    """Return the kernel's count of OOM kills, or None if unknown."""
    kills = found_in(Path("/proc/vmstat"), r"^oom_kill (\d+)$")
    return None if kills is None else int(kills)


def words_of_no_memory(log: Path, start: int) -> str | None:
    """Return the last allocation failure in a log after byte ``start``, if any."""
    return _last_line_with(_WORDS_OF_NO_MEMORY, _last_bytes(log, start))


def _last_line_with(any_of: tuple[str, ...], text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if any(words in line for words in any_of)), None)


def tail(log: Path, start: int) -> str:
    return "\n".join(_last_bytes(log, start).splitlines()[-_TAIL_LINES:])


def _last_bytes(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def printed(log: Path, start: int) -> str:
    """Return a log's text after byte ``start``, shortened in the middle to about `_LOG_BYTES`."""
    with log.open("rb") as file:
        size = file.seek(0, 2) - start
        file.seek(start)
        if size <= _LOG_BYTES:
            return file.read().decode(errors="replace")
        head = file.read(_LOG_BYTES // 2)
        file.seek(-(_LOG_BYTES // 2), 2)
        left_out = f"\n… {size - _LOG_BYTES} bytes left out …\n".encode()
        return (head + left_out + file.read()).decode(errors="replace")


# Database addresses and credentials, hidden from trial processes.
SECRETS = frozenset(
    {
        DATABASE_URL_VARIABLE,
        f"{DATABASE_URL_VARIABLE}_FILE",
        "PGDATABASE",
        "PGHOST",
        "PGHOSTADDR",
        "PGPASSWORD",
        "PGPORT",
        "PGUSER",
        "PGPASSFILE",
        "PGSERVICE",
        "PGSERVICEFILE",
        "PGSSLKEY",
        "PGSSLPASSWORD",
    }
)
# The numerical libraries read these variables once, when Python loads the libraries.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# CUDA and cuBLAS read these variables once.
CUDA_DEFAULTS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # only workspaces of a fixed size repeat sums exactly
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as in nvidia-smi; CUDA's own order begins with the fastest GPU
}

# PyTorch reads this variable once. Expandable segments prevent fragmentation when batch sizes change.
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_POLL_SECONDS = 0.2  # seconds to notice a worker's exit while another process holds the pipe open

_STACK_SECONDS = 0.3  # seconds for a worker to write its stack, a few kilobytes

_SAID_CHARACTERS = 500  # the most characters of an error about an invalid reply


_KILL_ROUNDS = 100  # searches for newly started descendants

_PR_SET_DUMPABLE = 4  # prctl(2)


def hide_secrets() -> None:
    """If the environment has secrets, protect this process's memory and environment in ``/proc`` (Linux)."""
    # Workers of the same user could read secrets in ``/proc``, as root still can.
    known = [*os.environ.items()]
    with suppress(psutil.Error, OSError):
        known += psutil.Process().environ().items()  # the initial environment, which ``/proc`` keeps exposing
    if any(is_secret(name, value) for name, value in known):
        _prctl(_PR_SET_DUMPABLE, 0)


def is_secret(name: str, value: str) -> bool:
    return name in SECRETS or (name == CHECKPOINT_DIR_VARIABLE and is_url(value))


def worker_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    return (
        CUDA_DEFAULTS
        | {name: value for name, value in environment.items() if not is_secret(name, value)}
        | dict.fromkeys(THREAD_VARIABLES, str(threads))
    )


def allocator_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables for PyTorch's allocator, unless the process uses a MIG slice or the user sets these."""
    # expandable segments ask NVML, which refuses MIG slices (pytorch#197312)
    is_slice = "MIG-" in given.get("CUDA_VISIBLE_DEVICES", "")
    return {} if is_slice or any(name in given for name in ALLOCATOR_VARIABLES) else dict(EXPANDABLE_SEGMENTS)


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has exited, without reaping the process."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # other code of this process reaped the child
        return True


def report_folder_prefix(worker: int) -> str:
    return f"bssearch-report-{worker}-"


def kill_descendants(parent: int) -> None:
    """Suspend a process, then kill its descendants."""
    killed: set[psutil.Process] = set()
    with suppress(psutil.Error, ProcessLookupError):
        os.kill(parent, signal.SIGSTOP)
        for _ in range(_KILL_ROUNDS):
            fresh = set(psutil.Process(parent).children(recursive=True)) - killed
            if not fresh:
                break
            for one in fresh:
                with suppress(psutil.Error):
                    one.kill()
            killed |= fresh


def end_descendants(group: int, spared: Collection[psutil.Process] = (), seconds: float = math.inf) -> None:
    """Kill a process group, then this process's other descendants except ``spared``, in at most ``seconds``."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = [one for one in psutil.Process().children(recursive=True) if one.pid != group and one not in spared]
        if not left:
            break
        for one in left:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=1.0)


class WorkerHandle(ABC):
    """A slot's worker, which takes commands and puts replies into an `Inbox`.

    The worker's output begins at byte ``log_start`` of ``log``. ``place`` identifies a remote machine and is otherwise
    empty.
    """

    place = ""
    pid = 0

    def __init__(self, slot: int, log: Path, inbox: Inbox) -> None:
        self.slot = slot
        self.log = log
        log.touch()
        self.log_start = log.stat().st_size
        self.last_heard = time.monotonic()
        self._inbox = inbox

    def reply(self, reply: Reply | None) -> None:
        """Put a reply into the inbox. None announces the worker's end."""
        self.last_heard = time.monotonic()
        self._inbox.put((self, reply))

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command, unless the worker is dead."""

    @abstractmethod
    def has_exited(self) -> bool: ...

    @abstractmethod
    def write_stack(self) -> None:
        """Log the main thread's stack, if possible."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker and its descendants. A signal handler may call this method."""

    @abstractmethod
    def bury(self) -> Death:
        """Release a dead worker's resources and return its `Death`."""


Inbox = queue.SimpleQueue[tuple[WorkerHandle, Reply | None]]


class WorkerProcess(WorkerHandle):
    """A worker that is a child process in a new session.

    Create the worker in a long-lived thread, because Linux kills the worker when the thread ends. ``pid`` is also the
    group and session id.
    """

    def __init__(
        self,
        *,
        slot: int,
        threads: int,
        log: Path,
        inbox: Inbox,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(slot, log, inbox)
        self._kernel_kills = kernel_memory_kills()
        hide_secrets()
        lifeline, self._lifeline = os.pipe()
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    [
                        # -P: files in this folder must not shadow installed packages.
                        *(sys.executable, "-P", "-m", "bssearch.executors.worker"),
                        *("--parent", str(os.getpid()), "--lifeline", str(lifeline), "--slot", str(slot)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                    pass_fds=(lifeline,),
                    start_new_session=True,
                    env=worker_environment(os.environ, threads) | dict(environment),
                )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, self._process.stdout
        self._listener = threading.Thread(target=self._listen, name=f"bssearch slot {slot}", daemon=True)
        self._listener.start()

    def send(self, command: Command) -> None:
        if command != "exit" and not isinstance(command, TrialStop):  # only a job may kill the worker
            self._kernel_kills = kernel_memory_kills()
        with suppress(BrokenPipeError):
            self._commands.write(encode(command))

    def has_exited(self) -> bool:
        return has_exited(self._process)

    def write_stack(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)

    def kill(self) -> None:
        if not self.has_exited():
            kill_descendants(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> Death:
        self.kill()
        return_code = self._process.wait()
        self._listener.join()
        self._commands.close()
        self._replies.close()
        os.close(self._lifeline)
        for folder in Path(tempfile.gettempdir()).glob(f"{report_folder_prefix(self.pid)}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return Death.since(self._kernel_kills, return_code)

    def _listen(self) -> None:
        lines = LineSplitter()
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        try:
            while True:
                dead = self.has_exited()  # a forked child may hold the pipe open
                if not poll.poll(0 if dead else _POLL_SECONDS * 1000):
                    if dead:
                        break
                    continue
                chunk = os.read(self._replies.fileno(), CHUNK_BYTES)
                if not chunk:
                    break
                for line in lines.feed(chunk):
                    self.reply(decode_reply(line))
        except ValueError as error:
            self.kill()
            with self.log.open("a", encoding="utf-8") as log:
                said = " ".join(str(error).split())[:_SAID_CHARACTERS]
                log.write(f"bssearch killed the worker, because a reply is unreadable: {said}\n")
        finally:
            self.reply(None)


_PR_SET_PDEATHSIG = 1  # prctl(2): the signal when the thread that started this process ends

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): orphaned descendants become children


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started the process ends (Linux).

    A forked child may call this function. If the ``parent`` has already died, the process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_group()


def outlive_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Adopt orphaned descendants (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


# Look prctl up once, because few operations are safe after a fork.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _prctl(option: int, value: int) -> None:
    if _PRCTL is not None:
        _PRCTL(option, value, 0, 0, 0)


def end_group() -> NoReturn:
    """Kill this process, or the group that this process leads."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


class Watcher:
    """A shell that kills a process group when ``lifeline`` closes.

    Group 0 is the caller's group. Unless ``group`` is 0, the shell runs in a new session.
    """

    def __init__(self, lifeline: int, group: int = 0) -> None:
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", f"read line; kill -9 {-group}"],
                stdin=lifeline,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=group != 0,
            )
        finally:
            os.close(lifeline)
        self.pid = self._shell.pid

    def dismiss(self) -> None:
        self._shell.kill()
        self._shell.wait()
