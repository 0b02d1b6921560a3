"""Filters, answers and agreement of studies in several databases."""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from bssearch.analysis.answer import Answer, Optimal, objective_in
from bssearch.analysis.headline import with_interval
from bssearch.analysis.shape import Model
from bssearch.commands.across.databases import open_databases
from bssearch.errors import DatabaseError, NotFoundError, TargetNotReachedError, require
from bssearch.records import Goal, StudyRecord, Target, grouped
from bssearch.records.text import plural, span
from bssearch.search.finding import answer
from bssearch.search.stored_finding import short_answer
from bssearch.spec import changed_fields, spec_of
from bssearch.storage.repository import Store
from bssearch.storage.statements import StudySummary
from bssearch.workloads.base import SHIPPED

MOST_NAMED = 8  # the most values of a condition that an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFilter:
    """The conditions that select studies; None sets no condition.

    ``device`` is a part of the device's name.
    """

    workload: str | None = None
    device: str | None = None
    target: float | None = None
    metric: str | None = None
    objective: str | None = None
    precision: str | None = None

    @classmethod
    def of(
        cls,
        *,
        workload: str | None = None,
        device: str | None = None,
        target: str | float | None = None,
        objective: str | None = None,
        precision: str | None = None,
    ) -> Self:
        metric, value = (None, None) if target is None else target_of(target)
        return cls(
            workload=workload, device=device, target=value, metric=metric, objective=objective, precision=precision
        )

    @property
    def conditions(self) -> Mapping[str, Callable[[StudyRecord], bool]]:
        asked: dict[str, tuple[object, Callable[[StudyRecord], bool]]] = {
            "workload": (self.workload, lambda study: self.workload in workload_names(study)),
            "device": (self.device, lambda study: str(self.device).lower() in device_of(study).lower()),
            "target": (self.target, self._has_target),
            "objective": (self.objective, lambda study: study.objective == self.objective),
            "precision": (self.precision, lambda study: precision_of(study) == self.precision),
        }
        return {name: holds for name, (value, holds) in asked.items() if value is not None}

    @property
    def in_words(self) -> str:
        """The conditions as command-line options."""
        values = {name: getattr(self, name) for name in self.conditions}
        if self.target is not None:
            values["target"] = f"{self.metric}={self.target:g}" if self.metric else f"{self.target:g}"
        return " ".join(f"--{name} {value}" for name, value in values.items())

    def matches(self, study: StudyRecord) -> bool:
        return not self.unmet(study)

    def unmet(self, study: StudyRecord) -> set[str]:
        return {name for name, holds in self.conditions.items() if not holds(study)}

    def _has_target(self, study: StudyRecord) -> bool:
        target = study.target
        same = f"{target.value:g}" == f"{self.target:g}" or math.isclose(target.value, self.target or 0.0)
        return same and self.metric in (None, target.metric)


def target_of(text: str | float) -> tuple[str | None, float]:
    """Parse ``VALUE`` (without a metric) or ``METRIC=VALUE``; raise `UsageError` unless VALUE is a finite number."""
    metric, _, number = str(text).rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    require(
        math.isfinite(value), f"target {text} must be a finite number, or METRIC=NUMBER as in --target accuracy=0.97"
    )
    return metric.strip() or None, value


def workload_names(study: StudyRecord) -> set[str]:
    """Return the names that select a study's workload.

    ``tasks/task.py:Task`` also has the names ``tasks/task.py``, ``task.py:Task``, ``task.py``, ``task`` and ``Task``.
    """
    named = study.workload
    location, _, attribute = named.rpartition(":")
    location, attribute = (location, attribute) if location else (attribute, "")
    path = PurePath(location)
    last = path.stem if path.suffix == ".py" else location.rpartition(".")[2]
    names = {named, location, path.name, last, attribute, f"{path.name}:{attribute}".rstrip(":")}
    names |= {name for name, target in SHIPPED.items() if named in (name, target)} | {SHIPPED.get(named, named)}
    words = study.spec.get("command")
    for word in words if isinstance(words, list) else ():
        if str(word).endswith((".py", ".sh")):
            names |= {str(word), PurePath(str(word)).name}
    return names - {""}


