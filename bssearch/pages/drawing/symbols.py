"""The outlines of markers, in plotly's shapes and sizes, as paths relative to a marker's point.

The proportions are those of plotly.js, ``src/components/drawing/symbol_defs.js``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import sqrt

Points = Sequence[tuple[float, float]]
OPEN = "-open"

POLYGONS: dict[str, Points] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "cross": [
        *((1.2, 0.4), (0.4, 0.4), (0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4)),
        *((-1.2, -0.4), (-0.4, -0.4), (-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4)),
    ],
    "triangle-up": [(0, -1), (2 / sqrt(3), 0.5), (-2 / sqrt(3), 0.5)],
    "star": [
        (1.4 * x, 1.4 * y)
        for x, y in (
            *((0, -1), (0.225, -0.309), (0.951, -0.309), (0.363, 0.118), (0.588, 0.809)),
            *((0, 0.382), (-0.588, 0.809), (-0.363, 0.118), (-0.951, -0.309), (-0.225, -0.309)),
        )
    ],
    "arrow-up": [(0, 0), (1, 2), (-1, 2)],
}
"""Corners in half sizes of the marker; y grows downward."""
SYMBOLS = frozenset(f"{one}{kind}" for one in ("circle", *POLYGONS) for kind in ("", OPEN)) | {"x-thin-open"}


def is_open(symbol: str) -> bool:
    """Say whether a symbol is an outline."""
    return symbol.endswith(OPEN)


@cache
def outline(symbol: str, size: float) -> str:
    """Return the path of a symbol after a move to its point."""
    name, half = symbol.removesuffix(OPEN), size / 2
    if name == "circle":
        arc = f"a{short(half)} {short(half)} 0 1 0 "
        return f"m{short(-half)} 0{arc}{short(size)} 0{arc}{short(-size)} 0z"
    if name == "x-thin":
        return (
            f"m{short(-half)} {short(-half)}l{short(size)} {short(size)}m0 {short(-size)}l{short(-size)} {short(size)}"
        )
    corners = [(half * x, half * y) for x, y in POLYGONS[name]]
    steps = zip(corners[1:], corners, strict=False)
    sides = "".join(f"l{short(x - before_x)} {short(y - before_y)}" for (x, y), (before_x, before_y) in steps)
    return f"m{short(corners[0][0])} {short(corners[0][1])}{sides}z"


def short(value: float) -> str:
    """Return a length with one decimal, without it where it is 0."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
