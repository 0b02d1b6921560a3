"""A trace with its points on the figure, and its line, area and error bars as elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.hover import text_of
from bssearch.pages.drawing.scales import Axis
from bssearch.pages.drawing.strokes import Places, path_through, stroke
from bssearch.pages.drawing.symbols import short
from bssearch.pages.drawing.text import Box, escaped, plain

MOST_TOLD = 200
"""Points of a trace up to which each says what it is under the pointer: a choice, for the size of the page."""
REACH = 6
"""Half the size of what stands around a point of a line for the pointer."""


@dataclass(frozen=True, slots=True)
class Series:
    """A trace of plotly, the axes, and where its points lie on them."""

    trace: Figure
    x: Axis
    y: Axis
    places: Places

    @property
    def modes(self) -> set[str]:
        """Return what it is drawn as: lines, markers, text."""
        return set(self.trace["mode"].split("+"))

    @property
    def name(self) -> str:
        """Return what the legend calls it."""
        return plain(self.trace.get("name", ""))

    @property
    def has_entry(self) -> bool:
        """Say whether the legend names it."""
        return bool(self.trace.get("showlegend", True))

    def told(self) -> Iterator[tuple[float, float, str]]:
        """Yield the points that say something under the pointer; none of a trace of too many."""
        if len(self.places) > MOST_TOLD:
            return
        for index, (x, y) in enumerate(self.places):
            text = text_of(self.trace, index)
            if text is not None and self.shows(x, y):
                yield x, y, text

    def shows(self, x: float, y: float) -> bool:
        """Say whether a place lies within the axes."""
        return self.x.shows(x) and self.y.shows(y)


def series_of(trace: Figure, x: Axis, y: Axis) -> Series:
    """Return a trace on its axes. Raises `ValueError` for a point that they cannot show."""
    places = [(x.place(one), y.place(other)) for one, other in zip(trace["x"], trace["y"], strict=True)]
    return Series(trace, x, y, places)


def area(series: Series) -> Iterator[str]:
    """Yield the filled area that a trace's points surround."""
    if series.trace.get("fill"):
        yield f'<path d="{path_through(series.places)}z" fill="{paint(series.trace["fillcolor"])}"/>'


def line(series: Series) -> Iterator[str]:
    """Yield the line through a trace's points."""
    drawn = series.trace.get("line", {})
    if "lines" not in series.modes or not drawn.get("width", 2) or len(series.places) < 2:
        return
    path = path_through(series.places, drawn.get("shape", "linear"))
    yield f'<path d="{path}" fill="none" stroke-linejoin="round" {stroke(drawn)}/>'


def reached(series: Series) -> Iterator[str]:
    """Yield what the pointer finds of a line that has no markers: each point says what it is."""
    if "markers" in series.modes or not (found := list(series.told())):
        return
    yield '<g fill="none" pointer-events="all">'
    for x, y, text in found:
        yield f'<circle cx="{short(x)}" cy="{short(y)}" r="{REACH}">{title_of(text)}</circle>'
    yield "</g>"


def error_bars(series: Series) -> Iterator[str]:
    """Yield the bars from the lower to the upper end of each point's interval, where it has one."""
    for name, axis in (("error_x", series.x), ("error_y", series.y)):
        error = series.trace.get(name)
        if not error or not (path := "".join(_bar(*ends, error["width"]) for ends in _ends(series, name, axis))):
            continue
        yield f'<path d="{path}" fill="none" stroke="{paint(error["color"])}" stroke-width="{error["thickness"]:g}"/>'


def bar_boxes(series: Series) -> Iterator[Box]:
    """Yield the room that error bars take."""
    for name, axis in (("error_x", series.x), ("error_y", series.y)):
        if name in series.trace:
            for across, low, high, is_flat in _ends(series, name, axis):
                least, most = sorted((low, high))
                yield Box(least, across - 1, most, across + 1) if is_flat else Box(across - 1, least, across + 1, most)


def _ends(series: Series, name: str, axis: Axis) -> Iterator[tuple[float, float, float, bool]]:
    """Yield of each bar that has a length its place on the other axis, both ends, and whether it lies flat."""
    error, is_flat = series.trace[name], name == "error_x"
    values = series.trace["x" if is_flat else "y"]
    for value, above, below, (x, y) in zip(values, error["array"], error["arrayminus"], series.places, strict=True):
        if above or below:
            low = value - below
            start = axis.place(low) if low > 0 or not axis.is_log else axis.start
            yield y if is_flat else x, _within(axis, start), _within(axis, axis.place(value + above)), is_flat


def _within(axis: Axis, place: float) -> float:
    low, high = sorted((axis.start, axis.end))
    return min(max(place, low), high)


def _bar(across: float, low: float, high: float, is_flat: bool, cap: float) -> str:
    """Return a bar with a cap at either end, each half ``cap`` wide on either side."""
    if is_flat:
        return "".join(
            (
                f"M{short(low)} {short(across - cap)}v{short(2 * cap)}M{short(low)} {short(across)}H{short(high)}",
                f"M{short(high)} {short(across - cap)}v{short(2 * cap)}",
            )
        )
    return "".join(
        (
            f"M{short(across - cap)} {short(low)}h{short(2 * cap)}M{short(across)} {short(low)}V{short(high)}",
            f"M{short(across - cap)} {short(high)}h{short(2 * cap)}",
        )
    )


def title_of(text: str) -> str:
    """Return the element that a browser shows under the pointer."""
    return f"<title>{escaped(text)}</title>"
