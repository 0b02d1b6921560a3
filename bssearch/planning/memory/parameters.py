"""The bytes of parameters, gradients, optimizer state, master weights and activations."""

# master (Megatron, DeepSpeed, Apex): 16-bit weights and gradients with fp32 master weights; 16 bytes per parameter with
# Adam (Rajbhandari et al. 2020, arXiv 1910.02054, § 3.1). autocast (PyTorch): fp32 parameters and 16-bit copies during
# the passes; 18 bytes per parameter with Adam.
#
# A transformer's layer keeps s·h·(34 + 5·a·s/h) bytes per sample in 16 bits, for s tokens, hidden size h and a heads
# (Korthikanti et al. 2022, arXiv 2205.05198, equation 2). Fused attention (Dao et al. 2022, arXiv 2205.14135) keeps one
# logarithm per row instead of scores.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bssearch.planning.memory.request import MemoryPlanRequest


FP32 = 4


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """The bytes of a weight, a gradient and other numbers in a precision. ``fp8`` computes in 16 bits."""

    precision: str
    mixed: str | None
    weight: int
    gradient: int
    master: int
    state: int  # optimizer state
    copy: int  # copy by autocast
    activation: int


FORMATS = (
    NumberFormat("fp32", None, weight=4, gradient=4, master=0, state=4, copy=0, activation=4),
    NumberFormat("bf16", "master", weight=2, gradient=2, master=4, state=4, copy=0, activation=2),
    NumberFormat("bf16", "autocast", weight=4, gradient=4, master=0, state=4, copy=2, activation=2),
    NumberFormat("bf16", "pure", weight=2, gradient=2, master=0, state=2, copy=0, activation=2),
    NumberFormat("fp16", "master", weight=2, gradient=2, master=4, state=4, copy=0, activation=2),
    NumberFormat("fp16", "autocast", weight=4, gradient=4, master=0, state=4, copy=2, activation=2),
    NumberFormat("fp16", "pure", weight=2, gradient=2, master=0, state=2, copy=0, activation=2),
    NumberFormat("fp8", "master", weight=1, gradient=2, master=4, state=4, copy=0, activation=2),
)
BY_NAME = {(one.precision, one.mixed): one for one in FORMATS}
PRECISIONS = tuple(dict.fromkeys(one.precision for one in FORMATS))
MIXED = tuple(dict.fromkeys(one.mixed for one in FORMATS if one.mixed))

# Numbers per parameter in an optimizer's state. sgd has no momentum. adafactor keeps a first moment;
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

# Parameters per fp32 scale of a state in 8-bit Adam (Dettmers et al. 2022, arXiv 2110.02861, § 2; bitsandbytes)
BLOCK_8BIT = 256

MATRIX_SIDE = 1024  # side of a factored matrix without a hidden size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """The bytes per device that do not depend on the batch size."""

    weights: int
    gradients: int
    optimizer_state: int
    master_weights: int
    autocast_copies: int  # during the passes
    foreach: int  # during the update

    @property
    def fixed(self) -> int:
        """The bytes between steps, including gradients."""
        return self.weights + self.gradients + self.optimizer_state + self.master_weights

    @property
    def least(self) -> int:
        return self.fixed + self.autocast_copies


# Bytes of a frozen, quantised weight. int8: a scale per row is negligible. int4: NF4 has an fp32 scale per block of 64
# (Dettmers et al. 2023, arXiv 2305.14314, § 2; bitsandbytes without double quantisation).
BASE_BYTES: Mapping[str, float] = MappingProxyType({"int8": 1.0, "int4": 0.5 + FP32 / 64})


def parameter_bytes(asked: MemoryPlanRequest) -> ParameterBytes:
    trained, form, model = trained_parameters(asked), asked.form, asked.transformer
    frozen = asked.parameters - (0 if asked.lora_rank else trained)
    quantised = 0 if asked.base_precision is None else frozen
    if quantised and model is not None:  # embeddings, norms and the head keep their format
        quantised = min(frozen, model.layers * layer_parameters(model))
    whole = trained + frozen - quantised
    base = BASE_BYTES.get(asked.base_precision or "", 0) * quantised
    # a product widens one quantised matrix at a time
    widened = form.activation * model.hidden * _width(model) if quantised and model is not None else 0
    on_host = asked.offload_optimizer
    return ParameterBytes(
        weights=asked.share(whole * form.weight + base, 3),
        gradients=asked.share(trained * form.gradient, 2),
        optimizer_state=0 if on_host else asked.share(_state_bytes(asked, trained), 1),
        master_weights=0 if on_host else asked.share(trained * form.master, 1),
        autocast_copies=asked.share(whole * form.copy, 3) + widened,
        # 8-bit Adam has a kernel for each tensor
        foreach=0
        if on_host or asked.optimizer == "adam8bit"
        else asked.share(trained * (form.master or form.weight), 1),
    )


