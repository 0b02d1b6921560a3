"""A plan of memory: what a device must hold, term by term, and how many samples fit beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bssearch.planning.memory.devices import Device

GIB = 2**30

HEADROOM = 0.2
"""The share of the memory that the safe micro-batch leaves free: the handbook's 80 %, a choice.

It is for what no plan sees: blocks that lie unused in the allocator's segments, larger inputs, evaluation, and the
error of the plan itself (at most 15 % for traced models and 25 % for numbers on those of the benchmark). It says what
is feasible, not which batch size is best.
"""

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

    @classmethod
    def of(cls, name: str, size: float, per_sample: float = 0) -> Term:
        """Return a term with its meaning."""
        meaning, when = MEANINGS[name]
        return cls(term=name, bytes=round(size), bytes_per_sample=round(per_sample), when=when, meaning=meaning)


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
class MemoryPlan:
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
    terms: tuple[Term, ...]
    table: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        made = asdict(self)
        return {**made, "terms": list(made["terms"]), "table": list(made["table"]), "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a step may use: ``total`` bytes, None where none was named, less what the device takes itself.

    ``overhead`` are the context and the workspaces of a device that is named.
    """

    total: int | None
    overhead: int

    @classmethod
    def of(cls, device: Device | None, memory_bytes: int | None) -> Memory:
        """Return the memory of a device, or the bytes given, which are tensors' alone: no context is taken off."""
        if memory_bytes is not None or device is None:
            return cls(memory_bytes, 0 if device is None else device.workspace_bytes)
        return cls(device.memory_bytes, device.taken_bytes)

    @property
    def headroom(self) -> int | None:
        """Return the bytes that a safe micro-batch leaves free."""
        return None if self.total is None else round(HEADROOM * self.total)

    @property
    def largest(self) -> int | None:
        """Return the bytes that a step may have at most."""
        return None if self.total is None else self.total - self.overhead

    @property
    def safe(self) -> int | None:
        """Return the bytes that a step may have with the headroom left free."""
        return None if self.total is None else self.total - self.overhead - round(HEADROOM * self.total)


def in_order(terms: dict[str, Term]) -> tuple[Term, ...]:
    """Return the terms in the order of `MEANINGS`, without those that are nothing."""
    return tuple(
        terms[name] for name in MEANINGS if name in terms and (terms[name].bytes or terms[name].bytes_per_sample)
    )


def gib(size: float) -> str:
    """Return bytes in GiB for people."""
    return f"{size / GIB:.3g} GiB"
