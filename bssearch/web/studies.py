"""Pages about several studies, one study, the trials of a study, and one trial."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from bssearch.commands.across.answers import (
    ANSWERED,
    StudyFilter,
    answered_row,
    answers_in,
    device_of,
    in_words as agreement_in_words,
    precision_of,
    study_rows,
)
from bssearch.commands.across.databases import found_study
from bssearch.commands.report import COMPARED, compare, compared_row, picture_of
from bssearch.commands.rerun import Reproduction, reproduction
from bssearch.commands.trials import Status, status
from bssearch.errors import NotFoundError, TargetNotReachedError, UsageError, require, with_hint
from bssearch.exchange.trial_rows import matching_trials, trial_document, trial_row, trial_rows
from bssearch.figures.html import PageContent
from bssearch.figures.page import facts_of, page_of
from bssearch.figures.plots import recent_curves_chart
from bssearch.records import Observation, Phase, StudyRecord, TrialRecord, TrialState, sizes_in_words
from bssearch.records.text import NOTHING, in_words, number, plural, with_precision
from bssearch.search.finding import answer
from bssearch.storage.repository import Store
from bssearch.web.views import Answered, Document, PageRequest, View, numbered

FILTERS = ("workload", "device", "target", "objective", "precision")  # as in `bssearch study list`

LIVE_SECONDS = 5.0


def studies_page(asked: PageRequest) -> Answered:
    archived = asked.text("all") is not None
    wanted = _study_filter(asked)
    with asked.databases.opened() as stores:
        known = [(store, store.studies.summaries()) for store in stores]
        rows = [
            row
            for store, studies in known
            for row in study_rows(store, filter(wanted.matches, studies), archived=archived)
        ]
    if asked.text("format") == "json":
        return Document(rows)
    return View(
        template="studies.html",
        values={
            "studies": [_listed(asked, row) for row in reversed(sorted(rows, key=_created))],
            "filters": {name: asked.text(name) or "" for name in FILTERS},
            "offered": _offered([_conditions(study) for _, studies in known for study in studies]),
            "archived": archived,
            "several": len(asked.databases.names) > 1,
        },
        live_seconds=LIVE_SECONDS,
    )


def _conditions(study: StudyRecord) -> dict[str, str]:
    return {
        "workload": study.workload,
        "device": device_of(study),
        "target": f"{study.target.metric}={study.target.value:.12g}",
        "objective": study.objective,
        "precision": precision_of(study),
    }


def _offered(known: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: sorted({one[name] for one in known} - {""}) for name in FILTERS}


def _study_filter(asked: PageRequest) -> StudyFilter:
    return StudyFilter.of(**{name: asked.text(name) for name in FILTERS})


def _created(row: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(row["created_at"])


def _listed(asked: PageRequest, row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "db": asked.databases.number_of(row["database"]),
        "when": f"{_created(row):%Y-%m-%d %H:%M}",
        "place": with_precision(row["device"], row["precision"]),
    }


MOST_COMPARED = 20  # most compared studies; more do not fit side by side

MOST_SHOWN = 5  # most disagreements on the page; JSON has all disagreements


def compare_page(asked: PageRequest) -> Answered:
    names = list(dict.fromkeys(name for name in asked.several.get("study", []) if name))
    require(len(names) <= MOST_COMPARED, f"cannot compare {len(names)} studies; choose at most {MOST_COMPARED}")
    with asked.databases.opened() as stores:
        known = [(store, one.name) for store in stores for one in store.studies.summaries() if one.archived_at is None]
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


def best_page(asked: PageRequest) -> Answered:
    """Show the answers of matching studies and their agreement, or all workloads and targets without a filter."""
    wanted = _study_filter(asked)
    with asked.databases.opened() as stores:
        studies = [study for store in stores for study in store.studies.summaries()]
        found = answers_in(stores, wanted) if wanted.conditions else None
    if found is not None and asked.text("format") == "json":
        return Document(found.model_dump(mode="json"))
    known = [_conditions(study) for study in studies]
    values: dict[str, Any] = {
        "filters": {name: asked.text(name) or "" for name in FILTERS},
        "offered": _offered(known),
        "questions": sorted(
            Counter(
                (one["workload"], one["target"], study.target.in_words)
                for one, study in zip(known, studies, strict=True)
            ).items()
        ),
        "found": None,
    }
    if found is not None:
        values["found"] = {
            "columns": ANSWERED,
            "rows": [
                {**_shown(answered_row(one), ANSWERED), "db": asked.databases.number_of(one.database)}
                for one in found.answers
            ],
            "agreement": agreement_in_words(found.agreement),
            "disagreements": [one.message for one in found.agreement.disagreements[:MOST_SHOWN]],
            "more": max(0, len(found.agreement.disagreements) - MOST_SHOWN),
            "notes": [
                (one.study, one.note or f"not compared, because the study is a copy of {one.copy_of}")
                for one in found.answers
                if one.note is not None or one.copy_of is not None
            ],
        }
    return View(template="best.html", values=values)


def _placed(stores: list[Store], given: str) -> tuple[Store, str]:
    place, separator, name = given.partition(":")
    return (numbered(stores, place, UsageError), name) if separator else found_study(stores, given)


def _shown(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    return {name: in_words(row.get(name)) for name in columns}


MOST_CURVES = 8  # most curves, from the latest trials; readers cannot separate more curves

# A study is live for these seconds after the last trial, longer than the time between trials and than most step timing
# before the first trial
PAUSE_SECONDS = 60.0


def progress(store: Store, study: StudyRecord, trials: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return a study's progress, with the curves of running trials, or of the latest ended trials if no trial runs.

    ``is_live`` is also True between trials.
    """
    found = status(store, study.name)
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    drawn = (running or [trial for trial in trials if trial.state.is_finished])[-MOST_CURVES:]
    curves = store.trials.curves(study.name, [trial.number for trial in drawn]) if drawn else {}
    return {
        "status": found,
        "running": [_running_row(trial, curves.get(trial.number, [])) for trial in running],
        "counts": [(phase, state, count) for phase, states in found.trials.items() for state, count in states.items()],
        "curves": recent_curves_chart(study.target, [(trial, curves[trial.number]) for trial in drawn]),
        "summary": _summary(found),
        "is_live": is_live(store, study.name, found.running) and not found.is_imported,
    }


