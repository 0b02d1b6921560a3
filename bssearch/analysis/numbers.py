"""Numbers as people read them."""

from __future__ import annotations


def number(value: float, digits: int = 3) -> str:
    """Return a number for people: ``digits`` significant digits, thousands apart, no exponent where none is needed."""
    short = f"{value:.{digits}g}"
    is_thousands = abs(float(short)) >= 1000 and abs(value) < 1e9
    return f"{float(short):,.0f}" if is_thousands else short


def noise_scale(scale: float | None, low: float, high: float | None) -> str:
    """Return a gradient noise scale with its 95 % interval for people; without an upper end it is a lower bound."""
    return f"≥ {low:.3g}" if scale is None else f"{scale:.3g} [{low:.3g}, {high:.3g}]"
