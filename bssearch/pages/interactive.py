"""A figure of the page as plotly's own object, for a notebook: in the page's light colours, on its background."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from bssearch.errors import UsageError
from bssearch.pages.axes import PAGE, Figure
from bssearch.pages.drawing.colours import between_stops


def plotly_figure(figure: Figure) -> Any:
    """Return a figure as plotly's `Figure`. Raises `UsageError` where plotly is not installed."""
    try:
        from plotly.graph_objects import Figure as PlotlyFigure
    except ImportError:
        raise UsageError("the figure needs plotly, which is not installed", hint="pip install plotly") from None
    shown = PlotlyFigure(_coloured(figure, _light_colours()))
    return shown.update_layout(paper_bgcolor=_light_colours()[PAGE], plot_bgcolor=_light_colours()[PAGE])


def _light_colours() -> dict[str, str]:
    """Return the colours of the page's style sheet by the names that figures have for them, as light screens do."""
    style = resources.files("bssearch.pages").joinpath("page.css").read_text(encoding="utf-8")
    light = style.partition("@media")[0]
    colours = {f"var(--{name})": colour for name, colour in re.findall(r"--([\w-]+): ([^;]+);", light)}
    return colours | {f"var(--seq-{percent})": _in_sequence(colours, percent) for percent in range(101)}


def _in_sequence(colours: dict[str, str], percent: int) -> str:
    """Return the colour at a per cent of the sequence's way, between the two stops around it."""
    before, share = between_stops(percent)
    ends = [colours[f"var(--sequence-{stop})"] for stop in (before, before + 1)]
    parts = [[int(end[at : at + 2], 16) for end in ends] for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in parts)


def _coloured(value: Any, colours: dict[str, str]) -> Any:
    """Return a figure with the colours in the place of their names."""
    if isinstance(value, dict):
        return {key: _coloured(inner, colours) for key, inner in value.items()}
    if isinstance(value, list):
        return [_coloured(inner, colours) for inner in value]
    return colours.get(value, value) if isinstance(value, str) else value
