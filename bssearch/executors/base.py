"""The `Executor` interface between driver and trials."""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

from pydantic import BaseModel, TypeAdapter

from bssearch import registry
from bssearch.errors import BSSearchError, LaunchError, WorkloadError, require
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
    TrialPlan,
    TrialRequest,
    TrialState,
    TrialStop,
    WorkloadDescription,
)
from bssearch.spec import TRAINING_PARAMETERS, TrainingSpec

# returns (state, reason) if a running trial should end, else None
AskStop = Callable[[], tuple[TrialState, str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A user's Python ``script`` with its ``arguments``, or any ``command``.

    A script calls `bssearch.current_trial`. ``file.py:make_trainer`` names a function that returns a trainer.

    Attributes:
        default: configuration for describing the program.
        names: parameters that the study sets.
        report: regular expressions for the log; see `bssearch.executors.programs.reports`.
        searched: parameters that the study searches.
        needs_samples: whether the study's objective counts samples.
        counts_tokens: whether batch sizes count tokens.
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
    counts_tokens: bool = False

    def parameters(self, configuration: Configuration) -> dict[str, ParameterValue]:
        """Return the parameters in ``names``, except batch size and learning rate."""
        values = {**{name: getattr(configuration, name) for name in TRAINING_PARAMETERS}, **configuration.parameters}
        values["optimizer"] = configuration.optimizer
        return {name.rpartition(".")[2]: value for name, value in values.items() if name in self.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """The workload and the devices of an executor; see `ExecutorSpec`.

    Attributes:
        workload: name of a workload or program. Paths are relative to ``folder``.
        given: workload class or object, for the executor ``inline``.
        device: ``auto`` (CUDA devices round-robin, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        devices: possible numbers of devices per trial, ascending.
        own_parameters: defaults of parameters that the workload defines, as ``GROUP.NAME``.
        optimizers: the study's optimizers, whose libraries must be installed.
    """

    workload: str
    workload_settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    slots: int | Literal["auto"] = 1
    threads: int = 1
    device: str = "auto"
    devices: tuple[int, ...] = (1,)
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

    @property
    def least_slots(self) -> int:
        return 1 if self.slots == "auto" else self.slots


Event = TrialObserved | TrialEnded


class Executor(Protocol):
    """Runs trials in slots. Each trial's last event is a `TrialEnded`.

    Measure only while no trial runs. Constructors of registered executors take only `ExecutorSettings`.
    """

    slots: int

    @property
    def slots_apart(self) -> bool:
        """True if each slot has its own device or CPU cores."""

    def describe(self) -> WorkloadDescription:
        """Describe the workload's data, metrics, model and environment."""

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time a configuration's steps. Raises `LaunchError` if the worker dies, unless memory ran out."""

    def measure_memory(self, request: MemoryRequest) -> MemoryUse:
        """Test whether a micro-batch fits in memory."""

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target, or at a time limit."""

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot.

        Raises:
            LaunchError: the worker cannot start.
            WorkloadError: the workload does not load.
            ValueError: no slot is free.
        """

    def stop(self, stop: TrialStop) -> None:
        """Ask a running trial to end. Do nothing if the trial is unknown.

        A trial that cannot save a checkpoint is pruned instead of paused.
        """

    def events(self, timeout: float) -> list[Event]:
        """Return the events since the last call, after at most ``timeout`` seconds."""

    def kill(self) -> None:
        """Cancel all trials. A signal handler may call this method. The executor stays usable."""

    def close(self) -> None:
        """Cancel trials and release resources. Idempotent."""


@runtime_checkable
class TimesSideBySide(Executor, Protocol):
    """An executor that times steps in several slots at once."""

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        """Time the steps of at most `slots` requests, one request per slot."""

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        """Time a configuration's steps in all slots. Returns step times by device UUID or name."""


def check_threads(settings: ExecutorSettings, processes: int = 1) -> None:
    cpus, threads = os.cpu_count() or 1, settings.threads * processes
    asked = "executor.threads" if processes == 1 else "executor.threads × executor.devices"
    require(
        threads <= cpus,
        f"{asked} = {threads} must be <= {cpus}, the number of CPUs of this machine",
        hint=f"lower {asked.replace('×', 'or')}, because surplus threads slow each other",
    )


def make_executor(name: str, settings: ExecutorSettings) -> Executor:
    return cast(Executor, registry.load("executors", name)(settings))


Measurement = StepTimeRequest | MemoryRequest | NoiseRequest

Measured = StepTime | MemoryUse | NoiseMeasurement
Answer = WorkloadDescription | Measured

Work = Literal["describe"] | Measurement | TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The command to load a slot's workload. ``devices`` counts the usable devices of all slots together."""

    settings: ExecutorSettings
    slot: int
    revision: str | None = None
    devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """The command to do ``work`` with ``program``. ``given`` holds the parameters in the call of `current_trial`."""

    work: Work
    program: Program
    device: str
    revision: str
    memory_limit_bytes: int | None = None
    given: Mapping[str, ParameterValue] = field(default_factory=dict)

    @property
    def plan(self) -> TrialPlan | Measurement | None:
        """The trial's plan, the measurement, or None if the work is a description."""
        work = None if self.work == "describe" else self.work
        return work.plan if isinstance(work, TrialRequest) else work

    @property
    def configuration(self) -> Configuration:
        return self.program.default if self.plan is None else self.plan.configuration

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        return {**self.given, **self.program.parameters(self.configuration)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The answer to `Load`, with the workload's or program's ``revision`` and the number of usable ``devices``."""

    device: str
    revision: str | None = None
    device_uuid: str | None = None
    device_name: str | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer to a failed command. ``error`` says whether the workload or the launch failed."""

    error: Literal["workload", "launch"]
    message: str
    hint: str | None = None
    out_of_memory: bool = False

    def as_error(self) -> BSSearchError:
        return (WorkloadError if self.error == "workload" else LaunchError)(self.message, hint=self.hint)


Command = Load | Literal["describe", "exit"] | Measurement | TrialRequest | TrialStop | Assign

# "heartbeat" means that the trial has made progress
Reply = Loaded | Literal["heartbeat"] | Answer | Refused | TrialObserved | TrialEnded


def encode(message: Command | Reply) -> bytes:
    """Encode a message as one line. Raises `ValueError` if a number is not finite."""
    if isinstance(message, str):
        return f"{message}\n".encode()
    fields = json.dumps(
        asdict(message),
        default=lambda value: value.model_dump() if isinstance(value, BaseModel) else os.fspath(value),
        allow_nan=False,
    )
    return f"{type(message).__name__} {fields}\n".encode()


def decode_command(line: bytes) -> Command:
    return cast("Command", _decoded(line, Command))


def decode_reply(line: bytes) -> Reply:
    return cast("Reply", _decoded(line, Reply))


def _decoded(line: bytes, union: Any) -> Any:
    name, _, fields = line.decode().rstrip("\n").partition(" ")
    kind = _kinds(union).get(name)
    if kind is None:
        raise ValueError(f"unknown message {name[:80]!r}; expected one of {', '.join(_kinds(union))}")
    return kind if isinstance(kind, str) else _adapter(kind).validate_json(fields)


@functools.cache
def _kinds(union: Any) -> dict[str, Any]:
    parts = [one for part in get_args(union) for one in get_args(part) or (part,)]
    return {part if isinstance(part, str) else part.__name__: part for part in parts}


_adapter = functools.cache(TypeAdapter[Any])


HEARTBEAT_SECONDS = 1.0  # least interval between heartbeats, far below any hang timeout

CHUNK_BYTES = 1 << 16  # a pipe's capacity on Linux (pipe(7))

TRIAL_VARIABLE = "BSSEARCH_TRIAL"  # a program's connection to its search: a socket's descriptor or path

LONGEST_LINE_BYTES = 2**25  # far above a deep recursion's traceback of 1 MB


class LineSplitter:
    """Splits bytes into lines."""

    _rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that a chunk completes.

        Raises `ValueError` if an incomplete line exceeds `LONGEST_LINE_BYTES`.
        """
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            raise ValueError(f"a line has more than {LONGEST_LINE_BYTES:,} bytes")
        return whole
