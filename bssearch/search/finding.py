"""The answers of stored studies, cached or recomputed."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError, ValidatorFunctionWrapHandler, field_validator

from bssearch.analysis.answer import NO_NEXT_STEP, Answer
from bssearch.analysis.build_answer import (
    at_target,
    build_answer,
    compared_trials,
    first_verdict,
    other_target,
    refuse_another_target,
)
from bssearch.analysis.law.quick import Promise, QuickAnswer
from bssearch.analysis.notices import about_versions, retargeted
from bssearch.analysis.objectives import objective_of
from bssearch.analysis.optimum import CountedSeconds, without_early_ends
from bssearch.analysis.shape import Notice
from bssearch.errors import TargetNotReachedError, require
from bssearch.records import TrialRecord, TrialState, step_seconds_of, with_step_time
from bssearch.search.history import History
from bssearch.search.stored_finding import SearchEnd
from bssearch.spec import FINE_TUNING, FINE_TUNING_FACTOR, SCRATCH_RATES, StudySpec, spec_of
from bssearch.storage.repository import Store

ANSWERS = 36  # version of stored answers; increase this number if the same trials give another answer


MOVED = 0.01  # A notice reports a larger relative change of a median; printed medians have three digits


class Told(NamedTuple):
    """A batch size's number of trials, and the first median seconds reported with this number."""

    trials: int
    median: float


