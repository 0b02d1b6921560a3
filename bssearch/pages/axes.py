"""What all figures of a study's page have in common: axes, numbers and texts for people, colours by name.

Figures are plotly's JSON, made of plain values: `bssearch.pages.drawing` makes SVG of them, plotly a notebook's figure.
Colours are names of the page's style sheet, which has them for light and for dark; ``seq-0`` to ``seq-100`` lie on its
sequence, from the best to the worst.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from bssearch.analysis.numbers import number

Figure = dict[str, Any]

INK, MUTED, GRID, PAGE, PANEL = "var(--ink)", "var(--muted)", "var(--grid)", "var(--page)", "var(--panel)"
ACCENT, SECOND, THIRD, BAND = "var(--accent)", "var(--second)", "var(--third)", "var(--band)"
MOST_TICKS = 12
"""Batch sizes named on an axis: a choice, as many as fit beside each other on a page."""

LONGEST_LABEL = 40
"""Characters of a text from outside that a figure shows: a choice."""

PADDING = 0.06
"""Empty room on either side of an axis, as a share of its length: a choice."""


def label(text: object) -> str:
    """Return text from outside for a figure: cut where it is long, and escaped, for plotly reads some HTML."""
    words = " ".join(str(text).split())
    return html.escape(words if len(words) <= LONGEST_LABEL else f"{words[: LONGEST_LABEL - 1]}…", quote=False)


def framed(data: list[Figure], x: Figure, y: Figure) -> Figure:
    """Return a figure of traces and axes, in the frame of all figures."""
    return {
        "data": data,
        "layout": {
            "xaxis": x,
            "yaxis": y,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": INK, "size": 13, "family": "system-ui, sans-serif"},
            "margin": {"l": 12, "r": 16, "t": 12, "b": 12},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "itemclick": False,
                "itemdoubleclick": False,
            },
            "hovermode": "closest",
            "dragmode": False,
            "hoverlabel": {"bgcolor": PANEL, "bordercolor": GRID, "font": {"color": INK}},
            "showlegend": True,
        },
    }


def _axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "standoff": 10},
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "showline": True,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def batch_axis(sizes: Sequence[int]) -> Figure:
    """Return a logarithmic axis with a tick at each batch size, or at some where they are many."""
    every = math.ceil(len(sizes) / MOST_TICKS)
    shown = sizes[::every]
    low, high = math.log10(sizes[0]), math.log10(sizes[-1])
    room = max(0.1, PADDING * (high - low))
    return _axis(
        "batch size",
        type="log",
        range=[low - room, high + room],
        tickvals=list(shown),
        ticktext=[str(size) for size in shown],
        showgrid=False,
        ticks="outside",
        tickangle=0,
        tickcolor=GRID,
    )


def value_axis(title: str, values: Iterable[float], *, log: bool, room: float = PADDING) -> Figure:
    """Return an axis wide enough for values, logarithmic ones with ticks at round numbers."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(known), max(known)
    if not log:
        pad = room * ((high - low) or abs(high) or 1.0)
        return _axis(title, type="linear", range=[low - (pad if low else 0.0), high + pad])
    ends = (math.log10(low), math.log10(high))
    pad = max(0.04, room * (ends[1] - ends[0]))
    ticks = round_numbers(10 ** (ends[0] - pad), 10 ** (ends[1] + pad))
    shown = [number(tick) for tick in ticks]
    return _axis(title, type="log", range=[ends[0] - pad, ends[1] + pad], tickvals=ticks, ticktext=shown)


def round_numbers(low: float, high: float) -> list[float]:
    """Return the round numbers from low to high that a logarithmic axis is marked at: three to nine."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(step / 10 for step in range(10, 100))):
        found = [float(f"{step * 10.0**decade:.6g}") for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 9)] if len(found) > 1 else sorted({low, high})
