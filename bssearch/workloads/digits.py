"""scikit-learn's handwritten digits: 1,797 images (8 × 8), a small convolutional network, about 1 s per trial.

Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bssearch.errors import WorkloadError, require
from bssearch.workloads.base import check_whole
from bssearch.workloads.data import Data, Part, evenly, stratified_order
from bssearch.workloads.ten_classes import CLASSES, TenClasses


@dataclass(eq=False)
class Digits(TenClasses):
    """Classify the digits; by default 1,077 images train, 360 validate and 360 test, in a fixed stratified split."""

    validation_samples: int = 360
    test_samples: int = 360

    def __post_init__(self) -> None:
        check_whole(self, "validation_samples", "test_samples")

    def load(self, device: torch.device) -> Data:
        """Return standardised images (samples, 1, 8, 8) and digits (samples,)."""
        images, labels = _read()
        held_out = self.validation_samples + self.test_samples
        require(
            held_out < len(labels),
            f"validation_samples + test_samples = {held_out} leaves no training samples; choose a sum < {len(labels)}",
            error=WorkloadError,
        )
        order = stratified_order(labels)
        validation = evenly(order, self.validation_samples)
        rest = order[~np.isin(order, validation)]
        test = evenly(rest, self.test_samples)
        train = rest[~np.isin(rest, test)]
        train_images = images[train]
        images = (images - train_images.mean()) / train_images.std()

        def part(rows: np.ndarray) -> Part:
            return Part(
                torch.from_numpy(images[rows]).unsqueeze(1).to(device), torch.from_numpy(labels[rows]).to(device)
            )

        return Data(train=part(train), validation=part(validation), test=part(test))

    def build_model(self, *, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 32, kernel_size=3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * 2 * 2, CLASSES),
        )


def _read() -> tuple[np.ndarray, np.ndarray]:
    # Read images (1797, 8, 8) as float32 in 0 … 1, and digits (1797,) as int64.
    found = importlib.util.find_spec("sklearn")  # the slow import of sklearn is not needed
    assert found is not None and found.origin is not None, "scikit-learn is a dependency"
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    return table[:, :-1].reshape(-1, 8, 8) / 16, table[:, -1].astype(np.int64)
