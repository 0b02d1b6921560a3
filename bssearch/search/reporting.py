"""What the page of a study, its tables and a comparison of studies are made of, from an open store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from bssearch.analysis.answer import Answer, CriticalBatch, Time
from bssearch.analysis.objective import TIME, step_seconds_of
from bssearch.analysis.page import StudyPicture
from bssearch.analysis.plots import curve_trials
from bssearch.analysis.rules import audit
from bssearch.analysis.time_to_target import Estimate, estimate, ratio_upper_bound
from bssearch.errors import TargetNotReachedError
from bssearch.records import Observation, Phase, StudyRecord, TrialRecord
from bssearch.search.answers import answer
from bssearch.spec import StudySpec
from bssearch.storage.repository import Store

TRIALS_AT_ONCE = 200
OTHER_TARGET = "other target"


class RatioToFirst(BaseModel):
    """A study's time-to-target over that of the first, with its 95 % interval: null below three runs on either side."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float | None
    high: float | None


class Comparison(BaseModel):
    """One study beside others. ``note`` says why there is no answer, or no ratio."""

    model_config = ConfigDict(frozen=True)

    study: str
    device: str | None
    precision: str | None
    workload: str
    target: str
    optimal_batch_size: int | None = None
    time_to_target_s: Time | None = None
    ratio_to_first: RatioToFirst | None = None
    flat_range: list[int] | None = None
    b_crit: CriticalBatch | None = None
    fit_verdict: str | None = None
    largest_that_fits: int | None = None
    test_metric: float | None = None
    note: str | None = None


def picture_of(store: Store, name: str) -> StudyPicture:
    """Return all that the page of a study shows; the rules of thumb where some were audited.

    Raises `NotFoundError`, and `TargetNotReachedError` where no trial reached the target.
    """
    found = answer(store, name)
    study, trials = store.study(name), store.trials(name)
    spec = StudySpec.model_validate(study.spec)
    chosen = curve_trials(found, trials)
    curves = store.curves(name, list(chosen.values()))
    audited = any(trial.phase is Phase.AUDIT for trial in trials)
    return StudyPicture(
        study=study,
        spec=spec,
        answer=found,
        trials=trials,
        curves={size: curves[number] for size, number in chosen.items()},
        audit=audit(spec, trials, found, store.step_times(name), store.memory_boundary(name)) if audited else None,
    )


def observations_of(store: Store, name: str, trials: Sequence[TrialRecord]) -> Iterator[tuple[int, Observation]]:
    """Yield every observation of some trials with the trial's number, a few trials' in memory at a time."""
    numbers = [trial.number for trial in trials]
    for start in range(0, len(numbers), TRIALS_AT_ONCE):
        for number, curve in store.curves(name, numbers[start : start + TRIALS_AT_ONCE]).items():
            for observation in curve:
                yield number, observation


def compare(store: Store, names: Sequence[str]) -> list[Comparison]:
    """Return studies side by side, each on the device it is bound to, with its time over that of the first.

    Raises `NotFoundError` where one does not exist.
    """
    found = [_Compared(store, name) for name in names]
    return [one.beside(found[0]) for one in found]


class _Compared:
    """A study to compare, with its answer where there is one."""

    def __init__(self, store: Store, name: str) -> None:
        self.study: StudyRecord = store.study(name)
        self.answer: Answer | None = None
        self.time: Estimate | None = None
        self.missed = ""
        try:
            self.answer = answer(store, name)
        except TargetNotReachedError as error:
            self.missed = error.message
            return
        runs = [store.trial(name, number) for number in self.answer.optimal.trial_numbers]
        time, measure = self.answer.optimal.time_to_target_s, TIME
        if time is not None and time.basis == "steps_x_step_time":
            measure = replace(TIME, step_seconds=step_seconds_of(store.probes(name).values()))
        self.time = estimate(runs, measure)

    def beside(self, first: _Compared) -> Comparison:
        """Return the study's row in a comparison with the first."""
        target, environment = self.study.target, self.study.environment
        row = Comparison(
            study=self.study.name,
            device=None if environment is None else environment.device_name,
            precision=None if environment is None else environment.precision,
            workload=str(self.study.spec["workload"]),
            target=f"{target.metric} {target.goal.sign} {target.value:g}",
            note=self.missed or None,
        )
        if self.answer is None:
            return row
        fit = self.answer.fit
        same = target == first.study.target
        return row.model_copy(
            update={
                "optimal_batch_size": self.answer.optimal.batch_size,
                "time_to_target_s": self.answer.optimal.time_to_target_s,
                "ratio_to_first": _ratio(self.time, first.time) if same else None,
                "flat_range": self.answer.flat_range,
                "b_crit": fit and fit.b_crit,
                "fit_verdict": fit and fit.verdict,
                "largest_that_fits": self.answer.largest_that_fits.batch_size,
                "test_metric": self.answer.optimal.test_metric,
                "note": None if same else OTHER_TARGET,
            }
        )


def _ratio(time: Estimate | None, first: Estimate | None) -> RatioToFirst | None:
    if time is None or first is None or time.median is None or first.median is None:
        return None
    if time is first:
        return RatioToFirst(value=1.0, low=None, high=None)
    high, inverse = ratio_upper_bound(time, first), ratio_upper_bound(first, time)
    low = None if inverse is None else 1 / inverse
    return RatioToFirst(value=time.median / first.median, low=low, high=high)
