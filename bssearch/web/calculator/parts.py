"""What the page shows of a plan: cells that know where their number stands in the plan's JSON, tables, notes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bssearch.pages.chart import Chart
from bssearch.pages.words import NOTHING, in_words


@dataclass(frozen=True, slots=True)
class Cell:
    """A text; of a number also where it stands in the JSON of the command (``terms.0.bytes``), and its JSON value."""

    text: str
    key: str = ""
    value: str = ""

    @classmethod
    def of(cls, key: str, value: Any, text: str | None = None, *, missing: str = NOTHING) -> Cell:
        """Return the cell of a value of the plan, by default as people read it; ``missing`` where it is None."""
        shown = missing if value is None else in_words(value) if text is None else text
        return cls(shown, key, json.dumps(value))


@dataclass(frozen=True, slots=True)
class Tile:
    """A key figure, with what it must be read with."""

    name: str
    cell: Cell
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table; a marked one stands out."""

    cells: Sequence[Cell]
    marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with its caption; ``folded`` where it is seldom looked at."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Row]
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFigure:
    """A figure with its name in the page, its title and what it shows in a sentence."""

    name: str
    title: str
    text: str
    figure: Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something is refused: of a field where it is known which. The message has the page's own labels."""

    field: str | None
    label: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the results; where it has none, ``absent`` says why, and ``refusal`` what was wrong.

    ``command`` is the command line that prints the same numbers, empty where there is none.
    """

    name: str
    title: str
    text: str
    sentence: str = ""
    tiles: Sequence[Tile] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[DrawnFigure] = ()
    notes: Sequence[str] = ()
    command: str = ""
    absent: str = ""
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What a part is: its name in the page, its title, and how to read it."""

    name: str
    title: str
    text: str

    def part(self, **more: Any) -> Part:
        """Return the part with its contents."""
        return Part(name=self.name, title=self.title, text=self.text, **more)


Options = Mapping[str, str]
"""The field of each option of a command."""
