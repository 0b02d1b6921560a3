"""Build the answer from a study's records, also for another target or device."""

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from bssearch.analysis.answer import (
    NO_NEXT_STEP,
    Answer,
    Batch,
    Cost,
    Device,
    Figure,
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
    is_timed,
    peak_memory,
    steps_to_target,
    time_of,
    timed_probes,
    tuning,
)
from bssearch.analysis.certainty import Beliefs, Certainty, beliefs, step_figures
from bssearch.analysis.devices import by_devices
from bssearch.analysis.generalisation import generalisation
from bssearch.analysis.growing import batch_schedule_answer
from bssearch.analysis.headline import about_trade_offs, front
from bssearch.analysis.law.batch_model import LawFit, LawPoint, RunnableStep, fit_law, fit_step_time, predict_optimum
from bssearch.analysis.measured import NoiseAnswer, measured, noise_of_batches
from bssearch.analysis.missing_runs import MissingRun, missing_runs
from bssearch.analysis.notices import about_generalisation, about_the_host, notices
from bssearch.analysis.objectives import Objective, TimeToTarget, objective_of
from bssearch.analysis.optimum import (
    Candidate,
    Settles,
    Verdict,
    coefficient_of_variation,
    decide,
    median_samples,
    ratio_interval,
    repeats,
    runs_to_settle,
    without_early_ends,
)
from bssearch.analysis.shape import (
    Beyond,
    BeyondBatch,
    CriticalBatch,
    Fit,
    Interval,
    Law,
    Notice,
    parameters_of,
)
from bssearch.errors import TargetNotReachedError, UsageError, require
from bssearch.records import (
    FIRST_LOSS,
    FLAT_RATIO,
    FROM_90_TO_95,
    Environment,
    Goal,
    MemoryUse,
    NoiseMeasurement,
    Observation,
    Phase,
    ProbeRecord,
    StudyRecord,
    Target,
    TrialOutcome,
    TrialRecord,
    TrialState,
    at_most,
    first_crossing,
    median_known,
    step_seconds_of,
    student_t,
    train_seconds_of,
    trainings_of,
    with_crossing,
)
from bssearch.records.text import number, percent, plural, span
from bssearch.spec import StudySpec
from bssearch.spec.space import UNKNOWN, MemoryBoundary

NEXT = 2  # memory bounds the batch size if NEXT times the size does not fit; ladders double

LARGEST_SHARE = 5 / 6  # "at most 90 % of runs reach the target" is no information

EASIER = (
    "raise budget.trials and budget.trial_train_seconds, or run a new study with a wider space or an easier "
    "target (from `bssearch check --suggest-target`)"
)
IMPORTED_EASIER = "import the runs with an easier target"
NAN_DATA = "the learning rate is not the cause; look for NaN in the inputs and for log(0) or 0/0 in the loss"

# If 3 trials at learning rates a factor of 100 apart have no finite loss, the rates cannot all be too high.
NAN_TRIALS = 3
NAN_RATES = 100.0


