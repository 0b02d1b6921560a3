"""The loss and metrics of the shipped workloads with images in ten classes."""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from bssearch.records import MetricInfo
from bssearch.workloads.data import Part

CLASSES = 10
EVALUATION_CHUNK = 2048


class TenClasses:
    """A base class with cross-entropy and accuracy; a subclass adds data and a model."""

    metrics: Mapping[str, MetricInfo] = {
        "accuracy": MetricInfo(low=0.0, high=1.0, chance=1 / CLASSES),
        "loss": MetricInfo(low=0.0, chance=math.log(CLASSES)),
    }

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        return functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        scores = torch.cat([model(inputs) for inputs, _ in part.chunks(EVALUATION_CHUNK)])
        return {
            "accuracy": (scores.argmax(1) == part.targets).sum().item() / len(part),
            "loss": functional.cross_entropy(scores, part.targets).item(),
        }