def is_live(store: Store, name: str, running: Sequence[int]) -> bool:
    return bool(running) or store.trials.seconds_at_rest(name) < PAUSE_SECONDS


def _summary(found: Status) -> str:
    if found.is_imported:
        return f"{plural(found.spent_trials, 'imported run')}."
    spent, budget, running = found.spent_trials, found.budget_trials, len(found.running)
    of = f"of {budget} search trials" if spent <= budget else f"search trials, more than the budget of {budget}"
    ended = "" if found.search_ended is None else f"; search ended: {found.search_ended}"
    return f"{spent} {of}{f', {running} running' if running else ''}{ended}."


def _running_row(trial: TrialRecord, curve: Sequence[Observation]) -> dict[str, Any]:
    last = curve[-1] if curve else None
    return {
        "number": trial.number,
        "phase": trial.phase.value,
        "batch_size": sizes_in_words(trial.configuration),
        "learning_rate": number(trial.configuration.learning_rate),
        "seconds": NOTHING if last is None else number(last.train_seconds),
        "limit": number(trial.train_seconds_limit),
        "metric": NOTHING if last is None else number(last.metric),
        "share": 0.0 if last is None else min(1.0, last.train_seconds / trial.train_seconds_limit),
    }


RUNNING_SECONDS = 2.0

RESTING_SECONDS = 15.0  # a slow refresh, because an idle study may resume


def study_page(asked: PageRequest) -> Answered:
    with asked.databases.study(asked.study, asked.database) as store:
        study, trials = store.studies.get(asked.study), store.trials.of(asked.study)
        far = progress(store, study, trials)
        page, missing = _found(store, asked.study, trials)
    return View(
        template="study.html",
        values={
            **_about_study(asked, far),
            "archived": study.archived_at is not None,
            "target": study.target.in_words,
            "page": page,
            "missing": missing,
        },
        live_seconds=RUNNING_SECONDS if far["is_live"] else RESTING_SECONDS,
    )


def study_version(asked: PageRequest) -> str:
    name = asked.study
    with asked.databases.study(name, asked.database) as store:
        running = [trial.number for trial in store.trials.of(name, states=[TrialState.RUNNING])]
        curves = store.trials.evaluations(name, running) if running else {}
        seen = sorted((number, len(curve)) for number, curve in curves.items())
        findings = {part: value for part, value in store.findings.last(name).items() if part != "answer"}
        shown = is_live(store, name, running), store.studies.get(name).archived_at
        content = f"{store.findings.stamp(name)} {seen} {shown} {findings}"
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def answer_document(asked: PageRequest) -> Answered:
    with asked.databases.study(asked.study, asked.database) as store:
        return Document(answer(store, asked.study).model_dump(mode="json"))


def _about_study(asked: PageRequest, far: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"study": asked.study, "db": asked.database, "progress": far}


