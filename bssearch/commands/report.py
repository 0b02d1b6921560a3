"""The content of a study's page, and the comparison of studies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from pydantic import Field

from bssearch.analysis.answer import Answer, Figure, Ratio, Time, objective_in
from bssearch.analysis.growing import typical_run
from bssearch.analysis.headline import with_interval
from bssearch.analysis.objectives import objective_of
from bssearch.analysis.optimum import Estimate, estimate, ratio_interval
from bssearch.analysis.rules.audit import FULL_LIMIT_PHASES, audit
from bssearch.analysis.shape import CriticalBatch, Model, Notice
from bssearch.errors import TargetNotReachedError
from bssearch.figures.page import StudyPicture
from bssearch.figures.plots import curve_trials, objective_picture
from bssearch.records import Phase, StudyRecord, TrialRecord, step_seconds_of
from bssearch.records.text import ends, number, plural, span
from bssearch.search.finding import answer, scratch_answers
from bssearch.spec import spec_of
from bssearch.storage.repository import Store

COMPARED = (
    "study",
    "optimal",
    "figure",
    "ratio to first",
    "within 5 %",
    "critical batch",
    "largest that fits",
    "test metric",
    "device",
    "precision",
    "workload",
    "objective",
    "target",
)


class Comparison(Model):
    """A study in a comparison; ``note`` is the reason for a missing answer or ratio."""

    study: str
    database: str
    device: str | None
    precision: str | None
    workload: str
    objective: str
    target: str
    optimal_batch_size: int | None = None
    objective_value: Figure | None = None
    time_to_target_s: Time | None = None
    ratio_to_first: Ratio | None = None  # ratio of median objective values
    flat_range: list[int] | None = None
    b_crit: CriticalBatch | None = None  # null if too few batch sizes support the law
    fit_verdict: str | None = None
    largest_that_fits: int | None = None
    test_metric: float | None = None
    note: str | None = None
    warnings: list[Notice] = Field(default_factory=list)


def picture_of(store: Store, name: str, trials: Sequence[TrialRecord] | None = None) -> StudyPicture:
    """Gather the content of a study's page; ``trials``, if given, must be all trials of the study."""
    study, trials = store.studies.get(name), store.trials.of(name) if trials is None else trials
    found = answer(store, name, trials=trials)
    spec = spec_of(study)
    chosen = curve_trials(found, trials)
    grown = None if found.batch_schedule is None else typical_run(found.batch_schedule, trials)
    curves = store.trials.curves(name, [*chosen.values(), *([] if grown is None else [grown.number])])
    return StudyPicture(
        study=study,
        spec=spec,
        answer=found,
        trials=trials,
        curves={size: curves[number] for size, number in chosen.items()},
        audit=audit(
            spec,
            trials,
            found,
            store.probes.step_times(name),
            store.probes.memory_boundary(name),
            scratch=scratch_answers(store, spec),
        ).model_dump(mode="json")
        if any(trial.phase in FULL_LIMIT_PHASES for trial in trials)
        else None,
        grown=None if grown is None else (grown, curves[grown.number]),
    )


def svg_of(store: Store, name: str) -> str:
    found, study = answer(store, name), store.studies.get(name)
    spec = spec_of(study)
    return objective_picture(
        found,
        default_batch_size=spec.default.batch_size if spec.default_is_known else None,
        measured_on=study.created_at.date(),
    )


def compare(studies: Sequence[tuple[Store, str]]) -> list[Comparison]:
    """Compare studies with the first study, and close the stores."""
    with ExitStack() as stack:
        for store in dict.fromkeys(store for store, _ in studies):
            stack.enter_context(store)  # errors about an unusable row name the row
        found = [_Compared(store, name) for store, name in studies]
    return [one.beside(found[0]) for one in found]


