"""Blocks of the shipped transformers, and the check of their sizes."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bssearch.workloads.base import check_whole

MLP_RATIO = 4  # hidden units per unit of width, as in GPT-2 and ViT


class Block(nn.Module):
    """Pre-norm self-attention and MLP with residuals; ``hidden_dropout`` acts inside the MLP."""

    def __init__(
        self, width: int, heads: int, dropout: float, *, hidden_dropout: float, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self.is_causal = is_causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, MLP_RATIO * width)
        self.mlp_out = nn.Linear(MLP_RATIO * width, width)
        self.dropout = nn.Dropout(dropout)
        self.hidden_dropout = nn.Dropout(hidden_dropout)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.dropout(self._attend(self.attention_norm(stream)))
        hidden = self.hidden_dropout(functional.gelu(self.mlp_in(self.mlp_norm(stream))))
        return stream + self.dropout(self.mlp_out(hidden))  # type: ignore[no-any-return]

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        split = self.attention_in(stream).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.attention_out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def check_sizes(workload: Any, names: Iterable[str]) -> None:
    """Raise `ValueError` unless the named settings are whole numbers >= 1 and ``heads`` divides ``width``."""
    check_whole(workload, *names)
    if workload.width % workload.heads:
        raise ValueError(f"width = {workload.width} must be a multiple of heads = {workload.heads}")
