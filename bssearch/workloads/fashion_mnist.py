"""Fashion-MNIST: 70,000 images (28 × 28) of clothes in ten classes.

Source: Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import WorkloadError
from bssearch.records import MetricInfo
from bssearch.workloads.base import Data, Part
from bssearch.workloads.data import evenly, stratified_order
from bssearch.workloads.data_folder import find_fashion_mnist, read_idx

CLASSES = 10
SIDE = 28
HELD_OUT = 5000  # images that never train, even if fewer validate

MODELS = ("resnet", "mlp")
NORMS = ("group", "batch")

SHIFT = 2  # most pixels by which augment moves an image

_STAGES = (32, 64, 96)
_GROUPS = 8
_HIDDEN = 256
_EVALUATION_CHUNK = 2048
_LABELS_CRC32 = {"train": 0x2ED6E46A, "t10k": 0x242BC73F}


class FashionMnist:
    """Classify the images; 55,000 train, up to 5,000 validate, and 10,000 test, in a fixed stratified split.

    ``model`` is ``resnet`` or ``mlp``. ``norm`` of the resnet is ``group`` (default) or ``batch``; with ``batch``,
    accumulation changes the result. ``augment`` moves training images by up to two pixels and mirrors half of them.
    """

    metrics: Mapping[str, MetricInfo] = {
        "accuracy": MetricInfo(low=0.0, high=1.0, chance=1 / CLASSES),
        "loss": MetricInfo(low=0.0, chance=math.log(CLASSES)),
    }

    def __init__(
        self,
        model: str = "resnet",
        norm: str | None = None,
        validation_samples: int = HELD_OUT,
        augment: bool = False,
    ) -> None:
        if model not in MODELS:
            raise ValueError(f"model = {model!r} must be one of {', '.join(MODELS)}")
        if norm is not None and norm not in NORMS:
            raise ValueError(f"norm = {norm!r} must be one of {', '.join(NORMS)}")
        if norm is not None and model == "mlp":
            raise ValueError(
                f"norm = {norm!r} has no effect on model = 'mlp', which has no normalisation; leave it out"
            )
        if type(validation_samples) is not int or not 1 <= validation_samples <= HELD_OUT:
            raise ValueError(f"validation_samples = {validation_samples!r} must be a whole number from 1 to {HELD_OUT}")
        if type(augment) is not bool:
            raise ValueError(f"augment = {augment!r} must be true or false")
        self.model = model
        self.norm = norm or "group"
        self.validation_samples = validation_samples
        self._augments = augment

    def load(self, device: torch.device) -> Data:
        """Images (samples, 1, 28, 28) as float32, standardised over the training part, and int64 classes.

        Raises `WorkloadError` for missing or damaged files, or another data set's.
        """
        files = find_fashion_mnist()
        images, labels = read_images(files, "train")
        test_images, test_labels = read_images(files, "t10k")
        train, validation = split(labels, self.validation_samples)
        mean, deviation = _moments(images[train])

        def part(images: np.ndarray, labels: np.ndarray) -> Part:
            pixels = torch.from_numpy(images).to(device).to(torch.float32).sub_(mean).div_(deviation)
            return Part(pixels.unsqueeze(1), torch.from_numpy(labels.astype(np.int64)).to(device))

        return Data(
            train=part(images[train], labels[train]),
            validation=part(images[validation], labels[validation]),
            test=part(test_images, test_labels),
        )

    def build_model(self, *, dropout: float) -> nn.Module:
        """A fresh model."""
        return perceptron(dropout) if self.model == "mlp" else residual_network(dropout, self.norm)

    def checkpointed_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """The residual blocks."""
        return [module for module in model.modules() if isinstance(module, ResidualBlock)]

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        """Move and mirror images if ``augment`` is set."""
        return moved_and_mirrored(inputs) if self._augments else inputs

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        """Mean cross-entropy."""
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        """Accuracy and mean cross-entropy."""
        scores = torch.cat([model(inputs) for inputs, _ in part.chunks(_EVALUATION_CHUNK)])
        correct = (scores.argmax(1) == part.targets).sum()
        return {
            "accuracy": correct.item() / len(part),
            "loss": functional.cross_entropy(scores, part.targets).item(),
        }


def read_images(files: Mapping[str, Path], part: Literal["train", "t10k"]) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, 28, 28) and classes (samples,) of a pair of files, as uint8.

    Raises `WorkloadError` if damaged or another data set's: MNIST has the same file names.
    """
    images_file, labels_file = files[f"{part}-images-idx3-ubyte"], files[f"{part}-labels-idx1-ubyte"]
    labels = read_idx(labels_file, dimensions=1)
    if len(labels) and labels.max() >= CLASSES:
        row = int(np.argmax(labels >= CLASSES))
        raise WorkloadError(f"{labels_file}: label {row} is {labels[row]}; it must be < {CLASSES}")
    images = read_idx(images_file, dimensions=3)
    if images.shape[1:] != (SIDE, SIDE):
        height, width = images.shape[1:]
        raise WorkloadError(f"{images_file} holds images of {height} × {width} pixels; they must be {SIDE} × {SIDE}")
    if len(images) != len(labels):
        raise WorkloadError(f"{images_file} holds {len(images)} images, but {labels_file} {len(labels)} labels")
    checksum = zlib.crc32(labels.tobytes())
    if checksum != _LABELS_CRC32[part]:
        raise WorkloadError(
            f"{labels_file} does not hold the labels of Fashion-MNIST: its {len(labels)} labels have the CRC-32 "
            f"{checksum:08x}, not {_LABELS_CRC32[part]:08x}; MNIST's files have the same names"
        )
    return images.copy(), labels


