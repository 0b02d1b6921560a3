"""Messages between driver, worker and program: a line with the class name and its fields as JSON.

A driver sends `Command`, a worker `Reply`. A program gets `Assign`, then `TrialStop`, and sends replies.
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

Measured = StepTime | MemoryUse | NoiseMeasurement
Answer = WorkloadDescription | Measured

Work = Literal["describe"] | StepTimeRequest | MemoryRequest | TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load a slot's workload, at ``revision`` if set; slots share ``devices``."""

    settings: ExecutorSettings
    slot: int
    revision: str | None = None
    devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """``work`` for ``program``, with its own values ``given``."""

    work: Work
    program: Program
    device: str
    revision: str
    memory_limit_bytes: int | None = None
    given: Mapping[str, ParameterValue] = field(default_factory=dict)

    @property
    def plan(self) -> TrialPlan | StepTimeRequest | MemoryRequest | None:
        """Configuration and threads; None for a description."""
        if self.work == "describe":
            return None
        return self.work.plan if isinstance(self.work, TrialRequest) else self.work

    @property
    def configuration(self) -> Configuration:
        """Configuration to train with, or to describe."""
        return self.program.default if self.plan is None else self.plan.configuration

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """Values besides batch size and learning rate."""
        return {**self.given, **self.program.parameters(self.configuration)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Answer to `Load`, with the file's ``revision``, the GPU's ``device_uuid`` and ``device_name``; slots share
    ``devices``.
    """

    device: str
    revision: str | None = None
    device_uuid: str | None = None
    device_name: str | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Failed in the ``workload`` or at ``launch``."""

    error: Literal["workload", "launch"]
    message: str
    hint: str | None = None
    out_of_memory: bool = False

    def as_error(self) -> BSSearchError:
        """The error to raise."""
        kind = WorkloadError if self.error == "workload" else LaunchError
        return kind(self.message, hint=self.hint)


Command = Load | Literal["describe", "exit"] | Measurement | TrialRequest | TrialStop | Assign

# heartbeat: the trial has made progress since the last
Reply = Loaded | Literal["heartbeat"] | Answer | Refused | TrialObserved | TrialEnded


def encode(message: Command | Reply) -> bytes:
    """Return one line; raise `ValueError` for NaN or infinity."""
    if isinstance(message, str):
        return f"{message}\n".encode()
    fields = json.dumps(asdict(message), default=_plain, allow_nan=False)
    return f"{type(message).__name__} {fields}\n".encode()


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else os.fspath(value)


def decode_command(line: bytes) -> Command:
    """Parse and check a command; raise `ValueError` if invalid."""
    return cast("Command", _decoded(line, Command))


def decode_reply(line: bytes) -> Reply:
    """Parse a reply; raise `ValueError` if invalid."""
    return cast("Reply", _decoded(line, Reply))


def _decoded(line: bytes, union: Any) -> Any:
    name, _, fields = line.decode().rstrip("\n").partition(" ")
    kind = _kinds(union).get(name)
    if kind is None:
        raise ValueError(f"a line must begin with one of {', '.join(_kinds(union))}")
    return kind if isinstance(kind, str) else _adapter(kind).validate_json(fields)


@functools.cache
def _kinds(union: Any) -> dict[str, Any]:
    parts = [one for part in get_args(union) for one in get_args(part) or (part,)]
    return {part if isinstance(part, str) else part.__name__: part for part in parts}


_adapter = functools.cache(TypeAdapter[Any])


HEARTBEAT_SECONDS = 1.0  # least interval; small compared with any hang timeout

CHUNK_BYTES = 1 << 16  # a pipe's capacity on Linux (pipe(7))

TRIAL_VARIABLE = "BSSEARCH_TRIAL"  # a program's connection to its search: a socket's descriptor or path

LONGEST_LINE_BYTES = 2**25  # a deep recursion's traceback takes 1 MB


class LineSplitter:
    """Splits bytes into lines; raises `ValueError` above `LONGEST_LINE_BYTES`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Lines that a chunk completes."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            raise ValueError(f"a line of more than {LONGEST_LINE_BYTES:,} bytes")
        return whole
