"""The `Executor` interface between driver and trials."""

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
from bssearch.spec.parts import TrainingSpec
from bssearch.spec.space import TRAINING_PARAMETERS

# returns (state, reason) once a running trial should end, else None
AskStop = Callable[[], tuple[TrialState, str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python ``script`` with ``arguments``, or any ``command``.

    A script calls `bssearch.current_trial`; ``file.py:make_trainer`` returns a trainer per trial.

    Attributes:
        default: configuration of the description.
        names: parameters set by the study.
        report: progress expressions, see `bssearch.executors.programs.reports`.
        searched: placeholders required of a command that only reports.
        needs_samples: the objective is in samples.
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
        """Values besides batch size and learning rate."""
        values = {**{name: getattr(configuration, name) for name in TRAINING_PARAMETERS}, **configuration.parameters}
        values["optimizer"] = configuration.optimizer
        return {name.rpartition(".")[2]: value for name, value in values.items() if name in self.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """The workload and devices of an executor.

    Attributes:
        workload: name, resolved in ``folder``, or the program's name.
        given: workload class or object, for the executor ``inline``.
        slots: ``auto`` is one per CUDA device, or up to four on a CPU (`cpu_slots`).
        threads: CPU threads per slot.
        device: ``auto`` (CUDA devices round-robin, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        hang_seconds: maximum time without progress.
        memory_limit_bytes: simulates a smaller device.
        allow_busy: accept devices in use.
        own_parameters: defaults for the description, as ``model.NAME`` and ``loss.NAME``.
        optimizers: optimizers whose libraries must be installed.
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
        """``slots``; ``auto`` is 1 until loaded."""
        return 1 if self.slots == "auto" else self.slots


Event = TrialObserved | TrialEnded


class Executor(Protocol):
    """Runs trials in slots; a trial's last event is its only `TrialEnded`.

    Nothing is measured while a trial runs. Classes take only `ExecutorSettings`.
    """

    slots: int

    @property
    def slots_apart(self) -> bool:
        """True if runs in different slots are compared as if each ran alone: each has a device, or cores of a CPU."""

    def describe(self) -> WorkloadDescription:
        """Describe the workload; raise `WorkloadError` or `LaunchError`."""

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time steps; raise `LaunchError` if the worker dies."""

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        """Test in a new process whether a micro-batch fits."""

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the noise scale near a target."""

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot.

        Raises:
            LaunchError: no worker can be started.
            ValueError: no slot is free, or the trial is running.
        """

    def stop(self, stop: TrialStop) -> None:
        """Ask a running trial to end within a step; ignore unknown numbers.

        `TrialState.PAUSED` without a writable ``checkpoint`` prunes.
        """

    def events(self, timeout: float) -> list[Event]:
        """Return new events; wait up to ``timeout`` seconds."""

    def kill(self) -> None:
        """Cancel all trials at once, even in a signal handler; the executor stays usable."""

    def close(self) -> None:
        """Cancel trials and release resources. Idempotent."""


@runtime_checkable
class TimesSideBySide(Protocol):
    """Times steps on several devices at once."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        """Time requests, one per slot at a time."""

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        """Time a configuration in all slots."""


def check_threads(settings: ExecutorSettings) -> None:
    """Raise `UsageError` for more threads than CPUs."""
    cpus = os.cpu_count() or 1
    if settings.threads > cpus:
        raise UsageError(
            f"executor.threads = {settings.threads} must be <= {cpus}, the CPUs of this machine",
            hint="more threads than CPUs wait for each other",
        )


def make_executor(name: str, settings: ExecutorSettings) -> Executor:
    """Make an executor; raise `UsageError` for an unknown name."""
    executor: Executor = registry.load("executors", name)(settings)
    return executor