def device_of(study: StudyRecord) -> str:
    return "" if study.environment is None else study.environment.device_name


def precision_of(study: StudyRecord) -> str:
    return "" if study.environment is None else study.environment.precision


def nothing_matches(asked: StudyFilter, studies: Sequence[StudyRecord]) -> NotFoundError:
    if not studies:
        return NotFoundError(
            "found no study that is not archived",
            hint="make a study with `bssearch run SPEC`, or name another database with --db",
        )
    return NotFoundError(
        f"no study matches {asked.in_words}", hint=f"choose from {'; '.join(_there_are(asked, studies))}"
    )


def _there_are(asked: StudyFilter, studies: Sequence[StudyRecord]) -> Iterator[str]:
    for name in asked.conditions:
        near = [study for study in studies if asked.unmet(study) == {name}] or studies
        values = {_VALUES[name](study) or "unknown" for study in near}
        named = ", ".join(difflib.get_close_matches(str(getattr(asked, name)), values, MOST_NAMED, 0.0))
        yield f"{name}s {named}{f' and {len(values) - MOST_NAMED} more' if len(values) > MOST_NAMED else ''}"


_VALUES: Mapping[str, Callable[[StudyRecord], str]] = {
    "workload": lambda study: study.workload,
    "device": device_of,
    "target": lambda study: study.target.in_words,
    "objective": lambda study: study.objective,
    "precision": precision_of,
}


