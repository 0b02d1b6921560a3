"""A figure as SVG: drawn twice, for a screen and for a phone, of which the page's style sheet shows one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.frame import axes_of, axis_texts, bottom_of, grid, notes, reference_lines
from bssearch.pages.drawing.known import check
from bssearch.pages.drawing.labels import Labels
from bssearch.pages.drawing.legend import colour_scale, legend
from bssearch.pages.drawing.markers import marker_boxes, markers
from bssearch.pages.drawing.scales import Axis
from bssearch.pages.drawing.series import Series, area, bar_boxes, error_bars, line, reached, series_of
from bssearch.pages.drawing.sizes import WIDE_WIDTH, Size, sizes
from bssearch.pages.drawing.symbols import short
from bssearch.pages.drawing.text import Box, escaped

MOST_OBSTACLES = 500
"""Points that the texts of a figure stay clear of: a choice, for the time that it takes."""


def svg(figure: Figure, name: str, title: str, wide: float = WIDE_WIDTH) -> str:
    """Return a figure as two ``svg`` elements, of the classes ``wide`` and ``narrow``.

    ``name`` makes the ids, and is one of its own on a page; ``title`` says what a reader who does not see it is told
    first. ``wide`` is the width on a screen in CSS pixels. Raises `ValueError` for what is not drawn of plotly.
    """
    check(figure)
    return "\n".join(part for size in sizes(wide) for part in _drawn(figure, f"{name}-{size.kind}", title, size))


def _drawn(figure: Figure, name: str, title: str, size: Size) -> Iterator[str]:
    layout = figure["layout"]
    head, top = _head(figure, name, size)
    x, y = axes_of(layout, size, top)
    every = [series_of(trace, x, y) for trace in _in_order(figure)]
    height = bottom_of(y, size)
    plot = (
        f'x="{short(x.start)}" y="{short(y.end)}" width="{short(x.end - x.start)}" height="{short(size.plot_height)}"'
    )
    yield (
        f'<svg class="{size.kind}" viewBox="0 0 {short(size.width)} {short(height)}" role="img" '
        f'aria-label="{escaped(f"{title}: {y.title} by {x.title}")}" aria-describedby="{escaped(name)}-about" '
        f'font-family="system-ui, sans-serif" font-size="{short(size.font)}" fill="var(--ink)">'
    )
    yield f'<desc id="{escaped(name)}-about">{escaped(_about(x, y, every))}</desc>'
    yield f'<clipPath id="{escaped(name)}-plot"><rect {plot}/></clipPath>'
    yield from head
    yield from grid(x, y, layout)
    yield f'<g clip-path="url(#{escaped(name)}-plot)">'
    yield from reference_lines(layout, x, y)
    for series in every:
        yield from (*area(series), *line(series))
    yield "</g>"
    for series in every:
        yield from (*error_bars(series), *markers(series, tells=size.tells))
    yield from axis_texts(x, y, size)
    yield from _texts(layout, x, y, every, size)
    if size.tells:
        for series in every:
            yield from reached(series)
    yield "</svg>"


def _in_order(figure: Figure) -> list[Figure]:
    return sorted(figure["data"], key=lambda trace: int(trace.get("zorder", 0)))


def _head(figure: Figure, name: str, size: Size) -> tuple[list[str], float]:
    """Return what stands above the plot, and where the plot begins."""
    rows: list[str] = []
    top = 0.0
    if figure["layout"].get("showlegend", True):
        named = [Series(trace, *_NO_AXES, [(0.0, 0.0)] * len(trace["x"])) for trace in figure["data"]]
        rows, top = legend([one for one in named if one.has_entry], size)
    for trace in figure["data"]:
        if "colorbar" in trace.get("marker", {}):
            scale, height = colour_scale(trace["marker"], escaped(name), size)
            rows += [f'<g transform="translate(0 {short(top + 4)})">', *scale, "</g>"]
            top += height + 4
    return rows, top + 2.4 * size.font


_NO_AXES = (Axis("", False, 0, 1, 0, 1, []), Axis("", False, 0, 1, 0, 1, []))
"""The axes of a trace in the legend, which has no points there."""


def _texts(layout: Figure, x: Axis, y: Axis, every: Sequence[Series], size: Size) -> Iterator[str]:
    """Yield the texts in the plot: first the notes, then those of points where there is room."""
    marks = [box for series in every for box in marker_boxes(series)]
    bars = [box for series in every for box in bar_boxes(series)]
    frame = Box(x.start, y.end - 2, size.width, y.start)
    labels = Labels(frame, marks[:MOST_OBSTACLES], bars[:MOST_OBSTACLES], size.font)
    for element, box in notes(layout, x, y, size):
        labels.take(box)
        yield element
    for series in every:
        yield from labels.of(series)


def _about(x: Axis, y: Axis, every: Sequence[Series]) -> str:
    """Return in words what a figure shows: its axes with their ends, and its series."""
    axes = " ".join(
        f"{which}: {axis.title}, {axis.ends[0]:.3g} to {axis.ends[1]:.3g}{', logarithmic' if axis.is_log else ''}."
        for which, axis in (("Across", x), ("Upward", y))
    )
    names = "; ".join(series.name for series in every if series.name)
    return f"{axes} Shown: {names}." if names else axes
