"""Measured values: observations, outcomes, step times, memory and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bssearch.records.question import Configuration, TrialState
from bssearch.records.text import storable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_TEST_METRICS = 1_000
LONGEST_NAME = 1_000  # characters of a metric's name
TRAINING = "training "  # begins the name of a further metric of training samples, instead of test samples

COULD_NOT_PAUSE = "could not be paused"  # reason of a trial whose checkpoint could not be saved

REFUSED = "refused: "  # start of the reason if the spec forbids a configuration

FIRST_LOSS = "the loss of the first step is"  # start of the reason if no update caused the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An evaluation. ``loss`` is the mean training loss since the previous evaluation.

    ``train_seconds`` exclude evaluation, except with `SecondsBasis.WALL`. If one CPU thread does the work,
    ``train_seconds`` also exclude waits for a CPU.
    """

    step: int
    samples: int
    train_seconds: float
    metric: float
    loss: float | None
    learning_rate: float


class MemoryBasis(StrEnum):
    """The method that measured peak memory.

    Attributes:
        DEVICE: Tensors on a GPU.
        RESIDENT: Growth of resident memory, by the kernel's high-water mark.
        RESIDENT_SAMPLED: Growth of resident memory by sampling, which misses short peaks.
    """

    DEVICE = "device"
    RESIDENT = "resident"
    RESIDENT_SAMPLED = "resident_sampled"


