"""The `Executor` interface between the driver and the processes that run trials."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from bssearch import registry
from bssearch.errors import UsageError
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    ParameterValue,
    StepTime,
    StepTimeRequest,
    TrialEnded,
    TrialObserved,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)
from bssearch.spec.space import TRAINING_PARAMETERS
from bssearch.spec.space.training import TrainingSpec

AskStop = Callable[[], tuple[TrialState, str] | None]
"""Returns (state, reason) once a running trial should end, else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A user's training program: a Python ``script`` with ``arguments``, or any ``command``.

    A script calls `bssearch.current_trial`; a script ``file.py:make_trainer`` returns a trainer per trial.

    Attributes:
        default: configuration with which the program is described.
        metric: name of the target's metric.
        names: parameters that the study sets; the program's own values apply to all others.
        report: how to parse a command's progress, see `bssearch.executors.programs.reports`.
        searched: a command needs a placeholder for each of these, unless it calls `current_trial`.
        needs_samples: the study's objective is in samples.
    """

    default: Configuration
    metric: str
    names: tuple[str, ...] = ()
    script: str | None = None
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    report: Mapping[str, str] = field(default_factory=dict)
    searched: tuple[str, ...] = ()
    needs_samples: bool = False

    def parameters(self, configuration: Configuration) -> dict[str, ParameterValue]:
        """Return the values the study sets besides batch size and learning rate, by bare name."""
        values = {**{name: getattr(configuration, name) for name in TRAINING_PARAMETERS}, **configuration.parameters}
        values["optimizer"] = configuration.optimizer
        return {name.rpartition(".")[2]: value for name, value in values.items() if name in self.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """The workload and the devices of an executor.

    Attributes:
        workload: name, resolved in ``folder``; the program's name if ``program`` is set.
        given: workload class or object that is not in a file; only the executor ``inline`` can run it.
        slots: number of slots; ``auto`` is one per device.
        threads: CPU threads per slot.
        device: ``auto`` (CUDA devices round-robin, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        hang_seconds: a trial without progress for this long is killed.
        memory_limit_bytes: simulates a smaller device.
        allow_busy: accept devices that other programs use.
        environment: environment variables added for the workload.
        log_folder: folder for the complete output of the workload; each trial's end carries it too.
        own_parameters: the user's defaults as ``model.NAME`` and ``loss.NAME``; the workload is described with them.
        optimizers: optimizers that trials may use; their libraries must be installed.
        address: Ray cluster, ``auto`` or ``HOST:PORT``.
    """

    workload: str
    workload_settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    slots: int | Literal["auto"] = 1
    threads: int = 1
    device: str = "auto"
    hang_seconds: float = 300.0
    training: TrainingSpec = field(default_factory=TrainingSpec)
    memory_limit_bytes: int | None = None
    allow_busy: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    log_folder: Path | None = None
    program: Program | None = None
    given: Any = None
    own_parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    address: str | None = None

    def __post_init__(self) -> None:
        if self.least_slots < 1:
            raise ValueError(f"slots = {self.slots} must be at least 1")

    @property
    def least_slots(self) -> int:
        """Return the number of slots, or 1 for ``auto``, whose number is known only after a worker has loaded."""
        return 1 if self.slots == "auto" else self.slots


Event = TrialObserved | TrialEnded


class Executor(Protocol):
    """Runs trials in slots. Each trial gets exactly one `TrialEnded`, as its last event.

    A registered executor class takes `ExecutorSettings` as its only argument.
    """

    slots: int

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has its own device, so that concurrent trials do not slow each other."""

    def describe(self) -> WorkloadDescription:
        """Load the workload and return its description; raise `WorkloadError` or `LaunchError`."""

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time isolated steps while no trial runs; raise `LaunchError` if the worker dies."""

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        """Test in a separate process whether a micro-batch fits, while no trial runs."""

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target while no trial runs."""

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot.

        Raises:
            LaunchError: no worker can be started.
            ValueError: no slot is free, or the trial is already running.
        """

    def stop(self, stop: TrialStop) -> None:
        """Ask a running trial to end in a state within one step. Unknown numbers are ignored.

        `TrialState.PAUSED` needs a writable ``checkpoint`` in the request; otherwise the trial is pruned.
        """

    def events(self, timeout: float) -> list[Event]:
        """Return events since the last call; wait up to ``timeout`` seconds for the first."""

    def kill(self) -> None:
        """Cancel every trial at once. Safe in a signal handler; new trials may be submitted afterwards."""

    def close(self) -> None:
        """Cancel running trials and release all resources. Idempotent."""


@runtime_checkable
class TimesSideBySide(Protocol):
    """An executor that can time steps on several devices at once."""

    @property
    def slots(self) -> int:
        """The number of slots."""

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        """Time each request as `Executor.measure_step_time`, one per slot at a time."""

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        """Time one configuration in all slots at once."""


def check_threads(settings: ExecutorSettings) -> None:
    """Raise `UsageError` if a slot has more threads than this machine has CPUs."""
    cpus = os.cpu_count() or 1
    if settings.threads > cpus:
        raise UsageError(
            f"executor.threads = {settings.threads} must be <= {cpus}, the CPUs of this machine",
            hint="more threads than CPUs wait for each other",
        )


def make_executor(name: str, settings: ExecutorSettings) -> Executor:
    """Return a new executor; raise `UsageError` for an unknown name."""
    executor: Executor = registry.load("executors", name)(settings)
    return executor
