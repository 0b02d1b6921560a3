"""Memory by term against the micro-batch, with the device's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bssearch.pages.axes import ACCENT, INK, MUTED, SECOND, THIRD, Figure, batch_axis, framed, value_axis
from bssearch.pages.traces import reference_line
from bssearch.planning.memory.plan import GIB, MemoryPlan, Term

STYLES = {"activations": (ACCENT, "solid"), "attention_scores": (THIRD, "dash"), "logits": (SECOND, "dot")}

DECADES = 10**4
"""How far below the peak a term is still drawn: a choice."""


def memory_figure(plan: MemoryPlan, sizes: Sequence[int], peaks: Sequence[int]) -> Figure:
    """Return what stays, what grows with the micro-batch, and the ``peaks`` in bytes at each of the ``sizes``."""
    standing = sum(term.bytes for term in plan.terms if term.when == "always") / GIB
    traces = [
        line("peak of a step", sizes, [peak / GIB for peak in peaks], INK, width=2.5),
        line("stays, whatever the batch", sizes, [standing] * len(sizes), MUTED, dash="dot"),
        *(_growing(term, sizes) for term in plan.terms if term.bytes_per_sample),
        *_fitting(plan),
    ]
    limits = [] if plan.memory_bytes is None else [plan.memory_bytes / GIB]
    values = [*(value for trace in traces for value in trace["y"]), *limits]
    least = max(values) / DECADES
    y = value_axis("GiB", [max(value, least) for value in values], log=True)
    figure = framed(traces, {**batch_axis(sizes), "title": {"text": "micro-batch, samples", "standoff": 10}}, y)
    figure["layout"]["shapes"] = [reference_line("h", limit, SECOND) for limit in limits]
    return figure


def line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, dash: str = "solid", width: float = 2
) -> Figure:
    """Return a named line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": width, "dash": dash},
        "hoverinfo": "skip",
    }


def mark(name: str, x: float, y: float, colour: str, symbol: str, size: int = 11) -> Figure:
    """Return a single marked point with its name."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x],
        "y": [y],
        "marker": {"color": colour, "size": size, "symbol": symbol},
        "hoverinfo": "skip",
    }


def _growing(term: Term, sizes: Sequence[int]) -> Figure:
    colour, dash = STYLES.get(term.term, (MUTED, "dash"))
    values = [(term.bytes + term.bytes_per_sample * size) / GIB for size in sizes]
    return line(term.term.replace("_", " "), sizes, values, colour, dash=dash)


def _fitting(plan: MemoryPlan) -> Iterator[Figure]:
    """Yield the largest and the safe micro-batch, on the line that they are fitted to."""
    if plan.memory_bytes is None or plan.headroom_bytes is None:
        return
    for name, size, height, symbol in (
        ("largest that fits", plan.largest_micro_batch, plan.memory_bytes, "diamond"),
        ("safe", plan.safe_micro_batch, plan.memory_bytes - plan.headroom_bytes, "circle"),
    ):
        if size:
            yield mark(f"{name}: {size}", size, height / GIB, SECOND, symbol)
