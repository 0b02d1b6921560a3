"""What the driver and a worker say to each other: one JSON object a line, told by its ``kind``.

The driver sends a `Command`, the worker answers with a `Reply`. A worker sends a program of the user's own an `Assign`,
and a `Stop` where it is to end; that answers with replies, too. Records travel as they are stored, through
`bssearch.records.to_json`, which refuses NaN and infinities; decoding validates every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from bssearch.errors import BSSearchError, LaunchError, WorkloadError
from bssearch.executors.base import ExecutorSettings, Program
from bssearch.records import (
    Configuration,
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    ParameterValue,
    StepTime,
    StepTimeRequest,
    TrainingSettings,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
    to_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Resolve and load a workload on a device (``auto``, ``cpu``, ``cuda`` or ``cuda:N``).

    ``memory_limit_bytes`` pretends a device with less memory; a busy device is refused unless ``allow_busy``. With a
    ``revision`` the workload's file must be of that one. With a ``program`` that is what trains. ``slot`` is one of
    ``slots``, which take turns over so many ``devices`` (None: those there are). ``own_parameters``, ``optimizers``
    and ``hang_seconds`` as in `ExecutorSettings`.
    """

    workload: str
    workload_settings: Mapping[str, Any]
    folder: str
    device: str
    slot: int
    threads: int
    training: TrainingSettings = field(default_factory=TrainingSettings)
    memory_limit_bytes: int | None = None
    allow_busy: bool = False
    revision: str | None = None
    program: Program | None = None
    own_parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    hang_seconds: float = 300.0
    slots: int = 1
    devices: int | None = None
    kind: Literal["load"] = "load"

    @classmethod
    def of(cls, settings: ExecutorSettings, slot: int, revision: str | None = None, devices: int | None = None) -> Load:
        """Return what a slot of an executor loads."""
        return cls(
            workload=settings.workload,
            workload_settings=settings.workload_settings,
            folder=str(settings.folder.resolve()),
            device=settings.device,
            slot=slot,
            threads=settings.threads,
            training=settings.training,
            memory_limit_bytes=settings.memory_limit_bytes,
            allow_busy=settings.allow_busy,
            revision=revision,
            program=settings.program,
            own_parameters=settings.own_parameters,
            optimizers=settings.optimizers,
            hang_seconds=settings.hang_seconds,
            slots=settings.least_slots,
            devices=devices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Say what the workload offers and what its model is before it is trained."""

    kind: Literal["describe"] = "describe"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureStepTime:
    """Time optimizer steps."""

    request: StepTimeRequest
    kind: Literal["measure_step_time"] = "measure_step_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureMemory:
    """Find out whether a micro-batch size fits, with ``reserve`` into a little less than all memory."""

    request: MemoryRequest
    reserve: bool = False
    kind: Literal["measure_memory"] = "measure_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureNoise:
    """Measure the gradient noise scale near a target."""

    request: NoiseRequest
    kind: Literal["measure_noise"] = "measure_noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a trial."""

    request: TrialRequest
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the running trial of this number in ``state``, within one step."""

    number: int
    state: TrialState
    reason: str
    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Leave; a running trial ends as cancelled first."""

    kind: Literal["exit"] = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """What a worker asks of a program of the user's own, in a process of its own: one piece of ``work``.

    ``configuration`` is what to train with, ``parameters`` all else that the study sets, by bare names; ``searched``
    names what it searches, and ``default`` is its default: what code that has been written for one trial has. If
    ``needs_samples``, the study's objective is in samples: a loop of the user's own must tell them.
    """

    work: Annotated[Describe | MeasureStepTime | MeasureMemory | Run, Field(discriminator="kind")]
    configuration: Configuration
    parameters: Mapping[str, ParameterValue]
    metric: str
    device: str
    revision: str
    memory_limit_bytes: int | None = None
    searched: tuple[str, ...] = ()
    needs_samples: bool = False
    default: Configuration | None = None
    kind: Literal["assign"] = "assign"

    @classmethod
    def of(
        cls,
        program: Program,
        work: Describe | MeasureStepTime | MeasureMemory | Run,
        *,
        device: str,
        revision: str,
        memory_limit_bytes: int | None = None,
    ) -> Assign:
        """Return what a program is assigned; it describes itself with its default."""
        configuration = program.default if isinstance(work, Describe) else work.request.configuration
        return cls(
            work=work,
            configuration=configuration,
            parameters=program.parameters(configuration),
            metric=program.metric,
            device=device,
            revision=revision,
            memory_limit_bytes=memory_limit_bytes,
            searched=program.searched,
            needs_samples=program.needs_samples,
            default=program.default,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The workload is loaded; ``device`` is the one it is on, ``revision`` that of its file, where it has one.

    ``device_uuid`` says which GPU that is (`bssearch.executors.devices.uuid_of`), ``device_name`` of which kind the
    device is. Slots take turns over ``devices``.
    """

    device: str
    revision: str | None = None
    device_uuid: str | None = None
    device_name: str | None = None
    devices: int = 1
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The answer to `Describe`."""

    description: WorkloadDescription
    kind: Literal["described"] = "described"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A load, a description or a measurement failed: through the user's ``workload``, or at ``launch``.

    ``out_of_memory`` says that there was no memory left for it.
    """

    error: Literal["workload", "launch"]
    message: str
    hint: str | None = None
    out_of_memory: bool = False
    kind: Literal["refused"] = "refused"

    def as_error(self) -> BSSearchError:
        """Return the error that the driver raises for it."""
        kind = WorkloadError if self.error == "workload" else LaunchError
        return kind(self.message, hint=self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The running trial has made progress since the last heartbeat."""

    kind: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeMeasured:
    """The answer to `MeasureStepTime`."""

    step_time: StepTime
    kind: Literal["step_time_measured"] = "step_time_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMeasured:
    """The answer to `MeasureMemory`."""

    memory: MemoryUse
    kind: Literal["memory_measured"] = "memory_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeasured:
    """The answer to `MeasureNoise`."""

    measurement: NoiseMeasurement
    kind: Literal["noise_measured"] = "noise_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialObserved:
    """The running trial was evaluated."""

    number: int
    observation: Observation
    kind: Literal["trial_observed"] = "trial_observed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """The trial ended; the last that is said of it. A ``broken`` worker (its device failed) can run no other."""

    number: int
    outcome: TrialOutcome
    broken: bool = False
    kind: Literal["trial_ended"] = "trial_ended"


Measured = StepTimeMeasured | MemoryMeasured | NoiseMeasured
Command = Load | Describe | MeasureStepTime | MeasureMemory | MeasureNoise | Run | Stop | Exit | Assign
Reply = Loaded | Described | Refused | Heartbeat | Measured | TrialObserved | TrialEnded

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_REPLIES: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def encode(message: Command | Reply) -> bytes:
    """Return the message as one line; raise `ValueError` where it holds NaN or an infinity."""
    return to_json(message).encode() + b"\n"


def decode_command(line: bytes) -> Command:
    """Return the command on the line; raise `ValueError` where it is none."""
    return _COMMANDS.validate_json(line)


def decode_reply(line: bytes) -> Reply:
    """Return the reply on the line; raise `ValueError` where it is none."""
    return _REPLIES.validate_json(line)


TRIAL_VARIABLE = "BSSEARCH_TRIAL"
"""Names the line to the search in a program's environment: a descriptor of a socket, or the path of one."""

LONGEST_LINE_BYTES = 2**25
"""The longest message: a choice; a traceback of a deep recursion takes a megabyte."""


class Lines:
    """Cuts a stream of bytes into whole lines; keeps the unfinished last one for the next chunk.

    Raises `ValueError` for a line of more than `LONGEST_LINE_BYTES`.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, without their line ends."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            raise ValueError(f"a line of more than {LONGEST_LINE_BYTES:,} bytes")
        return whole
