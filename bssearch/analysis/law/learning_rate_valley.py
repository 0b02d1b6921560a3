"""How much each batch size could gain from a better learning rate.

Model: log figure = level(B) + κ (x − μ − ρ b)², x and b the octaves of learning rate and batch size. All batch sizes
share κ, μ and ρ, so trials elsewhere inform a size with few. They are integrated over a grid, noise unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.objectives.base import Objective
from bssearch.analysis.optimum import Verdict
from bssearch.records import Phase, TrialRecord

CURVATURES = tuple(0.02 * 2 ** (step / 2) for step in range(11))
"""Log cost of twice or half the best learning rate."""

POWERS = tuple(step / 4 for step in range(-1, 6))
"""Powers of the batch size by which the best learning rate grows."""

BOTTOM_STEP = 0.25

BEYOND = 2.0
"""Octaves beyond the tried learning rates."""

FEWEST_MORE = 4
"""Beyond one trial per batch size: three parameters and the noise."""

LEAST_SQUARES = 1e-12

BADLY_TUNED = 0.12
TUNING_GAP = 0.12
WELL_TUNED_GAP = 0.01
"""Share of badly tuned batch sizes, and mean log gaps of badly and well tuned ones (exponential).

Measured (``tests/benchmarks/verdicts.py``): a third could be bettered by more than 3 %, by 0.16 on average; only
contenders matter.
"""

Numbers = NDArray[np.float64]


def heights(
    verdict: Verdict, trials: Sequence[TrialRecord], draws: int, rng: np.random.Generator
) -> Mapping[int, Numbers]:
    """Draws (``draws``,) of each candidate's log height above its valley's bottom; empty with too few trials.

    Only for the recommended optimizer. Missed trials count as lower bounds.
    """
    objective, optimizer = verdict.optimal.objective, verdict.optimal.configuration.optimizer
    counted = [one for one in trials if one.phase is Phase.SEARCH and one.configuration.optimizer == optimizer]
    reached = [(one, log) for one in counted if (log := _log(objective, objective.figure(one))) is not None]
    sizes = sorted({one.configuration.batch_size for one, _ in reached})
    rates = {one.configuration.learning_rate for one, _ in reached}
    if len(reached) < len(sizes) + FEWEST_MORE or len(rates) < FEWEST_MORE:
        return {}
    missed = [
        (one, log)
        for one in counted
        if one.configuration.batch_size in sizes and (log := _log(objective, objective.bound(one))) is not None
    ]
    middle = (math.log2(sizes[0]) + math.log2(sizes[-1])) / 2
    valleys = _valleys([_rate(one) for one, _ in reached])
    logs = _log_likelihoods(valleys, {size: math.log2(size) - middle for size in sizes}, reached, missed)
    above = {
        size: _height(valleys, math.log2(candidate.configuration.learning_rate), math.log2(size) - middle)
        for size, candidate in verdict.by_batch.items()
        if candidate.configuration.optimizer == optimizer
    }
    logs += sum(_log_density(height) for height in above.values())
    weights = np.exp(logs - logs.max())
    chosen = rng.choice(len(valleys), size=draws, p=weights / weights.sum())
    return {size: height[chosen] for size, height in above.items()}


def _log_density(height: Numbers) -> Numbers:
    tuned = math.log((1 - BADLY_TUNED) / WELL_TUNED_GAP) - height / WELL_TUNED_GAP
    found: Numbers = np.logaddexp(tuned, math.log(BADLY_TUNED / TUNING_GAP) - height / TUNING_GAP)
    return found


def _valleys(rates: Sequence[float]) -> Numbers:
    bottoms = np.arange(min(rates) - BEYOND, max(rates) + BEYOND, BOTTOM_STEP)
    return np.stack([one.ravel() for one in np.meshgrid(CURVATURES, POWERS, bottoms)], axis=1)


def _log_likelihoods(
    valleys: Numbers,
    octaves: Mapping[int, float],
    reached: Sequence[tuple[TrialRecord, float]],
    missed: Sequence[tuple[TrialRecord, float]],
) -> Numbers:
    """The noise is integrated with prior 1 / σ."""
    squares = np.zeros(len(valleys))
    for size, octave in octaves.items():
        here = [(one, log) for one, log in reached if one.configuration.batch_size == size]
        above = np.array([log - _height(valleys, _rate(one), octave) for one, log in here])
        level = above.mean(axis=0)
        squares += ((above - level) ** 2).sum(axis=0)
        for one, bound in missed:
            if one.configuration.batch_size == size:
                squares += np.maximum(0.0, bound - level - _height(valleys, _rate(one), octave)) ** 2
    freedom = len(reached) - len(octaves)
    found: Numbers = -freedom / 2 * np.log(np.maximum(squares, LEAST_SQUARES))
    return found


def _height(valleys: Numbers, rate: float, octave: float) -> Numbers:
    curvature, power, bottom = valleys.T
    found: Numbers = curvature * (rate - bottom - power * octave) ** 2
    return found


def _rate(trial: TrialRecord) -> float:
    return math.log2(trial.configuration.learning_rate)


def _log(objective: Objective, figure: float | None) -> float | None:
    return None if figure is None else objective.log(figure)
