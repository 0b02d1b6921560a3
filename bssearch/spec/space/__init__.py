"""The search space: parameters that vary between trials."""

from bssearch.spec.space.domains import (
    DECAY_SHARE,
    OPTIONAL,
    TRAINING_PARAMETERS,
    UNKNOWN_KEY,
    WORKLOAD_PARAMETERS,
    Dimension,
    Domain,
    ScheduleName,
    StrictModel,
    are_coordinates,
    bounds,
    within_limits,
)
from bssearch.spec.space.micro_batches import (
    RETUNED,
    UNKNOWN,
    BatchGrowth,
    BatchRules,
    MemoryBoundary,
    choose_micro_batch,
    in_force,
    split_batch,
)
from bssearch.spec.space.optimizers import OPTIMIZER_SETTINGS, OPTIMIZERS, Optimizer
from bssearch.spec.space.search_space import SearchSpace, is_alike

__all__ = [
    "DECAY_SHARE",
    "OPTIMIZERS",
    "OPTIMIZER_SETTINGS",
    "OPTIONAL",
    "RETUNED",
    "TRAINING_PARAMETERS",
    "UNKNOWN",
    "UNKNOWN_KEY",
    "WORKLOAD_PARAMETERS",
    "BatchGrowth",
    "BatchRules",
    "Dimension",
    "Domain",
    "MemoryBoundary",
    "Optimizer",
    "ScheduleName",
    "SearchSpace",
    "StrictModel",
    "are_coordinates",
    "bounds",
    "choose_micro_batch",
    "in_force",
    "is_alike",
    "split_batch",
    "within_limits",
]
