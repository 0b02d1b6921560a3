"""The parts of the calculator's results, each a plan with its figures and its command line, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bssearch.pages.chart import Chart
from bssearch.pages.plans import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFigure:
    """A figure with its name in the page, its title and what it shows in a sentence."""

    name: str
    title: str
    text: str
    figure: Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something is refused: of a field if it is known which. The message has the page's own labels."""

    field: str | None
    label: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the results: how to read it and what was found; if nothing was, ``absent`` says why.

    ``command`` is the command line that prints the same numbers, empty if there is none. ``refusals`` say what is
    wrong with the entries.
    """

    name: str
    title: str
    text: str
    shown: Shown = field(default_factory=Shown)
    figures: Sequence[DrawnFigure] = ()
    command: str = ""
    absent: str = ""
    refusals: Sequence[Refusal] = ()
