"""The answer's rows, one per batch size, and signs of poor tuning."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bssearch.analysis.answer import Batch, BestTrial, Figure, Restricted, Time
from bssearch.analysis.generalisation import over_seeds
from bssearch.analysis.law.batch_model import LawPoint, law_point, rising
from bssearch.analysis.law.beyond import BatchCurves
from bssearch.analysis.measured import BatchNoise
from bssearch.analysis.missing_runs import RATES_TRIED, is_rate_known, rates_tried
from bssearch.analysis.objectives import TIME, EnergyToTarget, Objective, least_of
from bssearch.analysis.optimum import Candidate, Slope, Verdict, median_samples, median_steps, slopes
from bssearch.analysis.shape import Interval, parameters_of
from bssearch.records import (
    FEWEST_RUNS,
    Configuration,
    MemoryBasis,
    ModelParameters,
    Observation,
    Phase,
    ProbeRecord,
    Target,
    TrialRecord,
    TrialState,
    grouped,
    is_said_to_need_warmup,
    median_known,
    model_parameters,
    student_t,
)
from bssearch.records.text import plural
from bssearch.spec import StudySpec

MODELS_DIFFER = "models_differ"
LAW_NOT_TIMED = "law_not_timed"


def is_timed(spec: StudySpec, configuration: Configuration) -> bool:
    return not spec.varied_in_model or model_parameters(configuration) == spec.timed_model


def are_of_one_model(spec: StudySpec, verdict: Verdict) -> bool:
    return not spec.varied_in_model or len(_models(verdict)) < 2


def timed_probes(spec: StudySpec, verdict: Verdict, probes: Mapping[int, ProbeRecord]) -> Mapping[int, ProbeRecord]:
    """Return ``probes``; empty if a best configuration has another model than the timed model."""
    return {} if spec.varied_in_model and _models(verdict) != {spec.timed_model} else probes


def _own_step_seconds(candidate: Candidate) -> float | None:
    # The median seconds per step of a candidate's runs, without CPU waits if known
    paces = [(one.undelayed_train_seconds or one.train_seconds) / one.steps for one in candidate.outcomes if one.steps]
    return statistics.median(paces) if paces else None


def about_default_model(spec: StudySpec) -> Iterator[tuple[str, str]]:
    if not spec.varied_in_model:
        return
    searched = ", ".join(spec.varied_in_model)
    yield (
        "default_model_timed",
        f"space.model searches {searched}, but step times and memory are known only for the default's model "
        f"({_in_words(spec.timed_model)}); trials of other models use measured seconds",
    )


def about_models(spec: StudySpec, verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield from about_default_model(spec)
    if not are_of_one_model(spec, verdict):
        yield (
            MODELS_DIFFER,
            f"the best configurations have {len(_models(verdict))} different models; steps of different models are not "
            "comparable, so the answer has no law and no slope",
        )
    elif spec.varied_in_model and _models(verdict) != {spec.timed_model}:
        yield (
            LAW_NOT_TIMED,
            "all batch sizes do best with the same model, but step times are of the default's model; the law predicts "
            "steps, not seconds",
        )


# Names of the decays of averaged weights and of averaged squared gradients
AVERAGES = {
    "ema_decay": re.compile(
        r"(?:.*[._])?(?:(?:ema|averag(?:e|ing)|polyak|swa)(?:[._]?(?:decay|momentum|beta|rate))?|"
        r"momentum[._]teacher|teacher[._]momentum|target[._](?:decay|momentum))",
        re.I,
    ),
    "beta2": re.compile(r"(?:.*[._])?beta(?:_?2|s[._]1)", re.I),
}


# Names of schedule lengths in steps
LENGTHS = re.compile(
    r"(?:.*[._])?(?:(?:num[._])?warm[._]?up[._](?:steps|iters|iterations)|(?:lr[._])?decay[._]steps|total[._]steps|t[._]max)",
    re.I,
)


def about_fixed_constants(tried: Collection[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Yield (code, sentence) for each decay, warmup and schedule that is equal at batch sizes far apart.

    ``tried`` has pairs of batch size and parameters.
    """
    for name in sorted({name for _, parameters in tried for name in parameters}):
        given = {size: parameters[name] for size, parameters in tried if parameters.get(name) is not None}
        values = {parameters.get(name) for _, parameters in tried} - {None}
        if len(values) != 1 or not is_said_to_need_warmup(max(given), min(given)):
            continue
        (value,) = values
        rule = next((rule for rule, pattern in AVERAGES.items() if pattern.fullmatch(name)), None)
        where, growth = f"at batch sizes {min(given)} to {max(given)}", f"{max(given) / min(given):.3g} ×"
        if rule is not None and isinstance(value, float) and 0.5 <= value < 1:  # a faster decay forgets within a step
            followed = "betas" if rule == "beta2" else rule
            yield (
                f"{rule}_fixed",
                f"{name} = {value:g} is the same {where}, so the half-life in samples grows {growth}; set "
                f"`batch_rules: {{{followed}: half_life}}` or use {value:g}^(batch / reference batch)",
            )
        elif LENGTHS.fullmatch(name) and isinstance(value, int | float) and value >= 1:
            yield (
                "steps_fixed",
                f"{name} = {value:g} is the same {where}, so the length in samples grows {growth}; use epochs, "
                f"samples, or {value:g} × reference batch / batch",
            )


