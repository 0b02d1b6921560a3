"""The activations of a transformer from its dimensions (Korthikanti et al. 2022, arXiv 2205.05198, § 4.1).

In 16 bits, with dropout and without fused attention, a layer keeps s·h·(34 + 5·a·s/h) bytes a sample, for s tokens,
hidden size h and a heads (their equation 2). The counts behind it are those of `_layer`, with 4 bytes an activation in
fp32, fewer heads for keys and values, another MLP, and with fused attention (Dao et al. 2022, arXiv 2205.14135)
without the scores: of these it keeps a logarithm a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bssearch.planning.memory.parameters import FP32, Format

MLP_TENSORS: Mapping[str, int] = MappingProxyType({"gelu": 2, "relu": 2, "gelu_new": 5, "swiglu": 4})
"""Tensors of the MLP's width that its backward pass needs: what goes into the activation and what comes out.

``gelu_new`` is GPT-2's, written out in five operations. ``swiglu`` has the gate, its activation, the other half and
their product (Shazeer 2020, arXiv 2002.05202).
"""

LOGIT_BYTES = 3 * FP32
"""Of each logit at the end of the forward pass, whatever the precision: its log-probability, the gradient of that and
its own, each in fp32, as cross-entropy computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A transformer's dimensions; ``kv_heads`` and ``intermediate`` are by default ``heads`` and 4 × ``hidden``.

    ``vocabulary`` is None if there are no logits to speak of.
    """

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
    """What one sample adds to the peak, in bytes."""

    activations: int
    attention_scores: int
    logits: int

    @property
    def total(self) -> int:
        """Return all of them."""
        return self.activations + self.attention_scores + self.logits


def sample_bytes(model: Transformer, form: Format, *, checkpointing: bool) -> SampleBytes:
    """Return the bytes that one sample adds to the peak, at the end of the forward pass.

    With checkpointing each layer keeps its input alone (2·s·h in 16 bits: § 5, full recomputation). Beside those inputs
    stand first the logits, then one layer at a time that is computed again: the larger of the two counts.
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
    """Return the parameters of one layer: four matrices of attention, those of the MLP, two norms."""
    shared = (model.kv_heads or model.heads) / model.heads
    attention = 2 * model.hidden**2 * (1 + shared)
    matrices = 3 if model.mlp == "swiglu" else 2
    return round(attention) + matrices * model.hidden * _width(model) + 4 * model.hidden


def _width(model: Transformer) -> int:
    return model.intermediate or 4 * model.hidden


def _stream_bytes(form: Format) -> int:
    """Return the bytes of an element of the residual stream: autocast keeps sums and norms in fp32."""
    return FP32 if form.mixed == "autocast" else form.activation


def _layer(model: Transformer, form: Format) -> int:
    """Return the bytes that a layer keeps of a sample, the scores of attention apart.

    Attention: its input, queries, keys, values, the input of its projection, the mask of dropout. MLP: its input, the
    tensors around its activation, the mask. Norms: the input of each, in the precision of the residual stream.
    """
    tokens = model.sequence * model.hidden
    shared = (model.kv_heads or model.heads) / model.heads
    wide = model.sequence * _width(model) * MLP_TENSORS[model.mlp]
    kept = form.activation * (tokens * (4 + 2 * shared) + wide)
    return round(kept) + 2 * tokens * model.dropout + 2 * tokens * _stream_bytes(form)


def _scores(model: Transformer, form: Format) -> int:
    """Return the bytes of attention's scores: after softmax, and with dropout its mask and what comes out of it."""
    rows = model.heads * model.sequence
    if model.fused_attention:
        return rows * FP32
    each = form.activation * (2 if model.dropout else 1) + model.dropout
    return rows * model.sequence * each
