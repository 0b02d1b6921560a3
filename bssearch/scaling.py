"""The scaling rules as pure functions of the batch-size ratio κ = batch / reference batch."""

from __future__ import annotations

import math
from enum import StrEnum


class LearningRateRule(StrEnum):
    """How the learning rate follows the batch size.

    linear: η·κ, for SGD well below the noise scale (Goyal et al. 2017, arXiv 1706.02677).
    sqrt: η·√κ (Hoffer et al. 2017, arXiv 1705.08741; for Adam, Granziol et al. 2020, arXiv 2006.09092).
    none: the same learning rate at every batch size.
    """

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"


def learning_rate_factor(rule: LearningRateRule, batch_size: int, reference_batch: int) -> float:
    """Return what the learning rate at ``reference_batch`` is multiplied by at ``batch_size``."""
    ratio = batch_size / reference_batch
    match rule:
        case LearningRateRule.LINEAR:
            return ratio
        case LearningRateRule.SQRT:
            return math.sqrt(ratio)
        case LearningRateRule.NONE:
            return 1.0