def trained_parameters(asked: MemoryPlanRequest) -> int:
    """Count the parameters with a gradient.

    As in QLoRA, each matrix of the blocks has an adapter with r·(in + out) parameters (Hu et al. 2021, arXiv
    2106.09685, § 4.1).
    """
    model = asked.transformer
    if asked.lora_rank and model is not None:
        return model.layers * asked.lora_rank * sum(inputs + out for inputs, out in _matrices(model))
    return int(asked.trainable_parameters or asked.parameters)


def _state_bytes(asked: MemoryPlanRequest, trained: int) -> float:
    size, name = asked.form.state, asked.optimizer
    if name == "adam8bit":
        return 2.0 * (trained + FP32 * ceil(trained / BLOCK_8BIT))
    if name == "adafactor-factored":
        return size * 2 * trained / (asked.hidden or MATRIX_SIDE)
    has_embedding = name == "muon" and not asked.lora_rank
    embedded = min(trained, (asked.hidden or 0) * (asked.vocabulary or 0)) if has_embedding else 0
    return size * (STATES[name] * trained + embedded)


# Tensors of the MLP's width for the backward pass, around the activation. gelu_new is GPT-2's, in five
# operations; swiglu has gate, activation, other half and product (Shazeer 2020, arXiv 2002.05202).
MLP_TENSORS: Mapping[str, int] = MappingProxyType({"gelu": 2, "relu": 2, "gelu_new": 5, "swiglu": 4})

# Bytes per logit, in fp32 as in cross-entropy: log-probability, gradient of the log-probability, gradient
LOGIT_BYTES = 3 * FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A transformer's dimensions. By default, ``kv_heads`` equals ``heads``, and ``intermediate`` is 4 × ``hidden``."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    mlp: str = "gelu"
    fused_attention: bool = False
    dropout: bool = True
    lora_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBytes:
    """The growth of a step's memory peak per sample, in bytes."""

    activations: int
    attention_scores: int
    logits: int

    @property
    def total(self) -> int:
        return self.activations + self.attention_scores + self.logits


def sample_bytes(model: Transformer, form: NumberFormat, *, checkpointing: bool) -> SampleBytes:
    """Return a sample's bytes at the memory peak of the forward and backward pass.

    With checkpointing, the peak has each layer's input (Korthikanti et al. 2022, arXiv 2205.05198, § 5), and the
    logits or a recomputed layer, whichever is larger.
    """
    layer, scores = _layer(model, form), _scores(model, form)
    stream = model.sequence * model.hidden * _stream_bytes(form)
    # the embedding's output with the mask, and the last norm's input
    ends = 2 * stream + model.sequence * model.hidden * model.dropout
    logits = model.sequence * (model.vocabulary or 0) * LOGIT_BYTES
    if checkpointing:
        kept = model.layers * stream + ends
        if logits >= layer + scores:
            return SampleBytes(activations=kept, attention_scores=0, logits=logits)
        return SampleBytes(activations=kept + layer, attention_scores=scores, logits=0)
    return SampleBytes(activations=model.layers * layer + ends, attention_scores=model.layers * scores, logits=logits)


def layer_parameters(model: Transformer) -> int:
    return sum(inputs * out for inputs, out in _matrices(model)) + 4 * model.hidden


def _matrices(model: Transformer) -> list[tuple[int, int]]:
    # Inputs and outputs of queries, keys, values, projection and the MLP
    hidden, wide = model.hidden, _width(model)
    shared = hidden * (model.kv_heads or model.heads) // model.heads
    attention = [(hidden, hidden), (hidden, shared), (hidden, shared), (hidden, hidden)]
    return [*attention, (hidden, wide), (wide, hidden), *([(hidden, wide)] if model.mlp == "swiglu" else [])]


def _width(model: Transformer) -> int:
    return model.intermediate or 4 * model.hidden


def _stream_bytes(form: NumberFormat) -> int:
    # Autocast keeps sums and norms in fp32
    return FP32 if form.mixed == "autocast" else form.activation


def _layer(model: Transformer, form: NumberFormat) -> int:
    # Attention without scores: input, queries, keys, values, projection input, dropout mask. MLP: input, tensors around
    # the activation, mask. Norms: inputs, in the residual stream's precision.
    tokens = model.sequence * model.hidden
    shared = (model.kv_heads or model.heads) / model.heads
    wide = model.sequence * _width(model) * MLP_TENSORS[model.mlp]
    kept = form.activation * (tokens * (4 + 2 * shared) + wide)
    adapters = form.activation * model.sequence * model.lora_rank * len(_matrices(model))
    return round(kept) + adapters + 2 * tokens * model.dropout + 2 * tokens * _stream_bytes(form)


def _scores(model: Transformer, form: NumberFormat) -> int:
    rows = model.heads * model.sequence
    if model.fused_attention:
        return rows * FP32
    return rows * model.sequence * (form.activation * (1 + model.dropout) + model.dropout)
