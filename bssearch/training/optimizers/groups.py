"""Which parameters have weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

ParameterGroups = list[dict[str, Any]]


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> ParameterGroups:
    """Return the groups with and without weight decay.

    Weight decay is for matrices and filters. Biases and the scales of norms, which have fewer than two dimensions,
    are left alone, as in Goyal et al. 2017 (§ 5.1), He et al. 2019 ("Bag of tricks", § 3.1) and the MLPerf references.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
