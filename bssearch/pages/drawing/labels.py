"""The texts beside points: each where it meets no other text and no marker, left out where there is no such place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.series import Series
from bssearch.pages.drawing.text import Anchor, Box, box_of, plain, text_at

HALO = ' paint-order="stroke" stroke="var(--page)" stroke-width="3" stroke-linejoin="round"'
"""Attributes of a text that stands over lines and points."""
ANCHORS: dict[str, Anchor] = {"left": "end", "center": "middle", "right": "start"}
APART = 5
"""Room between two texts, so that they are not read as one."""
POSITIONS = (
    *("top right", "bottom right", "top left", "bottom left", "top center", "bottom center"),
    *("middle right", "middle left"),
)


class Labels:
    """The texts of a figure one after the other, each with the room that those before it have left."""

    def __init__(self, frame: Box, markers: Sequence[Box], bars: Sequence[Box], font: float) -> None:
        self.frame, self.markers, self.bars, self.font = frame, markers, bars, font
        self.taken: list[Box] = [*markers]

    def of(self, series: Series) -> Iterator[str]:
        """Yield the texts of a trace's points."""
        if "text" not in series.modes:
            return
        colour, wanted = paint(series.trace["textfont"]["color"]), series.trace["textposition"]
        for (x, y), text in zip(series.places, map(plain, series.trace["text"]), strict=True):
            found = self._place(x, y, text, wanted, self._half_of(x, y) + 2)
            if found is not None:
                at_x, baseline, anchor = found
                self.take(box_of(text, self.font, at_x, baseline, anchor))
                yield text_at(at_x, baseline, text, anchor=anchor, more=f' fill="{colour}"{HALO}')

    def take(self, box: Box) -> None:
        """Keep the room of a text, and some on either side, from those that follow."""
        self.taken.append(Box(box.left - APART, box.top, box.right + APART, box.bottom))

    def _half_of(self, x: float, y: float) -> float:
        """Return half the size of the largest marker around a place."""
        here = Box(x, y, x, y)
        return max(((box.right - box.left) / 2 for box in self.markers if here.is_inside(box)), default=0.0)

    def _place(self, x: float, y: float, text: str, wanted: str, away: float) -> tuple[float, float, Anchor] | None:
        """Return where a text goes, None where there is no room: at best off the error bars too."""
        places = [self._beside(x, y, position, away) for position in dict.fromkeys((wanted, *POSITIONS))]
        boxed = [(one, box_of(text, self.font, *one)) for one in places]
        free = [
            (one, box)
            for one, box in boxed
            if box.is_inside(self.frame) and not any(box.meets(other) for other in self.taken)
        ]
        clear = (one for one, box in free if not any(box.meets(other) for other in self.bars))
        return next(clear, free[0][0] if free else None)

    def _beside(self, x: float, y: float, position: str, away: float) -> tuple[float, float, Anchor]:
        vertical, horizontal = position.split()
        aside = away * (1.0 if vertical == "middle" else 0.6)
        at_x = x + {"left": -aside, "center": 0.0, "right": aside}[horizontal]
        below = {"top": -away - 0.2 * self.font, "middle": 0.35 * self.font, "bottom": away + 0.8 * self.font}[vertical]
        return at_x, y + below, ANCHORS[horizontal]
