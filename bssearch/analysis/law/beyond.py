"""Predict the optimum at a harder target, or with more samples, from learning curves."""

# At each level of the metric, with w the mean over batch sizes of log samples (McCandlish et al. 2018, arXiv
# 1812.06162):
#
#     log E(B) = u + log(1 + B / B_crit) + departure(B),    log B_crit = b + p·(w − w of the hardest level)
#
# u is free at each level. The departure is a Gaussian process in w, because late runs are late at the next level, too.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bssearch.analysis.law.batch_model import around
from bssearch.analysis.posterior import Numbers
from bssearch.analysis.shape import Beyond, BeyondBatch, BeyondLevel, CriticalBatch, Interval
from bssearch.errors import UsageError, require
from bssearch.records import FLAT_RATIO, Goal, Target

FEWEST_LEVELS = 4  # two more than the parameters B_crit and p
FEWEST_BATCHES = 4
LEVEL_FACTOR = 1.18  # the factor of samples from level to level; evaluations are closer
LEAST_STEPS = 10  # levels start after this many steps of the largest batch size; earlier steps are warmup

FARTHEST = 4.0  # multiple of the measured samples; `tests/benchmarks/beyond.py` tests no larger multiple

# The prior of p is N(1.1, 0.25²). On recorded tables, B_crit ∝ E_min^0.5 … 0.9 and w grows 0.65 times as fast as log
# E_min, so p is 0.5 / 0.65 = 0.77 to 0.9 / 0.65 = 1.38, in the middle 1.1.
GROWTH, GROWTH_DEVIATION = 1.1, 0.25
GROWTHS = np.linspace(-1.0, 3.0, 81)
DRIFT = 0.2  # standard deviation of p's change beyond the levels
BEYOND_SIZES = 3.0  # B_crit may be up to e³ times beyond the batch sizes
B_CRITS, FINE_B_CRITS = 121, 601

CORRELATION = 1.0  # in w: departures correlate over a factor e of samples
NUGGET = 0.02  # share of a level's independent noise in the variance
FRESH = 0.3  # a new search's departures / the curves' departures; intervals cover 93 % on recorded tables
DEVIATION, DEVIATION_FREEDOM = 0.03, 4  # prior of a departure's standard deviation

# The gain approaches the ceiling as samples^(−1/β), with the prior N(log 2, 0.5²) of log β.
DECAY, DECAY_DEVIATION = 2.0, 0.5
DECAYS = np.exp(np.linspace(math.log(0.3), math.log(8), 41))
CEILINGS = np.exp(np.linspace(math.log(0.02), math.log(20), 61))  # above the hardest level, in ranges of the levels

NO_GROWTH = 3.84  # χ² at 5 %, one degree of freedom

DRAWS = 2000
TAILS = (0.05, 0.95)
HALVINGS = 12  # 12 halvings find samples to a thousandth


@dataclass(frozen=True, eq=False)
class BatchCurves:
    """The tuned runs of a batch size, each run as steps and best gain so far (`Target.gain`)."""

    batch_size: int
    micro_batch_size: int
    step_seconds: float
    runs: Sequence[tuple[Numbers, Numbers]]

    def log_samples(self, gain: float) -> Numbers:
        """Return each run's log samples to a gain; infinite if the run missed the gain."""
        return np.array([_log_steps(*run, gain) for run in self.runs]) + math.log(self.batch_size)

    def typical(self, gain: float) -> float:
        return float(np.median(self.log_samples(gain)))


def _log_steps(steps: Numbers, gains: Numbers, gain: float) -> float:
    hit = int(np.searchsorted(gains, gain))
    if hit == len(gains):
        return math.inf
    if hit == 0 or not math.isfinite(gains[hit - 1]):
        return math.log(max(1.0, steps[hit]))
    share = (gain - gains[hit - 1]) / (gains[hit] - gains[hit - 1])
    return math.log(max(1.0, steps[hit - 1] + share * (steps[hit] - steps[hit - 1])))


