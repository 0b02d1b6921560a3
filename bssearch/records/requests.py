"""Plans of trials, the requests that go to a worker, and the description of a loaded workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bssearch.records.measured import Environment
from bssearch.records.question import Configuration, ParameterValue, Phase, Target, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trial that goes on from a checkpoint of a longer run, for ``samples`` samples: whole steps of its batch size.

    ``start_samples`` are those that the run had seen there, None where nobody says. Over the first ``rise_samples`` the
    learning rate rises, for an optimizer that begins anew.
    """

    checkpoint: str
    samples: int
    start_samples: int | None = None
    rise_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The fields of a plan that a stored trial keeps.

    ``sampled`` has the coordinates in the space, None if the configuration is outside. ``train_seconds_limit`` ends the
    trial; with ``uncapped`` no other trial's time set that limit. ``retry_of`` is the trial that this one repeats.
    ``expected_improvement`` is the share of the incumbent's figure that the sampler expected a further trial to gain,
    None if unknown.
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
    """A trial to run: a new one, or a stored one that is ``queued`` or paused and ``resumed`` (its number).

    The limit ends the trial in ``limit_state``: `CAPPED` if the incumbent set the limit, `EXHAUSTED` if it is the whole
    budget of a trial. Without ``stop_at_target`` the trial trains past the target to its limit, and its time-to-target
    is that of the first crossing. ``after`` is the newest trial known to the planner: if there is a newer one the plan
    is not started; None: start it anyway.
    """

    limit_state: TrialState = TrialState.EXHAUSTED
    stop_at_target: bool = True
    queued: int | None = None
    resumed: int | None = None
    after: int | None = None

    @property
    def known_number(self) -> int | None:
        """Return the number of a stored trial, None for a new one."""
        return self.resumed if self.resumed is not None else self.queued

    @property
    def is_new_search(self) -> bool:
        """Return whether the trial is a new one of the search, not a stored one that is queued, resumed or retried."""
        is_stored = self.known_number is not None or self.retry_of is not None
        return self.phase in {Phase.SEARCH, Phase.GROWTH} and not is_stored

    @property
    def is_tested(self) -> bool:
        """Return whether the trial is evaluated on the test part at its end."""
        return self.phase not in {Phase.SEARCH, Phase.PROBE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """What a worker needs to run the trial of a plan.

    A paused trial is saved to the file ``checkpoint``, and a resumed one continues from it; without a file the trial
    ends as `PRUNED` instead. A ``branch`` continues from the user's own file and ends with its samples.
    """

    number: int
    plan: TrialPlan
    target: Target
    checkpoint: str | None = None
    branch: Branch | None = None

    @property
    def resumes(self) -> bool:
        """Return whether the trial continues from its checkpoint."""
        return self.plan.resumed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRequest:
    """Ask a worker to time optimizer steps and one evaluation of a configuration, alone on its device.

    Steps are timed until the 95 % interval of their median is within ``precision`` of it (half its width), or until
    ``seconds_limit`` of them have been timed. With ``trial_train_seconds``, the longest that a trial trains, they are
    timed between evaluations, as often as such a trial is evaluated; without, back to back.
    """

    configuration: Configuration
    threads: int = 1
    trial_train_seconds: float | None = None
    precision: float = 0.02
    seconds_limit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Ask a fresh worker for three whole optimizer steps and an evaluation at a configuration's micro-batch size.

    With ``reserve`` the size must leave a little of the memory free, so that it fits into other processes, too.
    """

    configuration: Configuration
    threads: int = 1
    reserve: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """Ask a worker to train a configuration toward a target and to measure the gradient noise scale near it.

    The training ends at ``train_seconds_limit`` at the latest, wherever it is then; the measurement at
    ``noise_seconds_limit``.
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
    """What is known of a metric: its bounds (None = unbounded) and the value that guessing gives.

    One that is ``reported`` is told beside the target's metric: of the recommended configuration, on the test part.
    """

    low: float | None = None
    high: float | None = None
    chance: float | None = None
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a worker found in a freshly initialised model.

    ``parameters`` counts the trainable ones, ``batch_norm_layers`` the layers that normalise over the batch;
    ``initial_metrics`` are those of the validation part before the first step, None where one is not finite. A program
    of the user's own keeps its model to itself: ``parameters`` is None, and metrics that it does not tell are missing.
    """

    parameters: int | None
    batch_norm_layers: int
    initial_metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDescription:
    """What a worker found when it loaded the workload; ``tokens_per_sample`` where the workload counts tokens.

    A program of the user's own keeps the numbers of its samples to itself: None. ``notice`` is a sentence on how its
    trials run, where there is something to know.
    """

    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    metrics: Mapping[str, MetricInfo]
    environment: Environment
    model: ModelDescription
    tokens_per_sample: int | None = None
    notice: str | None = None
