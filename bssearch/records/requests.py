"""Plans of trials, requests to workers, and workload descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bssearch.records.measured import Environment
from bssearch.records.question import Configuration, ParameterValue, Phase, Target, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trial that continues from a checkpoint of a longer run for ``samples``, in whole steps.

    A fresh optimizer's learning rate rises over ``rise_samples``.
    """

    checkpoint: str
    samples: int
    start_samples: int | None = None
    rise_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Plan fields that a stored trial keeps.

    ``sampled``: coordinates, None if outside the space. ``uncapped``: no other trial set ``train_seconds_limit``.
    """

    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    phase: Phase
    seed: int
    train_seconds_limit: float
    eval_every_steps: int = 1
    threads: int = 1
    uncapped: bool = False
    retry_of: int | None = None
    expected_improvement: float | None = None

    @property
    def kept(self) -> dict[str, Any]:
        """Fields by name."""
        return {one.name: getattr(self, one.name) for one in fields(Planned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan(Planned):
    """A trial to run: new, ``queued`` or ``resumed`` (stored number).

    ``limit_state``: `CAPPED` if the incumbent set the limit, `EXHAUSTED` if the budget did. If a trial newer than
    ``after`` exists, the plan is dropped.
    """

    limit_state: TrialState = TrialState.EXHAUSTED
    stop_at_target: bool = True
    queued: int | None = None
    resumed: int | None = None
    after: int | None = None

    @property
    def known_number(self) -> int | None:
        """Stored trial's number; None if new."""
        return self.resumed if self.resumed is not None else self.queued

    @property
    def is_new_search(self) -> bool:
        """True for a search trial not queued, resumed or retried."""
        is_stored = self.known_number is not None or self.retry_of is not None
        return self.phase in {Phase.SEARCH, Phase.GROWTH} and not is_stored

    @property
    def is_tested(self) -> bool:
        """True if the trial ends with a test evaluation."""
        return self.phase not in {Phase.SEARCH, Phase.PROBE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Request to run a trial.

    A paused trial saves ``checkpoint``, a resumed one loads it; without a path the trial ends as `PRUNED`. A ``branch``
    continues from the user's file.
    """

    number: int
    plan: TrialPlan
    target: Target
    checkpoint: str | None = None
    branch: Branch | None = None

    @property
    def resumes(self) -> bool:
        """True if it continues from its checkpoint."""
        return self.plan.resumed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRequest:
    """Request to time steps and one evaluation.

    Ends when half the 95 % interval of the median is within ``precision`` (relative), or after ``seconds_limit``. With
    ``trial_train_seconds`` steps are timed between evaluations; otherwise back to back.
    """

    configuration: Configuration
    threads: int = 1
    trial_train_seconds: float | None = None
    precision: float = 0.02
    seconds_limit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Request for three optimizer steps and an evaluation in a fresh worker.

    With ``reserve`` some memory must stay free, so that the size also fits in other processes.
    """

    configuration: Configuration
    threads: int = 1
    reserve: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """Request to train toward a target and measure the gradient noise scale near it."""

    configuration: Configuration
    seed: int
    target: Target
    train_seconds_limit: float
    noise_seconds_limit: float
    eval_every_steps: int
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """Bounds of a metric and its value at chance; ``reported``: on the test part for the recommendation."""

    low: float | None = None
    high: float | None = None
    chance: float | None = None
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A freshly initialised model; ``parameters`` counts trainable ones."""

    parameters: int | None
    batch_norm_layers: int
    initial_metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDescription:
    """A loaded workload; external programs may hide sample counts."""

    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    metrics: Mapping[str, MetricInfo]
    environment: Environment
    model: ModelDescription
    tokens_per_sample: int | None = None
    notice: str | None = None
