"""How far a study is: what it has spent, what runs at the moment, and the curves of what runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bssearch.analysis.numbers import number
from bssearch.batch_schedule import sizes_in_words
from bssearch.commands.status import Status, status
from bssearch.pages.chart import Chart
from bssearch.pages.trial_plots import recent_curves_chart
from bssearch.pages.words import NOTHING
from bssearch.records import Observation, StudyRecord, TrialRecord, TrialState
from bssearch.storage.repository import Store

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
    shown = running or [trial for trial in trials if trial.state.is_finished]
    drawn = shown[-MOST_CURVES:]
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
