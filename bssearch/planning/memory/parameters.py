"""Bytes that follow from the number of parameters: weights, gradients, optimizer state, master weights.

What ``precision`` and ``mixed`` mean, in bytes a parameter:

| precision | mixed | weights | gradients | master weights | optimizer state | autocast copies |
|---|---|---|---|---|---|---|
| fp32 | – | 4 | 4 | 0 | 4 each | 0 |
| bf16, fp16 | master | 2 | 2 | 4 | 4 each | 0 |
| bf16, fp16 | autocast | 4 | 4 | 0 | 4 each | 2 |
| bf16, fp16 | pure | 2 | 2 | 0 | 2 each | 0 |
| fp8 | master | 1 | 2 | 4 | 4 each | 0 |

``master`` is that of Megatron, DeepSpeed and Apex: 16-bit weights and gradients, and fp32 weights that the optimizer
updates; with Adam 16 bytes in all (Rajbhandari et al. 2020, arXiv 1910.02054, § 3.1). ``autocast`` is PyTorch's: the
parameters are fp32, and are the master weights, and forward and backward pass hold their 16-bit copies; with Adam 18.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from bssearch.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
MIXED = ("master", "autocast", "pure")

FP32 = 4

STATES: Mapping[str, float] = MappingProxyType(
    {
        "sgd": 0,
        "momentum": 1,
        "adam": 2,
        "adamw": 2,
        "adam8bit": 2,
        "adafactor": 1,
        "adafactor-factored": 0,
        "muon": 1,
        "lion": 1,
        "lamb": 2,
        "lars": 1,
        "nadam": 2,
        "radam": 2,
        "adamax": 2,
        "rmsprop": 1,
        "adagrad": 1,
    }
)
"""Numbers that each optimizer keeps for a parameter.

``sgd`` is without momentum. ``adafactor`` keeps a first moment, so that its state is half of Adam's;
``adafactor-factored`` does not (Shazeer & Stern 2018, arXiv 1804.04235, § 3 and 9; `torch.optim.Adafactor` and T5), and
is left with a row and a column a matrix. ``muon`` keeps momentum for matrices (Jordan et al. 2024); embedding and head
have AdamW's two.
"""

BLOCK_8BIT = 256
"""Parameters that share one fp32 scale in 8-bit Adam, for each of its two states (Dettmers et al. 2022, arXiv
2110.02861, § 2; bitsandbytes' block size)."""

MATRIX_SIDE = 1024
"""The side of a matrix of which a factored second moment keeps a row and a column, where no hidden size is given."""

NO_FOREACH = frozenset({"adam8bit"})
"""Optimizers that update each tensor in a kernel of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes on one device; ``autocast_copies`` live in the forward and backward pass, ``foreach`` in the update."""

    weights: int
    gradients: int
    optimizer_state: int
    master_weights: int
    autocast_copies: int
    foreach: int

    @property
    def fixed(self) -> int:
        """Return the bytes that stay from step to step, gradients included."""
        return self.weights + self.gradients + self.optimizer_state + self.master_weights

    @property
    def least(self) -> int:
        """Return the bytes without which no step is possible: the fixed ones, and autocast's copies beside them."""
        return self.fixed + self.autocast_copies


@dataclass(frozen=True, slots=True)
class Sharding:
    """ZeRO's stage over so many devices: what each of them holds a share of (Rajbhandari et al. 2020, § 5).

    1: optimizer state and master weights; 2: gradients too; 3: weights too, as FSDP does. 0 shards nothing.
    """

    stage: int = 0
    devices: int = 1

    def share(self, size: float, from_stage: int) -> int:
        """Return what one device holds of bytes that are sharded from a stage on."""
        return ceil(size / self.devices) if self.stage >= from_stage else ceil(size)


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are kept: the precision, and what ``mixed`` makes of it."""

    precision: str
    mixed: str

    @property
    def mixed_with_fp32(self) -> str | None:
        """Return how 16 bits mix with fp32, None where there is fp32 alone."""
        return None if self.precision == "fp32" else self.mixed

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a weight."""
        if self.precision == "fp32" or self.mixed == "autocast":
            return FP32
        return 1 if self.precision == "fp8" else 2

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of a gradient."""
        return max(2, self.weight_bytes)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of each number of the optimizer's state."""
        return 2 if self.mixed == "pure" and self.precision != "fp32" else FP32

    @property
    def master_bytes(self) -> int:
        """Return the bytes of a master weight, 0 where there are none."""
        return FP32 if self.mixed == "master" and self.precision != "fp32" else 0

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of a weight's copy under autocast."""
        return 2 if self.mixed == "autocast" and self.precision != "fp32" else 0

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of an activation; around fp8 matrix products they are of 16 bits."""
        return FP32 if self.precision == "fp32" else 2


def format_of(precision: str, mixed: str | None, default: str) -> Format:
    """Return a format; raise `UsageError` for one that there is not."""
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision!r} must be one of {', '.join(PRECISIONS)}")
    if mixed is not None and mixed not in MIXED:
        raise UsageError(f"--mixed {mixed!r} must be one of {', '.join(MIXED)}")
    if mixed is not None and precision == "fp32":
        raise UsageError(f"--mixed {mixed} needs --precision bf16, fp16 or fp8: fp32 mixes nothing")
    if precision == "fp8" and mixed in ("autocast", "pure"):
        raise UsageError(f"--mixed {mixed} does not go with --precision fp8: its weights have fp32 master weights")
    return Format(precision, "master" if precision == "fp8" else (mixed or default))


def parameter_bytes(
    parameters: int,
    form: Format,
    optimizer: str,
    sharding: Sharding = Sharding(),
    *,
    hidden: int | None = None,
    vocabulary: int | None = None,
) -> ParameterBytes:
    """Return the bytes of so many parameters on one device.

    ``hidden`` and ``vocabulary``, where known, say how much a factored second moment keeps, and for which parameters
    Muon leaves the update to AdamW.
    """
    state = _state_bytes(parameters, form, optimizer, hidden, vocabulary)
    updated = form.master_bytes or form.weight_bytes
    return ParameterBytes(
        weights=sharding.share(parameters * form.weight_bytes, 3),
        gradients=sharding.share(parameters * form.gradient_bytes, 2),
        optimizer_state=sharding.share(state, 1),
        master_weights=sharding.share(parameters * form.master_bytes, 1),
        autocast_copies=sharding.share(parameters * form.copy_bytes, 3),
        foreach=0 if optimizer in NO_FOREACH else sharding.share(parameters * updated, 1),
    )


def _state_bytes(parameters: int, form: Format, optimizer: str, hidden: int | None, vocabulary: int | None) -> float:
    size = form.state_bytes
    if optimizer == "adam8bit":
        return 2 * (parameters + FP32 * ceil(parameters / BLOCK_8BIT))
    if optimizer.startswith("adafactor"):
        factors = 2 * parameters / (hidden or MATRIX_SIDE) if optimizer == "adafactor-factored" else 0
        return size * (STATES[optimizer] * parameters + factors)
    if optimizer == "muon":
        embedded = min(parameters, (hidden or 0) * (vocabulary or 0))
        return size * (parameters + embedded)
    return size * STATES[optimizer] * parameters
