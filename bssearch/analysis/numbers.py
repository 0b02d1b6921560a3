"""Number formats for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bssearch.analysis.generalisation import MetricOverSeeds


def number(value: float, digits: int = 3) -> str:
    """Number with ``digits`` significant digits and thousands separators."""
    short = f"{value:.{digits}g}"
    is_thousands = abs(float(short)) >= 1000 and abs(value) < 1e9
    return f"{float(short):,.0f}" if is_thousands else short


def ends(low: float | None, high: float | None, digits: int = 3) -> str:
    """Interval to follow its figure."""
    return "" if low is None or high is None else f" [{number(low, digits)}, {number(high, digits)}]"


def noise_scale(scale: float | None, low: float, high: float | None) -> str:
    """Gradient noise scale with its 95 % interval, or a lower bound."""
    return f"≥ {low:.3g}" if scale is None else f"{scale:.3g} [{low:.3g}, {high:.3g}]"


def memory(value: int) -> str:
    """Bytes in GiB or MiB."""
    return f"{number(value / 2**30)} GiB" if value >= 2**30 else f"{number(value / 2**20)} MiB"


def metric_over_seeds(found: MetricOverSeeds) -> str:
    """Metric with its standard deviation over seeds."""
    spread = "" if found.standard_deviation is None else f" ± {found.standard_deviation:.2g}"
    return f"{found.median:.4g}{spread}"


def span(sizes: Sequence[int]) -> str:
    """Range of batch sizes, such as "16–64"."""
    low, high = sizes
    return str(low) if low == high else f"{low}–{high}"
