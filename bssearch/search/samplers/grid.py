"""Every combination of a space of lists."""

from __future__ import annotations

import itertools
import math
import random

from bssearch.errors import UsageError
from bssearch.search.history import History
from bssearch.search.samplers.base import Choice, Sampler, decoded
from bssearch.spec import StudySpec

MOST_CELLS = 1_000_000  # at one batch size: all of them are kept in memory


class Grid(Sampler):
    """Every combination, shuffled by the study's seed.

    Raises `UsageError` if the space has a range, or more than `MOST_CELLS` combinations.
    """

    def __init__(self, spec: StudySpec) -> None:
        dimensions = spec.space.dimensions()
        # "reference_" belongs to the coordinate of the learning rate.
        ranges = [one.name.removeprefix("reference_") for one in dimensions if not one.choices]
        if ranges:
            raise UsageError(f"sampler = grid needs lists of values: {', '.join(ranges)} is given as a range")
        each = math.prod(len(one.choices) for one in dimensions)
        if each > MOST_CELLS:
            raise UsageError(
                f"sampler = grid would try {each} combinations at each batch size; it must be at most {MOST_CELLS}"
            )
        names = [dimension.name for dimension in dimensions]
        cells = [
            dict(zip(names, cell, strict=True)) for cell in itertools.product(*(one.choices for one in dimensions))
        ]
        choices = [decoded(spec, size, cell) for cell in cells for size in spec.space.rungs]
        self._choices = list({one.configuration.in_micro_batches(1).key: one for one in choices}.values())
        random.Random(spec.seed).shuffle(self._choices)

    def choose(self, history: History, batch_size: int | None = None) -> Choice | None:
        """Untried feasible combination, or None."""
        fitting = self._fitting(history)
        if batch_size is not None:
            fitting = [one for one in fitting if one.configuration.batch_size == batch_size]
        return next((one for one in fitting if not history.tried(one.configuration)), None)

    def ending(self, history: History) -> str | None:
        """Line when all combinations are tried."""
        if self.choose(history) is not None:
            return None
        fitting = self._fitting(history)
        where = "" if len(fitting) == len(self._choices) else " at batch sizes that fit"
        return f"all {len(fitting)} combinations of the grid{where} have been tried"

    def _fitting(self, history: History) -> list[Choice]:
        feasible = history.feasible
        return [one for one in self._choices if one.configuration.batch_size in feasible]