class _Compared:
    def __init__(self, store: Store, name: str) -> None:
        self.database = store.masked_url
        self.study: StudyRecord = store.studies.get(name)
        self.answer: Answer | None = None
        self.estimate: Estimate | None = None
        self.missed = ""
        try:
            self.answer = answer(store, name)
        except TargetNotReachedError as error:
            self.missed = error.message
            return
        counted = [one for one in store.trials.of(name) if one.state.has_result]
        runs = [one for one in counted if one.number in self.answer.optimal.trial_numbers]
        objective = objective_in(self.answer).in_own_unit()
        confirmed = [one for one in counted if one.phase is Phase.CONFIRM]
        objective = objective.between(
            confirmed,
            step_seconds_of(store.probes.by_batch_size(name).values(), spec_of(self.study).timed_model),
            counted,
        )
        # An estimate needs positive figures, but a metric may be negative.
        if all((objective.figure(run) or 1) > 0 for run in runs):
            self.estimate = estimate(runs, objective)

    def beside(self, first: _Compared) -> Comparison:
        environment = self.study.environment
        row = Comparison(
            study=self.study.name,
            database=self.database,
            device=None if environment is None else environment.device_name,
            precision=None if environment is None else environment.precision,
            workload=self.study.workload,
            objective=self.study.objective,
            target=self.study.target.in_words,
            note=self.missed or None,
        )
        if self.answer is None:
            return row
        fit, note = self.answer.fit, self._unlike(first)
        return row.model_copy(
            update={
                "optimal_batch_size": self.answer.optimal.batch_size,
                "objective_value": self.answer.optimal.objective_value,
                "time_to_target_s": self.answer.optimal.time_to_target_s,
                "ratio_to_first": None if note else _ratio(self.estimate, first.estimate),
                "flat_range": self.answer.flat_range,
                "b_crit": None if fit is None or fit.verdict == "too_few_points" else fit.b_crit,
                "fit_verdict": fit and fit.verdict,
                "largest_that_fits": self.answer.largest_that_fits.batch_size,
                "test_metric": self.answer.optimal.test_metric,
                "note": note,
                "warnings": self.answer.warnings,
            }
        )

    def _unlike(self, first: _Compared) -> str | None:
        unit, other_unit = (objective_of(spec_of(one)).unit for one in (self.study, first.study))
        differs = {
            "other objective": self.study.objective != first.study.objective,
            "other target": self.study.target != first.study.target,
            "other unit of cost": unit != other_unit,
            "other kind of seconds": (self.answer and self.answer.clock) != (first.answer and first.answer.clock),
        }
        return next((why for why, holds in differs.items() if holds), None)


def _ratio(figure: Estimate | None, first: Estimate | None) -> Ratio | None:
    if figure is None or first is None or figure.median is None or first.median is None:
        return None
    if figure is first:
        return Ratio(value=1.0, at_least=False)
    low, high = ratio_interval(figure, first) or (None, None)
    return Ratio(value=figure.median / first.median, at_least=False, low=low, high=high)


def compared_row(one: Comparison) -> dict[str, Any]:
    figure, ratio, critical = one.objective_value, one.ratio_to_first, one.b_crit
    poor = "" if one.fit_verdict == "fits" else f" ({str(one.fit_verdict).replace('_', ' ')})"
    figures: list[Any] = [None, "target not reached", *[None] * 5]
    if one.optimal_batch_size is not None and one.flat_range is not None:
        figures = [
            one.optimal_batch_size,
            figure and f"{with_interval(figure)} ({plural(figure.runs, 'run')})",
            one.note if ratio is None else f"{number(ratio.value)}{ends(ratio.low, ratio.high)}",
            span(one.flat_range),
            critical and f"{critical.in_words}{poor}",
            one.largest_that_fits,
            one.test_metric,
        ]
    objective = str(one.objective).replace("_", " ")
    row = [one.study, *figures, one.device, one.precision, one.workload, objective, one.target]
    return dict(zip(COMPARED, row, strict=True))
