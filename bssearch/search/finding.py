"""The answer of a stored study: the one that was stored when its last trial ended, or made anew from its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from bssearch.analysis.answer import NO_NEXT_STEP, Answer
from bssearch.analysis.derived import at_target, easier_target, refuse_another_target
from bssearch.analysis.law.quick import Promise, QuickPrior, promise_of
from bssearch.analysis.notices import about_versions, retargeted
from bssearch.analysis.objectives.base import objective_of
from bssearch.analysis.report import build_answer
from bssearch.analysis.shape import Notice
from bssearch.errors import TargetNotReachedError, UsageError
from bssearch.records import Configuration, TrialRecord, model_parameters
from bssearch.spec import StudySpec
from bssearch.spec.parts import BudgetSpec
from bssearch.spec.stored import spec_of
from bssearch.step_times import step_seconds_of, with_step_time
from bssearch.storage.repository import Store

ANSWERS = 19
"""What makes answers: counted up where the same trials give another one, so that stored ones are made anew."""


class SearchEnd(BaseModel):
    """Why a search ended, with the trials that were ``spent`` then and the ``budget`` that it had."""

    reason: str
    spent: int
    budget: BudgetSpec

    @classmethod
    def stored(cls, store: Store, name: str) -> SearchEnd | None:
        """Return what is stored of the end of a study's search, None where that never was."""
        return cls.within(store.last_finding(name))

    @classmethod
    def within(cls, last: object) -> SearchEnd | None:
        """Return the end that a stored finding tells."""
        with suppress(ValidationError):  # what something else has written there does not matter
            return cls.model_validate(last.get("search_end") if isinstance(last, Mapping) else None)
        return None


def save_finding(store: Store, name: str, search_end: SearchEnd | None = None) -> None:
    """Store the answer of a study as it is now, for `answer` to find, and how its search ended.

    Without ``search_end`` the one that is stored stays. Where there is neither, nothing is stored.
    """
    stamp, last = store.stamp(name), store.last_finding(name)
    end, quick = search_end or SearchEnd.within(last), _quick_within(last)
    found = None
    with suppress(TargetNotReachedError):
        found = compute_answer(store, name).model_dump(mode="json")
    if found is not None or end is not None or quick is not None:
        store.save_finding(name, stamp, _document(found, end, quick))


def save_quick(store: Store, name: str, quick: Mapping[str, Any]) -> None:
    """Store the quick answer of a study, as JSON values; its answer is made anew when it is read."""
    kept = _document(None, SearchEnd.stored(store, name), quick)
    store.save_finding(name, store.stamp(name), kept, is_news=True)


def _document(
    found: Mapping[str, Any] | None, end: SearchEnd | None, quick: Mapping[str, Any] | None
) -> dict[str, object]:
    known = None if end is None else end.model_dump(mode="json")
    return {"made_by": ANSWERS, "answer": found, "search_end": known, "quick": quick}


def stored_quick(store: Store, name: str) -> Mapping[str, Any] | None:
    """Return what `save_quick` has stored of a study, None where there is nothing."""
    return _quick_within(store.last_finding(name))


def quick_prior(store: Store, spec: StudySpec) -> QuickPrior | None:
    """Return what the search of a study begins with: its stored quick answer, where its objective is one of seconds.

    A study has one question and one kind of device, and so has what is stored of it.
    """
    quick = stored_quick(store, spec.name) if objective_of(spec).trials_race else None
    return None if quick is None else QuickPrior.of(quick)


def _quick_within(last: object) -> Mapping[str, Any] | None:
    quick = last.get("quick") if isinstance(last, Mapping) else None
    return quick if isinstance(quick, Mapping) else None


def answer(store: Store, name: str, target: float | None = None, trials: Sequence[TrialRecord] | None = None) -> Answer:
    """Return the answer of a study in an open store; for another target from the stored curves.

    The one that was stored when the last trial ended is taken, where nothing has changed since. ``trials`` are all that
    the study has, where they were read.
    """
    if target is None:
        stored = store.finding(name)
        if isinstance(stored, Mapping) and stored.get("made_by") == ANSWERS and stored.get("answer") is not None:
            with suppress(ValidationError):  # what something else has written there does not matter
                return Answer.model_validate(stored["answer"])
    return compute_answer(store, name, target, trials)


def compute_answer(
    store: Store, name: str, target: float | None = None, trials: Sequence[TrialRecord] | None = None
) -> Answer:
    """Return the answer of a study from its trials, which are read where they are not given."""
    study = store.study(name)
    spec = spec_of(study)
    trials = store.trials(name) if trials is None else trials
    probes, memory = store.probes(name), store.memory_boundary(name)
    uses = [] if study.environment is None else store.memory(name, study.environment)
    noise, versions = store.noise(name), store.torch_versions(name)
    if target is not None:
        refuse_another_target(objective_of(spec))
    if target is None or target == study.target.value:
        found = _with(build_answer(study, spec, trials, probes, memory, uses, noise), about_versions(versions))
        return found.model_copy(update={"quick": _promise(stored_quick(store, name), found)})
    if spec.is_imported:
        raise UsageError(
            f"the runs of study {name!r} were imported without learning curves: when they reached "
            f"{study.target.metric} {target:g} is not known",
            hint="import them again with that target, where their table has the steps and seconds to it",
        )
    easier = easier_target(study.target, target)
    curves = store.curves(name, [trial.number for trial in trials])
    model = spec.timed_model

    def step_seconds(one: Configuration) -> float | None:
        probe = None if one.grows else probes.get(one.batch_size)
        return probe.step_seconds if probe is not None and model_parameters(one) == model else None

    timed = step_seconds_of(probes.values(), model)
    moved = [at_target(one, curves[one.number], easier, step_seconds(one.configuration)) for one in trials]
    moved = [with_step_time(one, timed) if one.configuration.grows else one for one in moved]
    found = build_answer(replace(study, target=easier), spec, moved, probes, memory, uses, noise)
    warnings = [retargeted(study.target), *found.warnings, *about_versions(versions)]
    return found.model_copy(update={"warnings": warnings, **NO_NEXT_STEP})


def _promise(quick: Mapping[str, Any] | None, found: Answer) -> Promise | None:
    try:
        return None if quick is None else promise_of(quick, found)
    except (KeyError, TypeError, ValueError):  # what something else has written there does not matter
        return None


def _with(found: Answer, notices: Sequence[Notice]) -> Answer:
    return found.model_copy(update={"warnings": [*found.warnings, *notices]}) if notices else found
