"""Text in a figure: how wide it is about, its characters in XML, and its element."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Literal

from bssearch.pages.drawing.symbols import short

Anchor = Literal["start", "middle", "end"]

WIDTHS = {0.34: "fijlt.,:;'!|I()[]/ -·", 0.85: "mwMW%@—→≥≤±×", 0.7: "ABCDEFGHJKLNOPQRSTUVXYZ&"}
"""Widths of characters in font sizes, others 0.62: about those of DejaVu Sans, which is wider than most."""
WIDTH_OF = {character: width for width, characters in WIDTHS.items() for character in characters}
USUAL_WIDTH = 0.62
NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 (section 2.2) does not have."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the figure, in its units."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Say whether two rectangles have a point in common."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_inside(self, other: Box) -> bool:
        """Say whether it lies within another."""
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


def width_of(text: str, size: float) -> float:
    """Return about how wide a text is, in the units of its font size."""
    return size * sum(WIDTH_OF.get(character, USUAL_WIDTH) for character in text)


def plain(text: object) -> str:
    """Return a text of a figure as people read it: `bssearch.pages.axes.label` has escaped it for plotly."""
    return html.unescape(str(text))


def lines_of(text: str) -> str:
    """Return a text of several lines, which plotly has ``<br>`` between."""
    return "\n".join(plain(line) for line in text.split("<br>"))


def escaped(text: str) -> str:
    """Return text for XML, without the characters that XML does not have."""
    return html.escape(NO_XML.sub("\ufffd", text))


def cut(text: str, size: float, room: float) -> str:
    """Return a text that fits into some room, its end left out where it does not."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(f"{text}…", size) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"


def box_of(text: str, size: float, x: float, baseline: float, anchor: Anchor) -> Box:
    """Return the room that a line of text takes."""
    width = width_of(text, size)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return Box(left, baseline - 0.95 * size, left + width, baseline + 0.25 * size)


def text_at(x: float, baseline: float, text: str, *, anchor: Anchor = "start", more: str = "") -> str:
    """Return the element of a line of text; ``more``: further attributes."""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{short(x)}" y="{short(baseline)}"{placed}{more}>{escaped(text)}</text>'
