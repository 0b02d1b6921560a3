"""The marks and lines that several figures of a study's page are made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from bssearch.analysis.law.fitted import Fit
from bssearch.pages.axes import ACCENT, INK, MUTED, PAGE, THIRD, Figure

Pairs = Sequence[tuple[float, float]]


def interval_trace(points: Sequence[tuple[int, Any]], name: str, fill: str) -> Figure:
    """Return figures with their intervals: each has a median, and a low and a high that may be None."""
    edge = ACCENT if fill is PAGE else fill
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [size for size, _ in points],
        "y": [one.median for _, one in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0 if one.high is None else one.high - one.median for _, one in points],
            "arrayminus": [0 if one.low is None else one.median - one.low for _, one in points],
            "color": edge,
            "thickness": 1.5,
            "width": 5,
        },
        "marker": {"color": fill, "size": 9, "line": {"color": edge, "width": 1.75}},
        "hovertemplate": "batch %{x}: %{y:.4~g}<extra></extra>",
    }


def lower_bounds(points: Iterable[tuple[int, float, str]], more: str) -> Figure:
    """Return lower bounds as arrows upward, what is not known being ``more`` than they are."""
    sizes, values, texts = zip(*points, strict=True)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{more} than this: target not reached",
        "x": list(sizes),
        "y": list(values),
        "customdata": list(texts),
        "marker": {"symbol": "arrow-up", "color": MUTED, "size": 14},
        "hovertemplate": f"batch %{{x}}: {more} than %{{y:.4~g}}<br>%{{customdata}}<extra></extra>",
    }


def law_curve(points: Pairs, name: str, fit: Fit) -> Figure:
    """Return a line of the law, dashed and called poor where the law does not fit."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name if fit.verdict == "fits" else f"{name} (poor fit)",
        "x": [size for size, _ in points],
        "y": [value for _, value in points],
        "line": {"color": THIRD, "width": 2, "dash": "solid" if fit.verdict == "fits" else "dash"},
        "hoverinfo": "skip",
    }


def dotted_line(points: Pairs, name: str, dash: str = "dot") -> Figure:
    """Return a thin muted line through points."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [size for size, _ in points],
        "y": [value for _, value in points],
        "line": {"color": MUTED, "width": 1.5, "dash": dash},
        "hoverinfo": "skip",
    }


def reference_line(direction: str, at: float, colour: str) -> Figure:
    """Return a dotted line across the figure, horizontal ("h") or vertical ("v"), at a value of the other axis."""
    ends: Figure = {"type": "line", "layer": "below", "line": {"color": colour, "width": 1.25, "dash": "dot"}}
    if direction == "h":
        return {**ends, "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at}
    return {**ends, "yref": "paper", "y0": 0, "y1": 1, "x0": at, "x1": at}


def hollow_marker(symbol: str) -> Figure:
    """Return the marker of a configuration that stands apart from the trials, as the default does."""
    return {"symbol": symbol, "color": INK, "size": 11, "line": {"color": INK, "width": 2}}


def sequence_colour(index: int, count: int) -> str:
    """Return the colour of one of several things in an order."""
    return f"var(--seq-{round(100 * index / max(1, count - 1))})"


def dense_sizes(sizes: Collection[int]) -> list[float]:
    """Return batch sizes from the smallest to the largest, close enough for a smooth line."""
    low, high = min(sizes), max(sizes)
    return [float(one) for one in np.geomspace(low, high, max(2, round(12 * math.log2(high / low)) + 1))]


def extent(trace: Figure) -> list[float]:
    """Return the values that a trace must have room for: its points and the ends of its intervals."""
    errors = trace.get("error_y", {"array": [0] * len(trace["y"]), "arrayminus": [0] * len(trace["y"])})
    ends = zip(trace["y"], errors["array"], errors["arrayminus"], strict=True)
    return [end for value, above, below in ends for end in (value + above, value - below)]
