"""Fine-tuning: a network that was trained on five classes of Fashion-MNIST learns the other five from few images.

It begins with the trunk of that training and a fresh head, and all of it learns, as J. Howard and S. Ruder (2018,
"Universal Language Model Fine-tuning for Text Classification", arXiv 1801.06146) call fine-tuning. What it forgets
(R. French 1999, "Catastrophic forgetting in connectionist networks", Trends in Cognitive Sciences 3) shows in the old
head, which stays as it was: it names the images of the old classes by what the trunk makes of them now.

Images and split are those of `bssearch.workloads.fashion_mnist`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import WorkloadError
from bssearch.records import MetricInfo
from bssearch.workloads import fashion_mnist
from bssearch.workloads.base import Data, Part
from bssearch.workloads.data import evenly, stratified_order
from bssearch.workloads.fashion_mnist import CLASSES, HELD_OUT, FashionMnist
from bssearch.workloads.pretrained import Weights, pretrained

OLD_CLASSES = 5
"""The classes 0 to 4 are those of the pre-training: T-shirts, trousers, pullovers, dresses, coats."""

NEW_CLASSES = CLASSES - OLD_CLASSES
"""The classes 5 to 9 are those of the fine-tuning: sandals, shirts, sneakers, bags, ankle boots."""

MOST_TRAINED = 27_500
"""The training images of the new classes."""

_CHANNELS = (16, 32, 64)
_GROUPS = 8
_FEATURES = 64
_EVALUATION_CHUNK = 2048

_PRETRAINING_EPOCHS = 2
_PRETRAINING_BATCH = 64
_PRETRAINING_RATE = 3e-3
"""AdamW's, falling to zero in a straight line; found by trying."""


@dataclass(eq=False)
class FineTune:
    """Classify the images of five classes with a network that knows five others.

    ``train_samples`` images train, as many of each new class: fine-tuning is for where there are few. Of the
    ``validation_samples`` that validate and of the 10,000 test images each class has its share: those of the new
    classes tell ``accuracy`` and ``loss``, those of the old ones ``old_accuracy``, and ``forgetting``, by how much that
    is less than it was before.
    """

    train_samples: int = 2500
    validation_samples: int = 2000
    metrics: Mapping[str, MetricInfo] = field(
        default_factory=lambda: {
            "accuracy": MetricInfo(low=0.0, high=1.0, chance=1 / NEW_CLASSES),
            "loss": MetricInfo(low=0.0, chance=math.log(NEW_CLASSES)),
            "old_accuracy": MetricInfo(low=0.0, high=1.0, reported=True),
            "forgetting": MetricInfo(low=-1.0, high=1.0, reported=True),
        },
        init=False,
    )

    def __post_init__(self) -> None:
        self._weights: Weights | None = None
        bounds = {"train_samples": (NEW_CLASSES, MOST_TRAINED), "validation_samples": (CLASSES, HELD_OUT)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} = {value!r} must be a whole number from {low} to {high}")

    def load(self, device: torch.device) -> Data:
        """Return images (samples, 1, 28, 28) as float32; targets (samples, 2) as int64.

        A target is the class, 0 to 9, and for the old ones whether the network names it rightly before the fine-tuning
        (0 or 1; 0 for the new ones). Only new classes train. The pre-training takes some ten seconds of one core the
        first time; its weights are then in the cache. Raises `WorkloadError` as `FashionMnist.load` does.
        """
        data = FashionMnist(validation_samples=self.validation_samples).load(torch.device("cpu"))
        train = data.train
        old = _chosen(train, train.targets < OLD_CLASSES)
        self._weights = pretrained("finetune", [*_code(), _digest(old)], lambda: pretrained_weights(old))
        new = _few(_chosen(train, train.targets >= OLD_CLASSES), self.train_samples)
        before = self.build_model(dropout=0.0).eval()
        return Data(
            train=_told(new, before).to(device),
            validation=_told(data.validation, before).to(device),
            test=_told(data.test, before).to(device),
        )

    def build_model(self, *, dropout: float) -> nn.Module:
        """Return the network of the pre-training with a fresh head; the images must have been loaded."""
        if self._weights is None:
            raise WorkloadError("finetune builds its model from pre-trained weights: call load() first")
        model = TwoHeaded(dropout)
        model.load_state_dict(self._weights, strict=False)
        return model

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        """Return the mean cross-entropy over images of new classes."""
        return functional.cross_entropy(model(inputs), targets[:, 0] - OLD_CLASSES, label_smoothing=label_smoothing)

    def evaluate(self, model: Any, part: Part) -> Mapping[str, float]:
        """Return accuracy and mean cross-entropy on the new classes, accuracy and forgetting on the old ones.

        The part must have images of both.
        """
        features = torch.cat([model.trunk(inputs) for inputs, _ in part.chunks(_EVALUATION_CHUNK)])
        classes, were_right = part.targets.unbind(1)
        is_old = classes < OLD_CLASSES
        scores, targets = model.head(features[~is_old]), classes[~is_old] - OLD_CLASSES
        right_before = were_right[is_old].sum().item()
        right = (model.old_head(features[is_old]).argmax(1) == classes[is_old]).sum().item()
        old = is_old.sum().item()
        return {
            "accuracy": (scores.argmax(1) == targets).sum().item() / len(targets),
            "loss": functional.cross_entropy(scores, targets).item(),
            "old_accuracy": right / old,
            "forgetting": (right_before - right) / old,
        }


