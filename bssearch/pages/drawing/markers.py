"""Markers: each an element where it has a text of its own, thousands of one colour a single path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.colours import check_scale, on_scale, paint
from bssearch.pages.drawing.series import Series, title_of
from bssearch.pages.drawing.symbols import is_open, outline, short
from bssearch.pages.drawing.text import Box

OPEN_WIDTH = 1.5
"""Width of an outline that a figure gives none."""
USUAL_SIZE = 6


@dataclass(frozen=True, slots=True)
class Style:
    """How a marker is drawn."""

    symbol: str
    colour: str
    size: float
    edge: str
    edge_width: float


def styles_of(marker: Figure, count: int) -> list[Style]:
    """Return the style of each of a trace's points."""
    symbols, colours = marker.get("symbol", "circle"), marker["color"]
    edge = marker.get("line", {})
    if isinstance(colours, list):
        check_scale(marker["colorscale"])
        low, high = marker["cmin"], marker["cmax"]
        colours = [on_scale(value, low, high) for value in colours]
    return [
        Style(
            symbol=symbol,
            colour=colour,
            size=float(marker.get("size", USUAL_SIZE)),
            edge=edge.get("color", colour),
            edge_width=float(edge.get("width", 0)),
        )
        for symbol, colour in zip(_each(symbols, count), _each(colours, count), strict=True)
    ]


def _each(values: str | Sequence[str], count: int) -> Sequence[str]:
    return [values] * count if isinstance(values, str) else values


def markers(series: Series, *, tells: bool) -> Iterator[str]:
    """Yield a trace's markers, of one style after the other in the order of their first points.

    ``tells``: with their texts for the pointer, unless they are too many.
    """
    if "markers" not in series.modes:
        return
    told = {(x, y): text for x, y, text in series.told()} if tells else {}
    for style, places in _by_style(series).items():
        if told:
            yield f'<g {_filled(style)} pointer-events="all">'
            for x, y in places:
                title = title_of(told[x, y]) if (x, y) in told else ""
                yield f'<path d="M{short(x)} {short(y)}{outline(style.symbol, style.size)}">{title}</path>'
            yield "</g>"
        elif style.symbol == "circle":
            yield from _dots(style, places)
        else:
            shape = outline(style.symbol, style.size)
            path = "".join(dict.fromkeys(f"M{short(x)} {short(y)}{shape}" for x, y in places))
            yield f'<path d="{path}" {_filled(style)}/>'


def marker_boxes(series: Series) -> Iterator[Box]:
    """Yield the room that a trace's markers take."""
    if "markers" in series.modes:
        half = 0.5 * series.trace["marker"].get("size", USUAL_SIZE)
        for x, y in series.places:
            yield Box(x - half, y - half, x + half, y + half)


def swatch(series: Series, x: float, y: float) -> str:
    """Return the marker that stands for a trace in the legend."""
    styles = styles_of(series.trace["marker"], len(series.places))
    style = next((one for one in styles if not is_open(one.symbol)), styles[0])
    if isinstance(series.trace["marker"]["color"], list):
        style = Style(style.symbol, "var(--seq-50)", style.size, style.edge, style.edge_width)
    return f'<path d="M{short(x)} {short(y)}{outline(style.symbol, style.size)}" {_filled(style)}/>'


def _by_style(series: Series) -> dict[Style, list[tuple[float, float]]]:
    groups: dict[Style, list[tuple[float, float]]] = {}
    styles = styles_of(series.trace["marker"], len(series.places))
    for style, (x, y) in zip(styles, series.places, strict=True):
        if series.shows(x, y):
            groups.setdefault(style, []).append((x, y))
    return groups


def _filled(style: Style) -> str:
    """Return the attributes of a marker's inside and edge."""
    if is_open(style.symbol):
        return f'fill="none" stroke="{paint(style.colour)}" stroke-width="{style.edge_width or OPEN_WIDTH:g}"'
    if not style.edge_width:
        return f'fill="{paint(style.colour)}"'
    return f'fill="{paint(style.colour)}" stroke="{paint(style.edge)}" stroke-width="{style.edge_width:g}"'


def _dots(style: Style, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Yield circles as lines of no length with round ends, a few bytes each; those at one place once."""
    path = "".join(dict.fromkeys(f"M{short(x)} {short(y)}h0" for x, y in places))
    rounds = 'fill="none" stroke-linecap="round"'
    if style.edge_width:
        outer = style.size + style.edge_width
        yield f'<path d="{path}" {rounds} stroke="{paint(style.edge)}" stroke-width="{outer:g}"/>'
    inner = style.size - style.edge_width
    yield f'<path d="{path}" {rounds} stroke="{paint(style.colour)}" stroke-width="{inner:g}"/>'
