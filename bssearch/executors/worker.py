"""The child process of one slot: ``python -m bssearch.executors.worker``, started by `LocalExecutor`.

Commands come as JSON lines on stdin, replies go as JSON lines to what was stdout at the start. Both are moved
to private descriptors before any user code runs: whatever that prints or reads cannot touch the protocol, its
prints go to stderr, which is the slot's log file.

Three threads: the main one loads, measures and trains; one listens for commands, so that a stop reaches a
running trial; one sends a heartbeat each second in which the training loop made progress, so that a hang
shows as silence.
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
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bssearch.errors import BSSearchError, LaunchError, WorkloadError
from bssearch.executors.failures import describe_exception
from bssearch.executors.lifeline import Watcher, die_with_parent, end_group
from bssearch.executors.messages import (
    Command,
    Describe,
    Described,
    Exit,
    Heartbeat,
    Lines,
    Load,
    Loaded,
    MeasureMemory,
    MeasureNoise,
    MeasureStepTime,
    MemoryMeasured,
    NoiseMeasured,
    Refused,
    Reply,
    Run,
    StepTimeMeasured,
    Stop,
    TrialEnded,
    TrialObserved,
    decode_command,
    encode,
)
from bssearch.records import Observation, TrialOutcome, TrialRequest, TrialState, WorkloadDescription

if TYPE_CHECKING:
    from bssearch.training.computation import Computation
    from bssearch.workloads.base import Data, Workload

HEARTBEAT_SECONDS = 1.0
_CHUNK_BYTES = 1 << 16


class Channel:
    """The line to the driver, on private copies of the descriptors 0 and 1."""

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
        """Send a reply from any thread; raise `ValueError` where it holds NaN. Without a driver, end."""
        line = memoryview(encode(reply))
        try:
            with self._lock:
                while line:
                    line = line[os.write(self._replies, line) :]
        except BrokenPipeError:
            end_group()

    def read(self) -> bytes:
        """Return the next bytes from the driver; none at the end."""
        return os.read(self._commands, _CHUNK_BYTES)


class Worker:
    """Does what the driver asks, one job after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._jobs: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._trial: int | None = None
        self._stop: tuple[TrialState, str] | None = None
        self._progress = 0
        self._loaded: tuple[Workload, Data, Computation] | None = None
        self._memory_limit_bytes: int | None = None

    def serve(self) -> None:
        """Work until the driver says `Exit`."""
        for target in (self._listen, self._send_heartbeats):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()
        while True:
            command = self._jobs.get()
            match command:
                case Load():
                    self._load(command)
                case Describe():
                    self._describe()
                case MeasureStepTime() | MeasureMemory() | MeasureNoise():
                    self._measure(command)
                case Run():
                    self._run(command.request)
                case Exit():
                    return

    def _listen(self) -> NoReturn:
        """Queue the jobs in their order; a stop goes straight to the trial it names."""
        lines = Lines()
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
                case Run():
                    self._trial, self._stop = command.request.number, None
                case Stop():
                    if command.number == self._trial:
                        self._stop = command.state, command.reason
                    return
                case Exit():
                    self._stop = self._stop or (TrialState.CANCELLED, "the run was closed")
        self._jobs.put(command)

    def _send_heartbeats(self) -> NoReturn:
        ticker = threading.Event()
        seen = 0
        while True:
            ticker.wait(HEARTBEAT_SECONDS)
            if seen != self._progress:
                seen = self._progress
                self._channel.send(Heartbeat())

    def _load(self, command: Load) -> None:
        self._memory_limit_bytes = command.memory_limit_bytes
        try:
            import torch
            import torch._dynamo  # the first optimizer would load it, seconds that no trial shall take

            from bssearch.executors.devices import choose_device
            from bssearch.training.batches import place
            from bssearch.training.computation import Computation
            from bssearch.training.memory import is_out_of_memory, limit_memory
            from bssearch.workloads.base import check_data, resolve

            torch.set_num_threads(command.threads)
            device = choose_device(command.device, command.slot, command.allow_busy)
            if command.memory_limit_bytes is not None:
                limit_memory(device, command.memory_limit_bytes)
            computation = Computation(device, command.training)
            workload = resolve(command.workload, command.workload_settings, Path(command.folder))
            try:
                data = check_data(workload.load(torch.device("cpu")))
            except BaseException as error:
                if is_out_of_memory(error):
                    raise
                message = f"workload {command.workload!r} does not load: {describe_exception(error)}"
                raise WorkloadError(message, hint=getattr(error, "hint", None)) from error
            data, _ = place(data, computation, command.memory_limit_bytes)
            self._loaded = workload, data, computation
            self._channel.send(Loaded(device=str(device)))
        except BaseException as error:
            self._refuse(error)

    def _describe(self) -> None:
        try:
            from bssearch.training.environment import describe_environment
            from bssearch.training.inspection import describe_model, tokens_per_sample

            assert self._loaded is not None, "the driver loads before it asks"
            workload, data, computation = self._loaded
            try:
                model = describe_model(workload, data, computation)
            except WorkloadError:
                raise
            except Exception as error:
                message = f"the workload's model cannot be built and evaluated: {describe_exception(error)}"
                raise WorkloadError(message) from error
            description = WorkloadDescription(
                train_samples=len(data.train),
                validation_samples=len(data.validation),
                test_samples=len(data.test),
                metrics=dict(workload.metrics),
                environment=describe_environment(computation, workload, memory_limit_bytes=self._memory_limit_bytes),
                model=model,
                tokens_per_sample=tokens_per_sample(workload),
            )
            try:
                self._channel.send(Described(description=description))
            except (TypeError, ValueError) as error:
                message = "the workload's metrics must map names to MetricInfo with finite bounds or None; they are"
                raise WorkloadError(f"{message} {dict(workload.metrics)}") from error
        except BaseException as error:
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        traceback.print_exception(error)
        lacks_memory = _ran_out_of_memory(error)
        message, hint = describe_exception(error), error.hint if isinstance(error, BSSearchError) else None
        if lacks_memory:
            limit = self._memory_limit_bytes
            allowed = "" if limit is None else f" under the limit of {limit / 2**30:.3g} GiB"
            message = f"out of memory{allowed}: {message}"
            if limit is not None and hint is None:
                hint = "the data and a model must fit beside each other: a higher limit, or none"
        self._channel.send(
            Refused(
                error="workload" if isinstance(error, WorkloadError) and not lacks_memory else "launch",
                message=message,
                hint=hint,
                out_of_memory=lacks_memory,
            )
        )

    def _measure(self, command: MeasureStepTime | MeasureMemory | MeasureNoise) -> None:
        request = command.request
        try:
            import torch

            from bssearch.probes.memory import bytes_within_reserve, measure_memory
            from bssearch.probes.noise_scale import measure_noise
            from bssearch.probes.step_time import measure_step_time

            assert self._loaded is not None, "the driver loads before it measures"
            torch.set_num_threads(request.threads)
            match command:
                case MeasureStepTime():
                    self._channel.send(StepTimeMeasured(step_time=measure_step_time(command.request, *self._loaded)))
                case MeasureMemory():
                    device, limit = self._loaded[2].device, self._memory_limit_bytes
                    memory_bytes = bytes_within_reserve(device, limit) if command.reserve else None
                    memory = measure_memory(command.request, *self._loaded, memory_bytes=memory_bytes)
                    self._channel.send(MemoryMeasured(memory=memory))
                case MeasureNoise():
                    self._channel.send(NoiseMeasured(measurement=measure_noise(command.request, *self._loaded)))
        except BaseException as error:
            traceback.print_exc()
            what = command.kind.removeprefix("measure_").replace("_", " ")
            self._channel.send(
                Refused(
                    error="launch" if isinstance(error, LaunchError) else "workload",
                    message=f"measuring the {what} of batch size {request.configuration.batch_size} failed: "
                    f"{describe_exception(error)}",
                    out_of_memory=_ran_out_of_memory(error),
                )
            )

    def _run(self, request: TrialRequest) -> None:
        outcome = self._outcome_of(request)
        broken = not _device_works()
        with self._lock:
            self._trial = self._stop = None
        try:
            self._channel.send(TrialEnded(number=request.number, outcome=outcome, broken=broken))
        except (TypeError, ValueError) as error:
            outcome = _failure(error)
            self._channel.send(TrialEnded(number=request.number, outcome=outcome, broken=broken))

    def _outcome_of(self, request: TrialRequest) -> TrialOutcome:
        def on_observation(observation: Observation) -> None:
            self._channel.send(TrialObserved(number=request.number, observation=observation))

        def on_progress() -> None:
            self._progress += 1

        def stop() -> tuple[TrialState, str] | None:
            return self._stop

        try:
            import torch

            from bssearch.training.clock import clock_for
            from bssearch.training.loop import run_trial

            assert self._loaded is not None, "the driver loads before it runs"
            workload, data, computation = self._loaded
            torch.set_num_threads(request.threads)
            return run_trial(
                request,
                workload,
                data,
                computation,
                clock=clock_for(computation.device),
                on_observation=on_observation,
                stop=stop,
                on_progress=on_progress,
            )
        except BaseException as error:
            return _failure(error)


