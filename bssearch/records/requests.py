"""Plans of trials, requests to workers, descriptions of workloads, and stored rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from bssearch.records.measured import REFUSED, Environment, StepTime, StepTimeError, TrialOutcome, field_values
from bssearch.records.question import Configuration, ParameterValue, Phase, Target, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trial that continues from a longer run's checkpoint for ``samples``, in whole steps.

    A fresh optimizer's learning rate rises over ``rise_samples``.
    """

    checkpoint: str
    samples: int
    start_samples: int | None = None
    rise_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The fields of a plan that a stored trial keeps.

    Attributes:
        sampled: The configuration's coordinates in the search space, if known.
        uncapped: True if the pruner does not pause, prune or cap the running trial.
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
        return {one.name: getattr(self, one.name) for one in fields(Planned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan(Planned):
    """A new trial to run, or a stored trial with the number ``queued`` or ``resumed``.

    ``limit_state`` is `EXHAUSTED` if the budget set the time limit, else `CAPPED`. If a trial newer than trial
    ``after`` exists, the driver drops the plan.
    """

    limit_state: TrialState = TrialState.EXHAUSTED
    stop_at_target: bool = True
    queued: int | None = None
    resumed: int | None = None
    after: int | None = None

    @property
    def known_number(self) -> int | None:
        return self.resumed if self.resumed is not None else self.queued

    @property
    def is_new_search(self) -> bool:
        """True for a search or growth trial that is not queued, resumed or retried."""
        is_stored = self.known_number is not None or self.retry_of is not None
        return self.phase in {Phase.SEARCH, Phase.GROWTH} and not is_stored

    @property
    def is_tested(self) -> bool:
        """True if the trial's phase allows an evaluation on the test part."""
        return self.phase not in {Phase.SEARCH, Phase.PROBE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """A request to run a trial.

    A paused trial saves ``checkpoint``, and a resumed trial loads ``checkpoint``. If ``checkpoint`` is None, a pause
    ends the trial as `PRUNED`. A ``branch`` continues from the user's checkpoint.
    """

    number: int
    plan: TrialPlan
    target: Target
    checkpoint: str | None = None
    branch: Branch | None = None

    @property
    def resumes(self) -> bool:
        return self.plan.resumed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRequest:
    """A request to time steps and one evaluation.

    The timing ends when the median's 95 % interval is within ± ``precision`` (relative), or after ``seconds_limit``,
    which a slow core extends. If ``trial_train_seconds`` is None, steps run back to back, else between evaluations.
    """

    configuration: Configuration
    threads: int = 1
    trial_train_seconds: float | None = None
    precision: float = 0.02
    seconds_limit: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """A request to measure the memory of steps and evaluations in a fresh worker.

    If ``reserve`` is set, some memory must stay free.
    """

    configuration: Configuration
    threads: int = 1
    reserve: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRequest:
    """A request to train toward a target and measure the gradient noise scale near the target."""

    configuration: Configuration
    seed: int
    target: Target
    train_seconds_limit: float
    noise_seconds_limit: float
    eval_every_steps: int
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """Bounds of a metric and its value at chance.

    An evaluation on the test part measures the target's metric and each ``reported`` metric.

    Example: ``metrics = {"accuracy": bssearch.MetricInfo(low=0.0, high=1.0, chance=0.1)}``
    """

    low: float | None = None
    high: float | None = None
    chance: float | None = None
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A freshly initialised model. ``parameters`` counts the trainable parameters."""

    parameters: int | None
    batch_norm_layers: int
    initial_metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDescription:
    """A loaded workload. Sample counts are None if the user's program has the training loop.

    ``starts_at_peak`` is True if a program's first step has the full learning rate, and None if unknown.
    """

    train_samples: int | None
    validation_samples: int | None
    test_samples: int | None
    metrics: Mapping[str, MetricInfo]
    environment: Environment
    model: ModelDescription
    tokens_per_sample: int | None = None
    notice: str | None = None
    starts_at_peak: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A driver's right to a trial, which expires ``seconds`` after the last heartbeat.

    ``user`` started the driver, and ``spec`` is the digest of the driver's spec. ``claim`` is the
    task, if any, that the driver must have claimed.
    """

    owner: str
    seconds: float
    user: str | None = None
    spec: str | None = None
    claim: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord(StepTime):
    """A stored step time and evaluation cadence, which are None if the training fails.

    ``error`` is None unless repeated timings (visits) gave the step time.
    """

    eval_every_steps: int | None
    error: StepTimeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord(Planned):
    """A stored trial.

    Each read computes ``steps_x_step_time_s`` = steps to target × isolated step time.
    """

    number: int
    state: TrialState
    lease_owner: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    ended_at: datetime | None
    steps_x_step_time_s: float | None
    outcome: TrialOutcome | None
    started_by: str | None = None
    spec_digest: str | None = None

    @classmethod
    def planned(cls, plan: Planned, *, number: int, lease: Lease | None, created_at: datetime) -> TrialRecord:
        return cls(
            number=number,
            state=TrialState.QUEUED if lease is None else TrialState.RUNNING,
            lease_owner=None if lease is None else lease.owner,
            lease_expires_at=None if lease is None else created_at + timedelta(seconds=lease.seconds),
            created_at=created_at,
            ended_at=None,
            steps_x_step_time_s=None,
            outcome=None,
            started_by=None if lease is None else lease.user,
            spec_digest=None if lease is None else lease.spec,
            **plan.kept,
        )

    @property
    def is_imported(self) -> bool:
        """True for an imported trial, whose start and end are equal."""
        return self.ended_at is not None and self.created_at == self.ended_at

    @property
    def is_refused(self) -> bool:
        return self.state is TrialState.FAILED and self.outcome is not None and self.outcome.reason.startswith(REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewStudy:
    """A study to store. ``spec_hash`` identifies the study's question, the fields that no resume may change."""

    name: str
    spec: Mapping[str, object]
    spec_hash: str
    objective: str
    target: Target
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord(NewStudy):
    """A stored study, bound to the device of ``environment``."""

    created_at: datetime
    archived_at: datetime | None = None
    environment: Environment | None

    @classmethod
    def created(cls, study: NewStudy, created_at: datetime, environment: Environment | None = None) -> StudyRecord:
        return cls(created_at=created_at, environment=environment, **field_values(study))

    @property
    def workload(self) -> str:
        return str(self.spec.get("workload", ""))

    @property
    def mark(self) -> str:
        """16 hex digits that identify the study in any database."""
        origin = f"{self.created_at.isoformat()} {self.created_by} {self.spec_hash}"
        return hashlib.sha256(origin.encode()).hexdigest()[:16]


def spec_digest(spec: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def train_seconds_of(trials: Iterable[TrialRecord]) -> float:
    return math.fsum(trial.outcome.train_seconds for trial in trials if trial.outcome is not None)


def trainings_of(trials: Iterable[TrialRecord], seconds: float) -> float:
    """Return the train seconds of all trials divided by the ``seconds`` of one training.

    Known waits for a CPU do not count.
    """
    outcomes = [trial.outcome for trial in trials if trial.outcome is not None]
    return math.fsum(one.undelayed_train_seconds or one.train_seconds for one in outcomes) / seconds
