"""The cells of a grid as the points that the time model chooses among."""

from collections.abc import Sequence

import numpy as np

from bssearch.records import ParameterValue
from bssearch.search.samplers.time_model.candidates import (
    SPREAD,
    Coordinates,
    Indices,
    Points,
    SpaceCandidates,
    columns_of,
    order_of,
)

# Grids up to this size are considered whole; of larger grids, the tried points, their neighbours and `SPREAD` others
MOST = 450


class GridCandidates(SpaceCandidates):
    """The cells of a grid, each a combination of values in the order of ``names``; combinations may be missing."""

    def __init__(self, names: Sequence[str], cells: Sequence[tuple[ParameterValue, ...]]) -> None:
        columns = {name: [cell[place] for cell in cells] for place, name in enumerate(names)}
        sizes = [_number(size) for size in columns["batch_size"]]
        rates = [_number(rate) for rate in columns.get("learning_rate", [1.0] * len(cells))]
        others = [
            column
            for name in names
            if name not in {"batch_size", "learning_rate"}
            for column in columns_of(columns[name], sorted(set(columns[name]), key=order_of))
        ]
        self._points = Points(
            np.array(sizes),
            np.log(rates),
            np.array(others).T.reshape(len(cells), len(others)),
        )
        self.batch_sizes = sorted({int(size) for size in sizes})
        self.log_rate_width = float(np.ptp(self._points.log_rates))
        ordered = {name: sorted(set(values), key=order_of) for name, values in columns.items()}
        places = {name: {value: place for place, value in enumerate(values)} for name, values in ordered.items()}
        # The place of each cell's value among those of its column, shape (cells, columns).
        self._places = np.array([[places[name][value] for value in values] for name, values in columns.items()]).T

    def take(self, indices: Indices) -> Points:
        points = self._points
        return Points(points.batch_sizes[indices], points.log_rates[indices], points.others[indices])

    def among(self, tried: Sequence[int], best: Sequence[int], rng: np.random.Generator) -> Indices:
        """Return all cells of a small grid; otherwise the tried cells, neighbours of the best, and random cells."""
        count = len(self._points)
        if count <= MOST:
            return np.arange(count)
        near = [np.flatnonzero(np.abs(self._places - self._places[one]).sum(axis=1) == 1) for one in best]
        return np.unique(np.concatenate([np.array(tried, int), *near, rng.choice(count, SPREAD, replace=False)]))


class CellCandidates(GridCandidates):
    """The combinations that a space lists at some batch sizes."""

    def __init__(self, cells: Sequence[tuple[int, Coordinates]]) -> None:
        names = ["batch_size", *cells[0][1]]
        super().__init__(names, [(size, *(values[name] for name in names[1:])) for size, values in cells])
        self._cells = cells
        self._index = {(size, *values.values()): index for index, (size, values) in enumerate(cells)}

    def __getitem__(self, index: int) -> tuple[int, Coordinates]:
        return self._cells[index]

    def add(self, batch_size: int, coordinates: Coordinates) -> int:
        """Return the index of a cell; of an unknown cell, the first cell of its batch size."""
        key = (batch_size, *(coordinates[name] for name in self._cells[0][1]))
        at_size = (index for index, (size, _) in enumerate(self._cells) if size == batch_size)
        return self._index.get(key, next(at_size, 0))


def _number(value: ParameterValue) -> float:
    assert isinstance(value, int | float), "batch sizes and learning rates are numbers"
    return float(value)
