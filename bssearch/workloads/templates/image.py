"""A workload for bssearch: a network that sorts images into classes.

The file runs as it is; change the places marked YOURS. bssearch does the other work: batches, optimizer, learning rate,
clock, stopping at the target. bssearch seeds torch's and numpy's global generators: draw from these, but not in load().
"""

from collections.abc import Mapping

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import bssearch


class Image:
    """YOURS: the data and the model; this example has images of 8 × 8 pixels and a small convolutional network."""

    # YOURS: the metrics of evaluate(), with bounds and the value of guessing; the spec's target is one of them.
    metrics: Mapping[str, bssearch.MetricInfo] = {"accuracy": bssearch.MetricInfo(low=0.0, high=1.0, chance=0.1)}

    def load(self, device: torch.device) -> bssearch.Data:
        """Return three parts that never change, on the device."""
        # YOURS: images (samples, channels, height, width) as float32, classes (samples,) as int64.
        digits = load_digits()
        images = digits.images[:, np.newaxis].astype(np.float32) / 16
        classes = digits.target.astype(np.int64)

        order = np.random.default_rng(0).permutation(len(images))
        train, validation, test = np.split(order, [len(order) * 6 // 10, len(order) * 8 // 10])
        images = (images - images[train].mean()) / images[train].std()

        def part(rows: np.ndarray) -> bssearch.Part:
            return bssearch.Part(torch.from_numpy(images[rows]).to(device), torch.from_numpy(classes[rows]).to(device))

        return bssearch.Data(train=part(train), validation=part(validation), test=part(test))

    def build_model(self, *, dropout: float) -> nn.Module:
        """Return a new model, on the CPU; ignore dropout if the model has no dropout."""
        # YOURS. Normalise over groups or layers, because batch normalisation depends on the batch size.
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * 2 * 2, 10),
        )

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        """Return the mean loss of one batch; you may crop and flip the inputs here."""
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)  # YOURS

    def evaluate(self, model: nn.Module, part: bssearch.Part) -> Mapping[str, float]:
        """Return every metric over a whole part; the model is in eval mode, without gradients."""
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in part.chunks(1024))
        return {"accuracy": correct / len(part)}  # YOURS
