"""Pages about several studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from bssearch.commands.across.answers import ANSWERED, answered_row, answers_in
from bssearch.commands.across.answers import in_words as agreement_in_words
from bssearch.commands.across.databases import found_study
from bssearch.commands.across.matching import StudyFilter, study_rows
from bssearch.commands.report import COMPARED, compare, compared_row
from bssearch.errors import UsageError
from bssearch.records.text import in_words
from bssearch.storage.repository import Store
from bssearch.web.views import Answered, Asked, Document, View, numbered, shortened

FILTERS = ("workload", "device", "target", "objective", "precision")  # Study filters, as in `bssearch study list`

LIVE_SECONDS = 5.0


def studies_page(asked: Asked) -> Answered:
    """List matching studies of all databases, newest first."""
    archived = asked.text("all") is not None
    rows = _rows(asked, archived=archived)
    if asked.text("format") == "json":
        return Document(rows)
    return View(
        template="studies.html",
        values={
            "studies": [_listed(asked, row) for row in reversed(rows)],
            "filters": {name: asked.text(name) or "" for name in FILTERS},
            "archived": archived,
            "several": len(asked.databases.names) > 1,
        },
        live_seconds=LIVE_SECONDS,
    )


def study_filter(asked: Asked) -> StudyFilter:
    """Return a query's filter; raise `UsageError`."""
    return StudyFilter.of(**{name: asked.text(name) for name in FILTERS})


def _rows(asked: Asked, *, archived: bool) -> list[dict[str, Any]]:
    wanted = study_filter(asked)
    with asked.databases.opened() as stores:
        return [row for store in stores for row in study_rows(store, wanted, archived=archived)]


def _listed(asked: Asked, row: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromisoformat(row["created_at"])
    return {**row, "db": asked.databases.number_of(row["database"]), "when": f"{created:%Y-%m-%d %H:%M}"}


MOST_COMPARED = 20  # Maximum compared studies, more than fit side by side

MOST_TOLD = 5  # Maximum disagreements shown; JSON has all


def compare_page(asked: Asked) -> Answered:
    """Compare studies with the first."""
    names = list(dict.fromkeys(name for name in asked.several.get("study", []) if name))
    if len(names) > MOST_COMPARED:
        raise UsageError(f"{len(names)} studies are too many to compare: at most {MOST_COMPARED}")
    with asked.databases.opened() as stores:
        known = [(store, one.name) for store in stores for one in store.studies() if one.archived_at is None]
        found = compare([_placed(stores, name) for name in names]) if len(names) > 1 else []
    if asked.text("format") == "json":
        return Document([one.model_dump(mode="json") for one in found])
    numbers = [asked.databases.number_of(store.masked_url) for store, _ in known]
    return View(
        template="compare.html",
        values={
            "known": [
                (name if place is None else f"{place}:{name}", name)
                for (_, name), place in zip(known, numbers, strict=True)
            ],
            "chosen": names,
            "columns": COMPARED,
            "rows": [
                {**_shown(compared_row(one), COMPARED), "db": asked.databases.number_of(one.database)} for one in found
            ],
            "notes": [(one.study, one.note) for one in found if one.note is not None],
            "warnings": [(one.study, warning.message) for one in found for warning in one.warnings],
        },
    )


def best_page(asked: Asked) -> Answered:
    """Show matching studies' results and agreement; only the form without a filter."""
    wanted = study_filter(asked)
    values: dict[str, Any] = {"filters": {name: asked.text(name) or "" for name in FILTERS}, "found": None}
    if wanted.conditions:
        with asked.databases.opened() as stores:
            found = answers_in(stores, wanted)
        if asked.text("format") == "json":
            return Document(found.model_dump(mode="json"))
        values["found"] = {
            "columns": ANSWERED,
            "rows": [
                {**_shown(answered_row(one), ANSWERED), "db": asked.databases.number_of(one.database)}
                for one in found.answers
            ],
            "agreement": agreement_in_words(found.agreement),
            "disagreements": [one.message for one in found.agreement.disagreements[:MOST_TOLD]],
            "more": max(0, len(found.agreement.disagreements) - MOST_TOLD),
            "notes": [
                (one.study, one.note or f"a copy of {one.copy_of}, which does not count again")
                for one in found.answers
                if one.note is not None or one.copy_of is not None
            ],
        }
    return View(template="best.html", values=values)


def _placed(stores: list[Store], given: str) -> tuple[Store, str]:
    place, separator, name = given.partition(":")
    if not separator:
        return found_study(stores, given)
    store = numbered(stores, place)
    if store is None:
        raise UsageError(f"study = {shortened(given)!r}: the databases are 1 to {len(stores)}")
    return store, name


def _shown(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    return {name: in_words(row.get(name)) for name in columns}