@dataclass(frozen=True, eq=False)
class _Levels:
    # Log samples (levels, batch sizes) to each gain, the easiest first; `progress` is w

    gains: Numbers
    log_samples: Numbers
    curves: Sequence[BatchCurves]
    progress: Numbers
    batch_sizes: Numbers
    step_seconds: Numbers


def _levels_of(curves: Sequence[BatchCurves], hardest: float) -> _Levels:
    found = sorted((one for one in curves if math.isfinite(one.typical(hardest))), key=lambda one: one.batch_size)
    require(
        len(found) >= FEWEST_BATCHES,
        f"the number of batch sizes with curves to the target is {len(found)}; a prediction needs {FEWEST_BATCHES}",
        hint="run more search trials, or import runs with their learning curves",
    )
    start = max(gains[0] for one in found for _, gains in one.runs)
    known = np.unique(np.concatenate([gains for one in found for _, gains in one.runs]))
    rows: list[tuple[float, list[float]]] = []
    for gain in [hardest, *known[(known > start) & (known < hardest)][::-1]]:
        row = [one.typical(gain) for one in found]
        if row[-1] < math.log(LEAST_STEPS * found[-1].batch_size):
            break
        if not rows or np.mean(row) <= np.mean(rows[-1][1]) - math.log(LEVEL_FACTOR):
            rows.append((float(gain), row))
    require(
        len(rows) >= FEWEST_LEVELS,
        f"the number of metric levels between step {LEAST_STEPS} of batch {found[-1].batch_size} and the target is "
        f"{len(rows)}; a prediction needs {FEWEST_LEVELS}",
        hint="run a new study with a harder target or without the largest batch sizes",
    )
    logs = np.array([row for _, row in rows[::-1]])
    return _Levels(
        gains=np.array([gain for gain, _ in rows[::-1]]),
        log_samples=logs,
        curves=found,
        progress=logs.mean(axis=1),
        batch_sizes=np.array([float(one.batch_size) for one in found]),
        step_seconds=np.array([one.step_seconds for one in found]),
    )


def _shape(batch_sizes: Numbers, log_b_crit: Numbers) -> Numbers:
    # log(1 + B / B_crit) about its mean over batch sizes
    bare = np.logaddexp(0, np.log(batch_sizes) - log_b_crit[..., None])
    return np.asarray(bare - bare.mean(axis=-1, keepdims=True))


def _log_b_crits(batch_sizes: Numbers, count: int) -> Numbers:
    logs = np.log(batch_sizes)
    return np.linspace(logs.min() - BEYOND_SIZES, logs.max() + BEYOND_SIZES, count)


def nearest_law(log_samples: Numbers, batch_sizes: Numbers) -> tuple[Numbers, Numbers]:
    """Return log B_crit and log S_min of the laws fitted to log samples (n, batch sizes) by least squares."""
    grid = _log_b_crits(batch_sizes, FINE_B_CRITS)
    bare = log_samples - log_samples.mean(axis=1, keepdims=True)
    log_b_crit = grid[((bare[:, None, :] - _shape(batch_sizes, grid)) ** 2).sum(axis=-1).argmin(axis=1)]
    log_e_min = (log_samples - np.logaddexp(0, np.log(batch_sizes) - log_b_crit[:, None])).mean(axis=1)
    return log_b_crit, log_e_min - log_b_crit


