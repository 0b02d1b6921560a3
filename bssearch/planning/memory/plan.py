"""Memory plans: bytes by term, and the samples that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bssearch.planning.requests import Plan

GIB = 2**30

When = Literal["always", "forward_backward", "update"]

# meaning and lifetime of each term, in display order
MEANINGS: dict[str, tuple[str, When]] = {
    "weights": ("parameters in the forward pass, and buffers", "always"),
    "gradients": ("as large as the weights at every batch size", "always"),
    "optimizer_state": ("optimizer state between steps", "always"),
    "master_weights": ("fp32 weights that the optimizer updates", "always"),
    "workspaces": ("cuBLAS, the context of a named device, and layouts of convolutions", "always"),
    "autocast_copies": ("16-bit copies of fp32 weights", "forward_backward"),
    "gathered_weights": ("two layers whose shards are gathered (ZeRO stage 3)", "forward_backward"),
    "inputs": ("the batch itself", "forward_backward"),
    "activations": ("tensors kept for the backward pass", "forward_backward"),
    "attention_scores": (
        "attention's scores after softmax and dropout; with fused attention a number a row",
        "forward_backward",
    ),
    "activation_gradients": ("gradients of activations on their way back", "forward_backward"),
    "logits": ("logits, their log-probabilities and gradients, in fp32", "forward_backward"),
    "foreach_temporaries": ("temporary tensors of the update of all tensors at once", "update"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A line of a plan: ``bytes`` + ``bytes_per_sample`` × micro-batch."""

    term: str
    bytes: int
    bytes_per_sample: int
    when: When
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOption:
    """A table row for another precision, optimizer or checkpointing."""

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
    """A training step's memory per device in bytes; None for values not requested."""

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
    fixed_bytes: int  # weights, gradients, optimizer state, master weights
    activation_bytes_per_sample: int | None  # growth of the peak, with logits
    largest_micro_batch: int | None
    safe_micro_batch: int | None  # leaves headroom_bytes
    headroom_bytes: int | None
    micro_batch: int | None
    peak_bytes: int | None  # at micro_batch, by default the safe one
    terms: list[Term]
    table: list[MemoryOption]
    notes: list[str]


def in_order(terms: Mapping[str, tuple[float, float]]) -> list[Term]:
    """Return the non-empty terms in the order of `MEANINGS`."""
    sizes = {name: (round(size), round(slope)) for name, (size, slope) in terms.items()}
    return [
        Term(term=name, bytes=sizes[name][0], bytes_per_sample=sizes[name][1], when=when, meaning=meaning)
        for name, (meaning, when) in MEANINGS.items()
        if any(sizes.get(name, ()))
    ]


def gib(size: float) -> str:
    """Return bytes in GiB for people."""
    return f"{size / GIB:.3g} GiB"
