"""The quick answer and the critical batch size."""

# Samples to the target are E_min (1 + B / B_crit) times a departure, a Gaussian process over log B. The prior of log
# B_crit is normal around the gradient noise scale, or flat if the scale is unknown. The prior of log E_min is flat.
# Draws of B_crit are from a grid. Draws of departures, given B_crit, have the probability that missed runs need more
# samples as weight.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt

from bssearch.analysis.law.batch_model import CONFIDENCE, LawPoint, RunnableStep, around, fastest_by_size
from bssearch.analysis.posterior import Numbers
from bssearch.analysis.shape import Model, Notice
from bssearch.records.intervals import FLAT_RATIO
from bssearch.records.noise_scale import CRITICAL_BATCH_OCTAVES


class QuickOptimum(Model):
    """The batch size with the least expected time to the target."""

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    learning_rate: float


class QuickCriticalBatch(Model):
    """The critical batch size in samples, with the 90 % interval."""

    estimate: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class QuickRun(Model):
    """A run for the quick answer; ``steps`` are null if the run missed the target."""

    trial: int
    batch_size: int
    learning_rate: float
    steps: int | None
    train_seconds: float


class QuickAnswer(Model):
    """The batch size from a few runs and measurements, without a search.

    A step of n samples takes ``alpha_s`` + ``beta_s`` × n seconds.

    Attributes:
        interval: Contains the optimum with a probability of 90 %.
        gain: The default's expected time / the optimum's time.
        learning_rate_gain: Time with the scaling rule's learning rate / time with the recommended rate.
        target: Easier than the study's target if the default missed the study's target.
    """

    schema_version: Literal[1] = 1
    verified: Literal[False] = False
    study: str
    metric: str
    target: float
    default_batch_size: int
    optimal: QuickOptimum
    interval: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    flat_range: list[int]
    gain: float
    learning_rate_gain: float
    learning_rate_range: list[float]
    largest_micro_batch_size: int
    b_crit: QuickCriticalBatch
    noise_scale: PositiveFloat | None
    alpha_s: float | None
    beta_s: float | None
    runs: list[QuickRun]
    seconds: float
    warnings: list[Notice]

    def holds(self, batch_size: int) -> bool:
        return self.interval[0] <= batch_size <= self.interval[1]


class Promise(Model):
    """The quick answer compared with the search; ``holds`` is true if ``interval`` overlaps ``found_flat_range``."""

    batch_size: int
    interval: list[int]
    gain: float
    found_batch_size: int
    found_flat_range: list[int]
    holds: bool
    time_ratio: float | None

    @property
    def in_words(self) -> str:
        low, high = self.interval
        kept = f"{'overlaps' if self.holds else 'misses'} the sizes within 5 % of the best"
        ratio = "" if self.time_ratio is None else f", which takes {self.time_ratio:.2g}× the optimum's time"
        return f"the quick answer was batch {self.batch_size}{ratio}; the 90 % interval from {low} to {high} {kept}"


BEYOND_OCTAVES = 4.0  # B_crit may be this many octaves beyond the runnable batch sizes

RUN_DEVIATION = 0.15  # standard deviation of log samples between seeds

# Standard deviation and correlation length of the departure from the law
DEPARTURE = 0.25
DEPARTURE_OCTAVES = 1.5

LEVEL = 100.0  # standard deviation of log E_min, practically flat

GRID = 400
NODES_PER_OCTAVE = 4

DRAWS = 2000
SEED = 0


@dataclass(frozen=True)
class CriticalBatchPosterior:
    """Weighted draws of the law's ``log_b_crit`` (draws,) and ``departures`` (draws, nodes); ``weights`` sum to 1."""

    log_b_crit: Numbers
    log_nodes: Numbers
    departures: Numbers
    weights: Numbers

    @property
    def estimate(self) -> float:
        return self._quantile(0.5)

    @property
    def interval(self) -> tuple[float, float]:
        return self._quantile((1 - CONFIDENCE) / 2), self._quantile((1 + CONFIDENCE) / 2)

    def log_steps(self, sizes: Sequence[int]) -> Numbers:
        """Return log steps to the target (draws, sizes), up to a constant."""
        logs = np.log(np.array(sizes, dtype=float))
        departures = _between(self.log_nodes, self.departures, logs)
        return np.asarray(departures + np.logaddexp(0, self.log_b_crit[:, None] - logs))

    def _quantile(self, share: float) -> float:
        order = np.argsort(self.log_b_crit)
        return math.exp(float(np.interp(share, np.cumsum(self.weights[order]), self.log_b_crit[order])))


@dataclass(frozen=True)
class ExpectedOptimum:
    """The batch size with the least expected time; ``relative_times`` are expected times / the optimum's time."""

    step: RunnableStep
    interval: tuple[int, int]
    flat_range: tuple[int, int]
    relative_times: dict[int, float]


