"""What was measured: of a trial as it runs and when it has ended, of steps, of memory, of gradient noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from bssearch.records.question import Configuration, TrialState

COULD_NOT_PAUSE = "could not be paused"
"""Stands in the reason of a trial that was to be paused and could not be saved."""

REFUSED = "refused: "
"""The reason of a failed trial begins with it if the spec does not allow its configuration: nothing was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One evaluation during a trial; ``loss`` is the mean since the last.

    ``train_seconds`` exclude evaluation and, where one thread of the CPU does the work and the kernel tells, the waits
    for a CPU: by them trials race, and by them the target is reached.
    """

    step: int
    samples: int
    train_seconds: float
    metric: float
    loss: float | None
    learning_rate: float


class MemoryBasis(StrEnum):
    """What the peak memory of a trial is the peak of.

    ``device``: what tensors held on a GPU. ``resident``: how far the resident set of the trial's process grew past
    what it was when the trial's model was made, by the kernel's high-water mark. ``resident_sampled``: the same from
    samples of the resident set, where the mark cannot be reset; a peak between two samples is missed.
    """

    DEVICE = "device"
    RESIDENT = "resident"
    RESIDENT_SAMPLED = "resident_sampled"


class SecondsBasis(StrEnum):
    """Whose the train seconds of a trial are where bssearch did not measure them: of any program.

    ``reported``: the program's own. ``wall``: from its first reported step on, evaluation and all else included.
    """

    REPORTED = "reported"
    WALL = "wall"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """The gradient noise scale tr Σ / ‖G‖² in samples, with its 95 % interval; None where it was not measured.

    Where ‖G‖² cannot be told from zero ``scale`` and ``high`` are None: the scale is ``low`` or more. The ``adam``
    figures are of gradients preconditioned as Adam does it (None under other optimizers). ``passes`` counts the
    independent measurements behind them, which took ``seconds``. ``trace`` and ``square`` are their mean estimates of
    tr Σ and ‖G‖², known from the first pass on: too few passes for an interval are pooled over trials by these.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a device's own counters say of a trial; None where there are none, never 0.

    ``energy_joules`` and ``mean_power_watts`` are of the whole device in the train segments, ``mean_clock_mhz`` is the
    mean of the streaming multiprocessors' clock at the evaluations, and ``throttle_reasons`` lists what slowed the
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
    apart. ``undelayed_train_seconds`` are the train seconds less those that the thread waited for a CPU, where one did
    the work, and ``reference_seconds`` is what a small fixed kernel took meanwhile (`bssearch.training.contention`).
    ``host_bound_share`` is the share of the train seconds, 0 to 1, in which the host did not wait for a CUDA device,
    see `bssearch.training.clock.CudaClock.host_bound_share`; None on the CPU and in a loop of the user's own.
    The crossing of the target is kept as the interval (last miss, first hit); ``time_to_target_s`` and
    ``steps_to_target`` are interpolated inside it by the same fraction. Without a crossing the last miss is the last
    evaluation: all that is known of the time to the target is that it is longer. ``tokens`` are those of the samples
    seen, where the workload says how many a sample has. ``data_placement`` says where the training part lay,
    ``device`` or ``host``; ``further_test_metrics`` are those that the workload reports beside the target's, on the
    test part, None where there are none; ``skipped_steps`` counts the steps that fp16's loss scaling left out, None in
    other precisions; ``peak_memory_basis`` says what ``peak_memory_bytes`` is the peak of, None where there is no peak;
    ``data_seconds`` are those train seconds in which a loop of the user's own waited for data, and ``seconds_basis``
    says whose the train seconds are, None where bssearch measured them; ``warnings`` are sentences on what makes the
    figures less than they seem. ``device`` is where the trial's slot trained it, such as ``cuda:1``, and
    ``device_uuid`` which one of all devices that is, as the driver of an NVIDIA GPU names it; None on the CPU.
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


@dataclass(frozen=True, slots=True)
class TrialObserved:
    """A running trial was evaluated: a worker's message, which driver, engine and boards get as it is."""

    number: int
    observation: Observation


@dataclass(frozen=True, slots=True)
class TrialStop:
    """A running trial is to end in a state within one step: paused, pruned, capped or cancelled."""

    number: int
    state: TrialState
    reason: str


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has ended: a worker's message. ``log`` is the output of the user's code during the trial.

    A ``broken`` worker (its device failed) can run no other trial.
    """

    number: int
    outcome: TrialOutcome
    log: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one optimizer step: the median, and its 95 % interval.

    ``settled`` says whether the interval came within the asked precision before the time was up.
    ``undelayed_step_seconds`` are without waits for a CPU, if one thread does the work; ``reference_seconds`` are those
    of a small fixed kernel meanwhile. ``host_bound_share`` is as in `TrialOutcome`. ``contended``: another program used
    the device, as ``reason`` says.
    """

    batch_size: int
    micro_batch_size: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime(Timing):
    """The time of a step and of one evaluation, or ``out_of_memory``, with the ``reason``.

    ``update_seconds`` is the part of a step that is done once whatever the accumulation.
    """

    evaluation_seconds: float | None
    peak_memory_bytes: int | None
    out_of_memory: bool = False
    update_seconds: float | None = None

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
class Visit(Timing):
    """The step time of a batch size as one visit found it.

    A ``visit`` is a round over batch sizes, one soon after the other: a slow machine slows all of them.
    """

    visit: int
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeError:
    """How far a step time from several visits may be off: standard errors of its logarithm.

    ``own`` is the batch size's, with its degrees of ``freedom``; ``common`` is of all batch sizes alike, and in no
    ratio of two. Both come from the differences between visits.
    """

    own: float
    common: float
    freedom: float
    visits: int


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
class Environment:
    """Where trials ran. Seconds compare only between equal fingerprints.

    ``device_memory_bytes`` is what the device has, or the smaller limit that was set. ``workload_revision`` is the
    digest of the workload's file, ``git_revision`` the commit of the repository it lies in (with ``+`` where that file
    differs from it), and ``git_dirty`` says whether any file that the repository tracks does; None where nobody knows.
    ``libraries`` are further versions, each ``name version`` in the order of their names: those that bssearch stands
    on, and those that the workload imports and that decide what it trains; none where an older bssearch ran.
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
        """Return the versions of `libraries` by name."""
        return {name: version for name, _, version in (one.partition(" ") for one in self.libraries)}

    @property
    def fingerprint(self) -> str:
        """Return what binds a study to one kind of device: its name, the precision and the compile mode."""
        return f"{self.device_name} · {self.precision} · compile {self.compile_mode}"


def outcome_fields(outcome: TrialOutcome) -> dict[str, Any]:
    """Return an outcome as one flat mapping: the figures of the noise scale and the device stand beside the others."""
    fields = asdict(outcome)
    noise, use = fields.pop("noise"), fields.pop("device_use")
    return {**fields, **{f"noise_{name}": value for name, value in noise.items()}, **use}


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchMeasurement:
    """How a branch of a longer run ended: the target's metric at the ``checkpoint``, and the mean at the branch's end.

    ``metric`` is None where it diverged. ``digest`` is that of all that decides its end: the content of the checkpoint,
    and the request. ``start_samples`` are those seen at the checkpoint, None where nobody says; ``samples`` those of
    the branch; ``learning_rate`` is the peak, which a schedule multiplies.
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
