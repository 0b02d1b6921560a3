"""The worker process of a slot: ``python -m bssearch.executors.worker``.

Commands arrive on stdin, and replies leave on stdout. Before user code runs, the worker copies both descriptors and
redirects stdout to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from bssearch.executors.base import (
    CHUNK_BYTES,
    HEARTBEAT_SECONDS,
    Command,
    LineSplitter,
    Load,
    Loaded,
    Refused,
    Reply,
    decode_command,
    encode,
)
from bssearch.executors.failures import failed, not_measured, refused, trial_ended
from bssearch.executors.process import Watcher, die_with_parent, end_group
from bssearch.records import (
    MemoryRequest,
    NoiseRequest,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialRequest,
    TrialState,
    TrialStop,
)

if TYPE_CHECKING:
    from bssearch.executors.loaded import LoadedWorkload
    from bssearch.executors.programs.command import LoadedCommand
    from bssearch.executors.programs.script import LoadedScript

    Trainable = LoadedWorkload | LoadedScript | LoadedCommand


class Channel:
    """The connection to the driver, on copies of file descriptors 0 and 1."""

    def __init__(self) -> None:
        self._commands = os.dup(0)
        self._replies = os.dup(1)
        self._lock = threading.Lock()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def send(self, reply: Reply) -> None:
        """Send a reply, or exit if the driver is gone. Thread-safe. Raises `ValueError` if a number is not finite."""
        line = memoryview(encode(reply))
        try:
            with self._lock:
                while line:
                    line = line[os.write(self._replies, line) :]
        except BrokenPipeError:
            end_group()

    def read(self) -> bytes:
        return os.read(self._commands, CHUNK_BYTES)


class Worker:
    """Runs the driver's jobs, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._jobs: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._trial: int | None = None
        self._stop: tuple[TrialState, str] | None = None
        self._progress = 0
        self._loaded: Trainable | None = None
        self._job: Command | None = None
        self._memory_limit_bytes: int | None = None

    def serve(self) -> None:
        """Work until the driver sends ``exit``."""
        for target in (self._listen, self._send_heartbeats):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()
        while True:
            command = self._job = self._jobs.get()
            match command:
                case Load():
                    self._answer(partial(self._load, command), self._refused)
                case "describe":
                    self._answer(self._trainable.describe, self._refused)
                case StepTimeRequest() | MemoryRequest() | NoiseRequest():
                    self._answer(partial(self._trainable.measure, command), partial(not_measured, request=command))
                case TrialRequest():
                    self._run(command)
                case "exit":
                    return

    @property
    def _trainable(self) -> Trainable:
        assert self._loaded is not None, "the driver must send Load before other commands"
        return self._loaded

    def _listen(self) -> NoReturn:
        lines = LineSplitter()
        try:
            while chunk := self._channel.read():
                for line in lines.feed(chunk):
                    self._hear(decode_command(line))
        except ValueError:
            traceback.print_exc()
        end_group()

    def _hear(self, command: Command) -> None:
        with self._lock:
            match command:
                case TrialRequest():
                    self._trial, self._stop = command.number, None
                case TrialStop():
                    if command.number == self._trial:
                        self._stop = command.state, command.reason
                    return
                case "exit":
                    self._stop = self._stop or (TrialState.CANCELLED, "the run ended")
        self._jobs.put(command)

    def _send_heartbeats(self) -> NoReturn:
        ticker = threading.Event()
        seen = 0
        while True:
            ticker.wait(HEARTBEAT_SECONDS)
            if seen != self._progress:
                seen = self._progress
                self._channel.send("heartbeat")

    def _answer(self, work: Callable[[], Reply], refusal: Callable[[BaseException], Refused]) -> None:
        try:
            self._channel.send(work())
        except BaseException as error:
            traceback.print_exception(error)
            self._channel.send(refusal(error))

    def _refused(self, error: BaseException) -> Refused:
        return refused(error, self._memory_limit_bytes)

    def _load(self, load: Load) -> Loaded:
        settings = load.settings
        self._memory_limit_bytes = settings.memory_limit_bytes
        if settings.program is None:  # a program trains in another process
            self._loaded = _workload_class()(load, self._lost)
        elif settings.program.command:
            from bssearch.executors.programs.command import LoadedCommand

            self._loaded = LoadedCommand(load)
        else:
            from bssearch.executors.programs.script import LoadedScript

            self._loaded = LoadedScript(load)
        from bssearch.executors.devices import name_of, uuid_of

        gc.freeze()  # the workload's imports and data also stay for good
        device = self._loaded.device
        return Loaded(
            device=device,
            revision=self._loaded.revision,
            device_uuid=uuid_of(device),
            device_name=name_of(device),
            devices=self._loaded.devices,
        )

    def _run(self, request: TrialRequest) -> None:
        def on_progress() -> None:
            self._progress += 1

        try:
            outcome = self._trainable.run(
                request,
                lambda observation: self._channel.send(TrialObserved(request.number, observation)),
                stop=lambda: self._stop,
                on_progress=on_progress,
            )
        except BaseException as error:
            outcome = failed(error)
        ended = trial_ended(request.number, outcome)
        with self._lock:
            self._trial = self._stop = None
        self._channel.send(ended)

    def _lost(self, error: Exception) -> NoReturn:
        # The main thread may wait forever for an ended rank.
        match self._job:
            case TrialRequest() as request:
                self._channel.send(TrialEnded(request.number, failed(error), broken=True))
            case StepTimeRequest() | MemoryRequest() | NoiseRequest() as request:
                self._channel.send(not_measured(error, request))
        end_group()


def _workload_class() -> type[LoadedWorkload]:
    # Collecting torch's objects takes a third of startup and exit time, and 0.2 s per trial (torch 2.13, CPU seconds).
    gc.disable()
    try:
        from bssearch.executors.loaded import LoadedWorkload
        from bssearch.training.optimizers import defer_compiler
    finally:
        gc.enable()
    gc.freeze()
    defer_compiler()
    return LoadedWorkload


def main() -> None:
    parser = argparse.ArgumentParser(description="The worker of one bssearch slot. Only bssearch starts this program.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    parser.add_argument("--lifeline", type=int, required=True, help="file descriptor that closes when the driver ends")
    parser.add_argument("--slot", type=int, required=True, help="number of the slot, for readers of a process list")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    channel = Channel()
    watcher = Watcher(arguments.lifeline)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    Worker(channel).serve()
    watcher.dismiss()


if __name__ == "__main__":
    main()
