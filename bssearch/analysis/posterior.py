"""The posterior of each configuration's log objective value, given the runs and, if known, the law of batch sizes."""

# For configuration c at batch size B with seed s:
#
#     log figure = level + base(B) + log(1 + B_crit / B) + departure(B) + tuning(c) + seed(s) + noise
#
# `base` is the log figure of one step; for the law see McCandlish et al. 2018, arXiv 1812.06162. The noise is Student's
# t with a scale that may grow with the batch size. Configurations share the effects of common seeds, so ratios are
# paired. A grid integrates over the hyperparameters; given these, all else is Gaussian.

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bssearch.records.noise_scale import STEPS_DEVIATION

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

DRAWS = 4000  # enough to know a probability of 0.9 to half a per cent

# The grid of log B_crit; the prior is uniform up to `OCTAVES_BEYOND` octaves beyond the batch sizes
OCTAVES_BEYOND = 3
B_CRITS = 33
NEGLIGIBLE = 1e-4

SCALES = np.exp2(np.linspace(-1.5, 1.5, 7))  # the grid of Student's t scale, in pooled deviations of repeats

# The growth of log noise per unit of log batch size, N(0, 0.2²) by three Gauss–Hermite points
SLOPES = np.array([-0.35, 0.0, 0.35])
SLOPE_WEIGHTS = np.array([1 / 6, 2 / 3, 1 / 6])

SHARED = np.array([0.02, 0.2, 0.4, 0.6, 0.8])  # the share of seed effects in the variance; the prior is Beta(2, 2)

# The standard deviation about the law; the prior is half-normal with scale `STEPS_DEVIATION`
DEPARTURES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.4])

WITHOUT_LAW = 0.35  # without a law: the standard deviation of a log figure's change per octave, in a random walk

FREEDOM = 5.0  # degrees of freedom of Student's t; one run in 200 is beyond four scales

# Weights treat a run as Gaussian, but Student's t has less information by the square of this factor
WIDENED = math.sqrt((FREEDOM + 3) / (FREEDOM + 1))

LEAST_DEVIATION = 1e-3

# Grid points for the mean log figure of a configuration with missed runs; each grid zooms in on the previous grid
LEVELS = 401
ZOOMS = 5


@dataclass(frozen=True, eq=False)
class Runs:
    """Seeds and log objective values of runs (n,); a missed run has the value of the last evaluation.

    Attributes:
        of: Index of each run's configuration.
        gaps: Log steps between the evaluations before and at the target.
    """

    of: Indices
    seeds: Indices
    logs: Numbers
    gaps: Numbers
    missed: NDArray[np.bool_]

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int, float, float, bool]]) -> Self:
        columns = list(zip(*rows, strict=True)) or [()] * 5
        kinds = (np.int64, np.int64, np.float64, np.float64, np.bool_)
        return cls(*(np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)))

    @cached_property
    def deviation(self) -> float:
        """The pooled standard deviation of repeats that reached the target; 0 if unknown."""
        values, of = self.logs[~self.missed], self.of[~self.missed]
        groups = [values[of == one] for one in np.unique(of)]
        freedom = len(values) - len(groups)
        squares = math.fsum(float(((one - one.mean()) ** 2).sum()) for one in groups)
        return math.sqrt(squares / freedom) if freedom else 0.0


@dataclass(frozen=True, eq=False)
class Posterior:
    """Draws of log objective values (`DRAWS`, configurations) and of the law's parameters (`DRAWS`,).

    ``unshared`` (configurations,) is the standard deviation of a run's noise beyond seed effects.
    """

    levels: Numbers
    law_level: Numbers
    log_b_crit: Numbers
    departure: Numbers
    unshared: Numbers


