"""Axes: where a value lies, and which ticks there is room for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.text import plain

Ticks = list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from one pixel to another; ``low`` and ``high`` are logarithms to base 10 on a logarithmic one."""

    title: str
    is_log: bool
    low: float
    high: float
    start: float
    end: float
    ticks: Ticks
    has_grid: bool = True

    def place(self, value: float) -> float:
        """Return the pixel of a value. Raises `ValueError` for one that a logarithmic axis cannot show."""
        return self.place_of_coordinate(math.log10(value) if self.is_log else value)

    def place_of_coordinate(self, coordinate: float) -> float:
        """Return the pixel of a value of the range: on a logarithmic axis, of a logarithm."""
        if not math.isfinite(coordinate):
            raise ValueError(f"{coordinate} has no place on the axis {self.title!r}")
        return self.start + (coordinate - self.low) / (self.high - self.low) * (self.end - self.start)

    def place_of_share(self, share: float) -> float:
        """Return the pixel at a share of the axis."""
        return self.start + share * (self.end - self.start)

    def shows(self, place: float) -> bool:
        """Say whether a pixel lies on the axis, but for rounding."""
        return min(self.start, self.end) - 0.5 <= place <= max(self.start, self.end) + 0.5

    @property
    def ends(self) -> tuple[float, float]:
        """Return the values at both ends."""
        return (10**self.low, 10**self.high) if self.is_log else (self.low, self.high)


def axis_of(drawn: Figure, start: float, end: float, *, most_ticks: int) -> Axis:
    """Return a figure's axis on the pixels from start to end, with its own ticks or at most some round ones."""
    low, high = drawn["range"]
    if "tickvals" in drawn:
        ticks = [(float(value), plain(text)) for value, text in zip(drawn["tickvals"], drawn["ticktext"], strict=True)]
    elif drawn["type"] == "linear":
        ticks = linear_ticks(low, high, most_ticks)
    else:
        raise ValueError(f"the axis {drawn['title']['text']!r} is not drawn: a logarithmic one needs tickvals")
    title, is_log = plain(drawn["title"]["text"]), drawn["type"] == "log"
    axis = Axis(title, is_log, low, high, start, end, [], drawn.get("showgrid", True))
    shown = [tick for tick in ticks if axis.shows(axis.place(tick[0]))]
    return Axis(title, is_log, low, high, start, end, shown, axis.has_grid)


def linear_ticks(low: float, high: float, most: int) -> Ticks:
    """Return at most some multiples of 1, 2 or 5 times a power of ten between low and high."""
    least = (high - low) / most
    power = 10 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(index * step, f"{index * step:,.{decimals}f}".replace("-", "−")) for index in range(first, last + 1)]


def fitting(ticks: Ticks, meet: Callable[[tuple[float, str], tuple[float, str]], bool]) -> Ticks:
    """Return every tick, or every second, third and so on, until the texts of neighbours do not meet."""
    for every in range(1, len(ticks)):
        shown = ticks[::every]
        if not any(meet(one, following) for one, following in itertools.pairwise(shown)):
            return shown
    return ticks[:1]
