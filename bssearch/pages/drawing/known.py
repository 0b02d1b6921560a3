"""What is drawn of plotly's figures. Anything else is refused, rather than left out in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.symbols import SYMBOLS

ANY: frozenset[Any] = frozenset()
"""A property with any value; one with a set has only these."""
FONT = {"color": ANY, "size": ANY, "family": ANY}
DASHES = frozenset({"solid", "dash", "dot"})
POSITIONS = frozenset(
    {"top right", "top left", "bottom right", "bottom left", "top center", "bottom center", "middle right"}
    | {"middle left"}
)
MODES = frozenset({"lines", "markers", "lines+markers", "markers+text", "lines+markers+text"})
ERRORS = {
    "type": frozenset({"data"}),
    "symmetric": frozenset({False}),
    "array": ANY,
    "arrayminus": ANY,
    "color": ANY,
    "thickness": ANY,
    "width": ANY,
}
COLORBAR = {
    "title": {"text": ANY, "side": ANY},
    "tickvals": ANY,
    "ticktext": ANY,
    "thickness": ANY,
    "outlinewidth": frozenset({0}),
}
TRACE = {
    "type": frozenset({"scatter"}),
    "mode": MODES,
    "name": ANY,
    "showlegend": ANY,
    "x": ANY,
    "y": ANY,
    "text": ANY,
    "textposition": POSITIONS,
    "textfont": {"color": ANY},
    "customdata": ANY,
    "hovertemplate": ANY,
    "hoverinfo": frozenset({"skip"}),
    "cliponaxis": ANY,
    "zorder": ANY,
    "fill": frozenset({"toself"}),
    "fillcolor": ANY,
    "line": {"color": ANY, "width": ANY, "dash": DASHES, "shape": frozenset({"linear", "hv", "vh"})},
    "marker": {
        "symbol": SYMBOLS,
        "color": ANY,
        "size": ANY,
        "line": {"color": ANY, "width": ANY},
        "colorscale": ANY,
        "cmin": ANY,
        "cmax": ANY,
        "colorbar": COLORBAR,
    },
    "error_x": ERRORS,
    "error_y": ERRORS,
}
AXIS = {
    "title": {"text": ANY, "standoff": ANY},
    "type": frozenset({"log", "linear"}),
    "range": ANY,
    "tickvals": ANY,
    "ticktext": ANY,
    "showgrid": ANY,
    "gridcolor": ANY,
    "linecolor": ANY,
    "tickcolor": ANY,
    "showline": frozenset({True}),
    "zeroline": frozenset({False}),
    "ticks": frozenset({"outside"}),
    "tickangle": frozenset({0}),
    "automargin": ANY,
    "fixedrange": ANY,
}
SHAPE = {
    "type": frozenset({"line"}),
    "layer": frozenset({"below"}),
    "xref": frozenset({"paper"}),
    "yref": frozenset({"paper"}),
    "x0": ANY,
    "x1": ANY,
    "y0": ANY,
    "y1": ANY,
    "line": {"color": ANY, "width": ANY, "dash": DASHES},
}
ANNOTATION = {
    "xref": frozenset({"paper"}),
    "yref": frozenset({"paper"}),
    "x": ANY,
    "y": ANY,
    "text": ANY,
    "showarrow": frozenset({False}),
    "xanchor": frozenset({"left", "center", "right"}),
    "yanchor": frozenset({"top", "middle", "bottom"}),
    "font": {"color": ANY},
}
OF_A_SCRIPT_OR_THE_STYLE = dict.fromkeys(
    ("paper_bgcolor", "plot_bgcolor", "margin", "legend", "hovermode", "dragmode", "hoverlabel"), ANY
)
"""Parts of the layout that only plotly needs: the page's style sheet and the drawing have their own."""
FIGURE = {
    "data": TRACE,
    "layout": {
        "xaxis": AXIS,
        "yaxis": AXIS,
        "showlegend": ANY,
        "shapes": SHAPE,
        "annotations": ANNOTATION,
        "font": FONT,
        **OF_A_SCRIPT_OR_THE_STYLE,
    },
}


def check(figure: Figure) -> None:
    """Raise `ValueError` for the first trace type, property or value that is not drawn, with where it stands."""
    _check(figure, FIGURE, "figure")


def _check(value: Any, known: Any, where: str) -> None:
    if isinstance(known, Mapping):
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            here = where if index is None else f"{where}[{index}]"
            if not isinstance(item, Mapping):
                raise ValueError(f"{here} = {item!r} is not drawn: it has no properties")
            for name, inner in item.items():
                if name not in known:
                    raise ValueError(f"{here}.{name} is not drawn; there are {', '.join(known)}")
                _check(inner, known[name], f"{here}.{name}")
    elif known:
        for one in value if isinstance(value, list) else [value]:
            if one not in known:
                raise ValueError(f"{where} = {one!r} is not drawn; there are {', '.join(sorted(map(str, known)))}")