def study_rows(store: Store, studies: Iterable[StudySummary], *, archived: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``study list --format json`` in the order of ``studies``.

    Skips archived studies unless ``archived``, and closes the store.
    """
    with store:
        for one in studies:
            if one.archived_at is not None and not archived:
                continue
            found = short_answer(store, one.name)
            yield {
                "name": one.name,
                "workload": one.workload,
                "target": one.target.in_words,
                "objective": one.objective,
                "trials": one.trials,
                "reached": one.reached,
                "running": one.running,
                "best_batch_size": found and found.optimal.batch_size,
                "best_seconds": found and found.seconds,
                "within_5_percent": found and found.within_5_percent,
                "provisional": found and found.provisional,
                "answer": found and found.in_words,
                "medians": found and found.medians,
                "created_by": one.created_by,
                "created_at": one.created_at.isoformat(timespec="seconds"),
                "archived_at": one.archived_at and one.archived_at.isoformat(timespec="seconds"),
                "database": store.masked_url,
                "device": device_of(one) or None,
                "precision": precision_of(one) or None,
            }


class Question(Model):
    """The conditions that two studies must share for comparable answers.

    ``workload`` omits the folder. Unknown ``device`` and ``precision`` are empty.
    """

    workload: str
    metric: str
    target: float
    goal: Goal
    objective: str
    device: str
    precision: str

    @property
    def in_words(self) -> dict[str, str]:
        return {
            "workload": self.workload,
            "target": f"{self.metric} {self.goal.sign} {self.target:g}",
            "objective": self.objective,
            "device": self.device or "unknown",
            "precision": self.precision or "unknown",
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """A study with its answer and database."""

    study: StudyRecord
    database: str
    answer: Answer

    @property
    def acceptable(self) -> set[int]:
        """The tried batch sizes with an objective value within 5 % of the best value."""
        low, high = self.answer.flat_range
        flat = {row.batch_size for row in self.answer.batches if low <= row.batch_size <= high}
        return {self.answer.optimal.batch_size, *flat, *self.answer.tied}

    def accepts(self, batch_size: int) -> bool:
        """Return True if a batch size, tried or not, has an objective value within 5 % of the best value."""
        low, high = self.answer.flat_range
        return low <= batch_size <= high or batch_size in self.acceptable

    @property
    def question(self) -> Question:
        target = self.answer.target
        return Question(
            workload=_without_folder(self.study.workload),
            metric=target.metric,
            target=target.value,
            goal=target.goal,
            objective=self.answer.objective,
            device=device_of(self.study),
            precision=precision_of(self.study),
        )


def _without_folder(workload: str) -> str:
    location, separator, attribute = SHIPPED.get(workload, workload).rpartition(":")
    return f"{PurePath(location).name}:{attribute}" if separator else workload


def without_copies(found: Sequence[Finding]) -> list[Finding]:
    """Of each study's copies, keep the copy with the most trials."""
    copies = grouped((one.study.mark, one) for one in found)
    kept = [max(ones, key=lambda one: sum(row.trials for row in one.answer.batches)) for ones in copies.values()]
    return [one for one in found if any(one is other for other in kept)]


MOST_DIFFERENCES = 5  # the most differences between two studies that a sentence names

LONGEST_VALUE = 40  # the most characters of a value in a sentence

OF_DEVICE = ("device_name", "precision", "compile_mode")
OF_VERSIONS = ("torch_version", "cuda_version", "cudnn_version", "driver_version", "python_version")
# Environment fields that distinguish two studies besides their questions; the host comes last.
OF_CODE = ("workload_revision", "git_revision")


class Disagreement(Model):
    """Two studies that disagree ``about`` the batch size or the objective value, with their differences."""

    between: list[str]
    about: list[Literal["batch_size", "figure"]]
    differences: list[str]
    message: str


class Agreed(Model):
    """The agreement of answers on a batch size within 5 % of each optimum, and on the objective value."""

    agree: bool
    batch_size: int | None
    flat_range: list[int] | None  # common range of all answers
    disagreements: list[Disagreement]


class QuestionAgreement(Agreed):
    """The agreement of the answers to one ``question``."""

    question: Question
    studies: list[str]


class Agreement(Agreed):
    """The agreement of studies; studies with different questions do not agree."""

    questions: list[QuestionAgreement]


def agreement_of(found: Sequence[Finding]) -> Agreement:
    """Return the agreement of all answers, and of the answers to each question."""
    named = labelled(without_copies(found))
    asked = grouped((tuple(one.question.in_words.values()), (label, one)) for label, one in named)
    questions = [_of_one_question(named) for named in asked.values()]
    only = questions[0] if len(questions) == 1 else None
    return Agreement(
        agree=only is not None and only.agree,
        batch_size=None if only is None else only.batch_size,
        flat_range=None if only is None else only.flat_range,
        disagreements=[disagreement for one in questions for disagreement in one.disagreements],
        questions=questions,
    )


def labelled(found: Sequence[Finding]) -> list[tuple[str, Finding]]:
    counts = Counter(one.study.name for one in found)
    return [(one.study.name if counts[one.study.name] == 1 else in_database(one), one) for one in found]


def in_database(found: Finding) -> str:
    return f"{found.study.name} in {found.database}"


def _of_one_question(named: Sequence[tuple[str, Finding]]) -> QuestionAgreement:
    found = [one for _, one in named]
    disagreements = [apart for one, other in combinations(named, 2) if (apart := _between(*one, *other)) is not None]
    size = _common_size(found)
    low, high = max(one.answer.flat_range[0] for one in found), min(one.answer.flat_range[1] for one in found)
    return QuestionAgreement(
        question=found[0].question,
        studies=[label for label, _ in named],
        agree=size is not None and not disagreements,
        batch_size=size,
        flat_range=[low, high] if size is not None and low <= high else None,
        disagreements=disagreements,
    )


def _common_size(found: Sequence[Finding]) -> int | None:
    recommended = Counter(one.answer.optimal.batch_size for one in found)
    known = set().union(*(one.acceptable | set(one.answer.flat_range) for one in found))
    common = [size for size in known if all(one.accepts(size) for one in found)]
    everywhere = set.intersection(*(one.acceptable for one in found))
    return min(common, key=lambda size: (-recommended[size], size not in everywhere, size), default=None)


def _between(name: str, one: Finding, other_name: str, other: Finding) -> Disagreement | None:
    about: list[Literal["batch_size", "figure"]] = []
    if _common_size([one, other]) is None:
        about.append("batch_size")
    if _figures_are_apart(one, other):
        about.append("figure")
    if not about:
        return None
    differences = list(differing(one, other))
    told = [f"{name} {_recommends(one)}, {other_name} {_recommends(other)}"]
    if "figure" in about:
        told.append(f"{name} measured {_figure(one)}, {other_name} measured {_figure(other)}")
    return Disagreement(
        between=[name, other_name],
        about=about,
        differences=differences,
        message=f"{'; '.join(told)}. {_likely_cause(differences)}.",
    )


def _figures_are_apart(one: Finding, other: Finding) -> bool:
    if objective_in(one.answer).unit != objective_in(other.answer).unit or one.answer.clock != other.answer.clock:
        return False
    figures = [one.answer.optimal.objective_value, other.answer.optimal.objective_value]
    known = [(one.low, one.high) for one in figures if one.low is not None and one.high is not None]
    # An interval is missing if the runs are too few.
    return len(known) == 2 and max(low for low, _ in known) > min(high for _, high in known)


def _recommends(one: Finding) -> str:
    (low, high), size = one.answer.flat_range, one.answer.optimal.batch_size
    others = [str(tied) for tied in one.answer.tied if not low <= tied <= high]
    within = ", ".join([str(low) if low == high else f"{low} to {high}", *others])
    flat = "" if within == str(size) else f" ({within} are within 5 %)"
    return f"recommends {'provisionally ' if one.answer.provisional else ''}batch {size}{flat}"


def _figure(one: Finding) -> str:
    figure, objective = one.answer.optimal.objective_value, objective_in(one.answer)
    return with_interval(figure, objective.digits, objective.unit)


def _likely_cause(differences: Sequence[str]) -> str:
    if not differences:
        return "The studies have equal questions, devices, versions and code"
    more = len(differences) - MOST_DIFFERENCES
    return f"Differences: {'; '.join(differences[:MOST_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}"


def differing(one: Finding, other: Finding) -> Iterator[str]:
    specs = [spec_of(one.study), spec_of(other.study)]
    changes = {
        **_changed(one, other, OF_DEVICE),
        **changed_fields(specs[0].question, specs[1].question),
        **changed_fields(specs[0].executor.threads, specs[1].executor.threads, "executor.threads"),
        **_changed(one, other, OF_VERSIONS),
        **_changed(one, other, OF_CODE),
        **_changed(one, other, ("host",)),
    }
    for field, (value, its) in changes.items():
        yield f"{field} {_short(value)} / {_short(its)}"


def _changed(one: Finding, other: Finding, names: Sequence[str]) -> dict[str, tuple[object, object]]:
    first, second = ({name: getattr(each.study.environment, name) for name in names} for each in (one, other))
    return changed_fields(first, second)


def _short(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def in_words(agreement: Agreement) -> list[str]:
    asked = agreement.questions
    if len(asked) == 1:
        return [_told_of(asked[0])]
    answers = sum(len(one.studies) for one in asked)
    told = [one.question.in_words for one in asked]
    apart = [about for about in told[0] if len({one[about] for one in told}) > 1]
    return [
        f"The {answers} answers concern {len(asked)} different questions and are not comparable:",
        *(
            f"- {', '.join(f'{about} {words[about]}' for about in apart)}: {_told_of(one)}"
            for one, words in zip(asked, told, strict=True)
        ),
    ]


def _told_of(one: QuestionAgreement) -> str:
    size, flat, answers = one.batch_size, one.flat_range, len(one.studies)
    each = " in each answer" * (answers > 1)
    within = "" if flat is None or flat[0] == flat[1] else f" ({flat[0]} to {flat[1]} are within 5 %{each})"
    if answers == 1:
        return f"One study answers: batch {size}{within}."
    if size is None:
        return f"The {answers} answers do not agree: no batch size is within 5 % of the best in every answer."
    cost = "" if one.agree else ", but not on its objective value"
    return f"The {answers} answers agree on batch {size}{within}{cost}."


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


class StudyAnswer(Model):
    """A study's answer; without an answer, ``note`` gives the reason."""

    study: str
    database: str
    workload: str
    device: str
    precision: str
    created_by: str
    created_at: str
    objective: str
    target: Target
    unit: str = ""
    optimal: Optimal | None = None
    flat_range: list[int] | None = None
    tied: list[int] | None = None
    provisional: bool | None = None
    within_5_percent: float | None = None
    note: str | None = None
    copy_of: str | None = None  # the copy that counts


class AcrossAnswer(Model):
    """The answers to a ``query``, and their agreement."""

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
    """Return the answers of all matching studies, and their agreement.

    Skips archived studies. Raises `UsageError` if no condition is given or ``target`` is wrong, `NotFoundError` if no
    study matches, and `TargetNotReachedError` if no match has an answer. An unusable database raises `DatabaseError`.

    Example: ``bssearch.best_across(["sqlite:///a.db", "sqlite:///b.db"], workload="digits")``
    """
    asked = StudyFilter.of(workload=workload, device=device, target=target, objective=objective, precision=precision)
    require(
        asked.conditions, "best_across() needs a condition", hint="give a workload, device or target to select studies"
    )
    with open_databases([db] if isinstance(db, str) else db) as stores:
        return answers_in(stores, asked)


def answers_in(stores: Sequence[Store], asked: StudyFilter) -> AcrossAnswer:
    listed: list[StudyRecord] = []
    found: list[tuple[StudyAnswer, Finding | None]] = []
    for store in stores:
        with store:
            here = [study for study in store.studies.summaries() if study.archived_at is None]
            found += [_answered(store, study) for study in here if asked.matches(study)]
        listed += here
    if not found:
        raise nothing_matches(asked, listed)
    if all(finding is None for _, finding in found):
        first = found[0][0]
        raise TargetNotReachedError(
            f"{len(found)} studies match, but no study has an answer; for example, {first.study}: {first.note}"
            if len(found) > 1
            else f"study {first.study!r} matches, but has no answer: {first.note}",
            hint=f"see the study's trials with `bssearch study show {first.study}`",
        )
    return AcrossAnswer(
        query={**asdict(asked), "databases": [store.masked_url for store in stores]},
        answers=_with_copies(found),
        agreement=agreement_of([finding for _, finding in found if finding is not None]),
    )


def _with_copies(found: Sequence[tuple[StudyAnswer, Finding | None]]) -> list[StudyAnswer]:
    kept = {one.study.mark: one for one in without_copies([finding for _, finding in found if finding is not None])}
    return [
        row
        if finding is None or kept[finding.study.mark] is finding
        else row.model_copy(update={"copy_of": in_database(kept[finding.study.mark])})
        for row, finding in found
    ]


def _answered(store: Store, study: StudyRecord) -> tuple[StudyAnswer, Finding | None]:
    row = StudyAnswer(
        study=study.name,
        database=store.masked_url,
        workload=study.workload,
        device=device_of(study),
        precision=precision_of(study),
        created_by=study.created_by,
        created_at=study.created_at.isoformat(timespec="seconds"),
        objective=study.objective,
        target=study.target,
    )
    try:
        spec_of(study)
    except DatabaseError as error:  # other studies may still have answers
        return row.model_copy(update={"note": error.message}), None
    try:
        found = answer(store, study.name)
    except TargetNotReachedError as error:
        return row.model_copy(update={"note": error.message}), None
    return row.model_copy(
        update={
            "optimal": found.optimal,
            "flat_range": found.flat_range,
            "tied": found.tied,
            "provisional": found.provisional,
            "within_5_percent": found.within_5_percent,
            "unit": objective_in(found).unit,
        }
    ), Finding(study, store.masked_url, found)


def answered_row(one: StudyAnswer) -> dict[str, Any]:
    row = {
        "study": one.study,
        "database": one.database,
        "device": one.device,
        "who": one.created_by,
        "when": one.created_at[:10],
    }
    if one.optimal is None or one.flat_range is None:
        return {**row, "figure": "no answer"}
    figure = one.optimal.objective_value
    return {
        **row,
        "optimal": one.optimal.batch_size,
        "learning_rate": one.optimal.parameters.get("learning_rate"),
        "figure": f"{with_interval(figure, unit=one.unit)} ({plural(figure.runs, 'run')})",
        "within 5 %": span(one.flat_range),
        "provisional": "yes" if one.provisional else "no",
    }
