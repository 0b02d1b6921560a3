"""One HTML file that needs nothing else: a headline, key figures, sections of figures and tables.

The template escapes every value; plotly's script, the page's own and the figures' JSON are the only parts put in as
they are. The page's own security policy runs no other script, and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bssearch.errors import UsageError
from bssearch.pages.axes import Figure


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


def html_page(
    *,
    title: str,
    kicker: str,
    headline: str,
    sections: Sequence[Section],
    tiles: Sequence[Tile] = (),
    warnings: Sequence[str] = (),
    reproduction: Mapping[str, Any] | None = None,
) -> str:
    """Return a page as HTML; ``reproduction`` has the values of its last section, None for no such section.

    Raises `UsageError` where the extra ``plots`` is not installed.
    """
    plotly, environment = _tools()
    from markupsafe import Markup

    figures = {name: figure for section in sections for name, figure in section.figures.items()}
    script = _asset("page.js")
    return str(
        environment.from_string(_asset("page.html")).render(
            title=title,
            kicker=kicker,
            headline=headline,
            tiles=tiles,
            warnings=warnings,
            sections=sections,
            reproduction=reproduction,
            policy=_policy(plotly, script),
            style=Markup(_asset("page.css")),
            figures=Markup(script_json(figures)),
            plotly=Markup(plotly),
            script=Markup(script),
        )
    )


def require_plots() -> None:
    """Raise `UsageError` where the extra ``plots`` is not installed."""
    _tools()


def script_json(value: object) -> str:
    """Return JSON that can stand inside a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _tools() -> tuple[str, Any]:
    """Return plotly's script and a template environment that escapes."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            f"the page needs {error.name or 'plotly'}, which is not installed", hint="pip install jinja2 plotly"
        ) from None
    # A browser reads every end of line as \n, and compares the digest of that with the policy's.
    plotly = str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")
    return plotly, jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


@cache
def _asset(name: str) -> str:
    return resources.files("bssearch.pages").joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Return a policy under which these scripts run, no others, and nothing is fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
