"""A small vision transformer on Fashion-MNIST (Dosovitskiy et al. 2021, arXiv 2010.11929)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bssearch.workloads.data import Data
from bssearch.workloads.fashion_mnist import HELD_OUT, SIDE, FashionMnist
from bssearch.workloads.ten_classes import CLASSES, TenClasses
from bssearch.workloads.transformer import Block, blocks_of, check_sizes

_SIZES = ("patch", "width", "depth", "heads")


@dataclass(eq=False)
class VitTiny(TenClasses):
    """Classify Fashion-MNIST's images, split as in `FashionMnist`.

    ``patch`` is a patch's side in pixels and must divide 28; ``heads`` must divide ``width``.
    """

    patch: int = 7
    width: int = 64
    depth: int = 3
    heads: int = 4
    validation_samples: int = HELD_OUT

    def __post_init__(self) -> None:
        check_sizes(self, _SIZES)
        if SIDE % self.patch:
            raise ValueError(f"patch = {self.patch} must divide the {SIDE} pixels of an image's side")
        self._images()

    def load(self, device: torch.device) -> Data:
        return self._images().load(device)

    def build_model(self, *, dropout: float) -> nn.Module:
        return VisionTransformer(
            patch=self.patch, width=self.width, depth=self.depth, heads=self.heads, dropout=dropout
        )

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(model)

    def _images(self) -> FashionMnist:
        return FashionMnist(validation_samples=self.validation_samples)


class VisionTransformer(nn.Module):
    """Applies linear patches, learned positions, blocks, a mean over patches, and a linear head.

    The mean replaces the class token of Dosovitskiy et al. (appendix D.3). Dropout follows embeddings and the blocks'
    dense layers except queries, keys and values (appendix B.1).
    """

    def __init__(self, *, patch: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (SIDE // patch) ** 2, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, hidden_dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores (samples, classes) of images (samples, 1, 28, 28)."""
        stream = self.dropout(self.patches(inputs).flatten(2).transpose(1, 2) + self.positions)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream).mean(1))  # type: ignore[no-any-return]
