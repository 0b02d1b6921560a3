"""The frame of a figure: its axes with their ticks and names, the grid, reference lines and notes in the plot."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.labels import ANCHORS, HALO
from bssearch.pages.drawing.scales import Axis, Ticks, axis_of, fitting
from bssearch.pages.drawing.sizes import Size
from bssearch.pages.drawing.strokes import stroke
from bssearch.pages.drawing.symbols import short
from bssearch.pages.drawing.text import Anchor, Box, box_of, cut, plain, text_at, width_of

TICK, GAP = 4, 4
"""Length of a tick, and its distance from its text."""


def axes_of(layout: Figure, size: Size, top: float) -> tuple[Axis, Axis]:
    """Return both axes of a figure whose plot begins at some height, each with the ticks that there is room for."""
    bottom = top + size.plot_height
    upward = axis_of(layout["yaxis"], bottom, top, most_ticks=size.most_ticks)

    def meet(one: tuple[float, str], other: tuple[float, str]) -> bool:
        return abs(upward.place(one[0]) - upward.place(other[0])) < 1.3 * size.font

    ticks = fitting(upward.ticks, meet)
    left = max((width_of(text, size.font) for _, text in ticks), default=0) + TICK + GAP
    right = size.width - max(10, _overhang(layout["xaxis"], size))
    along = axis_of(layout["xaxis"], left, right, most_ticks=size.most_ticks)
    return _with(along, _fitting_along(along, size)), _with(upward, ticks)


def _with(axis: Axis, ticks: Ticks) -> Axis:
    return Axis(axis.title, axis.is_log, axis.low, axis.high, axis.start, axis.end, ticks, axis.has_grid)


def _overhang(drawn: Figure, size: Size) -> float:
    """Return how far the last tick's text may stand out to the right of the plot."""
    axis = axis_of(drawn, 0, size.width - 60, most_ticks=size.most_ticks)
    ends = (axis.place(value) + width_of(text, size.font) / 2 - axis.end for value, text in axis.ticks)
    return max((math.ceil(end) + 2 for end in ends), default=0)


def _fitting_along(axis: Axis, size: Size) -> Ticks:
    def meet(one: tuple[float, str], other: tuple[float, str]) -> bool:
        room = (width_of(one[1], size.font) + width_of(other[1], size.font)) / 2 + 0.5 * size.font
        return abs(axis.place(other[0]) - axis.place(one[0])) < room

    return fitting(axis.ticks, meet)


def grid(x: Axis, y: Axis, layout: Figure) -> Iterator[str]:
    """Yield the lines of the grid, and those of the axes with their ticks."""
    lines = []
    if y.has_grid:
        lines += [f"M{short(x.start)} {short(y.place(value))}H{short(x.end)}" for value, _ in y.ticks]
    if x.has_grid:
        lines += [f"M{short(x.place(value))} {short(y.start)}V{short(y.end)}" for value, _ in x.ticks]
    lines.append(f"M{short(x.start)} {short(y.end)}V{short(y.start)}H{short(x.end)}")
    lines += [f"M{short(x.place(value))} {short(y.start)}v{TICK}" for value, _ in x.ticks]
    yield f'<path d="{"".join(lines)}" fill="none" stroke="{paint(layout["xaxis"]["gridcolor"])}"/>'


def axis_texts(x: Axis, y: Axis, size: Size) -> Iterator[str]:
    """Yield the texts of the ticks, and the axes' names: that of the upward axis stands above it."""
    for value, text in x.ticks:
        yield text_at(x.place(value), y.start + TICK + GAP + 0.8 * size.font, text, anchor="middle")
    for value, text in y.ticks:
        yield text_at(x.start - TICK - GAP / 2, y.place(value) + 0.35 * size.font, text, anchor="end")
    muted = ' fill="var(--muted)"'
    title = cut(x.title, size.font, size.width)
    half = width_of(title, size.font) / 2
    middle = min(max((x.start + x.end) / 2, half), size.width - half)
    yield text_at(middle, bottom_of(y, size) - 0.4 * size.font, title, anchor="middle", more=muted)
    yield text_at(0, y.end - 0.8 * size.font, cut(y.title, size.font, size.width), more=muted)


def bottom_of(y: Axis, size: Size) -> float:
    """Return where the figure ends, below the name of the axis along it."""
    return y.start + TICK + GAP + 2.9 * size.font


def reference_lines(layout: Figure, x: Axis, y: Axis) -> Iterator[str]:
    """Yield the lines across the plot at a value of an axis."""
    for shape in layout.get("shapes", []):
        ends = [
            axis.place_of_share(shape[end]) if f"{name}ref" in shape else axis.place(shape[end])
            for name, axis in (("x", x), ("y", y))
            for end in (f"{name}0", f"{name}1")
        ]
        left, right, low, high = map(short, ends)
        yield f'<path d="M{left} {low}L{right} {high}" fill="none" {stroke(shape["line"])}/>'


def notes(layout: Figure, x: Axis, y: Axis, size: Size) -> Iterator[tuple[str, Box]]:
    """Yield the texts in the plot with the room that they take, kept within the plot."""
    for note in layout.get("annotations", []):
        text = cut(plain(note["text"]).strip(), size.font, x.end - x.start - 2 * GAP)
        at_x, at_y = (
            axis.place_of_share(note[name]) if f"{name}ref" in note else axis.place_of_coordinate(note[name])
            for name, axis in (("x", x), ("y", y))
        )
        anchor: Anchor = ANCHORS[{"left": "right", "right": "left"}.get(note["xanchor"], "center")]
        at_x += {"start": GAP, "middle": 0, "end": -GAP}[anchor]
        below = {"top": 1.1 * size.font, "middle": 0.35 * size.font, "bottom": -0.4 * size.font}[note["yanchor"]]
        baseline = min(max(at_y + below, y.end + 1.1 * size.font), y.start - 0.4 * size.font)
        box = box_of(text, size.font, at_x, baseline, anchor)
        aside = max(0.0, x.start + GAP - box.left) - max(0.0, box.right - x.end)
        more = f' fill="{paint(note["font"]["color"])}"{HALO}'
        yield (
            text_at(at_x + aside, baseline, text, anchor=anchor, more=more),
            box_of(text, size.font, at_x + aside, baseline, anchor),
        )
