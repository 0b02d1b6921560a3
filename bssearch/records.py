"""The values that every layer speaks: requests, observations, outcomes and what is stored of them.

Units are in the names: seconds are floats, memory is in bytes, ``steps`` are optimizer steps, ``samples`` are
training samples seen. All records are frozen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

ParameterValue = bool | int | float | str | None


class Goal(StrEnum):
    """Which way the metric is better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"

    @property
    def sign(self) -> str:
        """The sign between a metric and its target."""
        return "≥" if self is Goal.MAXIMIZE else "≤"


class Objective(StrEnum):
    """What the optimal batch size has the least of; `METRIC_IN_BUDGET`: the best of."""

    TIME_TO_TARGET = "time_to_target"
    SAMPLES_TO_TARGET = "samples_to_target"
    COST_TO_TARGET = "cost_to_target"
    ENERGY_TO_TARGET = "energy_to_target"
    METRIC_IN_BUDGET = "metric_in_budget"


class Phase(StrEnum):
    """Why a trial runs."""

    SEARCH = "search"
    CONFIRM = "confirm"
    AUDIT = "audit"
    PROBE = "probe"


class TrialState(StrEnum):
    """Where a trial stands, or how it ended. Only `REACHED` has a time-to-target.

    `PAUSED` is an end like `PRUNED`, from which a trial may yet go on.
    """

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    REACHED = "reached"
    PRUNED = "pruned"
    CAPPED = "capped"
    EXHAUSTED = "exhausted"
    OOM = "oom"
    DIVERGED = "diverged"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        """Whether the trial has ended; one that is paused may go on."""
        return self not in {TrialState.QUEUED, TrialState.RUNNING}

    @property
    def is_censored(self) -> bool:
        """Whether the trial was stopped before its target: its time-to-target is longer than what it ran."""
        return self in {TrialState.PAUSED, TrialState.PRUNED, TrialState.CAPPED, TrialState.EXHAUSTED}

    @property
    def is_missing(self) -> bool:
        """Whether the trial says nothing about its configuration and costs no budget."""
        return self in {TrialState.FAILED, TrialState.LOST, TrialState.CANCELLED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The metric value to reach on the validation part."""

    metric: str
    value: float
    goal: Goal = Goal.MAXIMIZE

    def gain(self, metric: float) -> float:
        """Return the metric with its sign set so that more is better."""
        return metric if self.goal is Goal.MAXIMIZE else -metric

    def shortfall(self, metric: float) -> float:
        """Return how far the metric is from the target: positive when missed, zero or less when reached."""
        return self.gain(self.value) - self.gain(metric)

    def is_met_by(self, metric: float) -> bool:
        """Return whether the metric reaches the target; NaN never does."""
        return self.shortfall(metric) <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one trial trains with, as really run: derived values, not the coordinates that were sampled.

    ``batch_size`` is the effective one: micro-batch × accumulation steps × world size.
    ``parameters`` holds the optimizer's and the schedule's own (momentum, beta1, horizon_samples, clip_norm, …).
    """

    batch_size: int
    learning_rate: float
    micro_batch_size: int
    accumulation_steps: int = 1
    world_size: int = 1
    warmup_epochs: float = 0.0
    weight_decay: float = 0.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    optimizer: str = "sgd"
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return a short digest that two runs share exactly when they run the same configuration."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:12]

    def in_micro_batches(self, micro_batch_size: int) -> Configuration:
        """Return what trains the same in micro-batches of another size, which divides the batch size."""
        steps = self.batch_size // (micro_batch_size * self.world_size)
        return replace(self, micro_batch_size=micro_batch_size, accumulation_steps=steps)

    def trains_like(self, other: Configuration) -> bool:
        """Return whether two configurations differ at most in how they split a batch into micro-batches."""
        return self.in_micro_batches(1) == other.in_micro_batches(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How a study's steps are computed: the same for all its trials, probes and slots.

    ``precision`` is ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``auto`` (bf16 on a CUDA device that has it, else fp32);
    ``compile`` is ``none``, ``default`` or ``reduce-overhead``; ``fused`` optimizers where None on CUDA only.
    ``data`` keeps the training part on the ``device``, on the ``host`` (streamed by a pinned loader of
    ``loader_workers`` processes), or, with ``auto``, on the device where it fits. ``ghost_batch_size`` is the number of
    samples over which batch normalisation takes its statistics, None for the whole micro-batch. ``measure_noise``
    measures the gradient noise scale beside the training.
    """

    precision: str = "auto"
    compile: str = "none"
    channels_last: bool = False
    fused: bool | None = None
    activation_checkpointing: bool = False
    deterministic: bool = False
    ghost_batch_size: int | None = None
    data: str = "auto"
    loader_workers: int = 2
    measure_noise: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """All that a worker needs to run one trial.

    ``train_seconds_limit`` ends the trial in the state ``limit_state``: `CAPPED` where the incumbent set the limit,
    `EXHAUSTED` where it is the whole budget of a trial. Without ``stop_at_target`` the trial goes on to its limit after
    it has reached the target, and its time-to-target is that of the first crossing.

    ``checkpoint`` is the file to which the trial is saved where it is stopped as `PAUSED`; without one it ends as
    `PRUNED` then. With ``resumes`` it goes on from that file.
    """

    number: int
    configuration: Configuration
    seed: int
    target: Target
    train_seconds_limit: float
    limit_state: TrialState
    eval_every_steps: int
    evaluate_test: bool = False
    stop_at_target: bool = True
    threads: int = 1
    checkpoint: str | None = None
    resumes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One evaluation during a trial; ``train_seconds`` excludes evaluation, ``loss`` is the mean since the last."""

    step: int
    samples: int
    train_seconds: float
    metric: float
    loss: float | None
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """The gradient noise scale tr Σ / ‖G‖² in samples, with its 95 % interval; None where it was not measured.

    Where ‖G‖² cannot be told from zero ``scale`` and ``high`` are None: the scale is ``low`` or more. The ``adam``
    figures are of gradients preconditioned as Adam does it (None under other optimizers). ``passes`` counts the
    independent measurements behind them.
    """

    scale: float | None = None
    low: float | None = None
    high: float | None = None
    adam_scale: float | None = None
    adam_low: float | None = None
    adam_high: float | None = None
    passes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a device's own counters say of a trial; None where there are none, never 0.

    ``energy_joules`` and ``mean_power_watts`` are of the whole device over the trial's wall time, ``mean_clock_mhz`` is
    the mean of the streaming multiprocessors' clock at the evaluations, and ``throttle_reasons`` lists what slowed the
    device down (comma-separated; empty where nothing did).
    """

    energy_joules: float | None = None
    mean_power_watts: float | None = None
    mean_clock_mhz: float | None = None
    throttle_reasons: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """How a trial ended and what it measured; None where it was not measured.

    train + evaluation + warm-up + other seconds are four ledgers, each timed on its own; ``wall_seconds`` is timed
    apart. The crossing of the target is kept as the interval (last miss, first hit); ``time_to_target_s`` and
    ``steps_to_target`` are interpolated inside it by the same fraction. Without a crossing the last miss is the last
    evaluation: all that is known of the time to the target is that it is longer. ``tokens`` are those of the samples
    seen, where the workload says how many a sample has. ``data_placement`` says where the training part lay, ``device``
    or ``host``; ``skipped_steps`` counts the steps that fp16's loss scaling left out, None in other precisions;
    ``warnings`` are sentences on what makes the figures less than they seem.
    """

    state: TrialState
    reason: str
    steps: int = 0
    samples: int = 0
    tokens: int | None = None
    train_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    warmup_seconds: float = 0.0
    other_seconds: float = 0.0
    wall_seconds: float = 0.0
    time_to_target_s: float | None = None
    steps_to_target: int | None = None
    last_miss_step: int | None = None
    last_miss_seconds: float | None = None
    first_hit_step: int | None = None
    first_hit_seconds: float | None = None
    final_metric: float | None = None
    best_metric: float | None = None
    test_metric: float | None = None
    peak_memory_bytes: int | None = None
    dropped_samples_per_epoch: int | None = None
    contended: bool = False
    skipped_steps: int | None = None
    data_placement: str | None = None
    warnings: tuple[str, ...] = ()
    traceback: str | None = None
    noise: GradientNoise = GradientNoise()
    device_use: DeviceUse = DeviceUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where trials ran. Seconds compare only between equal fingerprints.

    ``device_memory_bytes`` is what the device has, or the smaller limit that was set. ``workload_revision`` is the
    digest of the workload's file, ``git_revision`` the commit of the repository it lies in (with ``+`` where that file
    differs from it).
    """

    device_name: str
    device_type: str
    device_memory_bytes: int | None
    precision: str
    compile_mode: str
    torch_version: str
    cuda_version: str | None
    driver_version: str | None
    python_version: str
    host: str
    workload_revision: str | None
    cudnn_version: str | None = None
    git_revision: str | None = None

    @property
    def fingerprint(self) -> str:
        """Return what binds a study to one kind of device: its name, the precision and the compile mode."""
        return f"{self.device_name} · {self.precision} · compile {self.compile_mode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What is known of a metric: its bounds (None = unbounded) and the value that guessing gives."""

    low: float | None = None
    high: float | None = None
    chance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a worker found in a freshly initialised model.

    ``parameters`` counts the trainable ones, ``batch_norm_layers`` the layers that normalise over the batch;
    ``initial_metrics`` are those of the validation part before the first step, None where one is not finite.
    """

    parameters: int
    batch_norm_layers: int
    initial_metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDescription:
    """What a worker found when it loaded the workload; ``tokens_per_sample`` where the workload counts tokens."""

    train_samples: int
    validation_samples: int
    test_samples: int
    metrics: Mapping[str, MetricInfo]
    environment: Environment
    model: ModelDescription
    tokens_per_sample: int | None = None


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
class StepTime:
    """Seconds of one optimizer step and one evaluation: medians; or ``out_of_memory``.

    ``step_seconds_low`` and ``step_seconds_high`` are the 95 % interval of the step's median; ``settled`` says whether
    it came within the asked precision before the time was up. ``update_seconds`` is the part of a step that is done
    once whatever the accumulation. ``contended`` where something else used the device; ``reason`` says what, or why
    memory ran out.
    """

    batch_size: int
    micro_batch_size: int
    step_seconds: float | None
    evaluation_seconds: float | None
    steps_timed: int
    peak_memory_bytes: int | None
    out_of_memory: bool = False
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    update_seconds: float | None = None
    settled: bool | None = None
    contended: bool = False
    reason: str | None = None

    @classmethod
    def where_memory_ran_out(cls, configuration: Configuration) -> StepTime:
        """Return the answer for a configuration that does not fit."""
        return StepTime(
            batch_size=configuration.batch_size,
            micro_batch_size=configuration.micro_batch_size,
            step_seconds=None,
            evaluation_seconds=None,
            steps_timed=0,
            peak_memory_bytes=None,
            out_of_memory=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord(StepTime):
    """A stored step time and the evaluation cadence fixed from it; None where the batch size does not fit."""

    eval_every_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Ask a fresh worker for three whole optimizer steps and an evaluation at a configuration's micro-batch size."""

    configuration: Configuration
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What a micro-batch size needed: ``peak_memory_bytes`` where it is known, ``reason`` where it does not fit.

    On a GPU the peak is what tensors held; on the CPU it is the resident memory of the whole process.
    """

    micro_batch_size: int
    fits: bool
    peak_memory_bytes: int | None
    reason: str | None = None


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
class NoiseMeasurement:
    """A gradient noise scale, and where in the training it was measured: the ``step`` and the metric there.

    ``reason`` says why it was not near the target, None where it was.
    """

    batch_size: int
    micro_batch_size: int
    step: int
    metric: float
    noise: GradientNoise
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One stored trial. ``outcome`` is None until it has finished.

    ``sampled`` is what the sampler chose, in the space's own coordinates (None for a configuration that lies outside
    the space); ``evidence`` marks a trial that ran to the wider limit; ``steps_x_step_time_s`` is steps-to-target
    times the step time measured in isolation.
    """

    number: int
    state: TrialState
    phase: Phase
    evidence: bool
    configuration: Configuration
    sampled: Mapping[str, ParameterValue] | None
    seed: int
    train_seconds_limit: float
    eval_every_steps: int
    threads: int
    retry_of: int | None
    lease_owner: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    ended_at: datetime | None
    steps_x_step_time_s: float | None
    outcome: TrialOutcome | None

    @property
    def is_imported(self) -> bool:
        """Return whether the trial was made elsewhere: it began and ended in the moment of its import."""
        return self.ended_at is not None and self.created_at == self.ended_at


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """One stored study; ``spec`` is the whole spec as JSON values, ``environment`` the device it is bound to.

    An archived study is left out of lists and takes no more trials.
    """

    name: str
    spec: Mapping[str, object]
    spec_hash: str
    objective: str
    target: Target
    created_by: str
    created_at: datetime
    archived_at: datetime | None = None
    environment: Environment | None


def outcome_fields(outcome: TrialOutcome) -> dict[str, Any]:
    """Return an outcome as one flat mapping: the figures of the noise scale and the device stand beside the others."""
    fields = asdict(outcome)
    noise, use = fields.pop("noise"), fields.pop("device_use")
    return {**fields, **{f"noise_{name}": value for name, value in noise.items()}, **use}


def to_json(record: object) -> str:
    """Return a record as compact JSON with sorted keys; infinities and NaN are refused."""
    return json.dumps(asdict(record), sort_keys=True, separators=(",", ":"), allow_nan=False)  # type: ignore[call-overload]