def _models(verdict: Verdict) -> set[ModelParameters]:
    return {model_parameters(one.configuration) for one in verdict.by_batch.values() if math.isfinite(one.value)}


def _in_words(model: ModelParameters) -> str:
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in model)


def default_configuration(spec: StudySpec, trials: Sequence[TrialRecord]) -> Configuration:
    """Return the default, or an imported study's first configuration at the default batch size, if any."""
    if not spec.is_imported:
        return spec.default_configuration
    at_default = (trial.configuration for trial in trials if trial.configuration.batch_size == spec.default.batch_size)
    return next(at_default, spec.default_configuration)


def is_at_end(spec: StudySpec, trials: Sequence[TrialRecord], best: Configuration) -> bool:
    """True if the learning rate of ``best`` is near an end of the range, or at an end of an imported study's rates."""
    if not spec.is_imported:
        return spec.space.at_edge(best)
    if not is_rate_known(best):
        return False
    alike = [one.configuration for one in trials if one.configuration.optimizer == best.optimizer]
    tried = {(one.batch_size, one.learning_rate) for one in alike if is_rate_known(one)}
    rates = [rate for size, rate in tried if size == best.batch_size]
    if len(rates) < 2:
        rates = [rate for _, rate in tried] if len(tried) > len({size for size, _ in tried}) else []
    return best.learning_rate in (min(rates, default=None), max(rates, default=None))


def survival(runs: Sequence[TrialRecord], objective: Objective = TIME) -> Restricted | None:
    """Return the Kaplan–Meier estimate over repeats under the same limit; None if invalid.

    Censoring must not depend on a run's metric (Kaplan & Meier 1958). Only reached, exhausted and capped runs under one
    limit are valid. The estimate also needs a run that reached the target, a missed run, and known seconds of all runs.
    """
    ended = {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.CAPPED}
    if any(run.state not in ended for run in runs) or len({run.train_seconds_limit for run in runs}) > 1:
        return None
    reached = [seconds for run in runs if (seconds := objective.figure(run)) is not None]
    missed = [seconds for run in runs if (seconds := objective.bound(run)) is not None]
    if not reached or not missed or len(reached) + len(missed) < len(runs):
        return None
    from scipy.stats import CensoredData, ecdf  # the import takes half a second, and few studies need scipy.stats

    horizon = max(*missed, *reached)
    curve = ecdf(CensoredData(uncensored=reached, right=missed)).sf
    times, left = np.asarray(curve.quantiles), np.asarray(curve.probabilities)
    steps = np.diff(np.concatenate([[0.0], times, [horizon]]))
    crossed = times[left < 0.5]
    return Restricted(
        mean_s=float(steps @ np.concatenate([[1.0], left])),
        horizon_s=horizon,
        median_s=float(crossed[0]) if crossed.size else None,
        reached_share=float(1 - left[-1]),
    )


