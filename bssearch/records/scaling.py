"""Scaling rules as functions of κ = batch size / reference batch size."""

import math
from enum import StrEnum


class LearningRateRule(StrEnum):
    """How the learning rate η scales with the batch size.

    linear: η·κ, for SGD well below the noise scale (Goyal et al. 2017, arXiv 1706.02677).
    sqrt: η·√κ (Hoffer et al. 2017, arXiv 1705.08741; for Adam, Granziol et al. 2020, arXiv 2006.09092).
    none: the learning rate stays constant.
    """

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"

    @property
    def in_words(self) -> str:
        return {"linear": "∝ batch", "sqrt": "∝ √batch", "none": "the same throughout"}[self.value]


def learning_rate_factor(rule: LearningRateRule, batch_size: int, reference_batch: int) -> float:
    ratio = batch_size / reference_batch
    return {LearningRateRule.LINEAR: ratio, LearningRateRule.SQRT: math.sqrt(ratio), LearningRateRule.NONE: 1.0}[rule]


# Goyal et al. 2017, You et al. 2017 (linear); Malladi et al. 2022 (arXiv 2205.10287), You et al. 2020 (sqrt).
RULES_OF_OPTIMIZERS = {
    "sgd": LearningRateRule.LINEAR,
    "lars": LearningRateRule.LINEAR,
    "adam": LearningRateRule.SQRT,
    "adamw": LearningRateRule.SQRT,
    "rmsprop": LearningRateRule.SQRT,
    "lamb": LearningRateRule.SQRT,
}


def rule_of_optimizer(name: str) -> LearningRateRule:
    return RULES_OF_OPTIMIZERS.get(name, LearningRateRule.SQRT)


WARMUP_RATIO = 8  # guides recommend warmup from this κ on; Goyal et al. 2017 (§2.2) used warmup at κ = 32

REGULARISERS = ("dropout", "weight_decay", "label_smoothing")

LARGEST_DROPOUT = 0.95  # at 1 the model cannot learn


def is_said_to_need_warmup(batch_size: int, reference_batch: int) -> bool:
    """True if κ ≥ `WARMUP_RATIO`."""
    return batch_size >= WARMUP_RATIO * reference_batch


def sqrt_weight_decay(weight_decay: float, ratio: float) -> float:
    """Return λ·√κ (folklore). For AdamW, the result equals `timescale_weight_decay` at η ∝ √κ."""
    return weight_decay * math.sqrt(ratio)


def timescale_weight_decay(weight_decay: float, ratio: float, rate_ratio: float) -> float:
    """Return λ·κ·η0/η, which preserves AdamW's averaging time τ = B/(ηλN) in epochs.

    ``rate_ratio`` is η0/η. Sources: Wang & Aitchison 2024 (arXiv 2405.13698); Bergsma et al. 2025 (arXiv 2505.13738).
    """
    return weight_decay * ratio * rate_ratio


def sqrt_dropout(dropout: float, batch_size: int, reference_batch: int) -> float:
    """Return p·√κ, at most `LARGEST_DROPOUT`. This folklore follows from gradient noise ∝ 1/√batch."""
    return min(LARGEST_DROPOUT, dropout * math.sqrt(batch_size / reference_batch))


def half_life(decay: float, ratio: float) -> float:
    """Return ρ^κ, which preserves an average's half-life in samples.

    Weight averages: Busbridge et al. 2023 (arXiv 2307.13813); Adam's β₂: Marek et al. 2025 (arXiv 2507.07101).
    """
    return float(decay**ratio)


def sde_beta(beta: float, ratio: float) -> float:
    """Return 1 − κ(1 − β), at least 0, for Adam's β (Malladi et al. 2022, arXiv 2205.10287, Definition 2).

    The caller also scales the learning rate by √κ and ε by `sde_epsilon`.
    """
    return max(0.0, 1 - ratio * (1 - beta))


def sde_epsilon(epsilon: float, ratio: float) -> float:
    return epsilon / math.sqrt(ratio)


LARGE_BATCH = 8192  # guides recommend layerwise optimizers from this batch size on

# LARS (You et al. 2017, arXiv 1708.03888) and LAMB (You et al. 2020, arXiv 1904.00962).
LAYERWISE = ("lars", "lamb")
