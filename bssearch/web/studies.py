"""The list of all studies."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from bssearch.commands.across.matching import StudyFilter
from bssearch.commands.across.summaries import study_rows
from bssearch.web.views import Answered, Asked, Document, View

FILTERS = ("workload", "device", "target", "objective", "precision")
"""What studies can be asked for, as `bssearch studies` can."""

LIVE_SECONDS = 5.0
"""How often the list is looked at anew: a choice."""


def studies_page(asked: Asked) -> Answered:
    """Show the studies of all databases that match, the newest first."""
    archived = asked.text("all") is not None
    rows = _rows(asked, archived=archived)
    if asked.text("format") == "json":
        return Document(rows)
    return View(
        template="studies.html",
        values={
            "studies": [_shown(asked, row) for row in reversed(rows)],
            "filters": {name: asked.text(name) or "" for name in FILTERS},
            "archived": archived,
            "several": len(asked.databases.names) > 1,
        },
        live_seconds=LIVE_SECONDS,
    )


def study_filter(asked: Asked) -> StudyFilter:
    """Return which studies a query asks for. Raises `UsageError`."""
    return StudyFilter.of(**{name: asked.text(name) for name in FILTERS})


def _rows(asked: Asked, *, archived: bool) -> list[dict[str, Any]]:
    wanted = study_filter(asked)
    with asked.databases.opened() as stores:
        return [row for store in stores for row in study_rows(store, wanted, archived=archived)]


def _shown(asked: Asked, row: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromisoformat(row["created_at"])
    return {**row, "db": asked.databases.number_of(row["database"]), "when": f"{created:%Y-%m-%d %H:%M}"}
