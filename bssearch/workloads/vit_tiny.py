"""A small vision transformer on Fashion-MNIST (Dosovitskiy et al. 2021, arXiv 2010.11929)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from bssearch.records import MetricInfo
from bssearch.workloads.base import Data, Part
from bssearch.workloads.fashion_mnist import CLASSES, HELD_OUT, SIDE, FashionMnist

_COUNTS = ("patch", "width", "depth", "heads")
_MLP_RATIO = 4  # hidden units per unit of width, as in table 1 of the paper


@dataclass(eq=False)
class VitTiny:
    """Classify Fashion-MNIST's images, split as in `FashionMnist`.

    ``patch`` is a patch's side in pixels and must divide 28; ``heads`` must divide ``width``.
    """

    patch: int = 7
    width: int = 64
    depth: int = 3
    heads: int = 4
    validation_samples: int = HELD_OUT
    metrics: Mapping[str, MetricInfo] = field(
        default_factory=lambda: {
            "accuracy": MetricInfo(low=0.0, high=1.0, chance=1 / CLASSES),
            "loss": MetricInfo(low=0.0, chance=math.log(CLASSES)),
        },
        init=False,
    )

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r} must be a whole number >= 1")
        if SIDE % self.patch:
            raise ValueError(f"patch = {self.patch} must divide the {SIDE} pixels of an image's side")
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        self._images()

    def load(self, device: torch.device) -> Data:
        """See `FashionMnist.load`."""
        return self._images().load(device)

    def build_model(self, *, dropout: float) -> nn.Module:
        """A fresh transformer."""
        return VisionTransformer(
            patch=self.patch, width=self.width, depth=self.depth, heads=self.heads, dropout=dropout
        )

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer's blocks."""
        return [module for module in model.modules() if isinstance(module, Block)]

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        """Mean cross-entropy."""
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        """Accuracy and mean cross-entropy."""
        return self._images().evaluate(model, part)

    def _images(self) -> FashionMnist:
        return FashionMnist(validation_samples=self.validation_samples)


class VisionTransformer(nn.Module):
    """Linear patches, learned positions, blocks, mean over patches, and a linear head.

    The mean replaces the paper's class token (as good, appendix D.3). Dropout follows embeddings and all dense layers
    but queries, keys and values (appendix B.1).
    """

    def __init__(self, *, patch: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (SIDE // patch) ** 2, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores (samples, classes) of images (samples, 1, 28, 28)."""
        stream = self.dropout(self.patches(inputs).flatten(2).transpose(1, 2) + self.positions)
        for block in self.blocks:
            stream = block(stream)
        scores: torch.Tensor = self.head(self.norm(stream).mean(1))
        return scores


class Block(nn.Module):
    """Pre-norm self-attention and MLP with residuals."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, _MLP_RATIO * width)
        self.mlp_out = nn.Linear(_MLP_RATIO * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """The stream (samples, patches, width)."""
        stream = stream + self.dropout(self._attend(self.attention_norm(stream)))
        hidden = self.dropout(functional.gelu(self.mlp_in(self.mlp_norm(stream))))
        added: torch.Tensor = self.dropout(self.mlp_out(hidden))
        return stream + added

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        split = self.attention_in(stream).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value)
        added: torch.Tensor = self.attention_out(seen.transpose(1, 2).flatten(2))
        return added