def infer(
    runs: Runs,
    log_sizes: Numbers,
    base: Numbers | None,
    errors: Numbers,
    deviation: float | None = None,
    tuning: tuple[Numbers, Numbers] = (np.zeros(1), np.zeros((1, 1))),
) -> Posterior:
    """Infer the posterior of each configuration's log objective value.

    Args:
        log_sizes: Log batch sizes (configurations,).
        base: Log objective values of one step (configurations,); None if no law applies.
        errors: Standard errors of ``base`` (configurations,).
        deviation: Standard deviation of the noise if no configuration has repeats.
        tuning: Means and covariances of the log gains from full tuning.
    """
    noise = _Noise.around(runs, log_sizes, runs.deviation or deviation or 0.0)
    beyond = OCTAVES_BEYOND * math.log(2)
    ends = float(log_sizes.min() - beyond), float(log_sizes.max() + beyond)
    law = _Law.over(log_sizes, base, errors, tuning, ends)
    sites = _Sites(runs.logs, np.ones(len(runs.logs)), np.where(runs.missed, np.inf, 0.0))
    for _ in range(2):
        found = _Gaussian.given(sites, runs, noise, law)
        sites = found.improved(sites, runs, noise)
        noise = noise.where(found.weights.sum(axis=(1, 2)) > NEGLIGIBLE)
        law = _Law.over(log_sizes, base, errors, tuning, law.range_of(found.weights.sum(axis=(0, 1))))
    return _Gaussian.given(sites, runs, noise, law).draw(noise, law)


@dataclass(frozen=True, eq=False)
class _Noise:
    # The grid (n,) over the noise: scales (n, configurations), shared part, and log prior weights.

    scales: Numbers
    shared: Numbers
    log_weights: Numbers

    @classmethod
    def around(cls, runs: Runs, log_sizes: Numbers, deviation: float) -> Self:
        deviation = max(deviation, float(np.median(runs.gaps)) / math.sqrt(12), LEAST_DEVIATION)
        scale, slope, shared = (
            one.ravel() for one in np.meshgrid(SCALES * deviation, np.arange(3), SHARED, indexing="ij")
        )
        growth = SLOPES[slope.astype(int), None] * (log_sizes - log_sizes.mean())
        return cls(
            scale[:, None] * np.exp(growth), shared, np.log(SLOPE_WEIGHTS[slope.astype(int)] * shared * (1 - shared))
        )

    def where(self, holds: NDArray[np.bool_]) -> Self:
        # Select a part of the grid
        return replace(self, scales=self.scales[holds], shared=self.shared[holds], log_weights=self.log_weights[holds])


@dataclass(frozen=True, eq=False)
class _Law:
    # Means (B_crit, configurations), precisions (departures, configurations, configurations) and log prior weights.

    log_b_crit: Numbers
    departures: Numbers
    means: Numbers
    precisions: Numbers
    log_weights: Numbers

    @classmethod
    def over(
        cls,
        log_sizes: Numbers,
        base: Numbers | None,
        errors: Numbers,
        tuning: tuple[Numbers, Numbers],
        ends: tuple[float, float],
    ) -> Self:
        alike = log_sizes[:, None] == log_sizes
        own = alike * errors**2 + tuning[1] + NEGLIGIBLE**2 * np.eye(len(log_sizes))
        if base is None:
            apart = np.abs(log_sizes[:, None] - log_sizes) / math.log(2)
            precision = np.linalg.inv(WITHOUT_LAW**2 / 2 * (apart.max() + 1 - apart) + own)
            means = np.broadcast_to(tuning[0], (1, len(log_sizes)))
            return cls(np.zeros(1), np.zeros(1), means, precision[None], np.zeros(1))
        log_b_crit = np.linspace(*ends, B_CRITS)
        means = base + tuning[0] + np.logaddexp(0, log_b_crit[:, None] - log_sizes)
        precisions = np.asarray(np.linalg.inv(DEPARTURES[:, None, None] ** 2 * alike + own), dtype=np.float64)
        prior = np.gradient(DEPARTURES) * np.exp(-((DEPARTURES / STEPS_DEVIATION) ** 2) / 2)
        return cls(log_b_crit, DEPARTURES, means, precisions, np.log(prior))

    def range_of(self, weights: Numbers) -> tuple[float, float]:
        # The range of log B_crit with more than `NEGLIGIBLE` weight, wider by a grid point on both sides
        inside = np.flatnonzero(weights > NEGLIGIBLE)
        last = len(weights) - 1
        return float(self.log_b_crit[max(0, inside[0] - 1)]), float(self.log_b_crit[min(last, inside[-1] + 1)])