def critical_batch(
    sizes: Sequence[int], noise_scale: float | None, points: Sequence[LawPoint] = ()
) -> CriticalBatchPosterior:
    reach = BEYOND_OCTAVES * math.log(2)
    low, high = math.log(min(sizes)), math.log(max(sizes))
    known = [] if noise_scale is None else [math.log(noise_scale)]
    grid = np.linspace(min([low, *known]) - reach, max([high, *known]) + reach, GRID)
    runs = [(math.log(point.batch_size), math.log(samples)) for point in points for samples in point.samples]
    at, samples = np.array(runs).reshape(-1, 2).T
    octaves = max(1.0, (high - low) / math.log(2))  # a single batch size also needs two nodes
    nodes = np.linspace(low, low + octaves * math.log(2), round(NODES_PER_OCTAVE * octaves) + 1)
    given = _covariance(at, at) + RUN_DEVIATION**2 * np.eye(len(at))
    to_nodes = np.linalg.solve(given, _covariance(at, nodes)).T  # (nodes, runs)
    bare = samples - np.logaddexp(0, at - grid[:, None])  # (values, runs)
    logs = -0.5 * np.einsum("vr,vr->v", bare, np.linalg.solve(given, bare.T).T)
    if noise_scale is not None:
        logs -= 0.5 * ((grid - math.log(noise_scale)) / (CRITICAL_BATCH_OCTAVES * math.log(2))) ** 2
    rng = np.random.default_rng(SEED)
    chosen = _drawn(logs, rng)
    spread = rng.multivariate_normal(
        np.zeros(len(nodes)), _covariance(nodes, nodes) - to_nodes @ _covariance(at, nodes), size=DRAWS, method="eigh"
    )
    departures = bare[chosen] @ to_nodes.T + spread
    weights = _needing_more(points, grid[chosen], nodes, departures) if len(at) else np.ones(DRAWS)
    weights = weights + 1e-12
    return CriticalBatchPosterior(grid[chosen], nodes, departures, weights / weights.sum())


def _drawn(logs: Numbers, rng: np.random.Generator) -> NDArray[np.int64]:
    weights = np.exp(logs - logs.max())
    return rng.permutation(np.searchsorted(weights.cumsum() / weights.sum(), (np.arange(DRAWS) + 0.5) / DRAWS))


def _covariance(one: Numbers, other: Numbers) -> Numbers:
    apart = (one[:, None] - other) / (DEPARTURE_OCTAVES * math.log(2))
    return LEVEL**2 + DEPARTURE**2 * np.exp(-0.5 * apart**2)


def _between(nodes: Numbers, values: Numbers, at: Numbers) -> Numbers:
    right = np.clip(np.searchsorted(nodes, at), 1, len(nodes) - 1)
    share = (at - nodes[right - 1]) / (nodes[right] - nodes[right - 1])
    return values[:, right - 1] * (1 - share) + values[:, right] * share


def _needing_more(points: Sequence[LawPoint], log_b_crit: Numbers, nodes: Numbers, departures: Numbers) -> Numbers:
    from scipy.special import ndtr

    likely = np.ones(len(log_b_crit))
    for point in points:
        log_size = math.log(point.batch_size)
        law = np.logaddexp(0, log_size - log_b_crit) + _between(nodes, departures, np.array([log_size]))[:, 0]
        for missed in point.missed_at:
            likely = likely * ndtr((law - math.log(missed)) / RUN_DEVIATION)
    return likely


def expected_optimum(
    posterior: CriticalBatchPosterior, steps: Sequence[RunnableStep], ladder: Sequence[int]
) -> ExpectedOptimum:
    """Return the batch size in ``ladder`` with the least expected log time."""
    by_size = fastest_by_size(steps)
    sizes = list(by_size)
    # (draws, sizes), up to the level of the law
    times = posterior.log_steps(sizes) + np.log([by_size[size].step_seconds for size in sizes])
    expected = posterior.weights @ (times - times.min(axis=1, keepdims=True))
    at = dict(zip(sizes, expected.tolist(), strict=True))
    best = min(ladder, key=at.__getitem__)
    flat = around(sizes.index(best), expected <= max(at[best], expected.min() + math.log(FLAT_RATIO)))
    assert flat is not None, "the optimum is in the flat range"
    return ExpectedOptimum(
        step=by_size[best],
        interval=_interval(posterior, times, sizes),
        flat_range=(sizes[flat[0]], sizes[flat[1]]),
        relative_times={size: math.exp(at[size] - at[best]) for size in sizes},
    )


def _interval(posterior: CriticalBatchPosterior, times: Numbers, sizes: Sequence[int]) -> tuple[int, int]:
    shares = np.bincount(times.argmin(axis=1), weights=posterior.weights, minlength=len(sizes)).cumsum()
    low, high = np.searchsorted(shares, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return sizes[int(low)], sizes[min(int(high), len(sizes) - 1)]