class SecondsBasis(StrEnum):
    """The basis of a program's train seconds: the program's report, or wall time since step 0, with evaluation."""

    REPORTED = "reported"
    WALL = "wall"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """The gradient noise scale tr Σ / ‖G‖² in the unit of batch sizes, with its 95 % interval.

    If ‖G‖² may be zero, ``scale`` and ``high`` stay None. Fields that begin with ``adam_`` describe gradients
    that Adam preconditions.

    Attributes:
        trace: Mean tr Σ over ``passes``.
        square: Mean ‖G‖² over ``passes``.
    """

    scale: float | None = None
    low: float | None = None
    high: float | None = None
    adam_scale: float | None = None
    adam_low: float | None = None
    adam_high: float | None = None
    passes: int | None = None
    trace: float | None = None
    square: float | None = None
    adam_trace: float | None = None
    adam_square: float | None = None
    seconds: float | None = None

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width / scale, infinite if the scale or a bound is unknown."""
        if self.scale is None or self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / (2 * self.scale) if self.scale > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Counters of the whole device during a trial. An unavailable counter is None, never 0."""

    energy_joules: float | None = None
    mean_power_watts: float | None = None
    mean_clock_mhz: float | None = None
    throttle_reasons: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The end and the measurements of a trial. Fields without a measurement are None.

    ``time_to_target_s`` and ``steps_to_target`` interpolate between the last miss and the first hit of `Crossing`. If
    no evaluation met the target, the last miss is the last evaluation, a lower bound.

    Attributes:
        undelayed_train_seconds: Train seconds minus waits for a CPU, if one thread did the work.
        reference_seconds: Time of a small fixed kernel during the trial (`bssearch.training.contention`).
        host_bound_share: See `CudaClock.host_bound_share`.
        skipped_steps: Steps that fp16 loss scaling skipped.
        data_seconds: Train seconds that a user's own loop waited for data.
        seconds_basis: None if bssearch measured the seconds.
    """

    state: TrialState
    reason: str
    steps: int = 0
    samples: int = 0
    tokens: int | None = None
    train_seconds: float = 0.0
    undelayed_train_seconds: float | None = None
    reference_seconds: float | None = None
    host_bound_share: float | None = None
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
    further_test_metrics: Mapping[str, float] | None = None
    peak_memory_bytes: int | None = None
    peak_memory_basis: MemoryBasis | None = None
    dropped_samples_per_epoch: int | None = None
    contended: bool = False
    skipped_steps: int | None = None
    data_placement: str | None = None
    data_seconds: float | None = None
    seconds_basis: SecondsBasis | None = None
    warnings: tuple[str, ...] = ()
    traceback: str | None = None
    noise: GradientNoise = GradientNoise()
    device_use: DeviceUse = DeviceUse()
    device: str | None = None
    device_uuid: str | None = None

    def __post_init__(self) -> None:
        # Clean texts here and not only in the database, so that an outcome equals the stored outcome.
        object.__setattr__(self, "reason", storable(self.reason))
        if self.traceback is not None:
            object.__setattr__(self, "traceback", storable(self.traceback))
        sentences = (" ".join(storable(one).split()) for one in self.warnings)
        object.__setattr__(self, "warnings", tuple(filter(None, sentences)))
        names = self.further_test_metrics or {}
        if len(names) > MOST_TEST_METRICS:
            raise ValueError(f"the trial has {len(names):,} test metrics; return at most {MOST_TEST_METRICS:,}")
        if (longest := max(names, key=len, default="")) and len(longest) > LONGEST_NAME:
            raise ValueError(
                f"the test metric {longest[:40]}… has {len(longest):,} characters; shorten the name to at most "
                f"{LONGEST_NAME:,}"
            )


@dataclass(frozen=True, slots=True)
class TrialObserved:
    """A new evaluation of a running trial."""

    number: int
    observation: Observation


@dataclass(frozen=True, slots=True)
class TrialStop:
    """A command to end a running trial within one step."""

    number: int
    state: TrialState
    reason: str


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """The end of a trial. A ``broken`` worker cannot run another trial."""

    number: int
    outcome: TrialOutcome
    log: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The seconds of one optimizer step, with the 95 % interval.

    ``settled`` is True if the interval reached the requested precision. `TrialOutcome` explains other fields.
    """

    batch_size: int
    micro_batch_size: int
    world_size: int = 1
    step_seconds: float | None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    undelayed_step_seconds: float | None = None
    reference_seconds: float | None = None
    host_bound_share: float | None = None
    steps_timed: int
    settled: bool | None = None
    contended: bool = False
    reason: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.batch_size == self.micro_batch_size * self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime(Timing):
    """The time of a step and of an evaluation.

    ``update_seconds`` is the part of a step that does not depend on accumulation.
    """

    evaluation_seconds: float | None
    peak_memory_bytes: int | None
    out_of_memory: bool = False
    update_seconds: float | None = None

    @classmethod
    def where_memory_ran_out(cls, configuration: Configuration) -> StepTime:
        return StepTime(
            batch_size=configuration.batch_size,
            micro_batch_size=configuration.micro_batch_size,
            world_size=configuration.world_size,
            step_seconds=None,
            evaluation_seconds=None,
            steps_timed=0,
            peak_memory_bytes=None,
            out_of_memory=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit(Timing):
    """The step time of a batch size in one ``visit``, a short timing that later visits repeat."""

    visit: int
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeError:
    """Standard errors of a log step time. ``common`` is equal at all batch sizes and cancels in ratios."""

    own: float
    common: float
    freedom: float
    visits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The peak memory of a micro-batch size."""

    micro_batch_size: int
    fits: bool
    peak_memory_bytes: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeasurement:
    """The gradient noise scale near the target. ``reason`` explains a measurement far from the target."""

    batch_size: int
    micro_batch_size: int
    step: int
    metric: float
    noise: GradientNoise
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the software of a trial. Seconds are comparable only if fingerprints are equal.

    Attributes:
        device_memory_bytes: The device's memory, or a smaller configured limit.
        workload_revision: Digest of the workload's file.
        git_revision: Commit, with a final ``+`` if the workload's file differs.
        git_dirty: True if the workload's file or a tracked file differs from the commit.
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
    git_dirty: bool | None = None
    libraries: tuple[str, ...] = ()

    @property
    def library_versions(self) -> dict[str, str]:
        return {name: version for name, _, version in (one.partition(" ") for one in self.libraries)}

    @property
    def fingerprint(self) -> str:
        """The device, precision and compile mode, equal within a study."""
        return f"{self.device_name} · {self.precision} · compile {self.compile_mode}"


def outcome_fields(outcome: TrialOutcome) -> dict[str, Any]:
    found = field_values(outcome)
    noise, device_use = field_values(found.pop("noise")), field_values(found.pop("device_use"))
    return {**found, **{f"noise_{name}": value for name, value in noise.items()}, **device_use}


def field_values(record: DataclassInstance) -> dict[str, Any]:
    """Return the field values by name, without copies."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchMeasurement:
    """The metric at a ``checkpoint`` and at the end of a branch. ``metric`` is None if the branch diverged.

    ``digest`` covers the checkpoint's content and the request.
    """

    digest: str
    checkpoint: str
    start_samples: int | None
    samples: int
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    seed: int
    start_metric: float | None
    metric: float | None