def _found(
    store: Store, name: str, trials: Sequence[TrialRecord]
) -> tuple[PageContent | None, TargetNotReachedError | None]:
    try:
        return page_of(picture_of(store, name, trials)), None
    except TargetNotReachedError as error:
        return None, error


PAGE_TRIALS = 100  # trials per page

COLUMNS = {
    "number": "Trial",
    "phase": "Phase",
    "state": "State",
    "batch_size": "Batch",
    "learning_rate": "Learning rate",
    "train_seconds": "Train seconds",
    "time_to_target_s": "Seconds to target",
    "steps_to_target": "Steps",
    "final_metric": "Metric",
    "reason": "Reason",
}
# Columns for sorting trials in ascending order; trial numbers sort the newest first
LEAST_FIRST = ("time_to_target_s", "batch_size", "learning_rate", "train_seconds", "steps_to_target")


# Fields outside the facts on a trial's page
HIDDEN = {"number", "phase", "state", "reason", "warnings", "traceback"}


def trials_page(asked: PageRequest) -> Answered:
    phase = asked.one_of("phase", {one.value: one for one in Phase})
    state = asked.one_of("state", {one.value: one for one in TrialState})
    size, order = asked.count("batch_size"), asked.one_of("order", {one: one for one in ("number", *LEAST_FIRST)})
    with asked.databases.study(asked.study, asked.database) as store:
        every = store.trials.of(asked.study)
        running = [trial.number for trial in every if trial.state is TrialState.RUNNING]
        live_seconds = RUNNING_SECONDS if is_live(store, asked.study, running) else RESTING_SECONDS
        kept = matching_trials(every, phase=phase, state=state, batch_size=size)
        if asked.text("format") == "json":
            return Document(trial_rows(store, asked.study, every, kept))
    rows = [trial_row(trial) for trial in kept]
    pages = max(1, math.ceil(len(rows) / PAGE_TRIALS))
    page = asked.count("page", 1, most=pages) or 1
    return View(
        template="trials.html",
        values={
            **_about_study(asked),
            "columns": COLUMNS,
            "rows": _ordered(kept, rows, order or "number")[(page - 1) * PAGE_TRIALS : page * PAGE_TRIALS],
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


def trial_page(asked: PageRequest) -> Answered:
    number = asked.path["number"]
    require(
        number.isascii() and number.isdecimal() and len(number) <= 9,
        f"study {asked.study!r} has no trial {number[:20]!r}; choose a trial of the study",
        error=NotFoundError,
    )
    with asked.databases.study(asked.study, asked.database) as store:
        study, trial = store.studies.get(asked.study), store.trials.get(asked.study, int(number))
        curve = store.trials.observations(asked.study, trial.number)
        environment, spec = (
            store.trials.environments(asked.study).get(trial.number),
            store.trials.spec(asked.study, trial.number),
        )
        document = trial_document(trial, curve, environment, spec)
        if asked.text("format") == "json":
            return Document(document)
        log, again = store.trials.log(asked.study, trial.number), _again(store, asked.study, trial)
    return View(
        template="trial.html",
        values={
            **_about_study(asked),
            "trial": trial,
            "size": sizes_in_words(trial.configuration),
            "facts": [
                (name, in_words(value))
                for name, value in document.items()
                if value is not None and not isinstance(value, dict | list) and name not in HIDDEN
            ],
            "warnings": trial.outcome.warnings if trial.outcome else (),
            "traceback": document["traceback"],
            "stages": document["stages"],
            "chart": recent_curves_chart(study.target, [(trial, curve)]),
            "evaluations": len(curve),
            "place_facts": facts_of(environment),
            "log": log,
            "again": again,
        },
        live_seconds=0 if trial.state.is_finished else RUNNING_SECONDS,
    )


def _ordered(trials: Sequence[TrialRecord], rows: Sequence[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    shown = [
        {**row, "batch_size": sizes_in_words(trial.configuration), "key": row[order]}
        for trial, row in zip(trials, rows, strict=True)
    ]
    if order == "number":
        return shown[::-1]
    return sorted(shown, key=lambda row: (row["key"] is None, row["key"] or 0, row["number"]))


def _options(present: Iterable[str]) -> list[tuple[str, str]]:
    return [("", "All"), *((one, one) for one in sorted(set(present)))]


def _page_link(asked: PageRequest, page: int) -> str:
    return f"?{urlencode({**{name: value for name, value in asked.query.items() if value}, 'page': page})}"


def _again(store: Store, study: str, trial: TrialRecord) -> Reproduction | str:
    try:
        return reproduction(store, study, trial.number)
    except UsageError as error:
        return with_hint(error)
