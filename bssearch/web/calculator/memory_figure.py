"""Memory by term against the micro-batch, with the device's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bssearch.pages.chart import (
    ACCENT,
    INK,
    MUTED,
    SECOND,
    THIRD,
    Chart,
    Dash,
    Point,
    Rule,
    Series,
    Symbol,
    batch_axis,
    extent,
    value_axis,
)
from bssearch.planning.memory.plan import GIB, MemoryPlan, Term
from bssearch.planning.trade_off import TradeOff

STYLES: dict[str, tuple[str, Dash]] = {
    "activations": (ACCENT, "solid"),
    "attention_scores": (THIRD, "dash"),
    "logits": (SECOND, "dot"),
}

DECADES = 10**4
"""How far below the peak a term is still drawn: a choice."""


def memory_figure(plan: MemoryPlan, sizes: Sequence[int], peaks: Sequence[int]) -> Chart:
    """Return what stays, what grows with the micro-batch, and the ``peaks`` in bytes at each of the ``sizes``."""
    standing = sum(term.bytes for term in plan.terms if term.when == "always") / GIB
    series = [
        line("peak of a step", sizes, [peak / GIB for peak in peaks], INK, width=2.5),
        line("stays, whatever the batch", sizes, [standing] * len(sizes), MUTED, dash="dot"),
        *(_growing(term, sizes) for term in plan.terms if term.bytes_per_sample),
        *_fitting(plan),
    ]
    limits = [] if plan.memory_bytes is None else [plan.memory_bytes / GIB]
    values = [*extent(series), *limits]
    least = max(values) / DECADES
    return Chart(
        x=batch_axis(sizes, "micro-batch, samples"),
        y=value_axis("GiB", [max(value, least) for value in values], log=True),
        series=series,
        rules=[Rule(at=limit, name="memory of the device", colour=SECOND) for limit in limits],
    )


def line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, dash: Dash = "solid", width: float = 2
) -> Series:
    """Return a named line."""
    points = [Point(*one) for one in zip(x, y, strict=True)]
    return Series(name=name, points=points, colour=colour, width=width, dash=dash)


def mark(name: str, x: float, y: float, colour: str, symbol: Symbol, size: int = 11) -> Series:
    """Return a single marked point with its name."""
    return Series(name=name, points=[Point(x, y)], colour=colour, symbol=symbol, size=size)


def _growing(term: Term, sizes: Sequence[int]) -> Series:
    colour, dash = STYLES.get(term.term, (MUTED, "dash"))
    values = [(term.bytes + term.bytes_per_sample * size) / GIB for size in sizes]
    return line(term.term.replace("_", " "), sizes, values, colour, dash=dash)


def _fitting(plan: MemoryPlan) -> Iterator[Series]:
    """Yield the largest and the safe micro-batch, on the line that they are fitted to."""
    if plan.memory_bytes is None or plan.headroom_bytes is None:
        return
    marks: list[tuple[str, int | None, float, Symbol]] = [
        ("largest that fits", plan.largest_micro_batch, plan.memory_bytes, "diamond"),
        ("safe", plan.safe_micro_batch, plan.memory_bytes - plan.headroom_bytes, "circle"),
    ]
    for name, size, height, symbol in marks:
        if size:
            yield mark(f"{name}: {size}", size, height / GIB, SECOND, symbol)


# Time and samples to the target against batch size, with what is best, what fits, and B_crit.

HIGHEST = 1e4
"""The highest multiple of the least that is drawn: a choice."""


def trade_off_figure(found: TradeOff, max_micro: int | None) -> Chart:
    """Return time and samples over the least of each; ``max_micro`` marks the largest batch that runs at once."""
    points = [one for one in found.points if max(one.relative_time, one.relative_samples) <= HIGHEST] or [found.fastest]
    sizes = [one.row.batch for one in points]
    times, samples = [one.relative_time for one in points], [one.relative_samples for one in points]
    series = [
        line("time to the target", sizes, times, ACCENT),
        line("samples to the target (cost)", sizes, samples, THIRD, dash="dash"),
        mark(f"least time: {found.fastest.row.batch:,}", found.fastest.row.batch, 1.0, SECOND, "star", 14),
        *_largest_at_once(found, sizes, max_micro),
    ]
    is_drawn = sizes[0] <= found.b_crit <= sizes[-1]
    return Chart(
        x=batch_axis(sizes),
        y=value_axis("times the least", [*times, *samples], log=True),
        series=series,
        rules=[Rule(at=found.b_crit, name="critical batch size", is_upright=True)] if is_drawn else [],
    )


def _largest_at_once(found: TradeOff, sizes: list[int], max_micro: int | None) -> Iterator[Series]:
    """Yield a mark at the largest batch drawn that fits in memory at once."""
    at_once = [one for one in found.points if one.row.batch in sizes and one.row.batch <= (max_micro or 0)]
    if at_once:
        last = at_once[-1]
        yield mark(f"largest that fits at once: {last.row.batch:,}", last.row.batch, last.relative_time, INK, "diamond")
