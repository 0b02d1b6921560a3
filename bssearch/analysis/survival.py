"""Repeats of one configuration of which some missed the target: what can be said of the time to it all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.objectives.time_to_target import TIME
from bssearch.records import TrialRecord, TrialState


@dataclass(frozen=True, slots=True)
class Survival:
    """Train seconds to the target where some runs missed it, of the kind that the objective counts.

    ``restricted_mean`` is the mean of min(seconds, ``horizon``), ``median`` that of Kaplan and Meier, by which more
    than half of the runs have reached: None where half or more have not by the horizon. ``reached_share`` is the share
    that has, by the same curve.
    """

    restricted_mean: float
    horizon: float
    median: float | None
    reached_share: float


def survival(runs: Sequence[TrialRecord], objective: Objective = TIME) -> Survival | None:
    """Return the Kaplan–Meier estimate of repeats under one limit; None where there is none to make.

    ``objective`` is one of time: it says of which kind the seconds are. Censoring must not depend on how a run goes
    (Kaplan & Meier 1958): of pruned runs, under differing limits, and where something else ended a run, nothing is
    said; nor where all runs reached or none did, or where the seconds of one are not known or not comparable.
    """
    ended = {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED}
    if any(run.state not in ended for run in runs) or len({run.train_seconds_limit for run in runs}) > 1:
        return None
    reached = [seconds for run in runs if (seconds := objective.figure(run)) is not None]
    missed = [seconds for run in runs if (seconds := objective.bound(run)) is not None]
    if not reached or not missed or len(reached) + len(missed) < len(runs):
        return None
    from scipy.stats import CensoredData, ecdf  # half a second, for the few studies that come here

    horizon = max(*missed, *reached)
    curve = ecdf(CensoredData(uncensored=reached, right=missed)).sf
    times, left = np.asarray(curve.quantiles), np.asarray(curve.probabilities)
    steps = np.diff(np.concatenate([[0.0], times, [horizon]]))
    crossed = times[left < 0.5]
    return Survival(
        restricted_mean=float(steps @ np.concatenate([[1.0], left])),
        horizon=horizon,
        median=float(crossed[0]) if crossed.size else None,
        reached_share=float(1 - left[-1]),
    )