def build_answer(
    study: StudyRecord,
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    probes: Mapping[int, ProbeRecord],
    memory: MemoryBoundary = UNKNOWN,
    memory_uses: Sequence[MemoryUse] = (),
    noise: Sequence[NoiseMeasurement] = (),
    on_devices: Collection[ProbeRecord] = (),
) -> Answer:
    """Build the answer; ``on_devices`` has step times on each number of devices.

    Raises:
        TargetNotReachedError: No configuration reached the target in most runs.
    """
    everything, trials = trials, compared_trials(trials, memory)
    verdict = first_verdict(study, spec, trials, probes)
    if verdict is None or study.environment is None:
        raise _not_reached(study, trials, objective_of(spec, study.target))
    tuned = tuning(spec, trials, verdict)
    noise_by_batch = noise_of_batches(trials)
    known = measured(probes.values(), memory_uses, memory, noise, verdict.optimal.runs, noise_by_batch)
    timed = timed_probes(spec, verdict, probes)
    law, fit = _fit_and_predict(tuned.points, timed.values(), known.noise_scale)
    times = _predicted_times(law, timed.values()) if law is not None and law.verdict == "fits" else {}
    rivals = [size for size, probe in probes.items() if probe.step_seconds is not None]
    drawn = beliefs(verdict, step_figures(spec, verdict, probes), trials, rivals)
    if drawn is not None:
        verdict = verdict.recommending(drawn.recommended, drawn.best)
    sure = None if drawn is None else drawn.certainty()
    shown = drawn or verdict  # both show which batch sizes are within 5 % of the best
    batches = list(batch_rows(spec, trials, probes, verdict, tuned, noise_by_batch, times))
    largest = _largest(spec, verdict, batches, memory)
    best = verdict.optimal.configuration.batch_size
    missing = missing_runs(trials, batches, best, shown.worse) if spec.is_imported else []
    searched = sum(one.phase is Phase.SEARCH for one in trials)
    # With an easier target, curves end at that target.
    final = generalisation(trials, verdict, study.target) if study.target == spec.record_target else None
    return Answer(
        study=study.name,
        objective=study.objective,
        price_per_device_hour=spec.price_per_device_hour,
        target=study.target,
        device=_device(study.environment, verdict.optimal.runs[0].threads),
        optimal=_optimal(spec, verdict.optimal),
        flat_range=list(verdict.flat_range),
        tied=shown.tied,
        worse=shown.worse,
        largest_that_fits=largest,
        speedup=_speedup(spec, trials, verdict, largest, drawn),
        batches=batches,
        fit=fit,
        measured=known,
        recommendation=Recommendation(rule=verdict.rule, least_batch_size=verdict.least.configuration.batch_size),
        imported=spec.is_imported,
        provisional=drawn is None or not drawn.are_sure or verdict.ignores_seeds,
        within_5_percent=None if sure is None else sure.within_5_percent,
        configuration_within_5_percent=None if sure is None else sure.configuration_within_5_percent,
        would_settle=None if sure is None or spec.is_imported else sure.settles,
        runs_to_settle=None if sure is None or spec.is_imported else sure.runs,
        next=list(islice(next_steps(spec, verdict, sure, largest, searched, missing), MOST_STEPS)),
        settle=_settle(verdict, drawn),
        front=front(batches, spec.price_per_device_hour, confirmed=verdict.confirmed, devices=spec.executor.world_size),
        by_devices=by_devices(verdict, law, on_devices, everything) if verdict.optimal.objective.trials_race else [],
        generalisation=final,
        batch_schedule=batch_schedule_answer(
            spec, everything, verdict, step_seconds_of(probes.values(), spec.timed_model)
        ),
        cost=Cost(
            train_seconds=train_seconds_of(everything),
            trainings=trainings_of(everything, seconds) if (seconds := verdict.optimal.time.median) else None,
        ),
        warnings=[
            *notices(spec, trials, verdict, probes.values(), shown.worse),
            *about_the_host(batches, verdict.optimal, timed.values(), law, study.environment.compile_mode),
            *about_trade_offs(batches, verdict.optimal, confirmed=verdict.confirmed),
            *about_generalisation(final, study.target),
        ],
    )


def compared_trials(trials: Sequence[TrialRecord], memory: MemoryBoundary) -> list[TrialRecord]:
    """Return trials with a constant batch size on the search's devices.

    The result leaves out confirmation runs that no longer fit in memory.
    """
    constant = (one for one in trials if not one.configuration.grows and one.phase is not Phase.DEVICES)
    return [
        one for one in constant if one.phase is not Phase.CONFIRM or memory.may_fit(one.configuration.micro_batch_size)
    ]


def first_verdict(
    study: StudyRecord, spec: StudySpec, trials: Sequence[TrialRecord], probes: Mapping[int, ProbeRecord]
) -> Verdict | None:
    return decide(
        trials, spec.confirm.runs, objective_of(spec, study.target), step_seconds_of(probes.values(), spec.timed_model)
    )


def _device(environment: Environment, threads: int) -> Device:
    return Device(
        name=environment.device_name,
        type=environment.device_type,
        memory_bytes=environment.device_memory_bytes,
        precision=environment.precision,
        torch_version=environment.torch_version,
        compile_mode=environment.compile_mode,
        threads=threads if environment.device_type == "cpu" else None,
    )


