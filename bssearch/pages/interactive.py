"""A figure of the page as plotly's own object, for a notebook: in the page's light colours, on its background."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from bssearch.errors import UsageError
from bssearch.pages.axes import PAGE, Figure


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
    return {f"var(--{name})": colour for name, colour in re.findall(r"--(\w+): ([^;]+);", light)}


def _coloured(value: Any, colours: dict[str, str]) -> Any:
    """Return a figure with the colours in the place of their names."""
    if isinstance(value, dict):
        return {key: _coloured(inner, colours) for key, inner in value.items()}
    if isinstance(value, list):
        return [_coloured(inner, colours) for inner in value]
    return colours.get(value, value) if isinstance(value, str) else value