@dataclass(frozen=True, eq=False)
class _Sites:
    # Gaussian approximations of runs (n,): values, weights of the noise's precision, and variances of missed runs.

    values: Numbers
    weights: Numbers
    variances: Numbers


@dataclass(frozen=True, eq=False)
class _Gaussian:
    # The c levels and the law's level, given the noise (n,), departure (m,) and B_crit (k,). Means (n, m, k, c + 1)
    # and covariances (n, m, c + 1, c + 1). ``weights`` (n, m, k) sum to 1.

    means: Numbers
    covariances: Numbers
    weights: Numbers

    @classmethod
    def given(cls, sites: _Sites, runs: Runs, noise: _Noise, law: _Law) -> Self:
        precision, pull, log_data = _likelihood(sites, runs, noise)
        count = precision.shape[-1]
        shape = len(precision), len(law.precisions)
        whole = np.empty((*shape, count + 1, count + 1))
        columns = law.precisions.sum(axis=-1)
        whole[..., :count, :count] = precision[:, None] + law.precisions
        whole[..., :count, count] = whole[..., count, :count] = -columns
        whole[..., count, count] = columns.sum(axis=-1)
        by_law = np.einsum("mij,kj->mki", law.precisions, law.means)
        pulls = np.empty((*shape, len(law.means), count + 1))
        pulls[..., :count] = pull[:, None, None] + by_law
        pulls[..., count] = -by_law.sum(axis=-1)
        covariances = np.linalg.inv(whole)
        means = pulls @ covariances
        logs = (pulls * means).sum(axis=-1) - np.einsum("mki,ki->mk", by_law, law.means)
        logs += (np.linalg.slogdet(law.precisions)[1] - np.linalg.slogdet(whole)[1])[..., None]
        logs = logs / 2 + (log_data + noise.log_weights)[:, None, None] + law.log_weights[:, None]
        weights = np.exp(logs - logs.max())
        return cls(means, covariances, weights / weights.sum())

    def improved(self, sites: _Sites, runs: Runs, noise: _Noise) -> _Sites:
        # Updates sites of Student's t (as a scale mixture) and of missed runs (expectation propagation, Minka 2001).
        # A configuration's missed runs share a site, because many separate sites oscillate.
        by_noise = self.weights.sum(axis=(1, 2))
        level = np.einsum("nmk,nmki->i", self.weights, self.means)[:-1]
        spread = np.einsum("nmk,nmki->i", self.weights, (self.means[..., :-1] - level) ** 2)
        spread += np.einsum("nm,nmii->i", self.weights.sum(axis=-1), self.covariances[..., :-1, :-1])
        scales = np.exp(by_noise @ np.log(noise.scales))[runs.of]
        shared = float(by_noise @ noise.shared)
        own = scales**2 * (1 - shared)
        residuals = runs.logs - level[runs.of]
        counted = np.where(runs.missed, 0.0, 1 / (own / sites.weights + runs.gaps**2 / 12))
        same_seed = (runs.seeds[:, None] == runs.seeds) * counted
        effects = same_seed @ residuals / (same_seed.sum(axis=1) + 1 / (shared * scales**2))
        weights = (FREEDOM + 1) / (FREEDOM + (residuals - effects) ** 2 / own)
        values, variances = runs.logs.copy(), np.where(runs.missed, np.inf, 0.0)
        for one in np.unique(runs.of[runs.missed]):
            here = runs.missed & (runs.of == one)
            scale = scales[here][0]
            known = 1 / (sites.variances[here] + shared * scale**2)
            precision = max(1 / spread[one] - known.sum(), 1e-3 / spread[one])
            without = (level[one] / spread[one] - (known * sites.values[here]).sum()) / precision
            mean, variance = _above(runs.logs[here], without, 1 / precision, scale)
            added = 1 / variance - precision
            if added > NEGLIGIBLE * precision:
                values[here] = (mean / variance - without * precision) / added
                variances[here] = max(here.sum() / added - shared * scale**2, scale**2 / 10)
        return _Sites(values, np.where(runs.missed, 1.0, weights), variances)

    def draw(self, noise: _Noise, law: _Law) -> Posterior:
        # Draw levels and log B_crit
        rng = np.random.default_rng(0)
        chosen = rng.choice(self.weights.size, size=DRAWS, p=self.weights.ravel())
        n, m, k = np.unravel_index(chosen, self.weights.shape)
        roots = np.linalg.cholesky(self.covariances)
        levels = self.means[n, m, k] + WIDENED * np.einsum(
            "dij,dj->di", roots[n, m], rng.standard_normal((DRAWS, roots.shape[-1]))
        )
        step = np.ptp(law.log_b_crit) / max(1, len(law.log_b_crit) - 1)
        log_b_crit = law.log_b_crit[k] + step * rng.uniform(-0.5, 0.5, DRAWS)
        variances = self.weights.sum(axis=(1, 2)) @ (noise.scales**2 * (1 - noise.shared[:, None]))
        return Posterior(
            levels[:, :-1], levels[:, -1], log_b_crit, law.departures[m], np.sqrt(variances * FREEDOM / (FREEDOM - 2))
        )