def _optimal(spec: StudySpec, candidate: Candidate) -> Optimal:
    configuration = candidate.configuration
    hits = candidate.hits
    tokens = next((one.tokens / one.samples for one in hits if one.tokens is not None and one.samples), None)
    samples = median_samples(candidate)
    peak, basis = peak_memory(candidate)
    parameters, figure = parameters_of(configuration), figure_of(candidate)
    assert figure is not None, "an optimum has an objective value"
    named = {"learning_rate", *spec.set_parameters} if spec.is_program else parameters.keys()
    return Optimal(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        accumulation_steps=configuration.accumulation_steps,
        world_size=configuration.world_size,
        parameters={name: value for name, value in parameters.items() if name in named},
        time_to_target_s=time_of(candidate),
        objective_value=figure,
        steps_to_target=steps_to_target(candidate),
        samples_to_target=samples,
        tokens_to_target=None if samples is None or tokens is None else samples * tokens,
        test_metric=median_known(one.test_metric for one in hits),
        peak_memory_bytes=peak,
        peak_memory_basis=basis,
        trial_numbers=[run.number for run in candidate.runs],
        further_metrics=further_metrics(candidate),
    )


def _largest(spec: StudySpec, verdict: Verdict, batches: Sequence[Batch], memory: MemoryBoundary) -> Largest:
    ran = [one for one in verdict.by_batch.values() if any(run.state is not TrialState.OOM for run in one.runs)]
    whole = [
        one
        for one in ran
        if one.configuration.accumulation_steps == 1 and memory.may_fit(one.configuration.micro_batch_size)
    ]
    candidate = (whole or ran)[-1]
    size = candidate.configuration.batch_size
    above = min((row.batch_size for row in batches if row.batch_size > size), default=size)
    limit = min(spec.space.max_micro_batch_size or math.inf, max(above, NEXT * size))
    is_bounded = memory.too_large is not None and memory.too_large <= limit
    reason = (
        f"a micro-batch of {memory.too_large} ran out of memory"
        if is_bounded
        else "the largest size that ran; every size that ran accumulates micro-batches"
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
        if counted := tuple(run for run in runs if run.state.has_result and run.state is not TrialState.OOM):
            return Candidate(counted[0].configuration, counted, objective)
    return None


def _speedup(
    spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict, largest: Largest, known: Beliefs | None
) -> Speedup:
    optimal, pooled = verdict.optimal, verdict.pooled_noise
    default = _default(spec, trials, optimal.objective)
    retuned = None if default is None else verdict.by_batch.get(default.configuration.batch_size)
    if default is not None and retuned is not None and retuned.configuration.trains_like(default.configuration):
        default = retuned  # the same configuration has no gain from retuning
    return Speedup(
        default_batch_size=spec.default.batch_size if spec.default_is_known else None,
        over_largest=_ratio(verdict.by_batch.get(largest.batch_size), optimal, pooled, known),
        over_default=_ratio(default, optimal, pooled, known if default is retuned else None),
        from_retuning=_ratio(default, retuned, pooled),
        from_batch_size=_ratio(retuned, optimal, pooled, known),
    )


def _ratio(
    other: Candidate | None, optimal: Candidate | None, noise: tuple[float, float] | None, known: Beliefs | None = None
) -> Ratio | None:
    if other is not None and other is optimal and math.isfinite(other.value):
        return Ratio(value=1.0, at_least=False, low=1.0, high=1.0)
    if other is None or optimal is None or not other.objective.has_ratios or not math.isfinite(optimal.value):
        return None
    if math.isfinite(other.value):
        value, interval = other.value / optimal.value, ratio_interval(other.estimate, optimal.estimate, noise)
        if known is not None:
            ends = known.log_ratio(other.configuration.batch_size, optimal.configuration.batch_size)
            from_log = other.objective.from_log
            interval = None if ends is None else (from_log(ends[0]), from_log(ends[1]))
        low, high = (None, None) if interval is None else (min(interval[0], value), max(interval[1], value))
        return Ratio(value=value, at_least=False, low=low, high=high)
    bound = other.lower_bound or 0.0
    return Ratio(value=bound / optimal.value, at_least=True) if bound > optimal.value else None


def _settle(verdict: Verdict, known: Beliefs | None) -> Settle | None:
    deviation = verdict.seed_deviation
    if not deviation or known is None:
        return None
    return Settle(
        coefficient_of_variation=coefficient_of_variation(deviation),
        runs_for_5_percent=runs_to_settle(deviation, FLAT_RATIO),
        runs_for_10_percent=runs_to_settle(deviation, 1.10),
        settled=known.are_sure,
        undecided=[] if known.are_sure else sorted({*known.contenders()} - {known.recommended}),
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
        states = ", ".join(f"{count} {one.value}" for one, count in Counter(trial.state for trial in trials).items())
        ended = [trial.number for trial in trials if trial.state.is_finished]
        return TargetNotReachedError(
            f"no trial of study {study.name!r} has a result: {states}",
            hint=NAN_DATA
            if are_nan_at_any_rate(trials)
            else f"see why trial {ended[-1]} ended with `bssearch trial show {shlex.quote(study.name)} {ended[-1]}`"
            if ended
            else _continue(study),
        )
    if not objective.stops_at_target:
        return TargetNotReachedError(
            f"no trial of study {study.name!r} trained to the full limit, so {study.objective} is unknown",
            hint=_continue(study),
        )
    if any(objective.figure(trial) is not None for trial in trials):
        return _refuted(study, repeats([trial for trial in trials if trial.state.has_result], objective))
    if reached := sum(trial.state is TrialState.REACHED for trial in trials):
        return TargetNotReachedError(
            f"{plural(reached, 'trial')} of study {study.name!r} reached the target, but {study.objective} was not "
            "measured",
            hint="run a new study with the objective samples_to_target, which needs only steps",
        )
    nearest: Any = min(tried)[2]
    one = "run" if nearest.is_imported else "trial"
    return TargetNotReachedError(
        f"0 of {plural(len(tried), one)} reached {target.metric} {target.value:g}; nearest: {one} {nearest.number} "
        f"(batch {nearest.configuration.batch_size}) with {nearest.outcome.best_metric:.4g} "
        f"after {nearest.outcome.train_seconds:.3g} s",
        hint=_easier([one for *_, one in tried]),
    )


def _continue(study: StudyRecord) -> str:
    return f"resume the study with `bssearch run {shlex.quote(study.name)}`"


def _easier(trials: Sequence[TrialRecord]) -> str:
    if all(trial.is_imported for trial in trials):
        return IMPORTED_EASIER
    if are_nan_at_any_rate(trials):
        return NAN_DATA
    if all(trial.state is TrialState.DIVERGED for trial in trials):
        return "all trials diverged; in a new study, lower space.learning_rate and default.learning_rate"
    return EASIER


def are_nan_at_any_rate(trials: Sequence[TrialRecord]) -> bool:
    """True if all trials diverged within one step, and the learning rate cannot be the cause."""
    outcomes = [one.outcome for one in trials if one.state is TrialState.DIVERGED and one.outcome]
    if not trials or len(outcomes) < len(trials) or any(one.steps > 1 for one in outcomes):
        return False
    rates = [one.configuration.learning_rate for one in trials]
    are_far_apart = len(trials) >= NAN_TRIALS and max(rates) >= NAN_RATES * min(rates)
    return are_far_apart or all(one.reason.startswith(FIRST_LOSS) for one in outcomes)


def _refuted(study: StudyRecord, candidates: Sequence[Candidate]) -> TargetNotReachedError:
    best = max(candidates, key=lambda one: (one.estimate.reached / len(one.runs), len(one.runs)))
    reached, runs, target = best.estimate.reached, len(best.runs), study.target
    highest = at_most(reached, runs)
    bound = (
        f"; at most {percent(highest)} of runs reach the target (95 % confidence)" if highest <= LARGEST_SHARE else ""
    )
    return TargetNotReachedError(
        f"no configuration of study {study.name!r} reaches {target.metric} {target.value:g} in most runs; batch "
        f"{best.configuration.batch_size} came closest: {reached} of {runs} runs reached the target{bound}",
        hint=IMPORTED_EASIER if best.runs[0].is_imported else EASIER,
    )


MOST_STEPS = 2  # proposed commands

MORE_TRIALS = 1.5  # proposed total of trials, as a multiple of the trials so far


def next_steps(
    spec: StudySpec,
    verdict: Verdict,
    sure: Certainty | None,
    largest: Largest,
    trials: int,
    missing: Sequence[MissingRun] = (),
) -> Iterator[NextStep]:
    name = shlex.quote(spec.name)
    if missing:
        words = "; ".join(one.in_words for one in missing)
        yield NextStep(
            command=f"bssearch export {name} --to spec",
            why=f"writes a spec around the imported runs. Missing runs: {words}",
        )
    if not spec.is_imported:
        if not verdict.confirmed:
            yield NextStep(
                command=f"bssearch study confirm {name}", why="repeats the best configurations with fresh seeds"
            )
        elif sure is not None and sure.settles is not None:
            yield _settling(spec, sure, sure.settles, trials)
        if (wider := _wider(spec, verdict, largest)) is not None:
            yield wider
    yield NextStep(command=f"bssearch best {name} --export yaml", why="writes the best values for your training")
    yield NextStep(command=f"bssearch report {name} --html {name}.html", why="shows all results")


def _settling(spec: StudySpec, sure: Certainty, settles: Settles, trials: int) -> NextStep:
    name = shlex.quote(spec.name)
    more = max(spec.budget.trials + 1, math.ceil(MORE_TRIALS * max(trials, 1)))
    command, why = {
        "runs": (
            f"study confirm {name} --max-runs {sure.runs}",
            f"up to {sure.runs} runs of each contending batch size should settle the answer",
        ),
        "idle_machine": (
            f"study confirm {name} --runs {sure.runs}",
            "other work on the machine slowed the runs; repeat the runs when the machine is idle",
        ),
        "step_times": (
            f"probe step-time {name}",
            "more runs cannot settle the answer, because step times are too uncertain; measure the step times again",
        ),
        "tuning": (
            f"run {name} --set budget.trials={more}",
            "more runs cannot settle the answer, because a batch size may need more search trials",
        ),
    }[settles]
    return NextStep(command=f"bssearch {command}", why=why)


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
        command=f"bssearch run {shlex.quote(spec.name)} {sets}",
        why=f"the optimum may be beyond batch {best}, the {'largest' if best == max(sizes) else 'smallest'} tried size",
    )


def refuse_another_target(objective: Objective) -> None:
    """Raise `UsageError` if the objective does not depend on a target."""
    require(
        objective.stops_at_target,
        f"a study of {objective.name} has no answer for another target, because the study compares metrics after "
        "equal train seconds",
        hint="omit the target, or run a study with objective time_to_target",
    )


def other_target(target: Target, value: float, *, may_be_harder: bool = False) -> Target:
    """Return the target with another value.

    Raises:
        UsageError: The value is not finite, or is harder and ``may_be_harder`` is False.
    """
    require(math.isfinite(value), f"target {value:g} must be a finite number")
    require(
        may_be_harder or target.gain(value) <= target.gain(target.value),
        f"target {value:g} is harder than {target.metric} {target.value:g}, at which the study's trials stopped; "
        f"use a value {'≤' if target.goal is Goal.MAXIMIZE else '≥'} {target.value:g}",
        hint=f"run `bssearch plan beyond STUDY --target {value:g}` for a prediction, or run a new study",
    )
    return replace(target, value=value)


def at_target(
    trial: TrialRecord, curve: Sequence[Observation], target: Target, step_seconds: float | None
) -> TrialRecord:
    """Return the trial as if training had ended at ``target`` on the learning curve, without test metrics.

    A trial that missed ``target`` stays unchanged, but an imported run that reached the study's target becomes
    exhausted.

    Raises:
        UsageError: The trial meets the target before step 1.
    """
    before = trial.outcome
    if before is None or trial.state.is_missing:
        return trial
    if (found := first_crossing(curve, target)) is None:
        reached_another = trial.is_imported and trial.state is TrialState.REACHED and curve
        return _missed(trial, before, curve[-1], target) if reached_another else trial
    require(
        found.first_hit_step > 0,
        f"target {target.value:g} is met before the first step: trial {trial.number} starts with "
        f"{target.metric} = {curve[0].metric:.4g}",
        hint="use a harder target",
    )
    hit = next(one for one in curve if one.step == found.first_hit_step)
    tokens, undelayed = before.tokens, before.undelayed_train_seconds
    outcome = replace(
        with_crossing(before, found),
        state=TrialState.REACHED,
        reason=f"{target.metric} = {hit.metric:.6g} at step {hit.step}",
        steps=hit.step,
        samples=hit.samples,
        tokens=None if tokens is None else tokens * hit.samples // before.samples,
        train_seconds=hit.train_seconds,
        undelayed_train_seconds=undelayed * hit.step / before.steps if undelayed is not None and before.steps else None,
        final_metric=hit.metric,
        best_metric=hit.metric,
        test_metric=None,
        further_test_metrics=None,
    )
    product = None if step_seconds is None else found.steps * step_seconds
    return replace(trial, state=TrialState.REACHED, outcome=outcome, steps_x_step_time_s=product)


def _missed(trial: TrialRecord, outcome: TrialOutcome, last: Observation, target: Target) -> TrialRecord:
    # An imported run that reached its target, but not this harder one by the end of its curve
    outcome = replace(
        outcome,
        state=TrialState.EXHAUSTED,
        reason=f"ended without {target.in_words}",
        steps=last.step,
        samples=last.samples,
        train_seconds=last.train_seconds,
        final_metric=last.metric,
        last_miss_step=last.step,
        last_miss_seconds=last.train_seconds,
        time_to_target_s=None,
        steps_to_target=None,
        first_hit_step=None,
        first_hit_seconds=None,
    )
    return replace(trial, state=TrialState.EXHAUSTED, outcome=outcome)


def answer_beyond(found: Answer, target: Target, predicted: Beyond) -> Answer:
    rows = {row.batch_size: row for row in found.batches}
    best, largest = predicted.of(predicted.optimal_batch_size), predicted.batches[-1]
    row, time = rows[best.batch_size], _predicted_time(best.time_to_target_s)
    assert row.best is not None, "a batch size with curves has a best trial"
    optimal = Optimal(
        batch_size=best.batch_size,
        micro_batch_size=best.micro_batch_size,
        accumulation_steps=best.batch_size // best.micro_batch_size,
        parameters=row.best.parameters,
        time_to_target_s=time,
        objective_value=_figure(time),
        steps_to_target=round(best.steps.value),
        samples_to_target=best.steps.value * best.batch_size,
        tokens_to_target=None,
        test_metric=None,
        peak_memory_bytes=row.peak_memory_bytes,
        peak_memory_basis=row.peak_memory_basis,
        trial_numbers=[],
    )
    message = (
        f"the trials stopped at {found.target.in_words}. The predicted optimum is batch "
        f"{span(predicted.optimum_interval)} (90 %). B_crit is {predicted.b_crit.in_words}, and "
        f"{number(predicted.b_crit_measured)} at the study's target. As a test, run batch {predicted.test_batch_size} "
        f"to {target.in_words}"
    )
    return found.model_copy(
        update={
            "target": target,
            "optimal": optimal,
            "flat_range": predicted.flat_range,
            "largest_that_fits": Largest(
                batch_size=largest.batch_size,
                time_to_target_s=_predicted_time(largest.time_to_target_s),
                lower_bound_s=None,
                reason="the largest batch size with curves to the study's target",
            ),
            "speedup": Speedup(
                default_batch_size=found.speedup.default_batch_size, over_largest=None, over_default=None
            ),
            "batches": [_predicted_row(rows[one.batch_size], one) for one in predicted.batches],
            "recommendation": Recommendation(rule="least", least_batch_size=best.batch_size),
            "provisional": True,
            "predicted": predicted,
            "warnings": [Notice(code="predicted", message=message)],
            **{name: [] for name in ("tied", "worse", "front")},
            **dict.fromkeys(("fit", "settle", "generalisation", "quick", "batch_schedule", "cost")),
            **dict.fromkeys(("within_5_percent", "configuration_within_5_percent")),
            **NO_NEXT_STEP,
        }
    )


def _predicted_time(seconds: Interval) -> Time:
    assert seconds.low and seconds.high, "a prediction has an interval"
    return Time(
        median=seconds.value,
        low=seconds.value * (seconds.low / seconds.value) ** FROM_90_TO_95,
        high=seconds.value * (seconds.high / seconds.value) ** FROM_90_TO_95,
        runs=0,
        basis="predicted",
    )


def _figure(time: Time) -> Figure:
    return Figure(median=time.median, low=time.low, high=time.high, runs=time.runs)


def _predicted_row(row: Batch, predicted: BeyondBatch) -> Batch:
    time = _predicted_time(predicted.time_to_target_s)
    return row.model_copy(
        update={
            **dict.fromkeys(("lower_bound_s", "objective_lower_bound", "regime", "slope", "restricted")),
            **dict.fromkeys(("energy_joules", "final_metric", "steps_x_step_time_s", "generalisation", "noise_scale")),
            "trials": 0,
            "reached": 0,
            "ended": {},
            "confirmed": False,
            "time_to_target_s": time,
            "predicted_s": time,
            "objective_value": _figure(time),
            "steps_to_target": round(predicted.steps.value),
            "samples_to_target": predicted.steps.value * row.batch_size,
        }
    )


# Codes of notices that do not apply to another device
OF_THE_STUDYS_DEVICE = frozenset({"contended", "step_times_contended", "measurement", "device_slower"})


def predict_for_device(
    study: StudyRecord,
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    step_times: Mapping[int, ProbeRecord],
    device_name: str,
) -> Answer:
    """Predict the answer from the study's steps and another device's step times.

    The prediction leaves out batch sizes without a step time, trials of other models than the default's, and trials
    with growing batches.

    Raises:
        UsageError: No batch size with trials has a step time.
        TargetNotReachedError: No batch size with a step time reached the target.
    """
    trials = without_early_ends(trials, objective_of(spec))
    constant = [trial for trial in trials if not trial.configuration.grows]
    grown = len(trials) - len(constant)
    trials = [one for one in constant if is_timed(spec, one.configuration)]
    others = len(constant) - len(trials)
    of_model = " with the default's model" if others else ""
    sizes = {trial.configuration.batch_size for trial in trials}
    left_out = sorted(sizes - step_times.keys())
    if not sizes & step_times.keys():
        ran, timed = (_listed(sorted(some)) for some in (sizes, step_times))
        raise UsageError(
            f"no batch size of study {study.name!r} has a step time; trials{of_model} ran at {ran or 'no batch size'}, "
            f"but step times are of {timed}",
            hint="give step times of batch sizes at which trials ran",
        )
    _check_reached(study, trials, step_times, of_model)
    moved = [
        at_step_time(trial, seconds)
        for trial in trials
        if (probe := step_times.get(trial.configuration.batch_size)) and (seconds := probe.step_seconds) is not None
    ]
    objective = spec.objective if objective_of(spec).trials_race else TimeToTarget.name
    timed_spec = spec.model_copy(update={"objective": objective})
    found = build_answer(replace(study, objective=objective), timed_spec, moved, step_times)
    measured_on = "an unknown device" if study.environment is None else study.environment.device_name
    caveats = [
        (
            "predicted",
            True,
            f"the answer predicts times on {device_name} from the steps on {measured_on}; no trial ran on "
            f"{device_name}",
        ),
        ("no_step_time", left_out, f"the answer leaves out batch sizes without a step time: {_listed(left_out)}"),
        (
            "other_models_left_out",
            others,
            f"the answer leaves out {plural(others, 'trial')} of other models; step times are of the default's model",
        ),
        ("growing_batches_left_out", grown, f"the answer leaves out {plural(grown, 'trial')} with growing batches"),
    ]
    notices = [Notice(code=code, message=message) for code, holds, message in caveats if holds]
    kept = [notice for notice in found.warnings if notice.code not in OF_THE_STUDYS_DEVICE]
    device = Device(name=device_name, type="unknown", memory_bytes=None, precision=None, torch_version=None)
    return found.model_copy(update={"device": device, "warnings": [*notices, *kept], **NO_NEXT_STEP})


def at_step_time(trial: TrialRecord, step_seconds: float) -> TrialRecord:
    """Return a copy of the trial with steps × step time as seconds, without peak memory and device use."""
    if (outcome := trial.outcome) is None:
        return trial
    reached, miss = outcome.steps_to_target, outcome.last_miss_step
    changed = replace(
        outcome,
        train_seconds=outcome.steps * step_seconds,
        undelayed_train_seconds=None,
        reference_seconds=None,
        host_bound_share=None,
        time_to_target_s=None if reached is None else reached * step_seconds,
        last_miss_seconds=None if miss is None else miss * step_seconds,
        first_hit_seconds=None if outcome.first_hit_step is None else outcome.first_hit_step * step_seconds,
        peak_memory_bytes=None,
        peak_memory_basis=None,
        contended=reached is not None,  # so that the answer uses steps × step time
        device_use=type(outcome.device_use)(),
        warnings=(),
    )
    return replace(trial, outcome=changed, steps_x_step_time_s=None if reached is None else reached * step_seconds)


def _check_reached(study: StudyRecord, trials: Sequence[TrialRecord], timed: Collection[int], of_model: str) -> None:
    reached = {
        trial.configuration.batch_size
        for trial in trials
        if trial.state is TrialState.REACHED and trial.outcome is not None and trial.outcome.steps_to_target is not None
    }
    require(
        reached,
        f"no trial of study {study.name!r}{of_model} has a known number of steps to the target",
        hint=f"see how the trials ended with `bssearch trial list {shlex.quote(study.name)}`",
        error=TargetNotReachedError,
    )
    if reached.isdisjoint(timed):
        ran = sorted({trial.configuration.batch_size for trial in trials} & set(timed))
        raise TargetNotReachedError(
            f"the batch sizes with step times did not reach the target in study {study.name!r}: {_listed(ran)}",
            hint=f"give step times of batch sizes that reached the target: {_listed(sorted(reached))}",
        )


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


SIZES_PER_OCTAVE = 16  # 4 % apart, less than the 5 % of a tie


def _fit_and_predict(
    points: Sequence[LawPoint], probes: Collection[ProbeRecord], noise: NoiseAnswer | None
) -> tuple[LawFit | None, Fit | None]:
    # The fitted law, as a `LawFit` and as the answer's `Fit`
    if (law := fit_law(points)) is None:
        return None, None
    line = fit_step_time(list(probes))
    optimum = predict_optimum(law, runnable_steps(probes, law.largest_batch))
    scale = None if noise is None else noise.scale
    fit = Fit(
        **_law(law).model_dump(),
        alpha_s=None if line is None else line.alpha_seconds,
        beta_s=None if line is None else line.beta_seconds,
        b_star=None if optimum is None else float(optimum.batch_size),
        predicted=optimum,
        including_untuned=None if law.including_untuned is None else _law(law.including_untuned),
        noise_scale_ratio=None if scale is None or law.b_crit_high is None else scale / law.b_crit,
    )
    return law, fit


def runnable_steps(probes: Collection[ProbeRecord], largest: int) -> list[RunnableStep]:
    """Return measured and, between sizes without accumulation, interpolated step times up to batch size ``largest``."""
    found = [
        RunnableStep(
            one.batch_size,
            one.micro_batch_size * one.world_size,
            one.step_seconds,
            0.0 if one.error is None else one.error.own,
        )
        for one in sorted(probes, key=lambda one: one.batch_size)
        if one.step_seconds is not None and one.batch_size <= largest
    ]
    whole = [one for one in found if one.batch_size == one.micro_batch_size]
    between = [one for pair in itertools.pairwise(whole) for one in _between(*pair)]
    return sorted([*found, *between], key=lambda one: one.batch_size)


def _between(low: RunnableStep, high: RunnableStep) -> list[RunnableStep]:
    count = SIZES_PER_OCTAVE * math.log2(high.batch_size / low.batch_size)
    sizes = {round(low.batch_size * 2 ** (index / SIZES_PER_OCTAVE)) for index in range(1, math.ceil(count))}
    slope = (high.step_seconds - low.step_seconds) / (high.batch_size - low.batch_size)
    return [
        RunnableStep(size, size, low.step_seconds + slope * (size - low.batch_size))
        for size in sorted(sizes - {low.batch_size, high.batch_size})
    ]


def _predicted_times(law: LawFit, probes: Collection[ProbeRecord]) -> dict[int, Time]:
    # Steps by the law × step time at each timed batch size, with the errors of both
    found: dict[int, Time] = {}
    for probe in probes:
        size, seconds = probe.batch_size, probe.step_seconds
        if seconds is None or size > law.largest_batch:
            continue
        steps, ends = law.steps(size), law.steps_interval(size)
        error = probe.error
        of_step = 0.0 if error is None else math.hypot(error.own, error.common) * student_t(error.freedom)
        low, high = (None, None) if ends is None else (math.log(steps / ends[0]), math.log(ends[1] / steps))
        found[size] = Time(
            median=steps * seconds,
            low=None if low is None else steps * seconds * math.exp(-math.hypot(low, of_step)),
            high=None if high is None else steps * seconds * math.exp(math.hypot(high, of_step)),
            runs=0,
            basis="steps_x_step_time",
        )
    return found


def _law(law: LawFit) -> Law:
    return Law(
        s_min=law.s_min,
        b_crit=CriticalBatch(estimate=law.b_crit, low=law.b_crit_low, high=law.b_crit_high),
        max_residual=law.max_residual,
        verdict=law.verdict,
        residuals=dict(law.residuals),
    )
