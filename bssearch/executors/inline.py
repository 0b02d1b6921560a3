"""Runs trials in this process, so that `breakpoint()` works.

Trials are not isolated: a crash ends the run, user code sees database passwords, and CPU memory has no limit. The log
omits the output of child processes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from bssearch.errors import LaunchError, require
from bssearch.executors.base import Event, ExecutorSettings, Load, Measurement, Refused, check_threads
from bssearch.executors.failures import failed, not_measured, refused, trial_ended
from bssearch.executors.process import CUDA_DEFAULTS, printed
from bssearch.executors.slots import LocalExecutor, LogFolder, RunningTrial
from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialOutcome,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)
from bssearch.settings import environment_with

if TYPE_CHECKING:
    from bssearch.executors.loaded import LoadedWorkload

T = TypeVar("T")

# Python's defaults, because reference cycles of training keep much memory with the command line's thresholds
PYTHON_THRESHOLDS = (700, 10, 10)

STDOUT, STDERR = 1, 2

_KILLED = "killed: the run ended"


class InlineExecutor:
    """An `Executor` in this process, for debugging.

    ``hang_seconds`` has no effect. Ctrl-C, or the end of the debugger, cancels the trial and raises KeyboardInterrupt.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        check_threads(settings)
        require(
            settings.least_slots == 1,
            f"executor.slots = {settings.slots} must be 1 with the executor inline, which runs one trial at a time",
            hint="set executor.slots: 1, or executor.name: local",
        )
        require(
            settings.devices == (1,),
            f"executor.devices = {settings.devices[-1]} must be 1 with the executor inline, which is one process",
            hint="set executor.devices: 1, or put the workload into a file and set executor.name: local",
        )
        self.slots = 1
        self._settings = settings
        self._logs = LogFolder(settings.log_folder)
        self._log = self._logs.file_of(0)
        self._log.touch()
        self._loaded: LoadedWorkload | None = None
        self._broken = False
        self._restore = ExitStack()
        self._trial: RunningTrial | None = None
        self._observations: Generator[Observation, None, TrialOutcome] | None = None
        self._stop: tuple[TrialState, str] | None = None
        self._events: list[Event] = []

    @property
    def slots_apart(self) -> bool:
        return self._loaded is not None and self._loaded.device != "cpu"

    def describe(self) -> WorkloadDescription:
        return self._answer(self._load().describe, self._refused)

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        return self._measured(request, StepTime)

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        self._refuse_while_a_trial_runs()
        require(
            self._settings.given is None,
            f"workload {self._settings.workload!r} must be in a file, because another process measures memory",
            hint="put the workload into a file, and name the file in the spec",
        )
        # This process uses the device.
        with closing(LocalExecutor(replace(self._settings, allow_busy=True, log_folder=None))) as executor:
            return executor.measure_memory(request)

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        return self._measured(request, NoiseMeasurement)

    def submit(self, request: TrialRequest) -> None:
        if self._trial is not None:
            raise ValueError(
                f"no slot is free for trial {request.number}; wait until trial {self._trial.request.number} ends"
            )
        from bssearch.executors.devices import uuid_of

        loaded = self._load()
        self._stop = None
        self._trial = RunningTrial(request, self._log.stat().st_size, loaded.device, uuid_of(loaded.device))
        self._observations = loaded.trial(request, stop=lambda: self._stop).observations()

    def stop(self, stop: TrialStop) -> None:
        if self._trial is not None and self._trial.request.number == stop.number:
            self._stop = stop.state, stop.reason

    def events(self, timeout: float) -> list[Event]:
        """Return the new events. If a trial runs and no event is new, train until the next evaluation or end."""
        if not self._events:
            if self._trial is None:
                time.sleep(timeout)
            else:
                self._advance(self._trial)
        events, self._events = self._events, []
        return events

    def kill(self) -> None:
        """Cancel the trial. A running step ends first."""
        self._cancel(_KILLED)

    def close(self) -> None:
        self._cancel("the run ended")
        self._loaded = None
        self._restore.close()
        self._logs.close()

    def _load(self) -> LoadedWorkload:
        require(
            not self._broken,
            "the device failed in an earlier trial, so this process can no longer use the device",
            hint="start a new process, and run the study again to resume",
            error=LaunchError,
        )
        if self._loaded is None:
            import torch
            import torch._dynamo  # or else the first optimizer imports torch._dynamo after the freeze below

            from bssearch.executors.loaded import LoadedWorkload

            require(
                self._settings.memory_limit_bytes is None
                or (self._settings.device != "cpu" and torch.cuda.is_available()),
                f"executor.memory_limit_gib = {(self._settings.memory_limit_bytes or 0) / 2**30:.3g} must be unset "
                "with the executor inline on the CPU, because the limit would apply to the whole run",
                hint="set executor.name: local, or remove executor.memory_limit_gib",
                error=LaunchError,
            )
            self._restore.callback(torch.set_num_threads, torch.get_num_threads())
            given = {name: value for name, value in CUDA_DEFAULTS.items() if name not in os.environ}
            self._restore.enter_context(environment_with({**given, **self._settings.environment}))
            load = Load(settings=self._settings, slot=0)
            self._restore.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(*PYTHON_THRESHOLDS)
            self._loaded = self._answer(lambda: LoadedWorkload(load), self._refused)
            if not gc.get_freeze_count():
                gc.freeze()  # afterwards the collector skips the libraries
                self._restore.callback(gc.unfreeze)
        return self._loaded

    def _measured(self, request: Measurement, kind: type[T]) -> T:
        self._refuse_while_a_trial_runs()
        answer = self._answer(partial(self._load().measure, request), lambda error: not_measured(error, request))
        assert isinstance(answer, kind), "the answer is not of the request's kind"
        return answer

    def _answer(self, work: Callable[[], T], refusal: Callable[[BaseException], Refused]) -> T:
        try:
            with self._logged():
                return work()
        except (KeyboardInterrupt, BdbQuit):
            raise KeyboardInterrupt from None
        except BaseException as error:
            raise refusal(error).as_error() from error

    def _refused(self, error: BaseException) -> Refused:
        return refused(error, self._settings.memory_limit_bytes)

    def _refuse_while_a_trial_runs(self) -> None:
        if self._trial is not None:
            raise ValueError(f"cannot measure while trial {self._trial.request.number} runs; wait for the trial's end")

    def _advance(self, trial: RunningTrial) -> None:
        assert self._observations is not None, "the trial in the slot has no observations"
        with self._logged():
            try:
                observation = next(self._observations)
            except StopIteration as end:
                outcome: TrialOutcome = end.value
            except (KeyboardInterrupt, BdbQuit):
                self._end(trial, TrialOutcome(state=TrialState.CANCELLED, reason=_KILLED))
                raise KeyboardInterrupt from None
            except BaseException as error:
                outcome = failed(error)
            else:
                trial.observations.append(observation)
                self._events.append(TrialObserved(trial.request.number, observation))
                return
            self._end(trial, outcome)

    def _cancel(self, reason: str) -> None:
        if self._trial is None or self._observations is None:
            return
        self._stop = TrialState.CANCELLED, reason
        if getgeneratorstate(self._observations) != GEN_RUNNING:
            self._observations.close()
            self._end(self._trial, TrialOutcome(state=TrialState.CANCELLED, reason=reason))

    def _end(self, trial: RunningTrial, outcome: TrialOutcome) -> None:
        self._trial = self._observations = None
        ended = trial_ended(trial.request.number, outcome)
        self._broken |= ended.broken
        self._events.append(
            TrialEnded(ended.number, trial.finished(ended.outcome), printed(self._log, trial.log_start))
        )

    @contextmanager
    def _logged(self) -> Iterator[None]:
        # stdout carries the run's data.
        with self._log.open("a") as log, _stdout_to_stderr():
            both = cast("IO[str]", _Copying(sys.stderr, log))
            with redirect_stdout(both), redirect_stderr(both):
                yield


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    _flush()
    try:
        kept = os.dup(STDOUT)
    except OSError:
        yield
        return
    try:
        os.dup2(STDERR, STDOUT)
        yield
    finally:
        _flush()  # while output still goes to stderr
        os.dup2(kept, STDOUT)
        os.close(kept)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


@dataclass(frozen=True)
class _Copying:
    _stream: IO[str]
    _log: IO[str]

    def write(self, text: str) -> int:
        self._log.write(text)
        self._log.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # debuggers read the stream's attributes
        return getattr(self._stream, name)
