"""Candidate points: tried points, neighbours of the best points, and a Latin hypercube over the space."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bssearch.records import ParameterValue, Progress
from bssearch.spec import REFERENCE_LEARNING_RATE, Dimension, SearchSpace, is_number

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

SPREAD = 220  # points of the Latin hypercube

STEPS = (0.05, 0.2)  # distances from a point to neighbours, as shares of a range


@dataclass(frozen=True)
class Points:
    """Configurations as arrays: ``batch_sizes`` and ``log_rates`` (points,), ``others`` (points, others) in [0, 1]."""

    batch_sizes: Numbers
    log_rates: Numbers
    others: Numbers

    def __len__(self) -> int:
        return len(self.batch_sizes)


Coordinates = Mapping[str, ParameterValue]


class SpaceCandidates:
    """The indexed points of a search space. `add` and `among` discard the points that `among` made."""

    def __init__(self, space: SearchSpace, batch_sizes: Sequence[int]) -> None:
        self.batch_sizes = sorted(batch_sizes)
        self._space = space
        self._dimensions = space.dimensions()
        self._choices = {one.name: {value: _shares(one, value) for value in one.choices} for one in self._dimensions}
        self._chosen: list[tuple[int, Coordinates]] = []
        self._rows: list[list[float]] = []
        self._keys: list[tuple[object, ...]] = []
        self._index: dict[tuple[object, ...], int] = {}
        self._kept = 0
        rate = next((one for one in self._dimensions if one.name == REFERENCE_LEARNING_RATE), None)
        self.log_rate_width = 0.0 if rate is None else math.log(_ends(rate)[1] / _ends(rate)[0])

    def __getitem__(self, index: int) -> tuple[int, Coordinates]:
        return self._chosen[index]

    def add(self, batch_size: int, coordinates: Coordinates) -> int:
        """Add a point and return a permanent index."""
        self._forget_made()
        index = self._add(batch_size, coordinates)
        self._kept = len(self._keys)
        return index

    def take(self, indices: Indices) -> Points:
        rows = np.array([self._rows[index] for index in indices])
        return Points(rows[:, 0], rows[:, 1], rows[:, 2:])

    def among(self, tried: Sequence[int], best: Sequence[int], rng: np.random.Generator) -> Indices:
        """The indices of ``tried`` points, neighbours of the ``best`` points, and new points."""
        self._forget_made()
        near = [neighbour for one in best for neighbour in self._neighbours(*self._chosen[one], rng)]
        spread = [
            (
                self.batch_sizes[int(share[0] * len(self.batch_sizes))],
                {one.name: _value(one, at) for one, at in zip(self._dimensions, share[1:].tolist(), strict=True)},
            )
            for share in latin_hypercube(SPREAD, 1 + len(self._dimensions), rng)
        ]
        return np.array(sorted({*tried, *(self._add(*one) for one in near + spread)}))

    def _add(self, batch_size: int, coordinates: Coordinates) -> int:
        key = (batch_size, *(coordinates[one.name] for one in self._dimensions))
        if key not in self._index:
            self._index[key] = len(self._keys)
            self._keys.append(key)
            self._chosen.append((batch_size, coordinates))
            self._rows.append(self._row(batch_size, coordinates))
        return self._index[key]

    def _forget_made(self) -> None:
        for key in self._keys[self._kept :]:
            del self._index[key]
        del self._keys[self._kept :], self._chosen[self._kept :], self._rows[self._kept :]

    def _neighbours(
        self, batch_size: int, coordinates: Coordinates, rng: np.random.Generator
    ) -> list[tuple[int, Coordinates]]:
        found: list[tuple[int, Coordinates]] = []
        if batch_size in self.batch_sizes:
            place = self.batch_sizes.index(batch_size)
            sizes = self.batch_sizes[max(0, place - 1) : place] + self.batch_sizes[place + 1 : place + 2]
            found += [(size, coordinates) for size in sizes]
        return found + [
            (batch_size, {**coordinates, one.name: value})
            for one in self._dimensions
            for value in _beside(one, coordinates[one.name], rng)
        ]

    def _row(self, batch_size: int, coordinates: Coordinates) -> list[float]:
        others = [
            share
            for one in self._dimensions
            if one.name != REFERENCE_LEARNING_RATE
            for share in self._shares(one, coordinates[one.name])
        ]
        return [float(batch_size), math.log(self._space.plain_learning_rate(batch_size, coordinates)), *others]

    def _shares(self, dimension: Dimension, value: ParameterValue) -> list[float]:
        known = self._choices[dimension.name].get(value)
        return _shares(dimension, value) if known is None else known


def columns_of(values: Sequence[ParameterValue], ordered: Sequence[ParameterValue]) -> list[list[float]]:
    """Return columns of values in [0, 1], as ranks if numeric, else one-hot."""
    if all(is_number(value) for value in ordered):
        last = max(1, len(ordered) - 1)
        return [[ordered.index(value) / last for value in values]]
    return [[float(value == one) for value in values] for one in ordered]


def _shares(dimension: Dimension, value: ParameterValue) -> list[float]:
    if dimension.choices:
        return [column[0] for column in columns_of([value], sorted(set(dimension.choices), key=order_of))]
    return [_share(dimension, value)]


def _share(dimension: Dimension, value: ParameterValue) -> float:
    low, high = dimension.low, dimension.high
    if dimension.log:
        return math.log(float(value or low) / low) / math.log(high / low)
    return (float(value or 0.0) - low) / (high - low)


def _value(dimension: Dimension, share: float) -> ParameterValue:
    if dimension.choices:
        ordered = sorted(dimension.choices, key=order_of)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
    return dimension.at_share(share)


def _beside(dimension: Dimension, value: ParameterValue, rng: np.random.Generator) -> list[ParameterValue]:
    if dimension.choices:
        ordered = sorted(dimension.choices, key=order_of)
        if not all(is_number(one) for one in ordered):
            return [one for one in ordered if one != value]
        place = ordered.index(value)
        return [*ordered[max(0, place - 1) : place], *ordered[place + 1 : place + 2]]
    share = _share(dimension, value)
    steps = [sign * step * float(rng.uniform(0.5, 1.5)) for step in STEPS for sign in (-1, 1)]
    found = [_value(dimension, share + step) for step in steps if 0 <= share + step <= 1]
    return _whole_beside(dimension, value, found) if dimension.integer else found


def _whole_beside(dimension: Dimension, value: ParameterValue, found: Sequence[ParameterValue]) -> list[ParameterValue]:
    next_to = [dimension.nearest(float(value or 0.0) + one) for one in (-1, 1)]
    return [one for one in dict.fromkeys([*next_to, *found]) if one != value]


def _ends(dimension: Dimension) -> tuple[float, float]:
    if dimension.choices:
        numbers = [float(choice or 0.0) for choice in dimension.choices]
        return min(numbers), max(numbers)
    return dimension.low, dimension.high


def latin_hypercube(count: int, dimensions: int, rng: np.random.Generator) -> Numbers:
    places = np.stack([rng.permutation(count) for _ in range(dimensions)], axis=1)
    return (places + rng.random((count, dimensions))) / count


def order_of(value: ParameterValue) -> tuple[str, object]:
    return ("", value) if is_number(value) else (type(value).__name__, str(value))


WINNERS = 12  # compare with this many fastest runs

LATE = 0.7  # predictions are averages from this share of a trial's time on

FIRST_SHARE = 1e-3  # smallest resolved share of a winner's time

WORST = 6.0  # trials slower than the fastest winner by this factor only give a bound

BOUND_DEVIATION = 0.3

# The prior of `Extrapolation.error`, and the prior's weight in winners
ERROR = 0.35
ERROR_TRIALS = 4

EARLY = 0.1  # running trials count from this share of the fastest winner's time

AT_CHANCE = 0.05  # trials are at chance below this share of the way from the worst first metric to the target


@dataclass(slots=True)
class Run:
    """A trial's point and learning curve. ``hit`` has the train seconds at the target."""

    point: int
    progress: Progress
    hit: float | None = None
    running: bool = True
    diverged: bool = False


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Logs of the predicted seconds to the target, of shape (runs,).

    ``variance`` excludes the seed-to-seed spread. ``error`` × log(1/F) is a prediction's standard deviation in log
    seconds, at share F of the time to the target.
    """

    points: NDArray[np.int64]
    log_seconds: Numbers
    variance: Numbers
    is_bound: NDArray[np.bool_]
    error: float


@dataclass(frozen=True, slots=True)
class _Winner:
    gains: Numbers
    train_seconds: Numbers
    seconds: float
    goal: float

    def log_share(self, gains: Numbers) -> Numbers:
        moments = np.interp(np.minimum(gains, self.goal), self.gains, self.train_seconds)
        return np.log(np.clip(moments / self.seconds, FIRST_SHARE, 1.0))


def extrapolate(runs: Sequence[Run], target_gain: float, most_points: int) -> Extrapolation | None:
    """Predict the seconds to the target at about ``most_points`` points or fewer, or None without a reference run."""
    early = EARLY * min((run.hit for run in runs if run.hit is not None), default=0.0)
    shown = [
        run
        for run in runs
        if not run.diverged and run.progress.now > (early if run.running else 0.0) and run.progress.gain > -math.inf
    ]
    gain = np.array([run.progress.gain for run in shown])
    hit = np.array([run.hit is not None for run in shown], bool)
    at_chance = ~hit & (gain < _at_chance(shown, target_gain))
    winners = _winners([run for run, is_lost in zip(shown, at_chance, strict=True) if not is_lost], target_gain)
    if not winners:
        return None
    log_share = _mean_log_share(winners, gain)
    log_now = np.log([run.progress.now for run in shown])
    fastest = hit & (log_now == log_now.min(where=hit, initial=math.inf))
    kept = _thinned([run.point for run in shown], np.where(fastest, -math.inf, log_now - log_share), most_points)
    shown, hit, at_chance = [shown[index] for index in kept], hit[kept], at_chance[kept]
    log_share, log_now, missed = log_share[kept], log_now[kept], gain[kept] < winners[0].goal
    log_seconds = _late_predictions(shown, winners)
    bound = math.log(WORST * min(winner.seconds for winner in winners))
    is_far = at_chance | (log_seconds > bound)
    is_bound = ~hit & (is_far | (missed & (log_seconds < log_now)))
    log_seconds = np.where(is_bound, np.where(is_far, bound, log_now), log_seconds)
    error = _error(winners)
    lost = [run.point for run in runs if run.diverged]
    lost = lost[:: 1 + len(lost) // (most_points // 8)]
    return Extrapolation(
        points=np.array([run.point for run in shown] + lost),
        log_seconds=np.append(log_seconds, np.full(len(lost), bound)),
        variance=np.append(
            np.where(hit, 0.0, (error * log_share) ** 2 + BOUND_DEVIATION**2 * is_bound),
            np.full(len(lost), BOUND_DEVIATION**2),
        ),
        is_bound=np.append(is_bound, np.full(len(lost), True)),
        error=error,
    )


def _at_chance(runs: Sequence[Run], target_gain: float) -> float:
    starts = [start for run in runs if (start := run.progress.gains[0]) > -math.inf]
    worst = min(starts, default=-math.inf)
    return worst + AT_CHANCE * (target_gain - worst) if starts else -math.inf


def _winners(runs: Sequence[Run], target_gain: float) -> list[_Winner]:
    hits = sorted((run for run in runs if run.hit is not None), key=lambda run: run.hit or 0.0)[:WINNERS]
    if hits:
        return [_winner(run, run.hit or 0.0, target_gain) for run in hits]
    first = max(runs, key=lambda run: (run.progress.gain, -run.progress.when_best), default=None)
    return [] if first is None else [_winner(first, first.progress.now, first.progress.gain)]


def _winner(run: Run, seconds: float, goal: float) -> _Winner:
    return _Winner(np.array(run.progress.gains), np.array(run.progress.train_seconds), seconds, goal)


def _mean_log_share(winners: Sequence[_Winner], gains: Numbers) -> Numbers:
    shares: Numbers = np.mean([winner.log_share(gains) for winner in winners], axis=0)
    return shares


def _error(winners: Sequence[_Winner]) -> float:
    squares, count = ERROR_TRIALS * ERROR**2, ERROR_TRIALS
    for index, winner in enumerate(winners):
        others = [*winners[:index], *winners[index + 1 :]]
        before = (winner.train_seconds > 0) & (winner.train_seconds < winner.seconds)
        if not others or not before.any():
            continue
        share = np.minimum(_mean_log_share(others, winner.gains[before]), -0.05)
        off = np.log(winner.train_seconds[before] / winner.seconds) - share
        squares += float(np.mean(off**2 / (share**2 + 0.05)))
        count += 1
    return math.sqrt(squares / count)


def _late_predictions(runs: Sequence[Run], winners: Sequence[_Winner]) -> Numbers:
    starts: list[int] = []
    seconds: list[float] = []
    gains: list[float] = []
    for run in runs:
        starts.append(len(seconds))
        first = run.progress.index_from(LATE * run.progress.now)
        seconds += run.progress.train_seconds[first:]
        gains += run.progress.gains[first:]
    each = np.log(seconds) - _mean_log_share(winners, np.array(gains))
    averages: Numbers = np.add.reduceat(each, starts) / np.diff([*starts, len(seconds)])
    return averages


def _thinned(points: Sequence[int], rough: Numbers, most: int) -> list[int]:
    ordered = list(dict.fromkeys(np.array(points)[np.argsort(rough, kind="stable")].tolist()))
    if len(ordered) <= most:
        return list(range(len(points)))
    head = 3 * most // 4
    rest = ordered[head:]
    step = max(1, len(rest) // (most - head))
    kept = {*ordered[:head], *rest[::step][: most - head]}
    return [index for index, point in enumerate(points) if point in kept]
