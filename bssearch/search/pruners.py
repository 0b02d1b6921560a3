"""When a trial is stopped early: pure functions of learning curves over train seconds.

Two rules, both against the incumbent, the trial with the least time-to-target so far:

cap: a trial past slack × the incumbent's time-to-target cannot win. Lossless for single runs; with seed noise of
    coefficient of variation c, slack = 1 + 2c keeps configurations whose mean is better (adaptive capping: Hutter et
    al. 2009, ParamILS; measured on recorded curves it halves the cost).
race: a trial whose best metric at t is worse than the incumbent's was at t / lag is behind by that factor at equal
    train seconds (performance-envelope capping: de Souza et al. 2022). Not before a tenth of the incumbent's time.

Equal train seconds, interpolated; never equal steps, which mean different times at different batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bssearch.curves import Envelope, envelope
from bssearch.records import Objective, Observation, Target, TrialState
from bssearch.spec.model import PrunerSpec

RACE_FROM = 0.1
BY_SECONDS = frozenset({Objective.TIME_TO_TARGET, Objective.COST_TO_TARGET})
"""The objectives that grow with a trial's train seconds alike at every batch size: others have no race."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """What a trial runs against: its number, seconds to the target, and best-so-far curve."""

    number: int
    time_to_target_s: float
    curve: Envelope


def train_seconds_limit(pruner: PrunerSpec, full: float, incumbent_seconds: float, sweeps: int) -> float:
    """Return how many train seconds a search trial may take.

    With an incumbent: slack × its time-to-target. Before the first hit limits grow: a quarter of the full limit
    while every batch size is tried once, half of it in the second sweep, all of it from the third. Never more than
    the full limit; always that without a pruner.
    """
    if pruner.name == "none":
        return full
    growing = full * min(1.0, 2.0 ** (sweeps - 2))
    return min(full, pruner.slack * incumbent_seconds, growing if incumbent_seconds == float("inf") else full)


def lags(curve: Envelope, train_seconds: float, incumbent: Incumbent, lag: float) -> bool:
    """Return whether a curve is worse at a moment than the incumbent's was at 1/lag of it."""
    if train_seconds < RACE_FROM * incumbent.time_to_target_s:
        return False
    own, theirs = curve.at(train_seconds), incumbent.curve.at(train_seconds / lag)
    return own is not None and theirs is not None and own < theirs


def verdict(
    pruner: PrunerSpec, observations: Sequence[Observation], target: Target, incumbent: Incumbent
) -> tuple[TrialState, str] | None:
    """Return the state and reason in which a trial is to be stopped after its last observation, or None."""
    if pruner.name == "none":
        return None
    now = observations[-1].train_seconds
    cap = pruner.slack * incumbent.time_to_target_s
    if now > cap:
        reason = f"past {pruner.slack:g} × the {incumbent.time_to_target_s:.3g} s of trial {incumbent.number}"
        return TrialState.CAPPED, reason
    if pruner.name == "race" and lags(envelope(observations, target), now, incumbent, pruner.lag):
        reason = f"at {now:.3g} s behind trial {incumbent.number} at {now / pruner.lag:.3g} s"
        return TrialState.PRUNED, reason
    return None