class TwoHeaded(nn.Module):
    """Three convolutions that halve the image, a linear layer, dropout, a head: 0.09 million parameters.

    ``old_head`` is that of the old classes, which never learns; it sees what the trunk makes without dropout.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.trunk = trunk()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(_FEATURES, NEW_CLASSES)
        self.old_head = nn.Linear(_FEATURES, OLD_CLASSES).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores (samples, new classes) of images (samples, 1, 28, 28)."""
        scores: torch.Tensor = self.head(self.dropout(self.trunk(inputs)))
        return scores


def trunk() -> nn.Sequential:
    """Return what makes features (samples, 64) of images (samples, 1, 28, 28)."""
    layers: list[nn.Module] = []
    width = 1
    for channels in _CHANNELS:
        layers += [nn.Conv2d(width, channels, 3, stride=2, padding=1), nn.GroupNorm(_GROUPS, channels), nn.ReLU()]
        width = channels
    side = 4  # 28 → 14 → 7 → 4 pixels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side * side, _FEATURES), nn.ReLU())


def pretrained_weights(old: Part) -> Weights:
    """Return the weights of trunk and old head, trained on images of the old classes (targets: classes 0 to 4)."""
    features, head = trunk(), nn.Linear(_FEATURES, OLD_CLASSES)
    parameters = [*features.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_PRETRAINING_RATE, foreach=True)
    steps_per_epoch = len(old) // _PRETRAINING_BATCH
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps_per_epoch * _PRETRAINING_EPOCHS)
    for _ in range(_PRETRAINING_EPOCHS):
        order = torch.randperm(len(old))[: steps_per_epoch * _PRETRAINING_BATCH]
        for rows in order.view(steps_per_epoch, _PRETRAINING_BATCH):
            inputs, targets = old.gather(rows)
            optimizer.zero_grad()
            functional.cross_entropy(head(features(inputs)), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    trained = {"trunk": features.state_dict(), "old_head": head.state_dict()}
    return {f"{part}.{name}": tensor for part, state in trained.items() for name, tensor in state.items()}


def _chosen(part: Part, rows: torch.Tensor) -> Part:
    """Return the samples of a part at which a mask (samples,) is true."""
    return Part(part.inputs[rows], part.targets[rows])


def _few(part: Part, count: int) -> Part:
    """Return ``count`` samples of a part, as many of each class: the same on every machine."""
    rows = torch.from_numpy(evenly(stratified_order(part.targets.numpy()), count))
    return Part(*part.gather(rows))


def _told(part: Part, before: Any) -> Part:
    """Return a part whose targets also tell whether a network names the images of old classes rightly."""
    with torch.no_grad():
        named = torch.cat([before.old_head(before.trunk(x)).argmax(1) for x, _ in part.chunks(_EVALUATION_CHUNK)])
    return Part(part.inputs, torch.stack([part.targets, (named == part.targets).long()], 1))


def _code() -> list[bytes]:
    """Return the code that makes the weights and their data."""
    return [Path(str(path)).read_bytes() for path in (__file__, fashion_mnist.__file__)]


def _digest(part: Part) -> bytes:
    """Return the digest of a part's images and classes."""
    found = hashlib.sha256(part.inputs.numpy())
    found.update(part.targets.numpy())
    return found.digest()
