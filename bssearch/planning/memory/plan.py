"""A plan of memory: what a device must hold, term by term, and how many samples fit beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bssearch.planning.requests import Plan

GIB = 2**30

When = Literal["always", "forward_backward", "update"]

MEANINGS: dict[str, tuple[str, When]] = {
    "weights": ("what the forward pass computes with, and buffers", "always"),
    "gradients": ("as large as the weights, whatever the batch size", "always"),
    "optimizer_state": ("what the optimizer keeps from step to step", "always"),
    "master_weights": ("fp32 weights that the optimizer updates", "always"),
    "workspaces": ("cuBLAS, the context of a named device, and layouts of convolutions", "always"),
    "autocast_copies": ("16-bit copies of fp32 weights", "forward_backward"),
    "gathered_weights": ("two layers whose shards are gathered (ZeRO stage 3)", "forward_backward"),
    "inputs": ("the batch itself", "forward_backward"),
    "activations": ("what the forward pass keeps for the backward pass", "forward_backward"),
    "attention_scores": (
        "attention's scores after softmax and dropout; with fused attention a number a row",
        "forward_backward",
    ),
    "activation_gradients": ("gradients of activations on their way back", "forward_backward"),
    "logits": ("logits, their log-probabilities and gradients, in fp32", "forward_backward"),
    "foreach_temporaries": ("what the update of all tensors at once needs besides", "update"),
}
"""What each term is and when it lives; in the order in which terms are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One line of a plan: its bytes are ``bytes`` + ``bytes_per_sample`` × micro-batch."""

    term: str
    bytes: int
    bytes_per_sample: int
    when: When
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A row of the table: what another precision, optimizer or checkpointing would come to."""

    precision: str
    mixed: str | None
    optimizer: str
    checkpointing: bool
    fixed_bytes: int
    activation_bytes_per_sample: int | None
    largest_micro_batch: int | None
    safe_micro_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(Plan):
    """What a training step needs on each device; None where it was not asked, all sizes in bytes.

    ``basis`` is ``numbers`` or ``trace``. ``fixed_bytes`` are weights, gradients, optimizer state and master weights.
    ``activation_bytes_per_sample`` is all that one more sample adds to the peak, logits included.
    ``largest_micro_batch`` leaves nothing free, ``safe_micro_batch`` leaves ``headroom_bytes``. ``peak_bytes`` is the
    peak at ``micro_batch``, which is the one that was asked for, or else the safe one.
    """

    basis: Literal["numbers", "trace"]
    model: str | None = None
    parameters: int
    precision: str
    mixed: str | None
    optimizer: str
    checkpointing: bool
    stage: int
    devices: int
    device: str | None
    memory_bytes: int | None
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    master_weights_bytes: int
    fixed_bytes: int
    activation_bytes_per_sample: int | None
    largest_micro_batch: int | None
    safe_micro_batch: int | None
    headroom_bytes: int | None
    micro_batch: int | None
    peak_bytes: int | None
    terms: list[Term]
    table: list[Choice]
    notes: list[str]


def in_order(terms: Mapping[str, tuple[float, float]]) -> list[Term]:
    """Return the terms that have bytes, or bytes a sample, in the order of `MEANINGS`."""
    sizes = {name: (round(size), round(slope)) for name, (size, slope) in terms.items()}
    return [
        Term(term=name, bytes=sizes[name][0], bytes_per_sample=sizes[name][1], when=when, meaning=meaning)
        for name, (meaning, when) in MEANINGS.items()
        if any(sizes.get(name, ()))
    ]


def gib(size: float) -> str:
    """Return bytes in GiB for people."""
    return f"{size / GIB:.3g} GiB"
