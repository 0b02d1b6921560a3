"""What a driver is told to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bssearch.records import Configuration, ParameterValue, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial to start; ``queued`` is the number of one that waits in the store, None for a new one.

    ``resumed`` is the number of one that was paused and goes on. Without ``stop_at_target`` it trains on to its limit.
    """

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    phase: Phase
    seed: int
    train_seconds_limit: float
    uncapped: bool = False
    retry_of: int | None = None
    queued: int | None = None
    resumed: int | None = None
    stop_at_target: bool = True
