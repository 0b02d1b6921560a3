"""The page of a simulation: what each policy costs against how often it loses the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bssearch.pages.axes import ACCENT, INK, MUTED, SECOND, Figure, framed, label, value_axis
from bssearch.pages.html import Page, Row, Section, Table, html_page

Ends = tuple[float, float | None, float | None]
"""A mean with its 95 % interval, where there is one: (mean, low, high)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One policy: its cost relative to no pruning, the share of draws it misses; ``kind`` is how it is marked.

    ours: an operating point of this project; simple: a rule that it builds on; peer: somebody else's.
    """

    name: str
    kind: str
    relative_cost: Ends
    miss_rate: Ends
    regret: float
    cost_to_within: float


KINDS = {"ours": ("star", SECOND, 13), "simple": ("circle", ACCENT, 9), "peer": ("square", MUTED, 9)}


def simulation_page(points: Sequence[Point], tables: Mapping[str, Sequence[Point]], protocol: str) -> str:
    """Return the page as HTML; ``protocol`` says what was drawn."""
    page = Page(
        title="Pruning policies, simulated",
        kicker=protocol,
        headline="What each pruning policy costs, and how often it loses the winner",
        sections=[
            _section("all", "All tables" if len(tables) > 1 else "Cost against misses", points),
            *(
                [_section(f"table-{index}", name, one) for index, (name, one) in enumerate(tables.items())]
                if len(tables) > 1
                else []
            ),
        ],
    )
    return html_page(page)


def _section(name: str, title: str, points: Sequence[Point]) -> Section:
    headings = ["Policy", "Relative cost [95 %]", "Missed [95 %]", "Regret", "Cost to within 5 %"]
    return Section(
        name=name,
        title=title,
        text="Down and to the left is better. Cost: train seconds over running every trial to its target or its end. "
        "Missed: the fastest trial kept is not within 5 % of the draw's fastest. Bars are 95 % intervals.",
        figures={name: frontier_figure(points)},
        table=Table(headings, [Row(_cells(point), point.kind == "ours") for point in points]),
    )


def _cells(point: Point) -> list[str]:
    return [
        point.name,
        _with_ends(point.relative_cost, 1.0, "{:.3f}", ""),
        _with_ends(point.miss_rate, 100.0, "{:.1f}", " %"),
        f"{point.regret:.4f}",
        f"{point.cost_to_within:.3f}",
    ]


def _with_ends(figure: Ends, unit: float, digits: str, sign: str) -> str:
    mean, low, high = figure
    ends = "" if low is None or high is None else f" [{digits.format(unit * low)}, {digits.format(unit * high)}]"
    return f"{digits.format(unit * mean)}{sign}{ends}"


def frontier_figure(points: Sequence[Point]) -> Figure:
    """Return misses (per cent) against relative cost, a mark a policy."""
    data = []
    for kind, (symbol, colour, size) in KINDS.items():
        here = [point for point in points if point.kind == kind]
        if not here:
            continue
        costs, misses = [point.relative_cost for point in here], [point.miss_rate for point in here]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": {"ours": "operating points", "simple": "simple rules", "peer": "Optuna's pruners"}[kind],
                "x": [mean for mean, _, _ in costs],
                "y": [100 * mean for mean, _, _ in misses],
                "text": [label(point.name) for point in here],
                "textposition": "top right",
                "textfont": {"color": INK},
                "error_x": _bars(costs, 1.0, colour),
                "error_y": _bars(misses, 100.0, colour),
                "marker": {"symbol": symbol, "color": colour, "size": size},
                "hovertemplate": "%{text}<br>cost %{x:.3f}, missed %{y:.1f} %<extra></extra>",
            }
        )
    x = value_axis("train seconds, relative to no pruning", [0.0, 1.0], log=False)
    most = max(100 * end for point in points for end in point.miss_rate if end is not None)
    return framed(data, x, value_axis("draws that miss the winner, %", [0.0, max(most, 1.0)], log=False))


def _bars(figures: Sequence[Ends], unit: float, colour: str) -> Figure:
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if high is None else unit * (high - mean) for mean, _, high in figures],
        "arrayminus": [0.0 if low is None else unit * (mean - low) for mean, low, _ in figures],
        "color": colour,
        "thickness": 1,
        "width": 3,
    }
