"""The page of one study: how far it is, and all that it has found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bssearch.analysis.answer import Answer
from bssearch.commands.report import picture_of
from bssearch.errors import TargetNotReachedError
from bssearch.pages.html import Page
from bssearch.pages.page import page_of
from bssearch.records import TrialRecord
from bssearch.search.finding import answer
from bssearch.storage.repository import Store
from bssearch.web.progress import Progress, progress, version_of
from bssearch.web.views import Answered, Asked, Document, View

RUNNING_SECONDS = 2.0
"""How often the page of a study that runs is looked at anew: a choice, as often as a reader sees something new."""

RESTING_SECONDS = 15.0
"""How often that of one that does not run: somebody may go on with it. A choice."""


def study_page(asked: Asked) -> Answered:
    """Show a study: its progress while it runs, and its answer with figures and tables as soon as there is one."""
    with asked.databases.study(asked.study, asked.database) as store:
        study, trials = store.study(asked.study), store.trials(asked.study)
        far = progress(store, study, trials)
        page, missing = _found(store, asked.study, trials)
    return View(
        template="study.html",
        values={
            **about_study(asked, far),
            "archived": study.archived_at is not None,
            "target": f"{study.target.metric} {study.target.goal.sign} {study.target.value:g}",
            "page": page,
            "missing": missing,
        },
        live_seconds=RUNNING_SECONDS if far.is_live else RESTING_SECONDS,
    )


def study_version(asked: Asked) -> str:
    """Return what changes with every trial of a study, and with each evaluation of those that run."""
    with asked.databases.study(asked.study, asked.database) as store:
        return version_of(store, asked.study)


def answer_document(asked: Asked) -> Answered:
    """Give a study's answer for programs: the contract of ``best --format json``."""
    with asked.databases.study(asked.study, asked.database) as store:
        found: Answer = answer(store, asked.study)
    return Document(found.model_dump(mode="json"))


def about_study(asked: Asked, far: Progress | None = None) -> dict[str, Any]:
    """Return what every page about a study shows of it."""
    return {"study": asked.study, "db": asked.database, "progress": far}


def _found(store: Store, name: str, trials: Sequence[TrialRecord]) -> tuple[Page | None, str | None]:
    """Return the contents of a study's page, or why there is no answer yet."""
    try:
        return page_of(picture_of(store, name, trials)), None
    except TargetNotReachedError as error:
        return None, error.message
