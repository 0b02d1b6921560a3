"""The sizes that a figure is drawn in: one for a screen or a sheet of paper, one for a phone."""

from __future__ import annotations

from dataclasses import dataclass

NARROW_WIDTH = 340
WIDE_WIDTH = 560
ALONE_WIDTH = 760
"""Widths of a figure on a phone, beside another one, and alone in its section: a choice, as all sizes here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A figure's width, the height of its plot without legend and axes, and its font size, in one unit."""

    kind: str
    width: float
    plot_height: float
    font: float = 13.0
    tells: bool = True
    """Whether a point says what it is under the pointer; a phone has none."""

    @property
    def line_height(self) -> float:
        """Return the height of a row of text."""
        return 1.55 * self.font

    @property
    def most_ticks(self) -> int:
        """Return how many round numbers an axis of its own has at most."""
        return 5 if self.kind == "narrow" else 7


def sizes(wide: float) -> tuple[Size, Size]:
    """Return the size for a screen with a width, and that for a phone."""
    return (
        Size(kind="wide", width=wide, plot_height=290 if wide <= WIDE_WIDTH else 330),
        Size(kind="narrow", width=NARROW_WIDTH, plot_height=220, font=12, tells=False),
    )
