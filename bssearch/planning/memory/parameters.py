"""Bytes per parameter: weights, gradients, optimizer state, master weights.

``master`` (Megatron, DeepSpeed, Apex): 16-bit weights and gradients with fp32 master weights; 16 bytes with Adam
(Rajbhandari et al. 2020, arXiv 1910.02054, § 3.1). ``autocast`` (PyTorch): fp32 parameters and 16-bit copies during
the passes; 18 bytes with Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bssearch.planning.memory.request import MemoryRequest

FP32 = 4


@dataclass(frozen=True, slots=True)
class Format:
    """Bytes per number: ``state`` of the optimizer, ``copy`` of autocast; fp8 computes in 16 bits."""

    precision: str
    mixed: str | None
    weight: int
    gradient: int
    master: int
    state: int
    copy: int
    activation: int


FORMATS = (
    Format("fp32", None, weight=4, gradient=4, master=0, state=4, copy=0, activation=4),
    Format("bf16", "master", weight=2, gradient=2, master=4, state=4, copy=0, activation=2),
    Format("bf16", "autocast", weight=4, gradient=4, master=0, state=4, copy=2, activation=2),
    Format("bf16", "pure", weight=2, gradient=2, master=0, state=2, copy=0, activation=2),
    Format("fp16", "master", weight=2, gradient=2, master=4, state=4, copy=0, activation=2),
    Format("fp16", "autocast", weight=4, gradient=4, master=0, state=4, copy=2, activation=2),
    Format("fp16", "pure", weight=2, gradient=2, master=0, state=2, copy=0, activation=2),
    Format("fp8", "master", weight=1, gradient=2, master=4, state=4, copy=0, activation=2),
)
BY_NAME = {(one.precision, one.mixed): one for one in FORMATS}
PRECISIONS = tuple(dict.fromkeys(one.precision for one in FORMATS))
MIXED = tuple(dict.fromkeys(one.mixed for one in FORMATS if one.mixed))

# Numbers that each optimizer keeps per parameter. sgd has no momentum. adafactor keeps a first moment;
# adafactor-factored (torch.optim.Adafactor, T5) only a row and a column per matrix (Shazeer & Stern 2018, arXiv
# 1804.04235, § 3 and 9). muon keeps momentum for matrices (Jordan et al. 2024), and AdamW's two for embedding and head.
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

# Parameters per fp32 scale of each state in 8-bit Adam (Dettmers et al. 2022, arXiv 2110.02861, § 2; bitsandbytes).
BLOCK_8BIT = 256

MATRIX_SIDE = 1024  # side of a factored matrix if no hidden size is given

NO_FOREACH = frozenset({"adam8bit"})  # update each tensor in its own kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes on one device; ``autocast_copies`` exist in the passes, ``foreach`` in the update."""

    weights: int
    gradients: int
    optimizer_state: int
    master_weights: int
    autocast_copies: int
    foreach: int

    @property
    def fixed(self) -> int:
        """Bytes between steps, gradients included."""
        return self.weights + self.gradients + self.optimizer_state + self.master_weights

    @property
    def least(self) -> int:
        """Least bytes of a step: fixed ones and autocast's copies."""
        return self.fixed + self.autocast_copies


def parameter_bytes(asked: MemoryRequest) -> ParameterBytes:
    """Return the bytes of the parameters on one device."""
    parameters, form = asked.parameters, asked.form
    return ParameterBytes(
        weights=asked.share(parameters * form.weight, 3),
        gradients=asked.share(parameters * form.gradient, 2),
        optimizer_state=asked.share(_state_bytes(asked), 1),
        master_weights=asked.share(parameters * form.master, 1),
        autocast_copies=asked.share(parameters * form.copy, 3),
        foreach=0 if asked.optimizer in NO_FOREACH else asked.share(parameters * (form.master or form.weight), 1),
    )


def _state_bytes(asked: MemoryRequest) -> float:
    size, name = asked.form.state, asked.optimizer
    parameters: int = asked.parameters
    if name == "adam8bit":
        return 2.0 * (parameters + FP32 * ceil(parameters / BLOCK_8BIT))
    if name == "adafactor-factored":
        return size * 2 * parameters / (asked.hidden or MATRIX_SIDE)
    embedded = min(parameters, (asked.hidden or 0) * (asked.vocabulary or 0)) if name == "muon" else 0
    return size * (STATES[name] * parameters + embedded)
