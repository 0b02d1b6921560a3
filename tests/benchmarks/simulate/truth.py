"""The time of a configuration of a recorded table with a new seed: a smooth model plus resampled residuals.

The best of hundreds of cells by a few seeds each is partly luck. A Gaussian process over the cells separates luck from
the trend of neighbours; the rest of each seed is a residual. A fresh run of a cell takes the model's time times a
residual of another cell, so the winner's lucky run never confirms itself.
"""

import math
import warnings
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bssearch.errors import UsageError
from tests.benchmarks.simulate.replay import Replay
from tests.benchmarks.simulate.table_space import BATCH_SIZE, LEARNING_RATE, TableSpace, is_ordinal

MOST_MISSED = 0.5  # from this share of misses on, a cell has no median time to the target

LENGTHS = (0.3, 10.0)  # bounds of the model's length scales, in units of a parameter's spread


class Truth:
    """The time of each cell of a table without the luck of its seeds."""

    def __init__(self, table: TableSpace) -> None:
        self._table = table
        logs, cells = [], []
        for point, trials in enumerate(table.trials):
            for trial in trials:
                if math.isfinite(trial.target_seconds):
                    logs.append(math.log(trial.target_seconds))
                    cells.append(point)
        if len(set(cells)) < 2:
            raise UsageError(f"only one combination of parameters of table {table.table!r} reaches the target")
        self._logs, self._cells = np.array(logs), np.array(cells)
        # The share of each cell's runs that miss the target
        self._missed = np.array(
            [sum(math.isinf(one.target_seconds) for one in trials) / len(trials) for trials in table.trials]
        )
        if np.count_nonzero(self._missed < MOST_MISSED) < 2:
            raise UsageError(
                f"fewer than two combinations of parameters of table {table.table!r} reach the target in most runs"
            )

    @cached_property
    def log_seconds(self) -> NDArray[np.float64]:
        """Log of the median train seconds to the target of each cell, with its misses, shape (cells,).

        If a share m of its runs misses, this is the quantile 0.5 / (1 − m) of the runs that reach the target; ∞ from m
        = 0.5 on.
        """
        of_hits = np.minimum(1.0, 0.5 / (1 - np.minimum(self._missed, MOST_MISSED)))
        medians = self._log_of_hits + np.quantile(self.residuals, of_hits)
        return np.where(self._missed >= MOST_MISSED, math.inf, medians)

    @cached_property
    def _log_of_hits(self) -> NDArray[np.float64]:
        """Smooth log train seconds of the runs that reach the target, shape (cells,); ∞ if half or more miss."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

        features = self._features
        kernel = ConstantKernel(1.0, (0.01, 100.0)) * RBF(np.ones(features.shape[1]), LENGTHS)
        model = GaussianProcessRegressor(kernel + WhiteKernel(0.01, (1e-4, 1.0)), normalize_y=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # A scale at its bound is meant: see `LENGTHS`.
            model.fit(features[self._cells], self._logs)
        means: NDArray[np.float64] = model.predict(features)
        return np.where(self._missed >= MOST_MISSED, math.inf, means)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Median train seconds to the target of each cell."""
        return tuple(np.exp(self.log_seconds).tolist())

    @cached_property
    def residuals(self) -> NDArray[np.float64]:
        """Deviations of recorded runs from the model, in log seconds, centred on 0; without misses."""
        off = self._logs - self._log_of_hits[self._cells]
        off = off[np.isfinite(off)]
        centred: NDArray[np.float64] = off - np.median(off)
        return centred

    @cached_property
    def seconds_by_batch_size(self) -> dict[int, float]:
        """Least seconds of any cell of a batch size, smallest batch size first."""
        return self._table.least_by_batch_size(self.seconds)

    def fresh_run(self, point: int, seed: int) -> Replay:
        """Return a run of a cell with a new seed: always the same for one cell and seed.

        A recorded run of the cell is drawn; a miss stays a miss. Otherwise its time is stretched to the model's time
        times a residual of another cell.
        """
        rng = np.random.default_rng((seed, point))
        trials = self._table.trials[point]
        run = trials[int(rng.integers(len(trials)))]
        if math.isinf(run.target_seconds) or math.isinf(self._log_of_hits[point]):
            return run
        others = self.residuals[self._finite_cells != point]
        residual = float(others[int(rng.integers(len(others)))])
        factor = math.exp(self._log_of_hits[point] + residual) / run.target_seconds
        return stretched(run, factor)

    @cached_property
    def _finite_cells(self) -> NDArray[np.int64]:
        finite: NDArray[np.int64] = self._cells[np.isfinite(self._log_of_hits[self._cells])]
        return finite

    @property
    def _features(self) -> NDArray[np.float64]:
        """Cells as numbers, shape (cells, features): batch size and rate in logs, all with spread 1."""
        columns: list[NDArray[np.float64]] = []
        for place, (name, values) in enumerate(zip(self._table.names, self._table.grid, strict=True)):
            column = [cell[place] for cell in self._table.cells]
            if len(values) < 2:
                continue
            if name in {BATCH_SIZE, LEARNING_RATE}:
                columns.append(np.log(np.array(column, float)))
            elif is_ordinal(values):
                columns.append(np.array([float(values.index(one)) for one in column]))
            else:
                columns += [np.array([float(one == value) for one in column]) for value in values]
        features = np.stack(columns, axis=1)
        spread: NDArray[np.float64] = features.std(axis=0)
        scaled: NDArray[np.float64] = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        return scaled


def stretched(run: Replay, factor: float) -> Replay:
    """Return a run that takes a factor longer in seconds and steps, with the same limit."""
    return replace(
        run,
        train_seconds=tuple(factor * seconds for seconds in run.train_seconds),
        steps=tuple(round(factor * step) for step in run.steps),
        target_seconds=factor * run.target_seconds,
    )
