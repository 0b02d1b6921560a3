"""The way to a first study, as questions: memory, priority, from scratch or fine-tuning, devices.

The decisions are those of the batch-size handbook's framework; what they come to is a spec that `start_spec` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.errors import LaunchError, UsageError
from bssearch.planning.given import check_count, check_finite, check_known, check_positive, check_text
from bssearch.planning.memory.devices import smallest_with
from bssearch.planning.memory.parameters import Format, Sharding, parameter_bytes
from bssearch.space.usual_rates import FINE_TUNING_FACTOR, SCRATCH_RATES

GIB, MIB = 2**30, 2**20

SAFE_SHARE = 0.8
"""The share of the memory that a plan fills: the handbook's 80 %. It is feasible, not optimal."""

TIGHT_SHARE = 0.5
SMALL_MICRO_BATCH = 16
"""Memory is the bound where what does not depend on the batch takes this share, or so few samples fit: choices."""

STAND_IN = "digits"
STAND_IN_SAMPLES = 1077
"""A shipped workload with its training samples, where the user names none: the spec runs as it is."""

TRIALS_PER_SIZE = 5
LIMIT_OVER_SECONDS = 3
"""Trials of each batch size, and the limit of a trial over the seconds of today's training: choices of the guide."""

Priority = Literal["speed", "accuracy", "cost", "memory"]
PRIORITIES: Mapping[Priority, str] = {
    "speed": "time_to_target",
    "accuracy": "metric_in_budget",
    "cost": "cost_to_target",
    "memory": "time_to_target",
}
"""What each priority minimises, or maximises."""

