"""The valley of a study's figure over the learning rate: how much each batch size could still gain from a better one.

Near its bottom the logarithm of the figure is taken for a parabola over the logarithm of the learning rate, of one
curvature at all batch sizes, whose bottom moves with the batch size by a power: κ (x − μ − ρ b)² above a level of each
batch size's own, x and b in octaves, b from the middle of the batch sizes. The three are integrated over a grid, with
the noise unknown: the trials at other batch sizes tell how well one is tuned that had few.
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
"""What a learning rate of twice or half the best costs, as a logarithm: 0.02 to 0.64. A choice, evenly likely."""

POWERS = tuple(step / 4 for step in range(-1, 6))
"""Powers of the batch size by which the best learning rate grows: from none to beyond the linear rule."""

BOTTOM_STEP = 0.25
"""Distance between the learning rates looked at for the bottom, in octaves: finer than trials tell. A choice."""

BEYOND = 2.0
"""How far beyond the learning rates tried the bottom is sought, in octaves: a choice."""

FEWEST_MORE = 4
"""Trials beyond one for each batch size that it takes to see a valley: its three parameters and the noise."""

LEAST_SQUARES = 1e-12
"""Trials that lie on a valley to the last digit say no more for it than this."""

BADLY_TUNED = 0.12
TUNING_GAP = 0.12
WELL_TUNED_GAP = 0.01
"""How often the best configuration found at a batch size could be bettered by retuning it, and by how much then and
otherwise, as a logarithm: means of exponentials. Choices; in studies with a known truth
(``tests/benchmarks/verdicts.py``) a third of the batch sizes could be bettered by more than 3 %, by 0.16 on the
average, but only the contenders matter."""

Numbers = NDArray[np.float64]


def heights(
    verdict: Verdict, trials: Sequence[TrialRecord], draws: int, rng: np.random.Generator
) -> Mapping[int, Numbers]:
    """Return draws (``draws``,) of how far each batch size's candidate lies above its valley's bottom, as a logarithm.

    Batch sizes are left out whose candidate has another optimizer than the recommended one; all are where too few
    search trials reached the target to tell. Trials that missed it count where the valley would have them reach sooner
    than they were watched.
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
    """Return the log prior density of how far the best configuration found lies above the bottom: mostly hardly at all.

    An exponential of mean `WELL_TUNED_GAP` with probability 1 − `BADLY_TUNED`, else of mean `TUNING_GAP`.
    """
    tuned = math.log((1 - BADLY_TUNED) / WELL_TUNED_GAP) - height / WELL_TUNED_GAP
    found: Numbers = np.logaddexp(tuned, math.log(BADLY_TUNED / TUNING_GAP) - height / TUNING_GAP)
    return found


def _valleys(rates: Sequence[float]) -> Numbers:
    """Return all valleys looked at, (valleys, 3): curvature, power, and the bottom at the middle batch size."""
    bottoms = np.arange(min(rates) - BEYOND, max(rates) + BEYOND, BOTTOM_STEP)
    return np.stack([one.ravel() for one in np.meshgrid(CURVATURES, POWERS, bottoms)], axis=1)


def _log_likelihoods(
    valleys: Numbers,
    octaves: Mapping[int, float],
    reached: Sequence[tuple[TrialRecord, float]],
    missed: Sequence[tuple[TrialRecord, float]],
) -> Numbers:
    """Return the log likelihood of each valley (valleys,) up to a constant, the noise integrated with a prior 1 / σ."""
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
    """Return how far above the bottom of each valley a learning rate lies, as a logarithm; rates in octaves."""
    curvature, power, bottom = valleys.T
    found: Numbers = curvature * (rate - bottom - power * octave) ** 2
    return found


def _rate(trial: TrialRecord) -> float:
    return math.log2(trial.configuration.learning_rate)


def _log(objective: Objective, figure: float | None) -> float | None:
    return None if figure is None else objective.log(figure)