def _failure(error: BaseException) -> TrialOutcome:
    """Return the outcome of a trial that an exception ended; the worker lives on."""
    from bssearch.training.memory import is_out_of_memory

    traceback.print_exception(error)
    return TrialOutcome(
        state=TrialState.OOM if is_out_of_memory(error) else TrialState.FAILED,
        reason=describe_exception(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that there was no memory left."""
    from bssearch.training.memory import is_out_of_memory

    while error is not None:
        if is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


def _device_works() -> bool:
    """Let go of what the last trial held on the device; return whether the device still takes work.

    An exception keeps the tensors of the frames that it passed through, in cycles that only the collector frees:
    without it a trial that ran out of memory would leave none to the next. A CUDA error (an assertion in a kernel, an
    illegal address) stays with the process for good.
    """
    import torch

    gc.collect()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


def main() -> None:
    """Tie this process to its driver, then serve it."""
    parser = argparse.ArgumentParser(description="Worker of one bssearch slot; started by bssearch itself.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    parser.add_argument("--lifeline", type=int, required=True, help="descriptor that closes with the driver")
    parser.add_argument("--slot", type=int, required=True, help="for the reader of a process list")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    channel = Channel()
    watcher = Watcher(arguments.lifeline)
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    Worker(channel).serve()
    watcher.dismiss()


if __name__ == "__main__":
    main()
