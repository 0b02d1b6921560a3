"""The rows above a figure's plot: what its traces are called, the scale of its colours, the name of its upward axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.markers import swatch
from bssearch.pages.drawing.scales import fitting
from bssearch.pages.drawing.series import Series
from bssearch.pages.drawing.sizes import Size
from bssearch.pages.drawing.strokes import stroke
from bssearch.pages.drawing.symbols import short
from bssearch.pages.drawing.text import cut, plain, text_at, width_of

SWATCH, GAP, BETWEEN = 24, 6, 16
"""Width of an entry's sample, its distance from the name, and that between entries."""
BAR_WIDTH, BAR_HEIGHT = 180, 10


def legend(entries: Sequence[Series], size: Size) -> tuple[list[str], float]:
    """Return the elements of the entries in rows as wide as the figure, and the height of all rows.

    Raises `ValueError` for an entry without a name.
    """
    elements, x, row = [], 0.0, 0
    for series in entries:
        if not series.name:
            raise ValueError("a trace of the legend is not drawn: it has no name")
        name = cut(series.name, size.font, size.width - SWATCH - GAP)
        width = SWATCH + GAP + width_of(name, size.font)
        if x and x + width > size.width:
            x, row = 0.0, row + 1
        middle = (row + 0.5) * size.line_height
        elements += [*_sample(series, x, middle), text_at(x + SWATCH + GAP, middle + 0.35 * size.font, name)]
        x += width + BETWEEN
    return elements, (row + 1) * size.line_height if entries else 0.0


def _sample(series: Series, x: float, y: float) -> Iterator[str]:
    """Yield what a trace looks like."""
    trace = series.trace
    if trace.get("fill"):
        yield f'<path d="M{short(x)} {short(y - 6)}h{SWATCH}v12h-{SWATCH}z" fill="{paint(trace["fillcolor"])}"/>'
    elif "lines" in series.modes:
        yield f'<path d="M{short(x)} {short(y)}h{SWATCH}" fill="none" {stroke(trace["line"])}/>'
    if "markers" in series.modes:
        below = -trace["marker"].get("size", 0) / 2 if "arrow" in str(trace["marker"].get("symbol")) else 0
        yield swatch(series, x + SWATCH / 2, y + below)


def colour_scale(marker: Figure, name: str, size: Size) -> tuple[list[str], float]:
    """Return the elements of the scale of a trace's colours, and their height; ``name`` is for an id of its own."""
    bar, scale = marker["colorbar"], marker["colorscale"]
    title = cut(plain(bar["title"]["text"]), size.font, size.width)
    texts = list(zip(bar["tickvals"], map(plain, bar["ticktext"]), strict=True))
    edge = max((width_of(text, size.font) for _, text in texts), default=0) / 2
    left, top = width_of(title, size.font) + GAP + edge, 0.0
    if left + BAR_WIDTH + edge > size.width:
        left, top = edge, size.line_height
    middle = top + size.line_height / 2
    low, high = float(marker["cmin"]), float(marker["cmax"])

    def place(value: float) -> float:
        return left + BAR_WIDTH * min(1.0, max(0.0, (value - low) / (high - low)))

    def meet(one: tuple[float, str], other: tuple[float, str]) -> bool:
        room = (width_of(one[1], size.font) + width_of(other[1], size.font)) / 2 + GAP
        return abs(place(other[0]) - place(one[0])) < room

    stops = "".join(f'<stop offset="{share:g}" stop-color="{paint(colour)}"/>' for share, colour in scale)
    elements = [
        f'<linearGradient id="{name}-scale">{stops}</linearGradient>',
        text_at(0, (middle if not top else size.line_height / 2) + 0.35 * size.font, title),
        f'<rect x="{short(left)}" y="{short(middle - BAR_HEIGHT / 2)}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" '
        f'fill="url(#{name}-scale)"/>',
    ]
    for value, text in fitting(texts, meet):
        elements.append(text_at(place(value), middle + BAR_HEIGHT / 2 + size.font, text, anchor="middle"))
    return elements, top + size.line_height + 1.1 * size.font
