"""Activations of a transformer from its dimensions (Korthikanti et al. 2022, arXiv 2205.05198, § 4.1).

In 16 bits with dropout and unfused attention, a layer keeps s·h·(34 + 5·a·s/h) bytes per sample, for s tokens, hidden
size h and a heads (equation 2). Fused attention (Dao et al. 2022, arXiv 2205.14135) keeps one logarithm per row instead
of scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bssearch.planning.memory.parameters import FP32, Format

# Tensors of the MLP's width that its backward pass needs, around the activation. gelu_new is GPT-2's, in five
# operations; swiglu has gate, activation, other half and product (Shazeer 2020, arXiv 2002.05202).
MLP_TENSORS: Mapping[str, int] = MappingProxyType({"gelu": 2, "relu": 2, "gelu_new": 5, "swiglu": 4})

# per logit: log-probability, its gradient and the logit's own, each in fp32, as cross-entropy computes them
LOGIT_BYTES = 3 * FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A transformer's dimensions; default ``kv_heads`` = ``heads``, ``intermediate`` = 4 × ``hidden``."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBytes:
    """Growth of the peak per sample, in bytes."""

    activations: int
    attention_scores: int
    logits: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.activations + self.attention_scores + self.logits


def sample_bytes(model: Transformer, form: Format, *, checkpointing: bool) -> SampleBytes:
    """Return a sample's bytes at the end of the forward pass.

    With checkpointing: each layer's input (2·s·h in 16 bits: § 5), and the larger of the logits and one recomputed
    layer.
    """
    layer, scores = _layer(model, form), _scores(model, form)
    stream = model.sequence * model.hidden * _stream_bytes(form)
    mask = model.sequence * model.hidden * model.dropout
    ends = 2 * stream + mask  # the embedding's output, and the last norm's input
    logits = model.sequence * (model.vocabulary or 0) * LOGIT_BYTES
    if checkpointing:
        kept = model.layers * stream + ends
        if logits >= layer + scores:
            return SampleBytes(activations=kept, attention_scores=0, logits=logits)
        return SampleBytes(activations=kept + layer, attention_scores=scores, logits=0)
    return SampleBytes(activations=model.layers * layer + ends, attention_scores=model.layers * scores, logits=logits)


def layer_parameters(model: Transformer) -> int:
    """Return a layer's parameters: four attention matrices, the MLP's, two norms."""
    shared = (model.kv_heads or model.heads) / model.heads
    attention = 2 * model.hidden**2 * (1 + shared)
    matrices = 3 if model.mlp == "swiglu" else 2
    return round(attention) + matrices * model.hidden * _width(model) + 4 * model.hidden


def _width(model: Transformer) -> int:
    return model.intermediate or 4 * model.hidden


def _stream_bytes(form: Format) -> int:
    # autocast keeps sums and norms in fp32
    return FP32 if form.mixed == "autocast" else form.activation


def _layer(model: Transformer, form: Format) -> int:
    # Attention: input, queries, keys, values, projection input, dropout mask. MLP: input, tensors around the
    # activation, mask. Norms: their inputs, in the residual stream's precision. Without attention scores.
    tokens = model.sequence * model.hidden
    shared = (model.kv_heads or model.heads) / model.heads
    wide = model.sequence * _width(model) * MLP_TENSORS[model.mlp]
    kept = form.activation * (tokens * (4 + 2 * shared) + wide)
    return round(kept) + 2 * tokens * model.dropout + 2 * tokens * _stream_bytes(form)


def _scores(model: Transformer, form: Format) -> int:
    rows = model.heads * model.sequence
    if model.fused_attention:
        return rows * FP32
    each = form.activation * (2 if model.dropout else 1) + model.dropout
    return rows * model.sequence * each