class _Kept(BaseModel):
    # Stored finding without its invalid parts

    made_by: int | None = None
    answer: Answer | None = None
    told: dict[int, Told] | None = None
    search_end: SearchEnd | None = None
    quick: QuickAnswer | None = None

    @field_validator("*", mode="wrap")
    @classmethod
    def _known(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            return None


def save_finding(store: Store, name: str, search_end: SearchEnd | None = None) -> None:
    """Store the current answer unless the stored answer is up to date. Also store ``search_end`` if given."""
    if search_end is None and _current(store, name) is not None:
        return
    stamp, last = store.findings.stamp(name), _Kept.model_validate(store.findings.last(name))
    found, told = None, None
    with suppress(TargetNotReachedError):
        found = compute_answer(store, name)
        told = _first_told(last, found)
    kept = _Kept(made_by=ANSWERS, answer=found, told=told, search_end=search_end or last.search_end, quick=last.quick)
    if kept.answer or kept.search_end or kept.quick:
        store.findings.save(name, stamp, kept.model_dump(mode="json"))


def _first_told(last: _Kept, found: Answer) -> dict[int, Told]:
    # The first reported median seconds after each batch size's newest trial
    before = (last.told or {}) if last.made_by == ANSWERS else {}
    now = {
        one.batch_size: Told(one.trials, one.time_to_target_s.median) for one in found.batches if one.time_to_target_s
    }
    return {
        size: before[size] if size in before and before[size].trials == one.trials else one for size, one in now.items()
    }


def _about_moved(told: Mapping[int, Told], found: Answer) -> list[Notice]:
    moved = [
        f"batch {size} by {100 * (now.median / before.median - 1):+.1f} %"
        for size, now in _first_told(_Kept(), found).items()
        if abs(now.median - (before := told[size]).median) > MOVED * before.median > 0
    ]
    message = f"new step times changed the median seconds of batch sizes without new trials: {', '.join(moved)}"
    return [Notice(code="step_times_changed", message=message)] if moved else []


def save_quick(store: Store, name: str, quick: QuickAnswer) -> None:
    """Store the quick answer. The next read recomputes the full answer."""
    last = _Kept.model_validate(store.findings.last(name))
    kept = _Kept(made_by=ANSWERS, told=last.told, search_end=last.search_end, quick=quick)
    store.findings.save(name, store.findings.stamp(name), kept.model_dump(mode="json"), is_news=True)


def stored_quick(store: Store, name: str) -> QuickAnswer | None:
    return _Kept.model_validate(store.findings.last(name)).quick


def quick_prior(store: Store, spec: StudySpec) -> QuickAnswer | None:
    """Return the quick answer as the search's prior; None if missing, or if the objective is not time or cost."""
    return stored_quick(store, spec.name) if objective_of(spec).trials_race else None


def answer(store: Store, name: str, target: float | None = None, trials: Sequence[TrialRecord] | None = None) -> Answer:
    """Return the stored answer if up to date and ``target`` is None, else compute the answer."""
    current = _current(store, name) if target is None else None
    return compute_answer(store, name, target, trials) if current is None else current


def scratch_answers(store: Store, spec: StudySpec) -> dict[str, Answer]:
    """Return the answers, by study name, of studies that train a fine-tuning study's workload from scratch."""
    found: dict[str, Answer] = {}
    for one in store.studies.summaries() if spec.preset == FINE_TUNING else ():
        if (one.workload, one.objective) == (spec.workload, spec.objective) and _is_from_scratch(spec_of(one)):
            with suppress(TargetNotReachedError):
                found[one.name] = answer(store, one.name)
    return found


def _is_from_scratch(spec: StudySpec) -> bool:
    # fine-tuning needs no preset, but has learning rates of at most a tenth of the usual rates
    middle = math.sqrt(spec.space.learning_rates[0] * spec.space.learning_rates[-1])
    return spec.preset != FINE_TUNING and any(
        middle * one.learning_rate_scale > SCRATCH_RATES[one.name] / FINE_TUNING_FACTOR for one in spec.space.optimizers
    )


def _current(store: Store, name: str) -> Answer | None:
    stored = _Kept.model_validate(store.findings.current(name) or {})
    return stored.answer if stored.made_by == ANSWERS else None


def compute_answer(
    store: Store, name: str, target: float | None = None, trials: Sequence[TrialRecord] | None = None
) -> Answer:
    """Compute the answer from ``trials`` or stored trials, at ``target`` if given.

    Raises `build_answer`'s errors, and `UsageError` for an unsuitable ``target``.
    """
    study = store.studies.get(name)
    spec = spec_of(study)
    trials = store.trials.of(name) if trials is None else trials
    probes, memory = store.probes.by_batch_size(name), store.probes.memory_boundary(name)
    uses = [] if study.environment is None else store.probes.memory(name, study.environment)
    noise, versions = store.probes.noise(name), store.trials.torch_versions(name)
    if target is not None:
        refuse_another_target(objective_of(spec))
    if target is None or target == study.target.value:
        found = build_answer(study, spec, trials, probes, memory, uses, noise, store.probes.step_times(name))
        last = _Kept.model_validate(store.findings.last(name))
        promise = None if last.quick is None else _promise_of(last.quick, found)
        warnings = [*found.warnings, *about_versions(versions), *_about_moved(_first_told(last, found), found)]
        return found.model_copy(update={"quick": promise, "warnings": warnings})
    curves = store.trials.curves(name, [trial.number for trial in trials])
    require(
        any(curves.values()) or not spec.is_imported,
        f"the imported runs of study {name!r} have no learning curves, so the time to "
        f"{study.target.metric} {target:g} is unknown",
        hint="import the runs again with this target, if the table has the steps and seconds to the target",
    )
    trials = without_early_ends(trials, objective_of(spec))
    other = other_target(study.target, target, may_be_harder=spec.is_imported)
    timed = step_seconds_of(probes.values(), spec.timed_model)
    step_seconds = History(spec, (), probes).step_seconds
    is_harder = study.target.gain(target) > study.target.gain(study.target.value)
    if is_harder:
        trials = [one for one in trials if curves[one.number] or one.state is not TrialState.REACHED]
    moved = [at_target(one, curves[one.number], other, step_seconds(one.configuration)) for one in trials]
    moved = [with_step_time(one, timed) if one.configuration.grows else one for one in moved]
    found = build_answer(replace(study, target=other), spec, moved, probes, memory, uses, noise)
    warnings = [*([] if is_harder else [retargeted(study.target)]), *found.warnings, *about_versions(versions)]
    return found.model_copy(update={"warnings": warnings, **NO_NEXT_STEP})


def counted_seconds(store: Store, name: str, trials: Sequence[TrialRecord]) -> dict[int, CountedSeconds]:
    study, probes = store.studies.get(name), store.probes.by_batch_size(name)
    verdict = first_verdict(study, spec_of(study), compared_trials(trials, store.probes.memory_boundary(name)), probes)
    return {} if verdict is None else verdict.seconds_of(trials)


def _promise_of(quick: QuickAnswer, answer: Answer) -> Promise | None:
    # Compare the quick answer with the confirmed answer; None before confirmation
    best = answer.optimal.batch_size
    if not any(row.confirmed and row.batch_size == best for row in answer.batches):
        return None
    (low, high), flat, size = quick.interval, answer.flat_range, quick.optimal.batch_size
    times = {row.batch_size: row.time_to_target_s.median for row in answer.batches if row.time_to_target_s is not None}
    return Promise(
        batch_size=size,
        interval=quick.interval,
        gain=quick.gain,
        found_batch_size=best,
        found_flat_range=flat,
        holds=low <= flat[1] and flat[0] <= high,
        time_ratio=times[size] / times[best] if times.get(best) and size in times else None,
    )
