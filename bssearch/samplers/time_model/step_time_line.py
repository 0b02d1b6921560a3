"""The step time of each batch size: measured where that is cheap, between those by the affine law of its neighbours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

ENOUGH = 2
"""Step times that are measured whatever they cost: two points are the least that a line takes."""

SLOWEST_FALL = 0.3
"""No batch size's step is taken for faster than this share of a smaller one's."""


class StepTimes:
    """Seconds of a step by batch size; ``probe`` measures one.

    Measured at once, from the smallest batch size up, are those that take no longer than ``affordable_seconds``, and
    two in any case. The others are learned as trials run at them.
    """

    def __init__(
        self, batch_sizes: Sequence[int], probe: Callable[[int], float], affordable_seconds: float = inf
    ) -> None:
        self._known: dict[int, float] = {}
        for size in sorted(batch_sizes):
            if len(self._known) >= ENOUGH and self.at(size) > affordable_seconds:
                break
            self._known[size] = probe(size)

    def learn(self, batch_size: int, seconds: float) -> None:
        """Take a step time that a trial has shown, where none is known."""
        self._known.setdefault(batch_size, seconds)

    def at(self, batch_size: int) -> float:
        """Return the seconds of a step, on the line through the two nearest batch sizes where it is not known."""
        if batch_size in self._known or len(self._known) == 1:
            return self._known.get(batch_size) or next(iter(self._known.values()))
        sizes = sorted(self._known)
        right = min(max(bisect_left(sizes, batch_size), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = max(0.0, (self._known[high] - self._known[low]) / (high - low))
        return max(self._known[low] + slope * (batch_size - low), SLOWEST_FALL * self._known[low])
