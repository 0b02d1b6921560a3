"""Which models a study's answer is about, where ``space.model`` searches: step times are those of the default's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

from bssearch.analysis.optimum import Candidate, Verdict
from bssearch.records import ModelParameters, ProbeRecord, model_parameters
from bssearch.spec import StudySpec

MODELS_DIFFER = "models_differ"
LAW_NOT_TIMED = "law_not_timed"


def is_timed(spec: StudySpec, candidate: Candidate | None) -> bool:
    """Return whether the study's step times are those of a candidate's model; of none they are its batch size's."""
    if candidate is None or not spec.has_several_models:
        return True
    return model_parameters(candidate.configuration) == spec.timed_model


def are_of_one_model(spec: StudySpec, verdict: Verdict) -> bool:
    """Return whether all batch sizes that reached the target did so with the same model, so that steps compare."""
    return not spec.has_several_models or len(_models(verdict)) < 2


def timed_probes(spec: StudySpec, verdict: Verdict, probes: Mapping[int, ProbeRecord]) -> Mapping[int, ProbeRecord]:
    """Return the step times by which a law of steps gives seconds: none where its steps are another model's."""
    return {} if spec.has_several_models and _models(verdict) != {spec.timed_model} else probes


def own_step_seconds(candidate: Candidate) -> float | None:
    """Return the median seconds of a step in a candidate's own runs, without waits for a CPU where they are known."""
    outcomes = [run.outcome for run in candidate.runs if run.outcome is not None and run.outcome.steps]
    paces = [(one.undelayed_train_seconds or one.train_seconds) / one.steps for one in outcomes]
    return statistics.median(paces) if paces else None


def about_default_model(spec: StudySpec) -> Iterator[tuple[str, str]]:
    """Yield, as (code, sentence), that step times and memory are the default's model's, where others are searched."""
    if not spec.has_several_models:
        return
    searched = ", ".join(spec.varied_in_model)
    yield (
        "default_model_timed",
        f"space.model searches {searched}, but step times and memory are measured with the default's model alone "
        f"({_in_words(spec.timed_model)}): what is predicted from them holds for that model; trials of others count "
        "by their own seconds, and a row of another model has its runs' own step time",
    )


def about_models(spec: StudySpec, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield, as (code, sentence), what a search over models means for an answer."""
    yield from about_default_model(spec)
    if not are_of_one_model(spec, verdict):
        yield (
            MODELS_DIFFER,
            f"the best configurations of the batch sizes have {len(_models(verdict))} different models: their steps do "
            "not compare, so there is no law and no slope",
        )
    elif spec.has_several_models and _models(verdict) != {spec.timed_model}:
        yield (
            LAW_NOT_TIMED,
            "the best configuration of each batch size has the same model, not the default's, of which the step times "
            "are: the law gives steps and no seconds",
        )


def _models(verdict: Verdict) -> set[ModelParameters]:
    return {model_parameters(one.configuration) for one in _reached(verdict.by_batch.values())}


def _reached(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [one for one in candidates if math.isfinite(one.value)]


def _in_words(model: ModelParameters) -> str:
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in model)