@dataclass(frozen=True)
class Tuning:
    """Signs of poor tuning and slopes by batch size, and data points of the law."""

    reasons: Mapping[int, list[str]]
    slopes: Mapping[int, Slope]
    points: list[LawPoint]


def tuning(spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict) -> Tuning:
    points = [law_point(size, candidate.runs) for size, candidate in verdict.by_batch.items()]
    comparable = are_of_one_model(spec, verdict)
    up = {*rising(points)} if comparable else {}
    slope_at = slopes(verdict.by_batch) if comparable else {}
    steep = {slope.since for slope in slope_at.values() if slope.is_too_steep}
    searched = {trial.configuration.batch_size for trial in trials if trial.phase is Phase.SEARCH}
    counts_rates = spec.is_imported and not spec.is_tuned_elsewhere  # a search by bssearch tunes
    reasons: dict[int, list[str]] = {}
    for size, candidate in verdict.by_batch.items():
        reached = [trial for trial in _at(trials, size) if trial.state is TrialState.REACHED]
        tuned = {trial.configuration.key for trial in reached}
        rates = len(rates_tried(trials, candidate.configuration)) if counts_rates else 0
        reasons[size] = [
            reason
            for reason, holds in (
                (
                    "the learning rate is "
                    + ("at an end of the tried rates" if spec.is_imported else "near an end of the range"),
                    bool(reached) and is_at_end(spec, trials, candidate.configuration),
                ),
                ("the next smaller batch size takes fewer steps", size in up),
                ("the next larger batch size takes fewer samples", size in steep),
                ("only one configuration reached the target", len(tuned) == 1 and size in searched),
                (f"the runs tried only {plural(rates, 'learning rate')}", 0 < rates < RATES_TRIED),
            )
            if holds
        ]
    flagged = [
        replace(point, untuned=bool(reasons[point.batch_size]))
        for point in points
        if comparable and (point.samples or point.missed_at)
    ]
    return Tuning(reasons, slope_at, flagged)


def tuned_curves(
    spec: StudySpec,
    verdict: Verdict,
    probes: Mapping[int, ProbeRecord],
    curves: Mapping[int, Sequence[Observation]],
    target: Target,
) -> Iterator[BatchCurves]:
    """Yield each batch size's learning curves of the best configuration, if the step time is known.

    ``curves`` has the evaluations by trial number.
    """
    timed = timed_probes(spec, verdict, probes)
    for size, candidate in verdict.by_batch.items():
        probe = timed.get(size)
        seconds = _own_step_seconds(candidate) if probe is None else probe.step_seconds
        runs = [
            (
                np.array([float(one.step) for one in curves[run.number]]),
                np.maximum.accumulate([target.gain(one.metric) for one in curves[run.number]]),
            )
            for run in candidate.runs
            if curves.get(run.number)
        ]
        if runs and seconds is not None:
            yield BatchCurves(size, candidate.configuration.micro_batch_size, seconds, runs)


def batch_rows(
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    probes: Mapping[int, ProbeRecord],
    verdict: Verdict,
    tuned: Tuning,
    noise: Mapping[int, BatchNoise],
    predicted: Mapping[int, Time],
) -> Iterator[Batch]:
    for size in sorted({*probes, *verdict.by_batch}):
        finished = [trial for trial in _at(trials, size) if trial.state.is_finished]
        candidate, probe = verdict.by_batch.get(size), probes.get(size)
        reasons = tuned.reasons.get(size, [])
        is_own = candidate is None or is_timed(spec, candidate.configuration)
        timed = probe.step_seconds if probe and is_own else None
        step_seconds = timed if candidate is None or is_own else _own_step_seconds(candidate)
        slope = tuned.slopes.get(size)
        share = None if candidate is None else median_known(one.host_bound_share for one in candidate.outcomes)
        if share is None and probe and is_own:
            share = probe.host_bound_share
        yield Batch(
            batch_size=size,
            trials=len(finished),
            reached=sum(trial.state is TrialState.REACHED for trial in finished),
            step_time_s=step_seconds,
            samples_per_s=None if step_seconds is None else size / step_seconds,
            regime=None if slope is None else slope.regime,
            slope=None if slope is None else Interval(value=slope.value, low=slope.low, high=slope.high),
            untuned=bool(reasons),
            untuned_because=reasons,
            noise_scale=noise.get(size),
            predicted_s=predicted.get(size),
            host_bound_share=share,
            ended=dict(sorted(Counter(trial.state.value for trial in finished).items())),
            **_of_candidate(candidate, timed),
        )