class _Process:
    # Departures over the levels' w, of unknown variance

    def __init__(self, progress: Numbers) -> None:
        self.progress = progress
        self.precision = np.linalg.inv(
            np.exp(-np.abs(progress[:, None] - progress) / CORRELATION) + NUGGET * np.eye(len(progress))
        )

    def squares(self, departures: Numbers) -> Numbers:
        return np.asarray(np.einsum("...kn,kl,...ln->...", departures, self.precision, departures))

    @staticmethod
    def weights(squares: Numbers, freedom: int, log_prior: Numbers) -> Numbers:
        logs = log_prior - 0.5 * (freedom + DEVIATION_FREEDOM) * np.log(squares + DEVIATION_FREEDOM * DEVIATION**2)
        return np.asarray(np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum())

    @staticmethod
    def variances(squares: Numbers, freedom: int, rng: np.random.Generator) -> Numbers:
        drawn = rng.chisquare(freedom + DEVIATION_FREEDOM, len(squares))
        return (squares + DEVIATION_FREEDOM * DEVIATION**2) / drawn

    def carried(
        self, to: Numbers, departures: Numbers, squares: Numbers, freedom: int, rng: np.random.Generator
    ) -> tuple[Numbers, Numbers]:
        # Means (n, batch sizes) and random deviations (n,) at w = `to`
        near = np.exp(-np.abs(to[:, None] - self.progress) / CORRELATION)
        weights = near @ self.precision
        free = np.sqrt(self.variances(squares, freedom, rng) * np.maximum(0, 1 - (weights * near).sum(axis=1)))
        return np.einsum("nk,nkb->nb", weights, departures), free


