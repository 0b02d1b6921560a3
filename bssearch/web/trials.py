"""The trials of a study, and one of them with its curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from bssearch.batch_schedule import sizes_in_words
from bssearch.commands.rerun import Reproduction, reproduction
from bssearch.commands.trials import matching_trials, trial_document, trial_row
from bssearch.errors import NotFoundError, UsageError
from bssearch.pages.trial_plots import recent_curves_chart
from bssearch.pages.words import in_words
from bssearch.records import Environment, Phase, TrialRecord, TrialState
from bssearch.storage.repository import Store
from bssearch.web.study import RESTING_SECONDS, RUNNING_SECONDS, about_study, is_live
from bssearch.web.views import Answered, Asked, Document, View

PAGE_TRIALS = 100
"""Trials of one page: a choice."""

COLUMNS = {
    "number": "Trial",
    "phase": "Phase",
    "state": "State",
    "batch_size": "Batch",
    "learning_rate": "Learning rate",
    "train_seconds": "Trained s",
    "time_to_target_s": "To target s",
    "steps_to_target": "Steps",
    "final_metric": "Metric",
    "reason": "Reason",
}
LEAST_FIRST = ("time_to_target_s", "batch_size", "learning_rate", "train_seconds", "steps_to_target")
"""The columns that trials can be ordered by, the least first, beside their numbers with the newest first."""


HIDDEN = {"number", "phase", "state", "reason", "warnings", "traceback"}
"""What stands above the table of a trial's facts."""


def trials_page(asked: Asked) -> Answered:
    """List the trials of a study: of a phase, a state, a batch size; a page of them at a time, the newest first."""
    phase = asked.one_of("phase", {one.value: one for one in Phase})
    state = asked.one_of("state", {one.value: one for one in TrialState})
    size, order = asked.count("batch_size"), asked.one_of("order", {one: one for one in ("number", *LEAST_FIRST)})
    with asked.databases.study(asked.study, asked.database) as store:
        every = store.trials(asked.study)
        running = [trial.number for trial in every if trial.state is TrialState.RUNNING]
        live_seconds = RUNNING_SECONDS if is_live(store, asked.study, running) else RESTING_SECONDS
    kept = matching_trials(every, phase=phase, state=state, batch_size=size)
    rows = [trial_row(trial) for trial in kept]
    if asked.text("format") == "json":
        return Document(rows)
    pages = max(1, math.ceil(len(rows) / PAGE_TRIALS))
    page = asked.count("page", 1, most=pages) or 1
    shown = _ordered(kept, rows, order or "number")[(page - 1) * PAGE_TRIALS : page * PAGE_TRIALS]
    return View(
        template="trials.html",
        values={
            **about_study(asked),
            "columns": COLUMNS,
            "rows": shown,
            "count": len(rows),
            "page": page,
            "pages": pages,
            "newer": _page_link(asked, page - 1) if page > 1 else None,
            "older": _page_link(asked, page + 1) if page < pages else None,
            "asked": {name: asked.text(name) or "" for name in ("phase", "state", "batch_size", "order")},
            "phases": _options(trial.phase.value for trial in every),
            "states": _options(trial.state.value for trial in every),
            "orders": [("", "Newest first"), *((name, f"Least {COLUMNS[name].lower()}") for name in LEAST_FIRST)],
        },
        live_seconds=live_seconds,
    )


def trial_page(asked: Asked) -> Answered:
    """Show one trial: its configuration, its curve, where it ran, why it ended, and how to run it again."""
    number = asked.path["number"]
    if not number.isascii() or not number.isdecimal() or len(number) > 9:
        raise NotFoundError(f"study {asked.study!r} has no trial {number[:20]!r}")
    with asked.databases.study(asked.study, asked.database) as store:
        study, trial = store.study(asked.study), store.trial(asked.study, int(number))
        curve = store.observations(asked.study, trial.number)
        environment, spec = store.environment_of(asked.study, trial.number), store.spec_at(asked.study, trial.number)
        document = trial_document(trial, curve, environment, spec)
        if asked.text("format") == "json":
            return Document(document)
        log, again = store.log(asked.study, trial.number), _again(store, asked.study, trial)
    settings = {
        name: value for name, value in document.items() if value is not None and not isinstance(value, dict | list)
    }
    return View(
        template="trial.html",
        values={
            **about_study(asked),
            "trial": trial,
            "size": _size(trial),
            "facts": [(name, in_words(value)) for name, value in settings.items() if name not in HIDDEN],
            "warnings": trial.outcome.warnings if trial.outcome else (),
            "traceback": document["traceback"],
            "stages": document["stages"],
            "chart": recent_curves_chart(study.target, [(trial, curve)]),
            "evaluations": len(curve),
            "place_facts": _place(environment),
            "log": log,
            "again": again,
        },
        live_seconds=0 if trial.state.is_finished else RUNNING_SECONDS,
    )


def _ordered(trials: Sequence[TrialRecord], rows: Sequence[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    shown = [{**row, "batch_size": _size(trial), "key": row[order]} for trial, row in zip(trials, rows, strict=True)]
    if order == "number":
        return shown[::-1]
    return sorted(shown, key=lambda row: (row["key"] is None, row["key"] or 0, row["number"]))


def _size(trial: TrialRecord) -> str:
    return sizes_in_words(trial.configuration) if trial.configuration.grows else str(trial.configuration.batch_size)


def _options(present: Iterable[str]) -> list[tuple[str, str]]:
    return [("", "All"), *((one, one) for one in sorted(set(present)))]


def _page_link(asked: Asked, page: int) -> str:
    return f"?{urlencode({**{name: value for name, value in asked.query.items() if value}, 'page': page})}"


def _place(environment: Environment | None) -> list[tuple[str, str]]:
    if environment is None:
        return []
    known = {**asdict(environment), "libraries": ", ".join(environment.libraries) or None}
    return [(name.replace("_", " "), in_words(value)) for name, value in known.items() if value is not None]


def _again(store: Store, study: str, trial: TrialRecord) -> Reproduction | str:
    """Return how to run a trial again, or why it cannot be."""
    try:
        return reproduction(store, study, trial.number)
    except UsageError as error:
        return error.message
