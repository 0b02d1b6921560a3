"""Builds the answer from a study's records."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from bssearch.analysis.answer import (
    Answer,
    Batch,
    Device,
    Largest,
    NextStep,
    Optimal,
    Ratio,
    Recommendation,
    Settle,
    Speedup,
    Time,
)
from bssearch.analysis.batches import (
    batch_rows,
    default_configuration,
    figure_of,
    further_metrics,
    peak_memory,
    steps_to_target,
    time_of,
    timed_probes,
    tuning,
)
from bssearch.analysis.certainty import Certainty, certainty, standing
from bssearch.analysis.generalisation import generalisation
from bssearch.analysis.growing import batch_schedule_answer
from bssearch.analysis.law.joint import fit_and_predict, predicted_figures, predicted_times
from bssearch.analysis.measured import measured, noise_of_batches
from bssearch.analysis.notices import about_generalisation, about_the_host, notices
from bssearch.analysis.objectives.base import Objective, objective_of
from bssearch.analysis.optimum import Candidate, Verdict, decide, median_samples, repeats, runs_to_settle
from bssearch.analysis.shape import Parameters, parameters_of
from bssearch.analysis.time_to_target import coefficient_of_variation, ratio_interval
from bssearch.analysis.trade_offs import about_trade_offs, front
from bssearch.errors import TargetNotReachedError
from bssearch.records import (
    MemoryUse,
    NoiseMeasurement,
    Phase,
    ProbeRecord,
    StudyRecord,
    TrialRecord,
    TrialState,
)
from bssearch.records.intervals import FLAT_RATIO, at_most
from bssearch.records.step_times import step_seconds_of
from bssearch.settings import shipped_studies
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary

NEXT = 2
"""Memory is the bound if this many times as many samples do not fit; ladders double."""

TOLD = 1.2
"""An upper limit of one in fewer says nothing."""

EASIER = (
    "raise budget.trial_train_seconds, widen the space, or set an easier target under a new name (`bssearch check "
    "--suggest-target` proposes one)"
)
IMPORTED_EASIER = "import them with an easier target"


def build_answer(
    study: StudyRecord,
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    probes: Mapping[int, ProbeRecord],
    memory: MemoryBoundary = UNKNOWN,
    memory_uses: Sequence[MemoryUse] = (),
    noise: Sequence[NoiseMeasurement] = (),
) -> Answer:
    """Answer from a study's records; raises `TargetNotReachedError` if no trial reached the target.

    Leaves out confirmation runs in micro-batches that no longer fit: they are repeated in smaller ones.
    """
    everything, trials = trials, [one for one in trials if not one.configuration.grows]
    trials = [one for one in trials if one.phase is not Phase.CONFIRM or _may_fit(memory, one)]
    objective = objective_of(spec, study.target)
    timed_steps = step_seconds_of(probes.values(), spec.timed_model)
    verdict = decide(trials, spec.confirm.runs, objective, timed_steps)
    if verdict is None or study.environment is None:
        raise _not_reached(study, trials, objective)
    tuned = tuning(spec, trials, verdict)
    noise_by_batch = noise_of_batches(trials)
    known = measured(probes.values(), memory_uses, memory, noise, verdict.optimal.runs, noise_by_batch)
    timed = timed_probes(spec, verdict, probes)
    law, fit = fit_and_predict(tuned.points, timed.values(), known.noise_scale)
    stands = standing(verdict)
    predicted: dict[int, float] = {}

    def sure_of(verdict: Verdict) -> Certainty | None:
        return certainty(verdict, predicted, trials, spec.batch_sizes)

    times: dict[int, Time] = {}
    if law is not None and law.verdict == "fits":
        times = predicted_times(law, timed.values())
        step_seconds = {size: probe.step_seconds for size, probe in timed.items() if probe.step_seconds is not None}
        predicted = predicted_figures(law, step_seconds, {*verdict.by_batch, *spec.batch_sizes}, objective)
        if not (stands and stands.is_settled):
            verdict = _surer(verdict.with_law(predicted), verdict, sure_of)
    sure = sure_of(verdict)
    batches = batch_rows(spec, trials, probes, verdict, tuned, noise_by_batch, times)
    largest = _largest(spec, verdict, batches, memory)
    environment = study.environment
    # The curves of an easier target end at it.
    final = generalisation(trials, verdict, study.target) if study.target == spec.record_target else None
    return Answer(
        study=study.name,
        objective=study.objective,
        price_per_device_hour=spec.price_per_device_hour,
        target=study.target,
        device=Device(
            name=environment.device_name,
            type=environment.device_type,
            memory_bytes=environment.device_memory_bytes,
            precision=environment.precision,
            torch_version=environment.torch_version,
            compile_mode=environment.compile_mode,
            threads=verdict.optimal.runs[0].threads if environment.device_type == "cpu" else None,
        ),
        optimal=_optimal(spec, verdict.optimal),
        flat_range=list(verdict.flat_range),
        tied=verdict.tied,
        worse=verdict.worse,
        largest_that_fits=largest,
        speedup=_speedup(spec, trials, verdict, largest),
        batches=batches,
        fit=fit,
        measured=known,
        recommendation=Recommendation(rule=verdict.rule, least_batch_size=verdict.least.configuration.batch_size),
        imported=spec.is_imported,
        provisional=sure is None or sure.is_provisional or verdict.ignores_seeds,
        within_5_percent=None if sure is None else sure.within_5_percent,
        would_settle=None if sure is None or spec.is_imported else sure.settles,
        runs_to_settle=None if sure is None or spec.is_imported else sure.runs,
        next=next_steps(spec, verdict, sure, largest, sum(one.phase is Phase.SEARCH for one in trials)),
        settle=_settle(verdict),
        front=front(batches, spec.price_per_device_hour, confirmed=verdict.confirmed),
        generalisation=final,
        batch_schedule=batch_schedule_answer(spec, everything, verdict, timed_steps),
        warnings=[
            *notices(spec, trials, verdict, probes.values()),
            *about_the_host(batches, verdict.optimal, timed.values(), law, environment.compile_mode),
            *about_trade_offs(batches, verdict.optimal, confirmed=verdict.confirmed),
            *about_generalisation(final, study.target),
        ],
    )


def _surer(by_law: Verdict, by_runs: Verdict, sure_of: Callable[[Verdict], Certainty | None]) -> Verdict:
    if by_law is by_runs:
        return by_runs
    law, runs = sure_of(by_law), sure_of(by_runs)
    return by_runs if law and runs and law.within_5_percent < runs.within_5_percent else by_law


def _told_of(spec: StudySpec, parameters: Parameters) -> Parameters:
    if not spec.is_program:
        return parameters
    told = {"learning_rate", *spec.set_parameters}
    return {name: value for name, value in parameters.items() if name in told}


def _optimal(spec: StudySpec, candidate: Candidate) -> Optimal:
    configuration = candidate.configuration
    steps = steps_to_target(candidate)
    outcomes = [run.outcome for run in candidate.runs if run.outcome]
    at_target = [outcome for outcome in outcomes if outcome.state is TrialState.REACHED]
    tests = [outcome.test_metric for outcome in at_target if outcome.test_metric is not None]
    tokens = next((one.tokens / one.samples for one in at_target if one.tokens is not None and one.samples), None)
    samples = median_samples(candidate)
    peak, basis = peak_memory(candidate)
    return Optimal(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        accumulation_steps=configuration.accumulation_steps,
        parameters=_told_of(spec, parameters_of(configuration)),
        time_to_target_s=time_of(candidate),
        objective_value=figure_of(candidate),
        steps_to_target=steps,
        samples_to_target=samples,
        tokens_to_target=None if samples is None or tokens is None else samples * tokens,
        test_metric=statistics.median(tests) if tests else None,
        peak_memory_bytes=peak,
        peak_memory_basis=basis,
        trial_numbers=[run.number for run in candidate.runs],
        further_metrics=further_metrics(candidate),
    )


def _may_fit(memory: MemoryBoundary, trial: TrialRecord) -> bool:
    return memory.may_fit(trial.configuration.micro_batch_size)


def _largest(spec: StudySpec, verdict: Verdict, batches: Sequence[Batch], memory: MemoryBoundary) -> Largest:
    ran = [one for one in verdict.by_batch.values() if one.fits]
    whole = [one for one in ran if one.configuration.accumulation_steps == 1 and _may_fit(memory, one.runs[0])]
    candidate = (whole or ran)[-1]
    size = candidate.configuration.batch_size
    above = min((row.batch_size for row in batches if row.batch_size > size), default=size)
    limit = min(spec.space.max_micro_batch_size or math.inf, max(above, NEXT * size))
    is_bounded = memory.too_large is not None and memory.too_large <= limit
    reason = (
        f"a micro-batch of {memory.too_large} ran out of memory"
        if is_bounded
        else "every batch size of the study accumulates micro-batches; this is the largest that ran"
        if not whole
        else "larger batch sizes of the study accumulate micro-batches, or did not run"
        if above > size
        else "the largest batch size of the study"
    )
    return Largest(
        batch_size=size,
        time_to_target_s=time_of(candidate),
        lower_bound_s=candidate.lower_bound_s,
        reason=reason,
        bounded_by_memory=is_bounded,
    )


def _default(spec: StudySpec, trials: Sequence[TrialRecord], objective: Objective) -> Candidate | None:
    if not spec.default_is_known:
        return None
    default = default_configuration(spec, trials)
    for phase in (Phase.CONFIRM, Phase.SEARCH):
        runs = [trial for trial in trials if trial.phase is phase and trial.configuration.trains_like(default)]
        ended = [run for run in runs if run.state.is_finished and not run.state.is_missing]
        counted = tuple(run for run in ended if run.state is not TrialState.OOM)
        if counted:
            return Candidate(counted[0].configuration, counted, objective)
    return None


def _speedup(spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict, largest: Largest) -> Speedup:
    optimal = verdict.optimal
    default = _default(spec, trials, optimal.objective)
    retuned = None if default is None else verdict.by_batch.get(default.configuration.batch_size)
    if default is not None and retuned is not None and retuned.configuration.trains_like(default.configuration):
        default = retuned  # one configuration: no gain from retuning
    return Speedup(
        over_largest=_ratio(verdict.by_batch.get(largest.batch_size), optimal),
        over_default=_ratio(default, optimal),
        from_retuning=_ratio(default, retuned),
        from_batch_size=_ratio(retuned, optimal),
    )


def _ratio(other: Candidate | None, optimal: Candidate | None) -> Ratio | None:
    if other is not None and other is optimal and math.isfinite(other.value):
        return Ratio(value=1.0, at_least=False, low=1.0, high=1.0)
    if other is None or optimal is None or not other.objective.has_ratios or not math.isfinite(optimal.value):
        return None
    if math.isfinite(other.value):
        value, interval = other.value / optimal.value, ratio_interval(other.estimate, optimal.estimate)
        low, high = (None, None) if interval is None else (min(interval[0], value), max(interval[1], value))
        return Ratio(value=value, at_least=False, low=low, high=high)
    bound = other.lower_bound or 0.0
    return Ratio(value=bound / optimal.value, at_least=True) if bound > optimal.value else None


def _settle(verdict: Verdict) -> Settle | None:
    deviation, found = verdict.seed_deviation, standing(verdict)
    if not deviation or found is None:
        return None
    return Settle(
        coefficient_of_variation=coefficient_of_variation(deviation),
        runs_for_5_percent=runs_to_settle(deviation, FLAT_RATIO),
        runs_for_10_percent=runs_to_settle(deviation, 1.10),
        settled=found.is_settled,
        undecided=found.undecided_batch_sizes,
    )


def _not_reached(study: StudyRecord, trials: Sequence[TrialRecord], objective: Objective) -> TargetNotReachedError:
    target = study.target
    tried = [
        (target.shortfall(trial.outcome.best_metric), trial.number, trial)
        for trial in trials
        if trial.outcome is not None and trial.outcome.best_metric is not None
    ]
    if not trials:
        return TargetNotReachedError(f"study {study.name!r} has no trial yet", hint=_continue(study))
    if not tried:
        ended = ", ".join(f"{count} {state.value}" for state, count in Counter(trial.state for trial in trials).items())
        return TargetNotReachedError(
            f"no trial of study {study.name!r} measured anything: {ended}",
            hint=f"`bssearch trial show {study.name} {trials[-1].number}` shows why a trial ended",
        )
    if not objective.stops_at_target:
        return TargetNotReachedError(
            f"no trial of study {study.name!r} trained to its full limit, at which {target.metric} counts",
            hint=_continue(study),
        )
    if any(objective.figure(trial) is not None for trial in trials):
        said = [trial for trial in trials if trial.state.is_finished and not trial.state.is_missing]
        return _refuted(study, repeats(said, objective))
    reached = sum(trial.state is TrialState.REACHED for trial in trials)
    if reached:
        return TargetNotReachedError(
            f"{reached} trials of study {study.name!r} reached the target, but {study.objective} was not measured",
            hint="energy needs a device that reports its power; samples_to_target needs only steps",
        )
    nearest: Any = min(tried)[2]
    one = "run" if nearest.is_imported else "trial"
    return TargetNotReachedError(
        f"none of {len(tried)} {one}s reached {target.metric} {target.value:g}; nearest: {one} {nearest.number} "
        f"(batch {nearest.configuration.batch_size}) with {nearest.outcome.best_metric:.4g} "
        f"after {nearest.outcome.train_seconds:.3g} s",
        hint=_easier([one for *_, one in tried]),
    )


def _continue(study: StudyRecord) -> str:
    return f"`bssearch run {_spec_of(study.name)}` continues it"


def _easier(trials: Sequence[TrialRecord]) -> str:
    if all(trial.is_imported for trial in trials):
        return IMPORTED_EASIER
    if all(trial.state is TrialState.DIVERGED for trial in trials):
        return "all diverged: lower space.learning_rate and default.learning_rate, under a new name"
    return EASIER


def _refuted(study: StudyRecord, candidates: Sequence[Candidate]) -> TargetNotReachedError:
    best = max(candidates, key=lambda one: (one.estimate.reached / len(one.runs), len(one.runs)))
    reached, runs, target = best.estimate.reached, len(best.runs), study.target
    one_in = 1 / at_most(reached, runs)
    so = f"at most one in {one_in:.2g} does (95 % confidence)" if one_in >= TOLD else "too few runs to tell"
    return TargetNotReachedError(
        f"no configuration of study {study.name!r} reaches {target.metric} {target.value:g} in most runs; the best, "
        f"batch {best.configuration.batch_size}, did in {reached} of {runs}; {so}",
        hint=IMPORTED_EASIER if best.runs[0].is_imported else EASIER,
    )


MOST = 2

MORE_TRIALS = 1.5

SPEC = "SPEC"


def next_steps(
    spec: StudySpec, verdict: Verdict, sure: Certainty | None, largest: Largest, trials: int
) -> list[NextStep]:
    """Most useful commands; ``trials`` counts the search trials."""
    return list(islice(_proposed(spec, verdict, sure, largest, trials), MOST))


def _proposed(
    spec: StudySpec, verdict: Verdict, sure: Certainty | None, largest: Largest, trials: int
) -> Iterator[NextStep]:
    name = shlex.quote(spec.name)
    if not spec.is_imported:
        if not verdict.confirmed:
            yield NextStep(command=f"bssearch study confirm {name}", why="repeats the best with fresh seeds")
        elif sure is not None and sure.is_provisional:
            yield _settling(spec, sure, trials)
        if (wider := _wider(spec, verdict, largest)) is not None:
            yield wider
    yield NextStep(command=f"bssearch best {name} --export yaml", why="writes these values for your training")
    yield NextStep(command=f"bssearch report {name} --html {name}.html", why="shows all results")


def _settling(spec: StudySpec, sure: Certainty, trials: int) -> NextStep:
    if sure.settles == "runs":
        return NextStep(
            command=f"bssearch study confirm {shlex.quote(spec.name)} --max-runs {sure.runs}",
            why=f"up to {sure.runs} runs of each batch size should settle which is best",
        )
    if sure.settles == "step_times":
        return NextStep(
            command=f"bssearch probe step-time {_spec_of(spec.name)}",
            why="step times are too uncertain; each run of this command adds measurements",
        )
    more = max(spec.budget.trials + 1, math.ceil(MORE_TRIALS * max(trials, 1)))
    return NextStep(
        command=f"bssearch run {_spec_of(spec.name)} --set budget.trials={more}",
        why="a batch size may not be fully tuned; more search trials would show it",
    )


def _wider(spec: StudySpec, verdict: Verdict, largest: Largest) -> NextStep | None:
    sizes, best = spec.batch_sizes, verdict.optimal.configuration.batch_size
    if len(sizes) == 1:
        return None
    if best == max(sizes) and not largest.bounded_by_memory:
        wider = [*sizes, 2 * best]
    elif best == min(sizes) and best > 1:
        wider = [best // 2, *sizes]
    else:
        return None
    sets = f"--set {shlex.quote(f'name={spec.name}-wider')} --set {shlex.quote(f'space.batch_size={wider}')}"
    return NextStep(
        command=f"bssearch run {_spec_of(spec.name)} {sets}",
        why=f"batch {best} is the {'largest' if best == max(sizes) else 'smallest'} tried; the optimum may be "
        "beyond it",
    )


def _spec_of(study: str) -> str:
    return shlex.quote(study) if study in shipped_studies() else SPEC
