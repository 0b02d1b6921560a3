"""One HTML file that needs nothing else: a headline, key figures, sections of figures and tables.

The templates escape every value, and the page has no script: its figures are drawn as SVG. The page's own security
policy runs none, knows its one style sheet by its digest, and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from bssearch.pages.axes import Figure
from bssearch.pages.drawing.sizes import WIDE_WIDTH
from bssearch.pages.drawing.svg import svg

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment
    from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Tile:
    """One key figure, with what it must be read with."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table; the optimum's is marked."""

    cells: list[str]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts."""

    headings: list[str]
    rows: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page: how to read it and its figures or table; without either, ``absent`` says why."""

    name: str
    title: str
    text: str
    absent: str = ""
    figures: Mapping[str, Figure]
    table: Table | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page as its templates show it. ``reproduction`` has the values of its last section, None for no such one."""

    title: str
    kicker: str
    headline: str
    tiles: Sequence[Tile] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section]
    reproduction: Mapping[str, Any] | None = None


def html_page(page: Page) -> str:
    """Return a page as one HTML file."""
    from markupsafe import Markup

    style = _asset("page.css")
    return _own_templates().get_template("page.html").render(page=page, policy=_policy(style), style=Markup(style))


def templates(*more: BaseLoader) -> Environment:
    """Return the templates of the page, and then those of further loaders, by the names of their files.

    They escape every value and refuse one that is not defined. ``figure | svg(name, title)`` draws a figure, with
    a third argument as wide as that on a screen; ``name`` makes its ids, ``title`` is read to those who do not see it.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader("bssearch.pages", "."), *more]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = _svg
    return environment


@cache
def _own_templates() -> Environment:
    return templates()


def _svg(figure: Figure, name: str, title: str, wide: float = WIDE_WIDTH) -> Markup:
    from markupsafe import Markup

    return Markup(svg(figure, name, title, wide))


@cache
def _asset(name: str) -> str:
    return resources.files("bssearch.pages").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str) -> str:
    """Return a policy under which no script runs, this style alone counts, and nothing is fetched."""
    # A browser reads every end of line as \n, and compares the digest of that with the policy's.
    lines = style.replace("\r\n", "\n").replace("\r", "\n")
    digest = base64.b64encode(hashlib.sha256(lines.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