def _likelihood(sites: _Sites, runs: Runs, noise: _Noise) -> tuple[Numbers, Numbers, Numbers]:
    # Precisions (n, c, c) and precision-weighted means (n, c) of the levels, and log weights (n,), without seed effects
    scales = noise.scales[:, runs.of]
    precisions = 1 / np.where(
        runs.missed, sites.variances, scales**2 * (1 - noise.shared[:, None]) / sites.weights + runs.gaps**2 / 12
    )
    of = np.eye(noise.scales.shape[1])[runs.of]
    by_seed = (runs.seeds == np.unique(runs.seeds)[:, None]).astype(float)
    prior = 1 / (noise.shared[:, None] * np.exp(2 * np.log(noise.scales).mean(axis=1, keepdims=True)))
    counts = np.einsum("nr,sr,rc->nsc", precisions, by_seed, of, optimize=True)
    sums = (precisions * sites.values) @ by_seed.T
    totals = counts.sum(axis=-1) + prior
    precision = np.einsum("nsc,cd->ncd", counts, np.eye(of.shape[1])) - np.einsum(
        "nsc,nsd->ncd", counts / totals[..., None], counts, optimize=True
    )
    pull = (precisions * sites.values) @ of - np.einsum("nsc,ns->nc", counts, sums / totals)
    logs = np.log(np.where(runs.missed, 1.0, precisions)).sum(axis=1) - (precisions * sites.values**2).sum(axis=1)
    logs += (sums**2 / totals + np.log(prior / totals)).sum(axis=1)
    return precision, pull, logs / 2


def _above(bounds: Numbers, mean: float, variance: float, scale: float) -> tuple[float, float]:
    # Mean and variance of a normal level if runs with noise of `scale` exceeded `bounds`
    from scipy.special import log_ndtr

    deviation = math.sqrt(variance)
    low, high = mean - 6 * deviation, max(mean + 6 * deviation, float(bounds.max()) + 6 * scale)
    for _ in range(ZOOMS):
        levels = np.linspace(low, high, LEVELS)
        logs = -((levels - mean) ** 2) / (2 * variance) + log_ndtr((levels[:, None] - bounds) / scale).sum(axis=1)
        weights = np.exp(logs - logs.max())
        inside = np.flatnonzero(weights > NEGLIGIBLE)
        low, high = levels[max(0, inside[0] - 1)], levels[min(LEVELS - 1, inside[-1] + 1)]
    weights /= weights.sum()
    found = float(weights @ levels)
    return found, float(weights @ (levels - found) ** 2)