def split(labels: np.ndarray, validation_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation rows."""
    held_out = evenly(stratified_order(labels), HELD_OUT)
    return np.setdiff1d(np.arange(len(labels)), held_out), evenly(held_out, validation_samples)


def _moments(images: np.ndarray) -> tuple[float, float]:
    # exact sums, equal on every machine
    counts = torch.bincount(torch.from_numpy(images).flatten(), minlength=256).numpy()
    brightness = np.arange(256)
    mean = float(counts @ brightness / counts.sum())
    return mean, math.sqrt(counts @ brightness**2 / counts.sum() - mean**2)


def moved_and_mirrored(images: torch.Tensor) -> torch.Tensor:
    """Move images (samples, 1, height, width) by up to `SHIFT` pixels; mirror half of them.

    He et al. 2016 (arXiv 1512.03385, § 4.2), with repeated borders.
    """
    samples, _, height, width = images.shape
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2, samples, 1), device=images.device)
    mirrored = torch.rand(samples, 1, device=images.device) < 0.5
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored, width - 1 - columns, columns)
    rows = (torch.arange(height, device=images.device) + down).clamp(0, height - 1)
    columns = (columns + right).clamp(0, width - 1)
    sample = torch.arange(samples, device=images.device)[:, None, None]
    return images[:, 0][sample, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def perceptron(dropout: float) -> nn.Module:
    """Two hidden layers of 256 units with dropout: 0.27 million parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, _HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(_HIDDEN, CLASSES),
    )


def residual_network(dropout: float, norm: str) -> nn.Module:
    """Three residual blocks of 32, 64 and 96 channels: 0.22 million parameters."""
    width = _STAGES[0]
    layers: list[nn.Module] = [_convolution(1, width), _norm(norm, width), nn.ReLU()]
    for stage, channels in enumerate(_STAGES):
        layers.append(ResidualBlock(width, channels, stride=1 if stage == 0 else 2, norm=norm))
        width = channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, CLASSES)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two normalised convolutions with a residual (He et al., arXiv 1512.03385, figure 2; option B shortcuts)."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _convolution(channels_in, channels_out, stride=stride),
            _norm(norm, channels_out),
            nn.ReLU(),
            _convolution(channels_out, channels_out),
            _norm(norm, channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                _convolution(channels_in, channels_out, size=1, stride=stride), _norm(norm, channels_out)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images (samples, channels_out, height / stride, width / stride)."""
        return functional.relu(self.branch(inputs) + self.shortcut(inputs))


def _convolution(channels_in: int, channels_out: int, *, size: int = 3, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)


def _norm(norm: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(_GROUPS, channels)
