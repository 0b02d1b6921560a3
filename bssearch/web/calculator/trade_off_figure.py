"""Time and samples to the target against batch size, with what is best, what fits, and B_crit."""

from __future__ import annotations

from collections.abc import Iterator

from bssearch.pages.chart import ACCENT, INK, SECOND, THIRD, Chart, Rule, Series, batch_axis, value_axis
from bssearch.planning.trade_off import TradeOff
from bssearch.web.calculator.memory_figure import line, mark

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
