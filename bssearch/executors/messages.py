"""What the driver and a worker say to each other, one message a line: the name of its class, and its fields as JSON.

The driver sends a `Command`, the worker answers with a `Reply`. A worker sends the user's program an `Assign`, and a
`TrialStop` to end its trial; the program answers with replies, too. A message without fields is one word. NaN and
infinities are refused, and decoding validates every field.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel, TypeAdapter

from bssearch.errors import BSSearchError, LaunchError, WorkloadError
from bssearch.executors.base import ExecutorSettings, Program
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
    TrialStop,
    WorkloadDescription,
)

Measurement = StepTimeRequest | MemoryRequest | NoiseRequest
"""What may be asked of a loaded workload, and `Measured` what it answers."""

Measured = StepTime | MemoryUse | NoiseMeasurement
Answer = WorkloadDescription | Measured

Work = Literal["describe"] | StepTimeRequest | MemoryRequest | TrialRequest
"""What may be asked of a program of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load what the settings name, for one of their slots.

    With a ``revision`` the code must be of that one. Slots take turns over so many ``devices`` (None: those there are).
    """

    settings: ExecutorSettings
    slot: int
    revision: str | None = None
    devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """What a worker asks of the user's ``program``, in a process of its own: one piece of ``work``.

    ``given`` are parameters of the script's own, for those that the study does not set.
    """

    work: Work
    program: Program
    device: str
    revision: str
    memory_limit_bytes: int | None = None
    given: Mapping[str, ParameterValue] = field(default_factory=dict)

    @property
    def plan(self) -> TrialPlan | StepTimeRequest | MemoryRequest | None:
        """Return what says configuration and threads; None if the program is to describe itself."""
        if self.work == "describe":
            return None
        return self.work.plan if isinstance(self.work, TrialRequest) else self.work

    @property
    def configuration(self) -> Configuration:
        """Return what to train with; a program describes itself with its default."""
        return self.program.default if self.plan is None else self.plan.configuration

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """Return the values beside batch size and learning rate, by bare names."""
        return {**self.given, **self.program.parameters(self.configuration)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The workload is loaded; ``device`` is the one it is on, ``revision`` that of its file, if it has one.

    ``device_uuid`` says which GPU that is (`bssearch.executors.devices.uuid_of`), ``device_name`` of which kind the
    device is. Slots take turns over ``devices``.
    """

    device: str
    revision: str | None = None
    device_uuid: str | None = None
    device_name: str | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A load, a description or a measurement failed: through the user's ``workload``, or at ``launch``.

    ``out_of_memory`` says that there was no memory left for it.
    """

    error: Literal["workload", "launch"]
    message: str
    hint: str | None = None
    out_of_memory: bool = False

    def as_error(self) -> BSSearchError:
        """Return the error that the driver raises for it."""
        kind = WorkloadError if self.error == "workload" else LaunchError
        return kind(self.message, hint=self.hint)


Command = Load | Literal["describe", "exit"] | Measurement | TrialRequest | TrialStop | Assign
"""``exit``: leave; a running trial ends as cancelled first."""

Reply = Loaded | Literal["heartbeat"] | Answer | Refused | TrialObserved | TrialEnded
"""``heartbeat``: the running trial has made progress since the last one."""


def encode(message: Command | Reply) -> bytes:
    """Return the message as one line; raise `ValueError` if it holds NaN or an infinity."""
    if isinstance(message, str):
        return f"{message}\n".encode()
    fields = json.dumps(asdict(message), default=_plain, allow_nan=False)
    return f"{type(message).__name__} {fields}\n".encode()


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else os.fspath(value)


def decode_command(line: bytes) -> Command:
    """Return the command on the line; raise `ValueError` if it is none."""
    return cast("Command", _decoded(line, Command))


def decode_reply(line: bytes) -> Reply:
    """Return the reply on the line; raise `ValueError` if it is none."""
    return cast("Reply", _decoded(line, Reply))


def _decoded(line: bytes, union: Any) -> Any:
    name, _, fields = line.decode().rstrip("\n").partition(" ")
    kind = _kinds(union).get(name)
    if kind is None:
        raise ValueError(f"a line must begin with one of {', '.join(_kinds(union))}")
    return kind if isinstance(kind, str) else _adapter(kind).validate_json(fields)


@functools.cache
def _kinds(union: Any) -> dict[str, Any]:
    """Return the kinds of messages of a union by their names: its classes, and the words of its literals."""
    parts = [one for part in get_args(union) for one in get_args(part) or (part,)]
    return {part if isinstance(part, str) else part.__name__: part for part in parts}


_adapter = functools.cache(TypeAdapter[Any])


HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats at least, small beside any time after which a trial counts as hung."""

CHUNK_BYTES = 1 << 16
"""Bytes read at a time: the capacity of a pipe on Linux (pipe(7))."""

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