STARTS = ("scratch", "fine_tuning")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its default; of ``choices`` there may be any where None are given."""

    name: str
    text: str
    default: str | int | float
    choices: Sequence[str] | None = None


QUESTIONS = (
    Question("memory_gib", "Memory of a device, in GiB", 24.0),
    Question("parameters", "Parameters of the model", 25_000_000),
    Question("precision", "Precision", "bf16", PRECISIONS),
    Question("optimizer", "Optimizer", "adamw", tuple(SCRATCH_RATES)),
    Question("priority", "What comes first", "speed", tuple(PRIORITIES)),
    Question("start", "From scratch, or from a pretrained model", "scratch", STARTS),
    Question("devices", "Devices to train on in the end", 1),
    Question("workload", "What is trained: FILE.py:NAME, FILE.py, or a shipped one that stands in", STAND_IN),
    Question("metric", "Metric to reach", "accuracy"),
    Question("target", "Its value", 0.97),
    Question("goal", "Is it to rise or to fall", "maximize", ("maximize", "minimize")),
    Question("seconds", "Seconds that a training takes to it today", 2.0),
)
"""The questions in their order: memory, priority, scratch or fine-tuning, devices, then what is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers to `QUESTIONS`, and what may be added to them where it is known.

    ``sample_mib`` are the MiB that a sample adds (`bssearch plan memory` says), ``train_samples`` those of an epoch;
    ``batch`` and ``learning_rate`` what is used today.
    """

    memory_gib: float = 24.0
    parameters: int = 25_000_000
    precision: str = "bf16"
    optimizer: str = "adamw"
    priority: str = "speed"
    start: str = "scratch"
    devices: int = 1
    workload: str = STAND_IN
    metric: str = "accuracy"
    target: float = 0.97
    goal: str = "maximize"
    seconds: float = 2.0
    name: str = "my-study"
    sample_mib: float | None = None
    train_samples: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    price_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be an answer; raise `UsageError`."""
        for name in ("memory_gib", "seconds"):
            check_positive(name, getattr(self, name))
        for name in ("parameters", "devices"):
            check_count(name, getattr(self, name))
        for name in ("sample_mib", "learning_rate", "price_per_device_hour"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("train_samples", "batch"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_finite("target", self.target)
        for name in ("name", "workload", "metric"):
            check_text(name, getattr(self, name))
        for question in QUESTIONS:
            if question.choices is not None:
                check_known(question.name, getattr(self, question.name), question.choices)
        if self.price_per_device_hour is not None and self.priority != "cost":
            raise UsageError(
                f"price_per_device_hour = {self.price_per_device_hour:g} contradicts priority = {self.priority!r}: it "
                "is for priority = 'cost'"
            )
        if self.train_samples is not None and self.batch is not None and self.batch > self.train_samples:
            raise UsageError(f"batch = {self.batch} must be <= train_samples = {self.train_samples}")

    @property
    def samples(self) -> int | None:
        """Return the samples of an epoch, as far as they are known."""
        if self.train_samples is None and self.workload == STAND_IN:
            return STAND_IN_SAMPLES
        return self.train_samples

    @property
    def is_fine_tuning(self) -> bool:
        """Return whether the training begins with a pretrained model."""
        return self.start == "fine_tuning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one device holds: bytes that do not depend on the batch, and the largest safe micro-batch, where known."""

    fixed_bytes: int
    memory_bytes: int
    safe_micro_batch: int | None

    @property
    def is_tight(self) -> bool:
        """Return whether memory is what bounds the training."""
        few = self.safe_micro_batch is not None and self.safe_micro_batch < SMALL_MICRO_BATCH
        return few or self.fixed_bytes > TIGHT_SHARE * self.memory_bytes


def fixed_bytes(answers: Answers, optimizer: str, stage: int = 0) -> int:
    """Return the bytes that stay from step to step on a device: weights, gradients, optimizer state, master weights.

    The ``sgd`` of a study has momentum; ``stage`` is ZeRO's over the devices that there are.
    """
    kept = "momentum" if optimizer == "sgd" else optimizer
    shared = Sharding(stage, answers.devices)
    return parameter_bytes(answers.parameters, Format(answers.precision, "master"), kept, shared).fixed


def memory_of(answers: Answers) -> Memory:
    """Return what the answers say of memory; raise `LaunchError` where the model does not fit, naming what would."""
    fixed, memory = fixed_bytes(answers, answers.optimizer), math.floor(answers.memory_gib * GIB)
    room = SAFE_SHARE * memory - fixed
    sample = None if answers.sample_mib is None else answers.sample_mib * MIB
    if fixed > SAFE_SHARE * memory or (sample is not None and room < sample):
        one = 0.0 if sample is None else sample
        raise LaunchError(
            f"memory_gib = {answers.memory_gib:g} does not hold {answers.parameters:,} parameters in "
            f"{answers.precision} with {answers.optimizer}: they take {fixed / GIB:.3g} GiB, a sample "
            f"{one / GIB:.3g}, and {SAFE_SHARE:.0%} of the memory are {SAFE_SHARE * answers.memory_gib:.3g}",
            hint=_would_fit(answers, fixed, one),
        )
    return Memory(
        fixed_bytes=fixed,
        memory_bytes=memory,
        safe_micro_batch=None if sample is None else min(math.floor(room / sample), 2**30),
    )


def _would_fit(answers: Answers, fixed: int, sample: float) -> str:
    """Return which device would hold the model, and which optimizer or ZeRO stage on the devices there are."""
    found = []
    needed = (fixed + sample) / SAFE_SHARE
    larger = smallest_with(math.ceil(needed))
    found.append(
        f"no device alone: it takes {needed / GIB:.4g} GiB" if larger is None else f"a device as {larger.name}"
    )
    room = SAFE_SHARE * answers.memory_gib * GIB - sample
    for name in ("sgd", "adafactor"):
        if fixed_bytes(answers, name) <= room:
            found.append(f"the optimizer {name}" + " with momentum" * (name == "sgd"))
    for stage in (1, 2, 3):
        if answers.devices > 1 and fixed_bytes(answers, answers.optimizer, stage) <= room:
            found.append(f"ZeRO stage {stage} over the {answers.devices} devices (FSDP is stage 3)")
            break
    return f"{', or '.join(found)}; bssearch itself trains on one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the answers come to: the ladder, the default, the learning rates, the micro-batch."""

    memory: Memory
    low: int
    high: int
    batch: int
    learning_rate: float
    lowest_rate: float
    highest_rate: float
    max_micro: int | None


def choices_of(answers: Answers) -> Choices:
    """Return the batch sizes and learning rates to search; raises as `memory_of`, and where no batch size is left."""
    memory = memory_of(answers)
    low, high, batch = _ladder(answers, memory)
    usual = SCRATCH_RATES[answers.optimizer]
    rate = answers.learning_rate or (usual / FINE_TUNING_FACTOR if answers.is_fine_tuning else usual)
    lowest, highest = (rate / 30, rate * 3) if answers.is_fine_tuning else (rate / 10, rate * 10)
    micros = [] if memory.safe_micro_batch is None else [_power_below(memory.safe_micro_batch)]
    if answers.devices > 1:
        micros.append(64)
    micro = min(micros, default=high)
    return Choices(
        memory=memory,
        low=low,
        high=high,
        batch=batch,
        learning_rate=rate,
        lowest_rate=lowest,
        highest_rate=highest,
        max_micro=micro if micro < max(high, batch) else None,
    )


def _ladder(answers: Answers, memory: Memory) -> tuple[int, int, int]:
    """Return the ends of the ladder and the default's batch size, no larger than half of an epoch."""
    if answers.is_fine_tuning:
        low, high, batch = 8, 64, 16
    elif answers.devices > 1:
        low = _power_below(min(32 * answers.devices, 2**20))
        high, batch = max(2048, 4 * low), 2 * low
    elif memory.is_tight or answers.priority == "memory":
        low, high, batch = 8, 256, 32
    else:
        low, high, batch = 16, 1024, 128
    most = None if answers.samples is None else _power_below(max(1, answers.samples // 2))
    if most is not None:
        low, high = min(low, max(1, most // 8)), min(high, most)
        batch = min(batch, high)
    given = answers.batch or batch
    if answers.samples is not None and given > answers.samples:
        raise UsageError(f"batch = {given} must be <= {answers.samples}, the training samples of {answers.workload}")
    return low, high, given


def _power_below(size: int) -> int:
    """Return the largest power of two that is no larger."""
    return int(2 ** (size.bit_length() - 1))
