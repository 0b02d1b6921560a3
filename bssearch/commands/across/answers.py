"""``best`` without a study: what all studies that match have found, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from bssearch.analysis.answer import Optimal, TargetAnswer, objective_in
from bssearch.analysis.headline import with_interval
from bssearch.analysis.numbers import span
from bssearch.analysis.shape import Model
from bssearch.commands.across.agreement import Agreement, Finding, agreement_of, in_database, without_copies
from bssearch.commands.across.databases import open_databases
from bssearch.commands.across.matching import StudyFilter, device_of, nothing_matches, precision_of
from bssearch.errors import DatabaseError, TargetNotReachedError, UsageError
from bssearch.pages.words import plural
from bssearch.records import StudyRecord
from bssearch.search.finding import answer
from bssearch.spec.stored import spec_of
from bssearch.storage.repository import Store

ANSWERED = (
    "study",
    "database",
    "device",
    "who",
    "when",
    "optimal",
    "learning_rate",
    "figure",
    "within 5 %",
    "provisional",
)
"""The headings of what all studies that match have found."""


class StudyAnswer(Model):
    """What one of the studies that match has found.

    ``database`` is a URL without its password. ``unit`` is that of the objective's figure, empty where it has none.
    From ``optimal`` on the fields are those of `bssearch.best`; they are null where the study has no answer yet, and
    ``note`` says why. ``copy_of`` names the study that counts, with its database, where this is a copy of it.
    """

    study: str
    database: str
    workload: str
    device: str
    precision: str
    created_by: str
    created_at: str
    objective: str
    target: TargetAnswer
    unit: str = ""
    optimal: Optimal | None = None
    flat_range: list[int] | None = None
    tied: list[int] | None = None
    provisional: bool | None = None
    within_5_percent: float | None = None
    note: str | None = None
    copy_of: str | None = None


class AcrossAnswer(Model):
    """What the studies that match a ``query`` have found, and whether they agree."""

    schema_version: Literal[1] = 1
    query: dict[str, Any]
    answers: Annotated[list[StudyAnswer], Field(min_length=1)]
    agreement: Agreement


def best_across(
    db: str | Sequence[str] | None = None,
    *,
    workload: str | None = None,
    device: str | None = None,
    target: str | float | None = None,
    objective: str | None = None,
    precision: str | None = None,
) -> AcrossAnswer:
    """Return what all studies that match have found, the oldest of each database first, and whether they agree.

    ``db`` is one database URL or several. The conditions are those of `StudyFilter`; ``target`` is a value or
    ``METRIC=VALUE``. Archived studies are left out. Raises `UsageError` without any condition, `NotFoundError` where no
    study matches, naming what there is, `TargetNotReachedError` where none that matches has an answer, and
    `DatabaseError`.
    """
    asked = StudyFilter.of(workload=workload, device=device, target=target, objective=objective, precision=precision)
    if not asked.conditions:
        raise UsageError("no condition is given", hint="workload, device or target says which studies are asked")
    with open_databases([db] if isinstance(db, str) else db) as stores:
        return answers_in(stores, asked)


def answers_in(stores: Sequence[Store], asked: StudyFilter) -> AcrossAnswer:
    """Return what the studies of open stores that match have found; see `best_across`."""
    listed: list[StudyRecord] = []
    found: list[tuple[StudyAnswer, Finding | None]] = []
    for store in stores:
        with store:
            here = [study for study in store.study_records() if study.archived_at is None]
            found += [_answered(store, study) for study in here if asked.matches(study)]
        listed += here
    if not found:
        raise nothing_matches(asked, listed)
    if all(finding is None for _, finding in found):
        first = found[0][0]
        raise TargetNotReachedError(
            f"{len(found)} studies match and none has an answer: {first.study}: {first.note}"
            if len(found) > 1
            else f"study {first.study!r} matches and has no answer: {first.note}"
        )
    query = {"workload": asked.workload, "device": asked.device, "target": asked.target, "metric": asked.metric}
    return AcrossAnswer(
        query={**query, "objective": asked.objective, "precision": asked.precision, "databases": _urls(stores)},
        answers=_with_copies(found),
        agreement=agreement_of([finding for _, finding in found if finding is not None]),
    )


def _with_copies(found: Sequence[tuple[StudyAnswer, Finding | None]]) -> list[StudyAnswer]:
    """Return the rows of studies, each copy with the name of what counts in its stead."""
    counted = without_copies([finding for _, finding in found if finding is not None])
    kept = {one.study.mark: one for one in counted}
    return [
        row
        if finding is None or kept[finding.study.mark] is finding
        else row.model_copy(update={"copy_of": in_database(kept[finding.study.mark])})
        for row, finding in found
    ]


def _urls(stores: Sequence[Store]) -> list[str]:
    return [store.masked_url for store in stores]


def _answered(store: Store, study: StudyRecord) -> tuple[StudyAnswer, Finding | None]:
    """Return what a study has found; a note where its target was not reached, or its spec cannot be read."""
    target = study.target
    row = StudyAnswer(
        study=study.name,
        database=store.masked_url,
        workload=str(study.spec.get("workload", "")),
        device=device_of(study),
        precision=precision_of(study),
        created_by=study.created_by,
        created_at=study.created_at.isoformat(timespec="seconds"),
        objective=study.objective,
        target=TargetAnswer(metric=target.metric, value=target.value, goal=target.goal),
    )
    try:
        spec_of(study)
    except DatabaseError as error:  # others are not concerned
        return row.model_copy(update={"note": error.message}), None
    try:
        found = answer(store, study.name)
    except TargetNotReachedError as error:
        return row.model_copy(update={"note": error.message}), None
    known = {
        "optimal": found.optimal,
        "flat_range": found.flat_range,
        "tied": found.tied,
        "provisional": found.provisional,
        "within_5_percent": found.within_5_percent,
        "unit": objective_in(found).unit,
    }
    return row.model_copy(update=known), Finding(study, store.masked_url, found)


def answered_row(one: StudyAnswer) -> dict[str, Any]:
    """Return the row of one of the studies that match a question."""
    row = {"study": one.study, "database": one.database, "device": one.device, "who": one.created_by}
    row["when"] = one.created_at[:10]
    if one.optimal is None or one.flat_range is None:
        return {**row, "figure": "no answer"}
    figure = one.optimal.objective_value
    return {
        **row,
        "optimal": one.optimal.batch_size,
        "learning_rate": one.optimal.parameters.get("learning_rate"),
        "figure": figure and f"{with_interval(figure, unit=one.unit)} ({plural(figure.runs, 'run')})",
        "within 5 %": span(one.flat_range),
        "provisional": "yes" if one.provisional else "no",
    }
