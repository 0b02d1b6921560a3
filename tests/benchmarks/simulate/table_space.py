"""A recorded table as a space to search: its combinations of parameters, each with some seeds."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bssearch.errors import UsageError
from bssearch.exchange.exporters.exports import RecordedTable
from bssearch.records import ParameterValue, Target
from tests.benchmarks.simulate.replay import Replay, replays

BATCH_SIZE = "batch_size"
LEARNING_RATE = "learning_rate"

Cell = tuple[ParameterValue, ...]  # a value of each parameter

MOST_MISSED = 0.1  # a cell with more missed runs does not reach the target


@dataclass(frozen=True)
class TableSpace:
    """Cells by point: ``cells[point]`` has a value of each of ``names``, ``trials[point]`` the trials recorded there.

    ``grid``: the values of each parameter, ascending. By batch size, if known: ``step_seconds``, and ``cadence``, the
    steps between evaluations. ``limit``: the longest training of a trial, in seconds.
    """

    table: str
    names: tuple[str, ...]
    grid: tuple[Cell, ...]
    cells: tuple[Cell, ...]
    trials: tuple[tuple[Replay, ...], ...]
    step_seconds: Mapping[int, float]
    limit: float
    target: Target
    cadence: Mapping[int, int]

    @property
    def target_gain(self) -> float:
        return self.target.gain(self.target.value)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """True train seconds to the target of each cell: the mean over its seeds, ∞ if over a tenth of them miss.

        Fewer misses count as the limit.
        """
        return tuple(self._mean([trial.target_seconds for trial in trials]) for trials in self.trials)

    def _mean(self, seconds: Sequence[float]) -> float:
        if sum(map(math.isinf, seconds)) > MOST_MISSED * len(seconds):
            return math.inf
        return statistics.fmean(min(one, self.limit) for one in seconds)

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The place of each cell's values in the grid."""
        return tuple(
            tuple(values.index(value) for value, values in zip(cell, self.grid, strict=True)) for cell in self.cells
        )

    @cached_property
    def points(self) -> dict[tuple[int, ...], int]:
        """The point of each place of the grid that has a cell."""
        return {place: point for point, place in enumerate(self.places)}

    @cached_property
    def best(self) -> float:
        """The least true train seconds to the target."""
        return min(self.seconds)

    def batch_size(self, point: int) -> int:
        """Return a cell's batch size."""
        size = self.cells[point][self.names.index(BATCH_SIZE)]
        assert isinstance(size, int)
        return size

    @cached_property
    def seconds_by_batch_size(self) -> dict[int, float]:
        """The least true train seconds of any cell of a batch size, smallest batch size first."""
        return self.least_by_batch_size(self.seconds)

    def least_by_batch_size(self, seconds: Sequence[float]) -> dict[int, float]:
        """Return the least of the cells' seconds at each batch size, smallest batch size first."""
        least: dict[int, float] = {}
        for point, one in enumerate(seconds):
            size = self.batch_size(point)
            least[size] = min(one, least.get(size, math.inf))
        return dict(sorted(least.items()))

    @property
    def middle(self) -> int:
        """The point in the middle of the grid, or the nearest cell."""
        return self.nearest([(len(values) - 1) // 2 for values in self.grid])

    def nearest(self, place: Sequence[int]) -> int:
        """Return the point fewest steps of the grid away from a place, the first of several."""
        return min(
            range(len(self.cells)),
            key=lambda point: sum(abs(a - b) for a, b in zip(self.places[point], place, strict=True)),
        )

    def point_of(self, assignments: str) -> int:
        """Return the point of ``name=value,…``, a value of every parameter.

        Raises `UsageError` with the unknown name or value, and the known ones.
        """
        given = self._assigned(assignments)
        if missing := [name for name in self.names if name not in given]:
            raise UsageError(
                f"default = {assignments!r} has no {', '.join(missing)}; it must have {', '.join(self.names)}"
            )
        wanted = tuple(given[name] for name in self.names)
        if wanted not in self.points:
            raise UsageError(f"no trial of table {self.table!r} has {assignments}: the combination does not occur")
        return self.points[wanted]

    def _assigned(self, assignments: str) -> dict[str, int]:
        """Return the place of each value that is given."""
        given: dict[str, int] = {}
        for one in assignments.split(","):
            name, equals, text = (part.strip() for part in one.partition("="))
            if not equals:
                raise UsageError(f"default: {one!r} must be name=value")
            if name not in self.names:
                raise UsageError(
                    f"default: table {self.table!r} has no parameter {name!r}; it has {', '.join(self.names)}"
                )
            if name in given:
                raise UsageError(f"default: {name} is given twice")
            values = self.grid[self.names.index(name)]
            places = [place for place, value in enumerate(values) if _is_told(value, text)]
            if not places:
                there = ", ".join(map(_told, values))
                raise UsageError(f"default: {name} = {text} is not in table {self.table!r}; there are {there}")
            given[name] = places[0]
        return given


def table_space(table: RecordedTable) -> TableSpace:
    """Return a table as a space.

    Raises `UsageError` for a table without batch sizes, with missing or wrong parameters, with a single cell, or
    without a cell that always reaches the target.
    """
    names = tuple(dict.fromkeys(name for trial in table.trials for name in trial.parameters))
    if BATCH_SIZE not in names:
        raise UsageError(f"table {table.name!r} has no column 'param.batch_size': a sampler has nothing to search")
    found: dict[Cell, list[Replay]] = defaultdict(list)
    for trial, replay in zip(table.trials, replays(table), strict=True):
        place = f"trial {trial.number} of table {table.name!r}"
        found[tuple(_value(place, name, trial.parameters.get(name)) for name in names)].append(replay)
    if len(found) < 2:
        raise UsageError(f"table {table.name!r} has one combination of parameters: there is nothing to search")
    grid = tuple(_ascending({cell[index] for cell in found}) for index in range(len(names)))
    cells = sorted(found, key=lambda cell: [values.index(one) for one, values in zip(cell, grid, strict=True)])
    space = TableSpace(
        table=table.name,
        names=names,
        grid=grid,
        cells=tuple(cells),
        trials=tuple(tuple(found[cell]) for cell in cells),
        step_seconds=_step_seconds(table),
        limit=max(replay.limit for trials in found.values() for replay in trials),
        target=table.target,
        cadence=_cadences(table),
    )
    if math.isinf(space.best):
        raise UsageError(f"no combination of parameters of table {table.name!r} reaches the target with all its seeds")
    return space


def is_ordinal(values: Collection[ParameterValue]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _value(origin: str, name: str, value: ParameterValue) -> ParameterValue:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    bound = None
    if value is None:
        bound = "set: a table to search has all its parameters in every trial"
    elif number is not None and not math.isfinite(number):
        bound = "finite"
    elif name == BATCH_SIZE and (number is None or number < 1 or number != int(number)):
        bound = "a whole number >= 1"
    elif name == LEARNING_RATE and (number is None or number <= 0):
        bound = "a number > 0"
    if bound is not None:
        raise UsageError(f"{origin}: param.{name} = {value!r} must be {bound}")
    return int(number) if name == BATCH_SIZE and number is not None else value


def _ascending(values: Collection[ParameterValue]) -> Cell:
    numbers = [value for value in values if isinstance(value, int | float)]
    return tuple(sorted(numbers) if is_ordinal(values) else sorted(values, key=str))


def _step_seconds(table: RecordedTable) -> dict[int, float]:
    """Return the seconds of a step by batch size: the median over its trials, from the last evaluation of each."""
    found = defaultdict(list)
    for trial in table.trials:
        if trial.steps[-1]:
            found[int(trial.parameters[BATCH_SIZE] or 0)].append(trial.train_seconds[-1] / trial.steps[-1])
    return {size: statistics.median(seconds) for size, seconds in found.items()}


def _is_told(value: ParameterValue, text: str) -> bool:
    if not is_ordinal([value]):
        return _told(value) == (text.lower() if isinstance(value, bool) else text)
    try:
        return float(text) == value
    except ValueError:
        return False


def _told(value: ParameterValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cadences(table: RecordedTable) -> dict[int, int]:
    """Return the steps between evaluations by batch size, the median over its trials."""
    found: dict[int, list[int]] = defaultdict(list)
    for trial in table.trials:
        apart = [after - before for before, after in itertools.pairwise(trial.steps)]
        found[int(trial.parameters[BATCH_SIZE] or 0)] += apart
    return {size: max(1, round(statistics.median(steps))) for size, steps in found.items() if steps}
