"""Regimes of steps-to-target over batch size (Shallue et al. 2019, arXiv 1811.03600)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bssearch.analysis.optimum import Candidate, median_steps
from bssearch.analysis.time_to_target import deviation_of, half_width, of_runs
from bssearch.records import TrialState
from bssearch.records.intervals import FEWEST_RUNS

Regime = Literal["perfect", "diminishing", "maximal", "undecided"]

PERFECT, MAXIMAL = -0.75, -0.25
"""Half-way between −1, −0.5 and 0."""


@dataclass(frozen=True)
class Slope:
    """Slope of log steps over log batch from ``since`` to the next batch size.

    The 95 % interval is Welch's with the gaps between evaluations, widened to hold the slope of medians; None below
    three runs a side or with a miss.
    """

    since: int
    value: float
    low: float | None
    high: float | None

    @property
    def regime(self) -> Regime:
        """Regime of the whole interval, else undecided."""
        if self.low is None or self.high is None:
            return "undecided"
        if self.high < PERFECT:
            return "perfect"
        if self.low > MAXIMAL:
            return "maximal"
        return "diminishing" if self.low >= PERFECT and self.high <= MAXIMAL else "undecided"

    @property
    def is_too_steep(self) -> bool:
        """True if steps fall by more than the batch grows: then the smaller batch is badly tuned."""
        return self.high is not None and self.high < -1


def slopes(candidates: Mapping[int, Candidate]) -> dict[int, Slope]:
    """Slope at each batch size but the smallest."""
    known = [(size, steps) for size, one in sorted(candidates.items()) if (steps := _steps(one)) is not None]
    return {here[0]: _slope(before, here) for before, here in itertools.pairwise(known)}


Steps = tuple[float, list[float], list[tuple[float, float]]]  # median, logs, and the errors of their mean


def _steps(candidate: Candidate) -> Steps | None:
    median = median_steps(candidate)
    if not median:
        return None
    reached = [run.outcome.steps_to_target for run in candidate.runs if run.outcome and run.state is TrialState.REACHED]
    logs = [math.log(one) for one in reached if one]
    if len(logs) < len(candidate.runs) or len(logs) < FEWEST_RUNS:
        return median, [], []
    return median, logs, of_runs(*deviation_of(logs, candidate.runs), len(logs))


def _slope(smaller: tuple[int, Steps], larger: tuple[int, Steps]) -> Slope:
    (size, (steps, logs, parts)), (larger_size, (larger_steps, larger_logs, larger_parts)) = smaller, larger
    span = math.log(larger_size / size)
    value = math.log(larger_steps / steps) / span
    half = half_width([*parts, *larger_parts])
    if not logs or not larger_logs or not half:
        return Slope(size, value, None, None)
    middle = statistics.fmean(larger_logs) - statistics.fmean(logs)
    return Slope(size, value, min(value, (middle - half) / span), max(value, (middle + half) / span))