def time_of(candidate: Candidate) -> Time | None:
    known = candidate.time
    if known.median is None:
        return None
    return Time(median=known.median, low=known.low, high=known.high, runs=known.reached, basis=known.basis)


def figure_of(candidate: Candidate) -> Figure | None:
    known, shown = candidate.estimate, candidate.objective.shown
    if known.median is None:
        return None
    ends = [] if known.low is None or known.high is None else sorted([shown(known.low), shown(known.high)])
    low, high = ends or (None, None)
    return Figure(median=shown(known.median), low=low, high=high, runs=known.reached)


def further_metrics(candidate: Candidate) -> dict[str, Figure]:
    found = grouped(pair for one in candidate.hits for pair in (one.further_test_metrics or {}).items())
    return {name: _over_seeds(values) for name, values in found.items()}


def _over_seeds(values: Sequence[float]) -> Figure:
    median, runs = statistics.median(values), len(values)
    if runs < FEWEST_RUNS:
        return Figure(median=median, low=None, high=None, runs=runs)
    mean, half = statistics.fmean(values), student_t(runs - 1) * statistics.stdev(values) / math.sqrt(runs)
    return Figure(median=median, low=min(median, mean - half), high=max(median, mean + half), runs=runs)


def steps_to_target(candidate: Candidate) -> int | None:
    steps = median_steps(candidate)
    return None if steps is None else math.ceil(steps)


def peak_memory(candidate: Candidate) -> tuple[int | None, MemoryBasis | None]:
    """Return the largest peak memory of the runs in bytes, with the basis; (None, None) if unknown."""
    peaks = [(one.peak_memory_bytes, one.peak_memory_basis) for one in candidate.outcomes]
    return max((one for one in peaks if one[0] is not None), key=lambda one: one[0] or 0, default=(None, None))


def _of_candidate(candidate: Candidate | None, step_seconds: float | None) -> dict[str, Any]:
    if candidate is None:
        empty = (
            "best time_to_target_s lower_bound_s steps_to_target final_metric micro_batch_size objective_value "
            "objective_lower_bound steps_x_step_time_s samples_to_target peak_memory_bytes energy_joules "
            "restricted"
        )
        return {**dict.fromkeys(empty.split()), "confirmed": False}
    steps, bound = median_steps(candidate), candidate.lower_bound
    peak, basis = peak_memory(candidate)
    best = least_of(candidate.runs, candidate.objective)
    return {
        "best": None if best is None else BestTrial(trial=best.number, parameters=parameters_of(best.configuration)),
        "time_to_target_s": time_of(candidate),
        "lower_bound_s": candidate.lower_bound_s,
        "steps_to_target": steps_to_target(candidate),
        "final_metric": median_known(one.final_metric for one in candidate.outcomes),
        "micro_batch_size": candidate.configuration.micro_batch_size,
        "objective_value": figure_of(candidate),
        "objective_lower_bound": None if bound is None else candidate.objective.shown(bound),
        "steps_x_step_time_s": None if steps is None or step_seconds is None else steps * step_seconds,
        "samples_to_target": median_samples(candidate),
        "peak_memory_bytes": peak,
        "peak_memory_basis": basis,
        "generalisation": over_seeds(candidate.runs),
        "energy_joules": median_known(map(EnergyToTarget().figure, candidate.runs)),
        "restricted": survival(candidate.runs, replace(TIME, common=candidate.objective.common)),
        "confirmed": candidate.is_confirmed,
    }


def _at(trials: Iterable[TrialRecord], batch_size: int) -> list[TrialRecord]:
    return [trial for trial in trials if trial.configuration.batch_size == batch_size]
