"""What the driver asks of the place where trials run."""

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
"""Returns how a running trial is to end, and why; None while it is to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Training that is a program of the user's own: a Python ``script`` with ``arguments``, or any ``command``.

    A script asks for its trial by `bssearch.current_trial`. One that is named ``file.py:make_trainer`` makes a trainer
    for each trial, which bssearch fits. Of a command ``report`` says how its progress is read (see
    `bssearch.executors.programs.reports`). It is described with the configuration ``default``, and ``metric`` is the
    target's.
    ``names`` are the parameters that the study sets; what it leaves out the program has its own values of. Those
    ``searched`` a command must have a place for, unless it asks for its trial as a script does. ``needs_samples``: the
    study's objective is in samples.
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
        """Return what the study sets in a configuration, beside batch size and learning rate, by bare names."""
        values = {**{name: getattr(configuration, name) for name in TRAINING_PARAMETERS}, **configuration.parameters}
        values["optimizer"] = configuration.optimizer
        return {name.rpartition(".")[2]: value for name, value in values.items() if name in self.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """What an executor runs, and where.

    ``workload`` is looked up in ``folder``. ``given`` is the class or the object itself where it lies in no file: only
    the executor ``inline`` can run that. Each of ``slots`` (``auto``: one for each device) computes with ``threads``
    CPU threads on ``device``: ``auto`` (slots take turns over the CUDA devices, else the CPU), ``cpu``, ``cuda`` or
    ``cuda:N``; one that another program computes on is refused unless ``allow_busy``. ``training`` says how steps are
    computed, ``memory_limit_bytes`` pretends a smaller device. A trial without progress for ``hang_seconds`` counts as
    hung. ``program`` stands where the training is a program of the user's own, whose name is then the ``workload``.
    ``environment`` is added to the environment variables that the workload sees. What the workload prints comes with
    the end of each trial; where there is a ``log_folder`` all of it is kept there as well. ``own_parameters`` are the
    user's own of the default, by ``model.NAME`` and ``loss.NAME``: the workload is described with these. ``optimizers``
    are the names of those that trials may have: what bssearch needs for them must be there.
    ``address`` is that of a Ray cluster, for the executor ``ray``: ``auto`` or ``HOST:PORT``.
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
        """Return the number of slots, 1 where it is one for each device: that is known once a worker has loaded."""
        return 1 if self.slots == "auto" else self.slots


Event = TrialObserved | TrialEnded


class Executor(Protocol):
    """Runs trials in slots. Whatever happens to a trial, its `TrialEnded` comes exactly once, and nothing after it.

    A class that is registered as an executor is made from `ExecutorSettings`, its one argument.
    """

    slots: int

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has a device of its own, so that trials side by side take nothing from each other."""

    def describe(self) -> WorkloadDescription:
        """Load the workload and return what it offers; raise `WorkloadError` or `LaunchError`."""

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time isolated steps while no trial runs; raise `LaunchError` if the worker dies of it."""

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        """Find out in a process of its own whether a micro-batch size fits; not while a trial runs."""

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target while no trial runs."""

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot; raise `LaunchError` if no worker can be started.

        Raises `ValueError` where no slot is free or a trial of that number runs already.
        """

    def stop(self, stop: TrialStop) -> None:
        """Ask a running trial to end in a state; it does within one step. Unknown numbers are ignored.

        Of `TrialState.PAUSED` it ends so once it is saved, where its request names a ``checkpoint`` and that can be
        written; else as pruned.
        """

    def events(self, timeout: float) -> list[Event]:
        """Return what has happened since the last call, waiting up to ``timeout`` seconds for the first."""

    def kill(self) -> None:
        """End every trial at once, as cancelled; a signal handler may call it. New ones may be submitted afterwards."""

    def close(self) -> None:
        """End what runs, as cancelled, and let go of all that is held; a second time does nothing."""


@runtime_checkable
class TimesSideBySide(Protocol):
    """An executor that can time steps on several devices at once, in as many ``slots``."""

    @property
    def slots(self) -> int:
        """How many slots there are."""

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        """Time each request as `Executor.measure_step_time` does, as many at once as there are slots."""

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        """Time one configuration as `Executor.measure_step_time` does, in all slots at once."""


def check_threads(settings: ExecutorSettings) -> None:
    """Raise `UsageError` where a slot is to compute with more threads than this machine has CPUs."""
    cpus = os.cpu_count() or 1
    if settings.threads > cpus:
        raise UsageError(
            f"executor.threads = {settings.threads} must be <= {cpus}, the CPUs of this machine",
            hint="more threads than CPUs wait for each other",
        )


def make_executor(name: str, settings: ExecutorSettings) -> Executor:
    """Return a new executor of a kind; raise `UsageError` for a name that is not known."""
    executor: Executor = registry.load("executors", name)(settings)
    return executor
