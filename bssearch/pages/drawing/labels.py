"""The texts beside points: each where it meets no other text, at best no marker either; left out where it would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bssearch.pages.drawing.colours import paint
from bssearch.pages.drawing.series import Series
from bssearch.pages.drawing.text import Anchor, Box, box_of, plain, text_at

HALO = ' paint-order="stroke" stroke="var(--page)" stroke-width="3" stroke-linejoin="round"'
"""Attributes of a text that stands over lines and points."""
ANCHORS: dict[str, Anchor] = {"left": "end", "center": "middle", "right": "start"}
POSITIONS = (
    *("top right", "bottom right", "top left", "bottom left", "top center", "bottom center"),
    *("middle right", "middle left"),
)


class Labels:
    """The texts of a figure one after the other, each with the room that those before it have left."""

    def __init__(self, frame: Box, obstacles: Sequence[Box], font: float) -> None:
        self.frame, self.obstacles, self.font = frame, obstacles, font
        self.taken: list[Box] = []

    def of(self, series: Series) -> Iterator[str]:
        """Yield the texts of a trace's points."""
        if "text" not in series.modes:
            return
        colour, wanted = paint(series.trace["textfont"]["color"]), series.trace["textposition"]
        away = 0.5 * series.trace["marker"].get("size", 6) + 2
        for (x, y), text in zip(series.places, map(plain, series.trace["text"]), strict=True):
            found = self._place(x, y, text, wanted, away)
            if found is not None:
                at_x, baseline, anchor = found
                self.taken.append(box_of(text, self.font, at_x, baseline, anchor))
                yield text_at(at_x, baseline, text, anchor=anchor, more=f' fill="{colour}"{HALO}')

    def _place(self, x: float, y: float, text: str, wanted: str, away: float) -> tuple[float, float, Anchor] | None:
        """Return where a text goes, the place that the figure asks for first; None where there is no room."""
        places = [self._beside(x, y, position, away) for position in dict.fromkeys((wanted, *POSITIONS))]
        boxed = [(one, box_of(text, self.font, *one)) for one in places]
        free = [
            (one, box)
            for one, box in boxed
            if box.is_inside(self.frame) and not any(box.meets(other) for other in self.taken)
        ]
        clear = (one for one, box in free if not any(box.meets(other) for other in self.obstacles))
        return next(clear, free[0][0] if free else None)

    def _beside(self, x: float, y: float, position: str, away: float) -> tuple[float, float, Anchor]:
        vertical, horizontal = position.split()
        aside = away * (1.0 if vertical == "middle" else 0.6)
        at_x = x + {"left": -aside, "center": 0.0, "right": aside}[horizontal]
        below = {"top": -away - 0.2 * self.font, "middle": 0.35 * self.font, "bottom": away + 0.8 * self.font}[vertical]
        return at_x, y + below, ANCHORS[horizontal]
