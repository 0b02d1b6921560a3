"""Pages as HTML files, with a headline, key figures, and sections of charts and tables.

The page's content security policy forbids scripts and requests, and allows the style sheet by digest.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bssearch.figures.svg import Chart, sparkline, stylesheet, svg


@dataclass(frozen=True, slots=True)
class Tile:
    """A key figure of the page, with a note."""

    name: str
    value: Any
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table, bold if ``marked``."""

    cells: Sequence[Any]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table, initially collapsed if ``folded``."""

    headings: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    text: str
    absent: str = ""  # the reason for a section without charts and tables
    charts: Mapping[str, Chart | None] = field(default_factory=dict)
    table: Table | None = None
    notes: Sequence[str] = ()

    @property
    def drawn(self) -> dict[str, Chart]:
        return {name: chart for name, chart in self.charts.items() if chart is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """The content of a page."""

    title: str
    kicker: str
    heading: str
    headline: str
    tiles: Sequence[Tile] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section]  # the page shows the first section above the headline
    reproduction: Mapping[str, Any] | None = None  # values of the last section


def html_page(page: PageContent) -> str:
    style = page_style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return rendered("page.html", page=page, policy=policy, style=Markup(style))


def rendered(template: str, **values: Any) -> str:
    return _own_templates().get_template(template).render(values)


def page_style() -> str:
    return stylesheet("colours.css") + stylesheet("page.css")


def templates(*more: BaseLoader) -> Environment:
    """Return a Jinja environment for page templates and the loaders ``more``.

    The filters ``svg`` and ``spark`` draw a chart and a `sparkline`.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("bssearch.figures", "."), *more]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda *drawn: Markup(svg(*drawn))
    environment.filters["spark"] = lambda *drawn: Markup(sparkline(*drawn))
    return environment


_own_templates = cache(templates)
