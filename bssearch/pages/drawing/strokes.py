"""Lines of a figure: their dashes, and paths through points."""

from __future__ import annotations

from collections.abc import Iterable

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.symbols import short

Places = list[tuple[float, float]]
SHORTEST_DASH = 3.0


def stroke(line: Figure) -> str:
    """Return the attributes of a line's colour, width and dashes, which are as long as plotly's."""
    width = float(line.get("width", 2))
    unit = max(width, SHORTEST_DASH)
    dashes = {"solid": "", "dot": f"{short(unit)}", "dash": f"{short(3 * unit)}"}[line.get("dash", "solid")]
    return f'stroke="{paint(line["color"])}" stroke-width="{width:g}"' + (
        f' stroke-dasharray="{dashes}"' if dashes else ""
    )


def path_through(places: Iterable[tuple[float, float]], shape: str = "linear") -> str:
    """Return the path through points: straight, or in steps, ``hv`` across and then up or down, ``vh`` the reverse."""
    steps = {"linear": "L{0} {1}", "hv": "H{0}V{1}", "vh": "V{1}H{0}"}[shape]
    first, *others = [(short(x), short(y)) for x, y in places]
    return f"M{first[0]} {first[1]}" + "".join(steps.format(x, y) for x, y in others)
