"""How steps are computed on a device: what a study's training settings come to there."""

from __future__ import annotations

import torch
from torch import nn

from bssearch.records import TrainingSettings
from bssearch.workloads.base import Workload


class Computation:
    """The training settings of a study, resolved for one device; a worker keeps it for all its trials."""

    def __init__(self, device: torch.device, settings: TrainingSettings | None = None) -> None:
        self.device = device
        self.settings = settings or TrainingSettings()

    def build_model(self, workload: Workload, dropout: float) -> nn.Module:
        """Return a freshly initialised model in training mode on the device; the caller has set the seed."""
        model = workload.build_model(dropout=dropout).to(self.device)
        return model.train()
