"""What the driver asks of the place where trials run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bssearch.records import (
    MemoryRequest,
    MemoryUse,
    NoiseMeasurement,
    NoiseRequest,
    Observation,
    StepTime,
    StepTimeRequest,
    TrialOutcome,
    TrialRequest,
    TrialState,
    WorkloadDescription,
)


@dataclass(frozen=True, slots=True)
class Observed:
    """A running trial was evaluated."""

    number: int
    observation: Observation


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial ended, for whatever reason; its slot is free again. ``log`` is what the user's code printed in it."""

    number: int
    outcome: TrialOutcome
    log: str = ""


Event = Observed | Ended


class Executor(Protocol):
    """Runs trials in slots. Whatever happens to a trial, its `Ended` event comes exactly once."""

    slots: int

    @property
    def slots_apart(self) -> bool:
        """Whether each slot has a device of its own, so that trials side by side take nothing from each other."""
        ...

    def describe(self) -> WorkloadDescription:
        """Load the workload and return what it offers; raise `WorkloadError` or `LaunchError`."""
        ...

    def measure_step_time(self, request: StepTimeRequest) -> StepTime:
        """Time isolated steps while no trial runs; raise `LaunchError` if the worker dies of it."""
        ...

    def measure_memory(self, request: MemoryRequest, *, reserve: bool = False) -> MemoryUse:
        """Find out in a process of its own whether a micro-batch size fits; not while a trial runs.

        With ``reserve`` it must leave a little of the memory free, so that it fits into other processes, too.
        """
        ...

    def measure_noise(self, request: NoiseRequest) -> NoiseMeasurement:
        """Measure the gradient noise scale near a target while no trial runs."""
        ...

    def submit(self, request: TrialRequest) -> None:
        """Start a trial in a free slot; raise `LaunchError` if no worker can be started."""
        ...

    def stop(self, number: int, state: TrialState, reason: str) -> None:
        """Ask a running trial to end in ``state``; it does within one step. Unknown numbers are ignored.

        Of `TrialState.PAUSED` it ends so once it is saved, where its request names a ``checkpoint`` and that can be
        written; else as pruned.
        """
        ...

    def events(self, timeout: float) -> list[Event]:
        """Return what has happened since the last call, waiting up to ``timeout`` seconds for the first."""
        ...

    def kill(self) -> None:
        """End every worker at once, without waiting for its trial."""
        ...

    def close(self) -> None:
        """Let the workers go in peace; kill those that do not."""
        ...
