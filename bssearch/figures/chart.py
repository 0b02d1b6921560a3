"""A chart as data: series of points on two axes, without pixels; `bssearch.figures.svg` draws it.

Colours are variables of ``colours.css``, for light and dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bssearch.records.text import number

INK, MUTED, PAGE = "var(--ink)", "var(--muted)", "var(--page)"
ACCENT, SECOND, THIRD, BAND = "var(--accent)", "var(--second)", "var(--third)", "var(--band)"

STOPS = 4  # Colours of the sequence in ``colours.css``: ``--sequence-0`` is the best, ``--sequence-3`` the worst

PADDING = 0.06  # Empty space at each end of an axis, as a share of the length

MOST_TICKS = 7
LONGEST_NAME = 40

Tick = tuple[float, str]
Symbol = Literal["circle", "square", "diamond", "cross", "triangle", "star", "arrow", "x"]
Dash = Literal["solid", "dash", "dot"]
Shape = Literal["straight", "hv", "vh"]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``; ticks without room lose their labels."""

    title: str
    low: float
    high: float
    ticks: Sequence[Tick]
    is_log: bool = False
    has_grid: bool = True

    def share(self, value: float) -> float:
        """Return a value's position: 0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def clamped(self, value: float) -> float:
        """Return a value limited to the axis."""
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Point:
    """A point with an optional interval, tooltip (``about``) and label."""

    x: float
    y: float
    about: str = ""
    label: str = ""
    low: float | None = None
    high: float | None = None
    colour: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points drawn as a line, symbols or both; without a name it is not in the legend."""

    points: Sequence[Point]
    name: str = ""
    colour: str = ACCENT
    width: float = 0
    dash: Dash = "solid"
    shape: Shape = "straight"  # hv steps horizontally, then vertically; vh the other way round
    symbol: Symbol | None = None
    size: float = 10
    is_hollow: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A shaded range of the x axis."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLine:
    """A named dotted line at a value of the y axis, or of the x axis if upright."""

    at: float
    name: str = ""
    colour: str = MUTED
    is_upright: bool = False


@dataclass(frozen=True, slots=True)
class ColourScale:
    """The legend of point colours: labels at shares of the colour sequence."""

    title: str
    ticks: Sequence[Tick]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series on two axes. Symbols cover lines, later symbols earlier ones, wider lines narrower ones."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    rules: Sequence[ReferenceLine] = ()
    colours: ColourScale | None = None


def batch_axis(sizes: Sequence[int], title: str = "batch size") -> Axis:
    """Return a logarithmic axis with a tick at each batch size (ascending)."""
    room = max(10**0.1, (sizes[-1] / sizes[0]) ** PADDING)
    ticks = [(float(size), str(size)) for size in sizes]
    return Axis(title, sizes[0] / room, sizes[-1] * room, ticks, is_log=True, has_grid=False)


def value_axis(title: str, values: Iterable[float], *, log: bool, room: float = PADDING) -> Axis:
    """Return an axis around the values, with ticks at round numbers."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(known), max(known)
    if log:
        factor = max(10**0.04, (high / low) ** room)
        low, high = low / factor, high * factor
        return Axis(title, low, high, [(tick, number(tick)) for tick in round_numbers(low, high)], is_log=True)
    pad = room * ((high - low) or abs(high) or 1.0)
    low, high = low - (pad if low else 0.0), high + pad
    return Axis(title, low, high, linear_ticks(low, high))


def extent(series: Iterable[Series]) -> list[float]:
    """Return the y values of points and interval ends."""
    points = (point for one in series for point in one.points)
    return [value for point in points for value in (point.y, point.low, point.high) if value is not None]


def linear_ticks(low: float, high: float) -> list[Tick]:
    """Return at most `MOST_TICKS` multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(index * step, f"{index * step:,.{decimals}f}".replace("-", "−")) for index in range(first, last + 1)]


def round_numbers(low: float, high: float) -> list[float]:
    """Return three to nine round numbers for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(step / 10 for step in range(10, 100))):
        found = [float(f"{step * 10.0**decade:.6g}") for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 9)] if len(found) > 1 else sorted({low, high})


def sequence_colour(share: float) -> str:
    """Return the colour at a share of the sequence; 0 is the best."""
    place = round(min(1.0, max(0.0, share)), 2) * (STOPS - 1)
    before = min(int(place), STOPS - 2)
    percent = round(100 * (place - before))
    return f"color-mix(in srgb,var(--sequence-{before + 1}) {percent}%,var(--sequence-{before}))"


def short_name(text: object) -> str:
    """Return a name on one line, cut to `LONGEST_NAME` characters."""
    words = " ".join(str(text).split())
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 1]}…"
