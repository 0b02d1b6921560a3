"""Pruning policies by name: those a spec may ask for, and those that a simulation compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bssearch.errors import UsageError
from bssearch.pruners.base import Cap, Policy, Race
from bssearch.pruners.pace import PATIENCE, Pace

MakePolicy = Callable[[float], Policy]


def _peer(limit: float, pruner: str) -> Policy:
    from bssearch.pruners.optuna import OptunaPolicy

    return OptunaPolicy(limit, pruner)


PEERS = ("median", "asha", "hyperband")
"""Those of Optuna; see `bssearch.pruners.optuna`."""

POLICIES: Mapping[str, MakePolicy] = {
    "none": Policy,
    "cap": Cap,
    **{f"lag-{lag:g}": partial(Race, lag=lag) for lag in (1.5, 2.0, 3.0)},
    **{name: partial(Pace, patience=patience) for name, patience in PATIENCE.items()},
    **{name: partial(_peer, pruner=name) for name in PEERS},
}
"""Policies by name, each made for the longest that a trial trains, in seconds."""


def policy_maker(name: str) -> MakePolicy:
    """Return how a policy is made. Raises `UsageError` for a name that is not known."""
    if name not in POLICIES:
        raise UsageError(f"pruner = {name!r} is not known; there are {', '.join(POLICIES)}")
    return POLICIES[name]
