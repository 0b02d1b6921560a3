"""Local worker processes, which end with their driver, even after SIGKILL.

Three mechanisms cover each other's gaps:

* ``PR_SET_PDEATHSIG`` (Linux) works while the interpreter's lock is held.
* A thread kills the process group when the commands end.
* A shell in the group kills the group, with data loaders, when the driver's pipe closes.

A user's command has its own group, `Watcher` and subreaper. Only processes that leave it survive.
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

import psutil

from bssearch.executors.base import CHUNK_BYTES, Command, LineSplitter, Reply, decode_reply, encode
from bssearch.executors.failures import Death, kernel_memory_kills
from bssearch.records import TrialStop
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_VARIABLE, is_url

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
# Read once by the numerical libraries, when they are loaded.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Read once by cuBLAS, which repeats its sums exactly only with workspaces of a fixed size.
REPEATABLE_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Read once by PyTorch: expandable segments prevent fragmentation when batch sizes change.
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_POLL_SECONDS = 0.2  # to notice a worker's exit when its pipe is held open

_STACK_SECONDS = 0.3  # for a worker to write its stack, a few kilobytes

_SAID_CHARACTERS = 500  # of an invalid reply's error in the log


_KILL_ROUNDS = 100  # searches for newly started descendants

_PR_SET_DUMPABLE = 4  # prctl(2)


def hide_secrets() -> None:
    """Protect this process's memory and environment in ``/proc`` (Linux).

    Workers of the same user could read secrets there; root still can.
    """
    known = [*os.environ.items(), *_first_environment().items()]
    if sys.platform == "linux" and any(is_secret(name, value) for name, value in known):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _first_environment() -> dict[str, str]:
    """The initial environment, which ``/proc`` keeps exposing."""
    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    parts = (one.partition(b"=") for one in content.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in parts}


def is_secret(name: str, value: str) -> bool:
    """True for `SECRETS` and a checkpoint store's URL."""
    return name in SECRETS or (name == CHECKPOINT_DIR_VARIABLE and is_url(value))


def worker_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """A worker's environment: no secrets, ``threads`` set."""
    scrubbed = {name: value for name, value in environment.items() if not is_secret(name, value)}
    return REPEATABLE_CUBLAS | scrubbed | dict.fromkeys(THREAD_VARIABLES, str(threads))


def allocator_environment(given: Mapping[str, str]) -> dict[str, str]:
    """PyTorch allocator settings, unless the user set any."""
    return {} if any(name in given for name in ALLOCATOR_VARIABLES) else dict(EXPANDABLE_SEGMENTS)


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """True if exited; not reaped, so that the pid stays reserved."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # someone else in this process reaped it
        return True


def report_folder_prefix(worker: int) -> str:
    """Prefix of a worker's report folders."""
    return f"bssearch-report-{worker}-"


def kill_descendants(parent: int) -> None:
    """Kill a process's descendants; stop it first, so that none escapes."""
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


class WorkerHandle(Protocol):
    """A process that takes commands and puts replies into an `Inbox`, None last.

    Output goes to ``log`` from byte ``log_start``. ``last_heard`` is monotonic seconds.
    """

    slot: int
    log: Path
    log_start: int
    last_heard: float

    @property
    def pid(self) -> int:
        """Process id on its machine."""

    @property
    def place(self) -> str:
        """The worker's machine; empty for this one."""

    def send(self, command: Command) -> None:
        """Send a command; a dead worker loses it."""

    def has_exited(self) -> bool:
        """True if the process has ended."""

    def write_stack(self) -> None:
        """Log the main thread's stack."""

    def kill(self) -> None:
        """Kill the worker and its descendants, even in a signal handler."""

    def bury(self) -> Death:
        """Release a dead worker; return how it died."""


Inbox = queue.SimpleQueue[tuple[WorkerHandle, Reply | None]]


class WorkerProcess:
    """A child in its own session; raises `OSError`.

    Create it in a thread that outlives it: Linux kills it with that thread.
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
        self.slot = slot
        self.log = log
        self.last_heard = time.monotonic()
        self._inbox = inbox
        self._kernel_kills = kernel_memory_kills()
        hide_secrets()
        lifeline, self._lifeline = os.pipe()
        try:
            with log.open("ab") as errors:
                self.log_start = errors.tell()
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
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, self._process.stdout
        self._listener = threading.Thread(target=self._listen, name=f"bssearch slot {slot}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Process, group and session id."""
        return self._process.pid

    @property
    def place(self) -> str:
        """This machine."""
        return ""

    def send(self, command: Command) -> None:
        """See `WorkerHandle.send`."""
        if command != "exit" and not isinstance(command, TrialStop):  # a job that it may die of
            self._kernel_kills = kernel_memory_kills()
        with suppress(BrokenPipeError):
            self._commands.write(encode(command))

    def has_exited(self) -> bool:
        """See `WorkerHandle.has_exited`; only `bury` reaps."""
        return has_exited(self._process)

    def write_stack(self) -> None:
        """See `WorkerHandle.write_stack`."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)

    def kill(self) -> None:
        """See `WorkerHandle.kill`; reaches other sessions."""
        if not self.has_exited():
            kill_descendants(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> Death:
        """Kill the group, reap, remove pipes."""
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
        """Queue replies, then None when the process is dead and its pipe empty.

        A forked child may hold the pipe open. An invalid reply kills the worker.
        """
        lines = LineSplitter()
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        try:
            while True:
                dead = self.has_exited()
                if not poll.poll(0 if dead else _POLL_SECONDS * 1000):
                    if dead:
                        break
                    continue
                chunk = os.read(self._replies.fileno(), CHUNK_BYTES)
                if not chunk:
                    break
                self.last_heard = time.monotonic()
                for line in lines.feed(chunk):
                    self._inbox.put((self, decode_reply(line)))
        except ValueError as error:
            self.kill()
            with self.log.open("a", encoding="utf-8") as log:
                log.write(
                    f"worker killed, its reply is unreadable: {' '.join(str(error).split())[:_SAID_CHARACTERS]}\n"
                )
        finally:
            self._inbox.put((self, None))


_PR_SET_PDEATHSIG = 1  # prctl(2): the signal when the thread that started this process ends

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): orphaned descendants become children


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its starting thread ends (Linux).

    Exits if the ``parent`` has already died.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_group()


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Adopt orphaned descendants, to kill them (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class DieWithParent:
    """A ``preexec_fn``: the kernel kills the process when ``parent`` ends.

    Finds the system call before the fork; few operations are safe afterwards.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        """Ask the kernel; exit if the parent has ended."""
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


def end_group() -> NoReturn:
    """Kill this process, and its own group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


class Watcher:
    """A shell that kills a process group when ``lifeline`` closes.

    Group 0 is its own; other groups need a new session. ``pid`` is the shell's.
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
        """End only the shell."""
        self._shell.kill()
        self._shell.wait()