class _Growth:
    # The posterior, on a grid, of p and of log B_crit at the hardest level

    def __init__(self, levels: _Levels) -> None:
        self.levels, self.process = levels, _Process(levels.progress)
        self.log_b_crits = _log_b_crits(levels.batch_sizes, B_CRITS)
        self.squares = self.process.squares(self._departures(self.log_b_crits[:, None], GROWTHS[None, :]))
        self.freedom = (len(levels.curves) - 1) * len(levels.progress)
        self.weights = self.process.weights(
            self.squares, self.freedom, -0.5 * ((GROWTHS - GROWTH) / GROWTH_DEVIATION) ** 2
        )

    def _departures(self, log_b_crit: Numbers, growth: Numbers) -> Numbers:
        progress = self.levels.progress
        at = log_b_crit[..., None] + growth[..., None] * (progress - progress[-1])
        return self.levels.log_samples - progress[:, None] - _shape(self.levels.batch_sizes, at)

    @property
    def is_shown(self) -> bool:
        # True if a constant B_crit fits worse, by the likelihood ratio at 5 %
        constant = self.squares[:, int(np.argmin(np.abs(GROWTHS)))].min()
        return self.freedom * math.log(constant / self.squares.min()) > NO_GROWTH

    def draw(self, progress: Numbers, rng: np.random.Generator) -> tuple[Numbers, Numbers, Numbers]:
        # Draws of p (n,) and of log samples (n, batch sizes) at w = `progress`: expected, and of fresh runs
        at = rng.choice(self.weights.size, len(progress), p=self.weights.ravel())
        own, growth = self.log_b_crits[at // len(GROWTHS)], GROWTHS[at % len(GROWTHS)]
        growth = growth + DRIFT * rng.standard_normal(len(progress))
        log_b_crit = own + growth * (progress - self.levels.progress[-1])
        expected = progress[:, None] + _shape(self.levels.batch_sizes, log_b_crit)
        # a new search has other runs and configurations, thus other departures
        deviation = FRESH * np.sqrt(self.process.variances(self.squares.ravel()[at], self.freedom, rng))
        return growth, expected, expected + deviation[:, None] * rng.standard_normal(expected.shape)


class _Approach:
    # The posterior, on a grid, of β and of the metric's ceiling: w = a − β·log(1 − (gain − hardest) / room), with
    # `room` from the hardest level to the ceiling

    def __init__(self, levels: _Levels, highest: float | None) -> None:
        self.gains, self.process = levels.gains, _Process(levels.progress)
        most = math.inf if highest is None else highest - self.gains[-1]
        self.room = np.minimum(CEILINGS * (self.gains[-1] - self.gains[0]), most)
        terms = -np.log1p((self.gains[-1] - self.gains) / self.room[:, None])
        bare = levels.progress - DECAYS[:, None] * terms[:, None, :]
        self.level: Numbers = bare @ self.process.precision.sum(axis=0) / self.process.precision.sum()
        self.departures = (bare - self.level[..., None])[..., None]
        self.squares = self.process.squares(self.departures)
        self.freedom = len(self.gains) - 1
        self.weights = self.process.weights(
            self.squares, self.freedom, -0.5 * (np.log(DECAYS / DECAY) / DECAY_DEVIATION) ** 2
        )

    def progress_at(self, gain: float, rng: np.random.Generator) -> Numbers:
        # Draws of w at a harder gain; infinite if the ceiling is below the gain
        at = rng.choice(self.weights.size, DRAWS, p=self.weights.ravel())
        with np.errstate(divide="ignore"):
            left = np.log1p(-np.minimum(1.0, (gain - self.gains[-1]) / self.room[at // len(DECAYS)]))
        bare = self.level.ravel()[at] - DECAYS[at % len(DECAYS)] * left
        hardest = self.process.progress[-1]
        carried, free = self._carried(at, np.where(np.isfinite(bare), np.maximum(bare, hardest), hardest), rng)
        return np.asarray(np.maximum(bare + carried + free * rng.standard_normal(DRAWS), hardest))

    def gains_at(self, progress: float, rng: np.random.Generator) -> Numbers:
        at = rng.choice(self.weights.size, DRAWS, p=self.weights.ravel())
        carried, free = self._carried(at, np.full(DRAWS, progress), rng)
        bare = progress - carried - free * rng.standard_normal(DRAWS) - self.level.ravel()[at]
        gained = -self.room[at // len(DECAYS)] * np.expm1(-bare / DECAYS[at % len(DECAYS)])
        return np.asarray(self.gains[-1] + np.maximum(gained, 0))

    def _carried(self, at: NDArray[np.int64], to: Numbers, rng: np.random.Generator) -> tuple[Numbers, Numbers]:
        carried, free = self.process.carried(
            to, self.departures.reshape(-1, len(self.gains), 1)[at], self.squares.ravel()[at], self.freedom, rng
        )
        return carried[:, 0], free


def beyond_target(curves: Sequence[BatchCurves], measured: Target, value: float) -> Beyond:
    """Predict the optimum at a harder target.

    Raises:
        UsageError: ``value`` is not harder or is out of reach, or the curves allow no prediction.
    """
    gain, highest = measured.gain(value), _highest(measured)
    require(
        math.isfinite(value) and gain > measured.gain(measured.value),
        f"target {value:g} must be harder than {measured.in_words}, which the study measured",
        hint=f"for an easier target, run `bssearch best STUDY --target {value:g}`",
    )
    if highest is not None and gain >= highest:
        raise UsageError(f"target {value:g} must be easier than {abs(highest):g}, the bound of {measured.metric}")
    levels = _levels_of(curves, measured.gain(measured.value))
    rng = np.random.default_rng(0)
    approach = _Approach(levels, highest)
    progress = approach.progress_at(gain, rng)
    times = float(np.exp(np.median(progress) - levels.progress[-1]))
    if times > FARTHEST:
        nearer = measured.gain(float(np.median(approach.gains_at(levels.progress[-1] + math.log(FARTHEST / 2), rng))))
        needs = f"would take {times:.2g} × the measured samples" if math.isfinite(times) else "is out of reach"
        raise UsageError(
            f"by the curves, {measured.metric} {value:g} {needs}; predictions end at {FARTHEST:g} × the measured "
            "samples",
            hint=f"first run a new study with an easier target, such as {nearer:.4g}",
        )
    return _predicted(levels, measured, progress, Interval(value=value, low=None, high=None), rng)


def beyond_samples(curves: Sequence[BatchCurves], measured: Target, samples: float) -> Beyond:
    """Predict the optimum after ``samples`` at the best batch size.

    Raises:
        UsageError: The samples are out of range, or the curves allow no prediction.
    """
    levels = _levels_of(curves, measured.gain(measured.value))
    seconds = np.exp(levels.log_samples[-1]) * levels.step_seconds / levels.batch_sizes
    known = float(np.exp(levels.log_samples[-1][seconds.argmin()]))
    require(
        known < samples <= FARTHEST * known,
        f"samples = {samples:.0f} must be > {math.floor(known)} and <= {math.floor(FARTHEST * known)}; the "
        f"range is 1 to {FARTHEST:g} times the samples to {measured.in_words} at the best batch size",
    )
    low, high = 0.0, math.log(2 * FARTHEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _with_samples(levels, measured, middle).samples.value < samples else (low, middle)
    return _with_samples(levels, measured, high)


def _with_samples(levels: _Levels, measured: Target, farther: float) -> Beyond:
    rng, progress = np.random.default_rng(0), levels.progress[-1] + farther
    gains = _Approach(levels, _highest(measured)).gains_at(progress, rng)
    return _predicted(
        levels, measured, np.full(DRAWS, progress), _interval(gains if measured.goal is Goal.MAXIMIZE else -gains), rng
    )


def _highest(target: Target) -> float | None:
    # The best possible gain, by the metric's name and value
    if target.goal is Goal.MINIMIZE:
        return 0.0 if target.value > 0 else None
    return 1.0 if target.is_above_one(math.inf) else None


def _predicted(
    levels: _Levels, measured: Target, progress: Numbers, metric: Interval, rng: np.random.Generator
) -> Beyond:
    growth = _Growth(levels)
    require(
        growth.is_shown,
        f"the curves show no change of B_crit up to {measured.in_words}, so a prediction of the optimum is not "
        "possible",
        hint="run more seeds with `bssearch study confirm STUDY`, or search at a harder target",
    )
    reaches = np.isfinite(progress)
    powers, expected, fresh = growth.draw(progress[reaches], rng)
    seconds = np.exp(expected) * levels.step_seconds / levels.batch_sizes
    typical = np.median(seconds, axis=0)
    best = int(typical.argmin())
    flat = around(best, typical <= FLAT_RATIO * typical.min())
    assert flat is not None, "the optimum is in the flat range"
    ends = np.quantile([best, *seconds.argmin(axis=1)], TAILS, method="inverted_cdf")
    sizes = [one.batch_size for one in levels.curves]
    log_b_crit, log_s_min = nearest_law(fresh, levels.batch_sizes)
    own_b_crit, own_s_min = nearest_law(levels.log_samples, levels.batch_sizes)
    return Beyond(
        metric=metric,
        samples=_interval(np.exp(fresh[:, best])),
        reachable=float(reaches.mean()),
        s_min=float(np.exp(np.median(log_s_min))),
        b_crit=_critical(log_b_crit, levels.batch_sizes),
        b_crit_measured=float(np.exp(own_b_crit[-1])),
        growth=_interval(powers),
        optimal_batch_size=sizes[best],
        flat_range=[sizes[flat[0]], sizes[flat[1]]],
        optimum_interval=[sizes[min(best, ends[0])], sizes[max(best, ends[1])]],
        test_batch_size=sizes[int(np.argmax([abs(float(np.corrcoef(one, log_b_crit)[0, 1])) for one in fresh.T]))],
        batches=[
            BeyondBatch(
                batch_size=one.batch_size,
                micro_batch_size=one.micro_batch_size,
                steps=_interval(np.exp(logs) / one.batch_size),
                time_to_target_s=_interval(np.exp(logs) / one.batch_size * one.step_seconds),
            )
            for one, logs in zip(levels.curves, fresh.T, strict=True)
        ],
        levels=[
            BeyondLevel(metric=measured.gain(float(gain)), s_min=float(np.exp(s_min)), b_crit=float(np.exp(b_crit)))
            for gain, s_min, b_crit in zip(levels.gains, own_s_min, own_b_crit, strict=True)
        ],
    )


def _interval(drawn: Numbers) -> Interval:
    low, high = np.quantile(drawn, TAILS)
    return Interval(value=float(np.median(drawn)), low=float(low), high=float(high))


def _critical(log_b_crit: Numbers, batch_sizes: Numbers) -> CriticalBatch:
    low, middle, high = np.quantile(log_b_crit, [TAILS[0], 0.5, TAILS[1]])
    grid = _log_b_crits(batch_sizes, FINE_B_CRITS)
    return CriticalBatch(
        estimate=float(np.exp(middle)),
        low=None if low <= grid[0] else float(np.exp(low)),
        high=None if high >= grid[-1] else float(np.exp(high)),
    )
