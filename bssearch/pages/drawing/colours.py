"""The colours of figures as CSS: names of the page's style sheet, which has them for light and for dark."""

from __future__ import annotations

import re
from collections.abc import Sequence

STOPS = 4
"""The colours ``--sequence-0`` to ``--sequence-3`` of the style sheet, the best first."""
NAME = re.compile(r"var\(--[a-z]+\)")
PLACE = re.compile(r"var\(--seq-(\d+)\)")


def between_stops(percent: float) -> tuple[int, float]:
    """Return the stop before a place of the sequence, and the share of the way from it to the next."""
    place = percent / 100 * (STOPS - 1)
    before = min(int(place), STOPS - 2)
    return before, place - before


def paint(colour: str) -> str:
    """Return a colour of a figure as CSS. Raises `ValueError` for one that is not of the style sheet."""
    if NAME.fullmatch(colour):
        return colour
    found = PLACE.fullmatch(colour)
    if found is None or int(found[1]) > 100:
        raise ValueError(f"the colour {colour!r} is not drawn: it is no name of the page's style sheet")
    before, share = between_stops(int(found[1]))
    ends = (f"var(--sequence-{before})", f"var(--sequence-{before + 1})")
    if share in (0, 1):
        return ends[int(share)]
    return f"color-mix(in srgb,{ends[1]} {round(100 * share)}%,{ends[0]})"


def on_scale(value: float, low: float, high: float) -> str:
    """Return the colour of a value on a scale from low to high, in whole per cents of the sequence."""
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    return f"var(--seq-{round(100 * share)})"


def check_scale(colorscale: Sequence[Sequence[object]]) -> None:
    """Raise `ValueError` for a scale that is not the page's sequence."""
    for share, colour in colorscale:
        if not isinstance(share, float) or colour != f"var(--seq-{round(100 * share)})":
            raise ValueError(f"the colour scale's {share!r}: {colour!r} is not drawn: it is not the page's sequence")
