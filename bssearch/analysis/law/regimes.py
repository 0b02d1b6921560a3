"""What a larger batch buys: how steps-to-target respond to the batch size (Shallue et al. 2019, arXiv 1811.03600)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bssearch.analysis.optimum import Candidate, median_steps
from bssearch.analysis.time_to_target import welch_half_width
from bssearch.records import TrialState
from bssearch.records.intervals import FEWEST_RUNS

Regime = Literal["perfect", "diminishing", "maximal", "undecided"]

PERFECT, MAXIMAL = -0.75, -0.25
"""The slopes that part the regimes: half-way between −1, where steps halve as the batch doubles, −0.5, and 0: a
choice."""


@dataclass(frozen=True)
class Slope:
    """The slope of log steps over log batch, from the batch size ``since`` to the next, with its 95 % interval.

    The interval is Welch's, over the seeds of both, widened to hold the slope of the medians. There is none where
    either has fewer than three runs, or one that missed the target, nor where all runs of either are alike.
    """

    since: int
    value: float
    low: float | None
    high: float | None

    @property
    def regime(self) -> Regime:
        """Return the regime that holds the whole interval; undecided where none does, or where there is no interval."""
        if self.low is None or self.high is None:
            return "undecided"
        if self.high < PERFECT:
            return "perfect"
        if self.low > MAXIMAL:
            return "maximal"
        return "diminishing" if self.low >= PERFECT and self.high <= MAXIMAL else "undecided"

    @property
    def is_too_steep(self) -> bool:
        """Return whether steps fall by more than the batch grows, which only a smaller batch out of tune explains."""
        return self.high is not None and self.high < -1


def slopes(candidates: Mapping[int, Candidate]) -> dict[int, Slope]:
    """Return the slope at each batch size that has steps to the target but the smallest of them."""
    known = [(size, steps) for size, one in sorted(candidates.items()) if (steps := _steps(one)) is not None]
    return {here[0]: _slope(before, here) for before, here in itertools.pairwise(known)}


def _steps(candidate: Candidate) -> tuple[float, list[float]] | None:
    """Return the median steps and the logarithms of all, or none of these where a run missed or there are too few."""
    median = median_steps(candidate)
    if not median:
        return None
    reached = [run.outcome.steps_to_target for run in candidate.runs if run.outcome and run.state is TrialState.REACHED]
    logs = [math.log(one) for one in reached if one]
    return median, logs if len(logs) == len(candidate.runs) >= FEWEST_RUNS else []


def _slope(smaller: tuple[int, tuple[float, list[float]]], larger: tuple[int, tuple[float, list[float]]]) -> Slope:
    (size, (steps, logs)), (larger_size, (larger_steps, larger_logs)) = smaller, larger
    span = math.log(larger_size / size)
    value = math.log(larger_steps / steps) / span
    sides = [(statistics.stdev(side), len(side)) for side in (logs, larger_logs) if side]
    if len(sides) < 2 or not any(deviation for deviation, _ in sides):
        return Slope(size, value, None, None)
    half = welch_half_width(*sides)
    middle = statistics.fmean(larger_logs) - statistics.fmean(logs)
    return Slope(size, value, min(value, (middle - half) / span), max(value, (middle + half) / span))
