"""The processes of a worker's ranks 1, 2, …: ``python -m bssearch.executors.rank_workers``.

Rank 0 is the worker, which sends pickled orders over a socket.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import psutil

from bssearch.errors import BSSearchError, LaunchError, WorkloadError, hint_of
from bssearch.executors.base import Load
from bssearch.executors.process import (
    describe_exception,
    die_with_parent,
    judge_exit,
    kernel_memory_kills,
    report_folder_prefix,
)
from bssearch.records import TrialState

if TYPE_CHECKING:
    from bssearch.training.computation import Computation
    from bssearch.training.ranks import Order, Ranks

LOAD_SECONDS = 3600.0  # seconds to load a workload, because slow network disks need minutes

# Seconds for a failed rank to report an error, and for rank 0's call to fail. The sum is below 1 s.
CAUSE_SECONDS = 0.4
GRACE_SECONDS = 0.5

_TICK_SECONDS = 0.2

_SEE = "if a trial ran, see `bssearch trial show STUDY NUMBER --log`"


class _EndedError(LaunchError):
    pass


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's failure as an ``error`` for rank 0. ``is_own`` says whether the rank itself caused the failure."""

    error: Exception
    is_own: bool = True


class RankProcess:
    """The process of a rank. A thread calls ``on_end`` when the process ends."""

    def __init__(self, rank: int, load: Load, on_end: Callable[[], None]) -> None:
        self.rank = rank
        self.failure: RankFailure | None = None
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._on_end = on_end
        self._kernel_kills = kernel_memory_kills()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "bssearch.executors.rank_workers"),
                    *("--parent", str(os.getpid()), "--line", str(theirs.fileno()), "--rank", str(rank)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._line: Connection[Any, Any] = Connection(ours.detach())
        _send(self._line, load)
        threading.Thread(target=self._listen, name=f"bssearch rank {rank}", daemon=True).start()

    def tell(self, order: Order) -> None:
        with suppress(OSError):
            _send(self._line, order)

    def has_exited(self) -> bool:
        # `poll` misses the exit while the listening thread returns from `wait`
        return self._process.poll() is not None or not psutil.pid_exists(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                kind, answer = _received(self._line)
                if kind == "failure":
                    self.failure = RankFailure(*answer)
                    break
                self.answers.put(answer)
        code = self._process.wait()
        if self.failure is None:
            state, reason = judge_exit(code, self._kernel_kills, who=f"rank {self.rank}")
            self.failure = RankFailure(MemoryError(reason) if state is TrialState.OOM else LaunchError(reason))
        self._line.close()
        self._on_end()


class RankProcesses:
    """A worker's ranks 1, 2, …, which start when a request needs ranks.

    A thread calls ``on_lost`` if a rank ends and the context `together` stays open for `GRACE_SECONDS`. ``on_lost``
    must end this process.
    """

    def __init__(self, load: Load, computation: Computation, on_lost: Callable[[Exception], NoReturn]) -> None:
        self._load, self._computation = load, computation
        self._on_lost = on_lost
        self._processes: list[RankProcess] = []
        self._ranks: Ranks | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_at_work = False

    @contextmanager
    def together(self, size: int, on_progress: Callable[[], None] = lambda: None) -> Iterator[Ranks]:
        """Open a context with ``size`` ranks, including rank 0. If a rank has ended, ranks 1, 2, … restart."""
        if any(process.has_exited() for process in self._processes):
            self.kill()
        with self._lock:
            self._is_at_work = True
        ranks = None
        try:
            self._start(size, on_progress)
            ranks = self._computation.ranks = self._joined(size)
            yield ranks
        finally:
            self._computation.ranks = None
            with self._lock:
                self._is_at_work = False
            if ranks is None or ranks.is_broken or self._ended.is_set():
                self.kill()
            for process in self._processes:
                process.tell(("leave", ()))

    def tell(self, order: Order) -> None:
        if self._ended.is_set():
            raise self.cause(_EndedError(f"a rank has ended; {_SEE}"))
        for process in self._members:
            process.tell(order)

    def answers(self) -> list[Any]:
        return [self._answer(process) for process in self._members]

    def cause(self, error: Exception) -> Exception:
        if not isinstance(error, _EndedError) and not _is_of_peer(error):
            return error
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline:
            for one in self._processes:
                if one.failure is not None and one.failure.is_own:
                    return one.failure.error
            time.sleep(0.01)
        return error

    def kill(self) -> None:
        processes, self._processes, self._ranks = self._processes, [], None
        for process in processes:
            process.kill()
        self._ended = threading.Event()

    @property
    def _members(self) -> list[RankProcess]:
        return self._processes[: (self._ranks.size if self._ranks is not None else len(self._processes) + 1) - 1]

    def _answer(self, process: RankProcess, on_progress: Callable[[], None] = lambda: None) -> Any:
        deadline = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < deadline:
            if self._ended.is_set():
                raise self.cause(_EndedError(f"rank {process.rank} has ended; {_SEE}"))
            with suppress(queue.Empty):
                return process.answers.get(timeout=_TICK_SECONDS)
            on_progress()
        raise LaunchError(f"rank {process.rank} has not answered for {LOAD_SECONDS:.0f} s; {_SEE}")

    def _start(self, size: int, on_progress: Callable[[], None]) -> None:
        kind = self._computation.device.type
        settings = replace(self._load.settings, allow_busy=True)
        fresh = [
            RankProcess(
                rank,
                replace(self._load, settings=replace(settings, device=f"cuda:{rank}" if kind == "cuda" else kind)),
                partial(self._has_ended, self._ended),
            )
            for rank in range(len(self._processes) + 1, size)
        ]
        self._processes += fresh
        for process in fresh:
            self._answer(process, on_progress)

    def _joined(self, size: int) -> Ranks:
        from bssearch.training.ranks import Ranks

        if self._ranks is None or self._ranks.size != size:
            self._ranks = None
            folder = Path(tempfile.mkdtemp(prefix=report_folder_prefix(os.getpid())))
            for process in self._processes[: size - 1]:
                process.tell(("join", (size, folder)))
            self._ranks = Ranks(
                0,
                size,
                self._computation.device,
                folder=folder,
                seconds=self._load.settings.hang_seconds,
                link=self,
            )
            shutil.rmtree(folder, ignore_errors=True)
        return self._ranks

    def _has_ended(self, ended: threading.Event) -> None:
        ended.set()
        if ended is not self._ended:  # `kill` ended the rank
            return
        time.sleep(GRACE_SECONDS)
        with self._lock:
            if self._is_at_work and ended is self._ended:
                self._on_lost(self.cause(_EndedError(f"a rank has ended; {_SEE}")))


def _send(line: Connection[Any, Any], message: object) -> None:
    # not `Connection.send`, whose pickles pass tensors by shared memory
    line.send_bytes(pickle.dumps(message))


def _received(line: Connection[Any, Any]) -> Any:
    return pickle.loads(line.recv_bytes())


def serve(line: Connection[Any, Any], rank: int) -> None:
    """Load the workload, then obey rank 0 until rank 0 ends."""
    load: Load = _received(line)
    try:
        from bssearch.executors.loaded import LoadedWorkload
        from bssearch.training.optimizers import defer_compiler

        defer_compiler()
        follower = LoadedWorkload(load).follower(rank, lambda answer: _send(line, ("answer", answer)))
        _send(line, ("answer", None))
        while (order := _next_order(line)) is not None:
            follower.obey(order)
    except BaseException as error:
        traceback.print_exception(error)
        with suppress(OSError):
            failure = _failure(error, rank)
            _send(line, ("failure", (failure.error, failure.is_own)))  # no class of this module, which is __main__ here


def _next_order(line: Connection[Any, Any]) -> Order | None:
    try:
        return cast("Order", _received(line))
    except (EOFError, OSError):  # the worker has ended
        return None


def _failure(error: BaseException, rank: int) -> RankFailure:
    from bssearch.training.memory import is_out_of_memory

    message = f"rank {rank}: {describe_exception(error)}"
    hint = hint_of(error)
    if is_out_of_memory(error):
        return RankFailure(MemoryError(message))
    if isinstance(error, LaunchError):
        return RankFailure(LaunchError(message, hint=hint))
    is_own = isinstance(error, BSSearchError) or not _is_of_peer(error)
    return RankFailure(WorkloadError(message, hint=hint), is_own=is_own)


def _is_of_peer(error: BaseException) -> bool:
    # gloo and NCCL raise RuntimeError when another rank has ended
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description="A rank of a bssearch worker. Only the worker starts this program.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker")
    parser.add_argument("--line", type=int, required=True, help="file descriptor of the connection to the worker")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, from 1")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(arguments.line), arguments.rank)
    os._exit(1)  # threads of a broken process group may not end


if __name__ == "__main__":
    main()
