"""The search space: what may vary between trials, in the coordinates in which it is searched.

The batch size is a ladder. The learning rate is searched relative to its rule: what is sampled is the learning rate
at the reference batch, and the rule gives the one at the trial's batch, so that what is learned at one batch size
helps at the next. Every other parameter is fixed (a scalar), a range (``{low, high}``) or a list of choices.
"""

from bssearch.space.domains import REGULAR, Dimension, Domain, StrictModel, bounds, within_limits
from bssearch.space.parts import OPTIMIZER_SETTINGS, AdamW, Optimizer, Sgd
from bssearch.space.search_space import SearchSpace, split_batch

__all__ = [
    "OPTIMIZER_SETTINGS",
    "REGULAR",
    "AdamW",
    "Dimension",
    "Domain",
    "Optimizer",
    "SearchSpace",
    "Sgd",
    "StrictModel",
    "bounds",
    "split_batch",
    "within_limits",
]
