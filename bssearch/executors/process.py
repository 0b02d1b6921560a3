"""One worker process as the driver sees it: spawned, spoken to, listened to by a thread, and buried."""

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
from typing import Protocol

import psutil

from bssearch.executors.failures import Death, kernel_memory_kills
from bssearch.executors.messages import CHUNK_BYTES, Command, Lines, Reply, decode_reply, encode
from bssearch.records import TrialStop
from bssearch.settings import CHECKPOINT_DIR_VARIABLE, DATABASE_URL_VARIABLE, is_url

# Variables that hold a database's address or credentials: a trial process needs none.
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

# Read once by PyTorch: segments that grow leave no holes where batch sizes follow each other on a GPU.
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_POLL_SECONDS = 0.2
"""How soon the end of a process shows whose pipe is held open: a choice."""

_STACK_SECONDS = 0.3
"""How long a worker may take to write its stack before it is killed: a choice; it is a few kilobytes."""

_SAID_CHARACTERS = 500
"""Of what is wrong with a reply as much goes to the log: a choice."""


_KILL_ROUNDS = 100
"""How often it is looked for what a killed program has started meanwhile: a choice."""

_PR_SET_DUMPABLE = 4  # prctl(2)


def hide_secrets() -> None:
    """Keep this process's memory and first environment from other processes of its user, where it holds secrets.

    A worker is of the same user, and could read them in ``/proc`` although its own environment has none: taking a
    variable out of `os.environ` leaves that as it was. The workers themselves begin anew and are open as ever. No
    protection from the superuser, whose workers read everything; nor elsewhere than on Linux.
    """
    known = [*os.environ.items(), *_first_environment().items()]
    if sys.platform == "linux" and any(is_secret(name, value) for name, value in known):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _first_environment() -> dict[str, str]:
    """Return the variables that this process began with, which it shows to others whatever it does."""
    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    parts = (one.partition(b"=") for one in content.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in parts}


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable is none of a trial's business: one of `SECRETS`, or a checkpoint store's URL."""
    return name in SECRETS or (name == CHECKPOINT_DIR_VARIABLE and is_url(value))


def worker_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment of a worker: without the secrets of database and store, with the thread count set."""
    scrubbed = {name: value for name, value in environment.items() if not is_secret(name, value)}
    return REPEATABLE_CUBLAS | scrubbed | dict.fromkeys(THREAD_VARIABLES, str(threads))


def allocator_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return how PyTorch's allocator is set where bssearch trains; nothing where the user has set it, by any name."""
    return {} if any(name in given for name in ALLOCATOR_VARIABLES) else dict(EXPANDABLE_SEGMENTS)


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended, without reaping it: until then its id is no other process's."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # someone else in this process reaped it
        return True


def report_folder_prefix(worker: int) -> str:
    """Return how the folders of a worker's pipes for reports are named, by its process id."""
    return f"bssearch-report-{worker}-"


def kill_descendants(parent: int) -> None:
    """Kill all that a process started, first stopping it: it could tell of their end, and lose sight of orphans."""
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


class Worker(Protocol):
    """A process that is told commands; its replies arrive in an `Inbox`, a None last, once it has ended.

    What it prints goes to ``log``, from ``log_start`` on, and is there before the reply that follows it.
    ``last_heard`` is when it last said something, by the monotonic clock. ``place`` tells the machines apart that
    workers run on.
    """

    slot: int
    log: Path
    log_start: int
    last_heard: float

    @property
    def pid(self) -> int:
        """The process id on its machine."""

    @property
    def place(self) -> str:
        """Which machine the worker is on; empty for this one."""

    def send(self, command: Command) -> None:
        """Send a command; one to a dead worker is lost, its death is told through the inbox."""

    def has_exited(self) -> bool:
        """Return whether the process is known to have ended."""

    def write_stack(self) -> None:
        """Have the worker write to its log where its main thread stands."""

    def kill(self) -> None:
        """Kill the worker and all that it started; its end is told through the inbox. A signal handler may call it."""

    def bury(self) -> Death:
        """Let go of a worker whose end was told; return how it died."""


Inbox = queue.SimpleQueue[tuple[Worker, Reply | None]]


class WorkerProcess:
    """A child process in a session of its own, as a `Worker`.

    ``environment`` is added to what it inherits. Make it in a thread that lives as long as the worker shall: on Linux
    the kernel ends it with the thread.
    Raises `OSError` where the process cannot be started.
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
                        # -P: nothing in this folder stands for an installed package.
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
        """The process id, which is also that of its group and session."""
        return self._process.pid

    @property
    def place(self) -> str:
        """This machine."""
        return ""

    def send(self, command: Command) -> None:
        """Send a command; one to a dead worker is lost, its death is told through the inbox."""
        if command != "exit" and not isinstance(command, TrialStop):  # a job that it may die of
            self._kernel_kills = kernel_memory_kills()
        with suppress(BrokenPipeError):
            self._commands.write(encode(command))

    def has_exited(self) -> bool:
        """Return whether the process has ended; leaves it to `bury` to reap it, so that its id stays ours."""
        return has_exited(self._process)

    def write_stack(self) -> None:
        """Have the worker write to its log where its main thread stands."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)

    def kill(self) -> None:
        """Kill the worker and all that it started, in sessions of their own too."""
        if not self.has_exited():
            kill_descendants(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def bury(self) -> Death:
        """Kill what is left of the group, reap the worker, remove its pipes; return how it died."""
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
        """Put each reply into the inbox, and a None once the process is dead and its pipe is empty.

        A process that the worker forked may hold the pipe open: its end alone does not tell. A worker that says what is
        no reply is killed; its log tells why.
        """
        lines = Lines()
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
                    f"worker killed: what it sent is no reply: {' '.join(str(error).split())[:_SAID_CHARACTERS]}\n"
                )
        finally:
            self._inbox.put((self, None))
