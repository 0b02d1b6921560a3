"""The page of one study: how far it is, and all that it has found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bssearch.analysis.answer import Answer
from bssearch.analysis.numbers import number
from bssearch.batch_schedule import sizes_in_words
from bssearch.commands.report import picture_of
from bssearch.commands.trials import Status, status
from bssearch.errors import TargetNotReachedError
from bssearch.pages.chart import Chart
from bssearch.pages.html import Page
from bssearch.pages.page import page_of
from bssearch.pages.trial_plots import recent_curves_chart
from bssearch.pages.words import NOTHING
from bssearch.records import Observation, StudyRecord, TrialRecord, TrialState
from bssearch.search.finding import answer
from bssearch.storage.repository import Store
from bssearch.web.views import Answered, Asked, Document, View

MOST_CURVES = 8
"""Curves that are drawn at most, of the trials that began last: a choice, as many as a reader tells apart."""

PAUSE_SECONDS = 60.0
"""How long after its last trial a study is still looked at as one that runs: a choice, longer than a driver takes from
one trial to the next, and than most step times before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a study's page shows of its run. ``curves`` is None where no trial has been evaluated.

    A study is live while trials run and between them, so that its page does not change its form with each.
    """

    status: Status
    running: list[dict[str, Any]]
    counts: list[tuple[str, str, int]]
    curves: Chart | None
    summary: str
    is_live: bool

    @property
    def is_running(self) -> bool:
        """Whether a trial runs at the moment."""
        return bool(self.status.running)


def version_of(store: Store, name: str) -> str:
    """Return what changes whenever the page of a study does: with its trials, evaluations that run, and its rest."""
    running = [trial.number for trial in store.trials(name, states=[TrialState.RUNNING])]
    seen = {number: len(curve) for number, curve in store.evaluations(name, running).items()} if running else {}
    found = {part: value for part, value in (store.last_finding(name) or {}).items() if part != "answer"}
    shown = is_live(store, name, running), store.study(name).archived_at
    told = f"{store.stamp(name)} {sorted(seen.items())} {shown} {found}"
    return hashlib.sha256(told.encode()).hexdigest()[:24]


def progress(store: Store, study: StudyRecord, trials: Sequence[TrialRecord]) -> Progress:
    """Return how far a study is. The curves are those of running trials; where none runs, of those that ended last."""
    found = status(store, study.name, trials)
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    drawn = (running or [trial for trial in trials if trial.state.is_finished])[-MOST_CURVES:]
    curves = store.curves(study.name, [trial.number for trial in drawn]) if drawn else {}
    return Progress(
        status=found,
        running=[_running_row(trial, curves.get(trial.number, [])) for trial in running],
        counts=[(phase, state, count) for phase, states in found.trials.items() for state, count in states.items()],
        curves=recent_curves_chart(study.target, [(trial, curves[trial.number]) for trial in drawn]),
        summary=_summary(found),
        is_live=is_live(store, study.name, found.running) and not found.is_imported,
    )


def is_live(store: Store, name: str, running: Sequence[int]) -> bool:
    """Return whether a study runs: one of its trials does, or did a moment ago."""
    return bool(running) or store.seconds_at_rest(name) < PAUSE_SECONDS


def _summary(found: Status) -> str:
    """Return a sentence on how far the study is: what a screen reader is told when it changes."""
    if found.is_imported:
        return f"{found.spent_trials} imported runs."
    spent, running = f"{found.spent_trials} of {found.budget_trials} search trials", len(found.running)
    ended = "" if found.search_ended is None else f"; the search has ended: {found.search_ended}"
    return f"{spent}{f', {running} running' if running else ''}{ended}."


def _running_row(trial: TrialRecord, curve: Sequence[Observation]) -> dict[str, Any]:
    last = curve[-1] if curve else None
    size = sizes_in_words(trial.configuration) if trial.configuration.grows else f"{trial.configuration.batch_size}"
    return {
        "number": trial.number,
        "phase": trial.phase.value,
        "batch_size": size,
        "learning_rate": number(trial.configuration.learning_rate),
        "seconds": NOTHING if last is None else number(last.train_seconds),
        "limit": number(trial.train_seconds_limit),
        "metric": NOTHING if last is None else number(last.metric),
        "share": 0.0 if last is None else min(1.0, last.train_seconds / trial.train_seconds_limit),
    }


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
            "target": study.target.in_words,
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
