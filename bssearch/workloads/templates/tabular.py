"""A workload for bssearch: a network that sorts the rows of a table into classes.

The file runs as it is; change the places marked YOURS. bssearch does the other work: batches, optimizer, learning rate,
clock, stopping at the target.
"""

from collections.abc import Mapping

import numpy as np
import torch
from sklearn.datasets import make_classification
from torch import nn
from torch.nn import functional

import bssearch

COLUMNS = 20  # YOURS
CLASSES = 4  # YOURS


class Tabular:
    """YOURS: the data and the model; this example has a made-up table and a network of two hidden layers."""

    # YOURS: the metrics of evaluate(), with bounds and the value of guessing; the spec's target is one of them.
    metrics: Mapping[str, bssearch.MetricInfo] = {
        "accuracy": bssearch.MetricInfo(low=0.0, high=1.0, chance=1 / CLASSES)
    }

    def load(self, device: torch.device) -> bssearch.Data:
        """Return three parts that never change, on the device."""
        # YOURS: columns (samples, COLUMNS) as numbers, classes (samples,) as int64.
        columns, classes = make_classification(
            10_240, COLUMNS, n_informative=10, n_classes=CLASSES, n_clusters_per_class=4, class_sep=1.5, random_state=0
        )

        order = np.random.default_rng(0).permutation(len(columns))
        train, validation, test = np.split(order, [len(order) * 6 // 10, len(order) * 8 // 10])
        columns = (columns - columns[train].mean(0)) / columns[train].std(0)

        def part(rows: np.ndarray) -> bssearch.Part:
            inputs = torch.from_numpy(columns[rows].astype(np.float32))
            return bssearch.Part(inputs.to(device), torch.from_numpy(classes[rows]).to(device))

        return bssearch.Data(train=part(train), validation=part(validation), test=part(test))

    def build_model(self, *, dropout: float) -> nn.Module:
        """Return a new model, on the CPU; ignore dropout if the model has no dropout."""
        return nn.Sequential(  # YOURS
            nn.Linear(COLUMNS, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, CLASSES),
        )

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        """Return the mean loss of one batch."""
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)  # YOURS

    def evaluate(self, model: nn.Module, part: bssearch.Part) -> Mapping[str, float]:
        """Return every metric over a whole part; the model is in eval mode, without gradients."""
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in part.chunks(4096))
        return {"accuracy": correct / len(part)}  # YOURS
