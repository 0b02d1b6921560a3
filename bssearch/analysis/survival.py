"""Repeats of one configuration of which some missed the target: what can be said of the time to it all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bssearch.records import TrialRecord, TrialState


@dataclass(frozen=True, slots=True)
class Survival:
    """Train seconds to the target where some runs missed it.

    ``restricted_mean`` is the mean of min(seconds, ``horizon``), ``median`` that of Kaplan and Meier: None where half
    of the runs or more have not reached by then. ``reached_share`` is the share that has, by the same curve.
    """

    restricted_mean: float
    horizon: float
    median: float | None
    reached_share: float


def survival(runs: Sequence[TrialRecord]) -> Survival | None:
    """Return the Kaplan–Meier estimate of repeats under one limit; None where there is none to make.

    Censoring must not depend on how a run goes (Kaplan & Meier 1958): of pruned runs, under differing limits, and
    where something else ended a run, nothing is said; nor where all runs reached or none did.
    """
    from scipy.stats import CensoredData, ecdf

    ended = {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED}
    outcomes = [run.outcome for run in runs if run.outcome is not None and run.state in ended]
    if len(outcomes) < len(runs) or len({run.train_seconds_limit for run in runs}) > 1:
        return None
    reached = [one.time_to_target_s for one in outcomes if one.time_to_target_s is not None]
    missed = [one.last_miss_seconds or 0.0 for one in outcomes if one.state is not TrialState.REACHED]
    if not reached or not missed or len(reached) + len(missed) < len(outcomes):
        return None
    horizon = max(*missed, *reached)
    curve = ecdf(CensoredData(uncensored=reached, right=missed)).sf
    times, left = np.asarray(curve.quantiles), np.asarray(curve.probabilities)
    steps = np.diff(np.concatenate([[0.0], times, [horizon]]))
    crossed = times[left <= 0.5]
    return Survival(
        restricted_mean=float(steps @ np.concatenate([[1.0], left])),
        horizon=horizon,
        median=float(crossed[0]) if crossed.size else None,
        reached_share=float(1 - left[-1]),
    )
