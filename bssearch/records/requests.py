"""Plans of trials, requests to workers, and workload descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bssearch.records.measured import Environment
from bssearch.records.question import Configuration, ParameterValue, Phase, Target, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trial that continues from a checkpoint of a longer run for ``samples`` samples, in whole steps.

    ``start_samples`` is None if unknown. The learning rate rises over ``rise_samples`` if the optimizer starts fresh.
    """

    checkpoint: str
    samples: int
    start_samples: int | None = None
    rise_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The fields of a plan that a stored trial keeps.

    ``sampled`` has the coordinates in the space; None if the configuration is outside. ``uncapped``: no other trial set
    ``train_seconds_limit``. ``retry_of`` is the trial that this one repeats. ``expected_improvement`` is the sampler's
    expected gain from a further trial as a share of the incumbent's value; None if unknown.
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
        """Return the fields by name."""
        return {one.name: getattr(self, one.name) for one in fields(Planned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan(Planned):
    """A trial to run: new, ``queued`` or ``resumed`` (a stored trial's number).

    ``limit_state``: `CAPPED` if the incumbent set the limit, `EXHAUSTED` if the budget did. Without ``stop_at_target``
    the trial trains to its limit, and its time-to-target is the first crossing. The plan is dropped if a trial newer
    than ``after`` exists; None disables this check.
    """

    limit_state: TrialState = TrialState.EXHAUSTED
    stop_at_target: bool = True
    queued: int | None = None
    resumed: int | None = None
    after: int | None = None

    @property
    def known_number(self) -> int | None:
        """Return the number of a stored trial; None for a new one."""
        return self.resumed if self.resumed is not None else self.queued

    @property
    def is_new_search(self) -> bool:
        """True for a new search trial, not queued, resumed or retried."""
        is_stored = self.known_number is not None or self.retry_of is not None
        return self.phase in {Phase.SEARCH, Phase.GROWTH} and not is_stored

    @property
    def is_tested(self) -> bool:
        """True if the trial ends with an evaluation on the test part."""
        return self.phase not in {Phase.SEARCH, Phase.PROBE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Request to run the trial of a plan.

    A paused trial is saved to ``checkpoint``, and a resumed one loads it; without a path the trial ends as `PRUNED`. A
    ``branch`` continues from the user's file and ends after its samples.
    """

    number: int
    plan: TrialPlan
    target: Target
    checkpoint: str | None = None
    branch: Branch | None = None

    @property
    def resumes(self) -> bool:
        """True if the trial continues from its checkpoint."""
        return self.plan.resumed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRequest:
    """Request to time steps and one evaluation of a configuration, alone on its device.

    Timing ends when half the 95 % interval of the median is within ``precision`` (relative), or after
    ``seconds_limit``. With ``trial_train_seconds`` steps are timed between evaluations, as in a trial of that length;
    otherwise back to back.
    """

    configuration: Configuration
    threads: int = 1
    trial_train_seconds: float | None = None
    precision: float = 0.02
    seconds_limit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Request for three optimizer steps and an evaluation in a fresh worker.

    With ``reserve`` some memory must stay free so that the size fits in other processes too.
    """

    configuration: Configuration
    threads: int = 1
    reserve: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """Request to train toward a target and measure the gradient noise scale near it.

    Training ends at ``train_seconds_limit`` at the latest, the measurement at ``noise_seconds_limit``.
    """

    configuration: Configuration
    seed: int
    target: Target
    train_seconds_limit: float
    noise_seconds_limit: float
    eval_every_steps: int
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """Bounds of a metric (None = unbounded) and its value at chance.

    A ``reported`` metric is shown beside the target's for the recommended configuration, on the test part.
    """

    low: float | None = None
    high: float | None = None
    chance: float | None = None
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Description of a freshly initialised model.

    ``parameters`` counts trainable ones, None if an external program hides them. ``initial_metrics`` are validation
    metrics before the first step, None if not finite.
    """

    parameters: int | None
    batch_norm_layers: int
    initial_metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDescription:
    """Description of a loaded workload.

    Sample counts are None if an external program hides them. ``notice`` is a sentence on how its trials run, if needed.
    """

    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    metrics: Mapping[str, MetricInfo]
    environment: Environment
    model: ModelDescription
    tokens_per_sample: int | None = None
    notice: str | None = None
