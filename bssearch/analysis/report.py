"""The answer of a study, in the shape that ``bssearch best --format json`` prints and its JSON Schema describes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bssearch.analysis.measured import Measured, measured
from bssearch.analysis.notices import Notice, notices
from bssearch.analysis.optimum import FLAT, Candidate, Regime, Verdict, decide, fastest, regime
from bssearch.analysis.time_to_target import Basis
from bssearch.errors import TargetNotReachedError
from bssearch.records import (
    Configuration,
    Goal,
    MemoryUse,
    NoiseMeasurement,
    Phase,
    ProbeRecord,
    StudyRecord,
    TrialRecord,
    TrialState,
)
from bssearch.space import REGULAR, UNKNOWN, MemoryBoundary
from bssearch.spec import StudySpec

Parameters = dict[str, bool | int | float | str | None]


class Model(BaseModel):
    """A part of the answer: numbers are finite, missing is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetAnswer(Model):
    """What was to be reached."""

    metric: str
    value: float
    goal: Goal


class Device(Model):
    """Where it was measured; the answer holds for this kind of device."""

    name: str
    type: str
    memory_bytes: int | None
    precision: str
    torch_version: str


class Time(Model):
    """Seconds over seeds: median, 95 % interval (null below three runs or where a run missed), runs that count."""

    median: float
    low: float | None
    high: float | None
    runs: int
    basis: Basis


class Ratio(Model):
    """A ratio of times; ``at_least`` where the slower side never finished."""

    value: float
    at_least: bool


class Optimal(Model):
    """The recommended configuration, whole; tokens where the workload counts them."""

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    parameters: Parameters
    time_to_target_s: Time | None
    steps_to_target: int | None
    samples_to_target: float | None
    tokens_to_target: float | None
    test_metric: float | None
    peak_memory_bytes: int | None
    trial_numbers: list[int]


class Largest(Model):
    """The largest batch size that ran without accumulation; the reason names what ran out of memory."""

    batch_size: int
    time_to_target_s: Time | None
    lower_bound_s: float | None
    reason: str


class Speedup(Model):
    """How much faster the optimum is."""

    over_largest: Ratio | None
    over_default: Ratio | None


class BestTrial(Model):
    """The configuration whose time-to-target stands for a batch size, and its fastest trial."""

    trial: int
    parameters: Parameters


class Batch(Model):
    """One batch size: its best time-to-target, or why it has none.

    ``untuned``: the learning rate lies at an end of its range, the steps rise from the next smaller batch size, or a
    single configuration has reached the target.
    """

    batch_size: int
    trials: int
    reached: int
    best: BestTrial | None
    time_to_target_s: Time | None
    lower_bound_s: float | None
    steps_to_target: int | None
    step_time_s: float | None
    final_metric: float | None
    regime: Regime | None
    untuned: bool
    ended: dict[str, int]


class CriticalBatch(Model):
    """The critical batch size with its interval."""

    estimate: float
    low: float
    high: float


class Fit(Model):
    """The law S = S_min (1 + B_crit / B) fitted to the tuned trials."""

    s_min: float
    b_crit: CriticalBatch
    alpha_s: float | None
    beta_s: float | None
    b_star: float | None
    max_residual: float
    verdict: Literal["fits", "poor", "too_few_points"]


class Answer(Model):
    """Which batch size is optimal, and the evidence."""

    schema_version: Literal[1] = 1
    study: str
    objective: str
    target: TargetAnswer
    device: Device
    optimal: Optimal
    flat_range: Annotated[list[int], Field(min_length=2, max_length=2)]
    tied: list[int]
    largest_that_fits: Largest
    speedup: Speedup
    batches: list[Batch]
    fit: Fit | None
    measured: Measured
    warnings: list[Notice]


def build_answer(
    study: StudyRecord,
    spec: StudySpec,
    trials: Sequence[TrialRecord],
    probes: Mapping[int, ProbeRecord],
    memory: MemoryBoundary = UNKNOWN,
    memory_uses: Sequence[MemoryUse] = (),
    noise: Sequence[NoiseMeasurement] = (),
) -> Answer:
    """Return the answer that a study's records give; raise `TargetNotReachedError` where none reached the target.

    ``probes`` are the step times in force and ``memory`` what is known of micro-batch sizes. Confirmation runs in
    micro-batches that ran out of memory since are left out: they are made again in smaller ones. ``memory_uses`` and
    ``noise`` are what was probed of memory and of the gradient noise scale.
    """
    trials = [one for one in trials if one.phase is not Phase.CONFIRM or _may_fit(memory, one)]
    verdict = decide(trials, spec.confirm.runs)
    if verdict is None or study.environment is None:
        raise _not_reached(study, trials)
    batches = _batches(spec, trials, probes, verdict)
    largest = _largest(spec, verdict, batches, memory)
    environment = study.environment
    return Answer(
        study=study.name,
        objective=study.objective,
        target=TargetAnswer(metric=study.target.metric, value=study.target.value, goal=study.target.goal),
        device=Device(
            name=environment.device_name,
            type=environment.device_type,
            memory_bytes=environment.device_memory_bytes,
            precision=environment.precision,
            torch_version=environment.torch_version,
        ),
        optimal=_optimal(verdict.optimal),
        flat_range=list(verdict.flat_range),
        tied=verdict.tied,
        largest_that_fits=largest,
        speedup=Speedup(
            over_largest=_ratio(verdict, verdict.by_batch.get(largest.batch_size)),
            over_default=_ratio(verdict, _default(spec, trials)),
        ),
        batches=batches,
        fit=None,
        measured=measured(probes.values(), memory_uses, memory, noise, verdict.optimal.runs),
        warnings=notices(spec, trials, verdict, probes.values()),
    )


def parameters_of(configuration: Configuration) -> Parameters:
    """Return everything of a configuration but its batch sizes, by name."""
    named: Parameters = {"learning_rate": configuration.learning_rate}
    named |= {name: getattr(configuration, name) for name in REGULAR}
    return {**named, "optimizer": configuration.optimizer, **configuration.parameters}


def headline(answer: Answer) -> str:
    """Return the answer in words: the optimum, how sure, how much faster, and what else would do."""
    optimal, target = answer.optimal, answer.target
    time = optimal.time_to_target_s
    assert time is not None, "an optimum has reached the target"
    wanted = f"{target.metric} {target.goal.sign} {target.value:g}"
    interval = f" [{time.low:.3g}, {time.high:.3g}]" if time.low is not None and time.high is not None else ""
    text = f"Batch {optimal.batch_size} reaches {wanted} in {time.median:.3g} s{interval}"
    text += f" ({time.runs} run{'s' if time.runs > 1 else ''})"
    largest = answer.largest_that_fits.batch_size
    untuned = any(row.batch_size == largest and row.untuned for row in answer.batches)
    named = f"the largest that fits ({largest}{', untuned' if untuned else ''})"
    comparisons = [
        (answer.speedup.over_largest, named, largest == optimal.batch_size),
        (answer.speedup.over_default, "your default", False),
    ]
    faster = [_faster(ratio, versus) for ratio, versus, same in comparisons if ratio is not None and not same]
    text += f", {' and '.join(faster)}." if faster else "."
    return " ".join([text, *_what_else(answer, time)])


def _what_else(answer: Answer, best: Time) -> list[str]:
    """Return the sentence on other batch sizes within 5 %, of those with as many runs; none below three runs."""
    if best.low is None:
        return []  # too few runs to say anything of
    low, high = answer.flat_range
    if low < high:
        inside = {row.batch_size for row in answer.batches if low <= row.batch_size <= high}
        verb = "is" if inside <= {*answer.tied} else "has a median"
        return [f"Anything from {low} to {high} {verb} within 5 %."]
    times = {row.batch_size: row.time_to_target_s for row in answer.batches if row.time_to_target_s}
    rivals = {
        size: time for size, time in times.items() if time.runs >= best.runs and size != answer.optimal.batch_size
    }
    near = [str(size) for size, time in rivals.items() if time.median <= FLAT * best.median]
    if near:
        return [f"The median of batch {', '.join(near)} is within 5 %, too."]
    undecided = {"not_separated", "unconfirmed"} & {notice.code for notice in answer.warnings}
    return ["No other batch size confirmed is within 5 %."] if rivals and not undecided else []


def _faster(ratio: Ratio, versus: str) -> str:
    factor = max(ratio.value, 1 / ratio.value)
    if factor < 1.005 and not ratio.at_least:
        return f"as fast as {versus}"
    amount = f"{factor - 1:.0%}".replace("%", " %") if factor < 1.1 else f"{factor:.2g}×"
    return f"{'at least ' if ratio.at_least else ''}{amount} {'faster' if ratio.value > 1 else 'slower'} than {versus}"


def _time(candidate: Candidate) -> Time | None:
    measured = candidate.estimate
    if measured.median is None:
        return None
    return Time(
        median=measured.median, low=measured.low, high=measured.high, runs=measured.reached, basis=measured.basis
    )


def _steps(candidate: Candidate) -> int | None:
    steps = [run.outcome.steps_to_target for run in candidate.runs if run.outcome]
    median = statistics.median([math.inf if value is None else value for value in steps])
    return math.ceil(median) if math.isfinite(median) else None


def _optimal(candidate: Candidate) -> Optimal:
    configuration = candidate.configuration
    steps = _steps(candidate)
    outcomes = [run.outcome for run in candidate.runs if run.outcome]
    at_target = [outcome for outcome in outcomes if outcome.state is TrialState.REACHED]
    tests = [outcome.test_metric for outcome in at_target if outcome.test_metric is not None]
    tokens = next((one.tokens / one.samples for one in at_target if one.tokens is not None and one.samples), None)
    samples = None if steps is None else float(steps * configuration.batch_size)
    peaks = [outcome.peak_memory_bytes for outcome in outcomes if outcome.peak_memory_bytes is not None]
    return Optimal(
        batch_size=configuration.batch_size,
        micro_batch_size=configuration.micro_batch_size,
        accumulation_steps=configuration.accumulation_steps,
        parameters=parameters_of(configuration),
        time_to_target_s=_time(candidate),
        steps_to_target=steps,
        samples_to_target=samples,
        tokens_to_target=None if samples is None or tokens is None else samples * tokens,
        test_metric=statistics.median(tests) if tests else None,
        peak_memory_bytes=max(peaks, default=None),
        trial_numbers=[run.number for run in candidate.runs],
    )


def _batches(
    spec: StudySpec, trials: Sequence[TrialRecord], probes: Mapping[int, ProbeRecord], verdict: Verdict
) -> list[Batch]:
    sizes = sorted({*probes, *verdict.by_batch})
    steps = [_steps(verdict.by_batch[size]) if size in verdict.by_batch else None for size in sizes]
    by_size: dict[int, list[TrialRecord]] = {size: [] for size in sizes}
    for trial in trials:
        by_size.setdefault(trial.configuration.batch_size, []).append(trial)
    rows = []
    for index, size in enumerate(sizes):
        finished = [trial for trial in by_size[size] if trial.state.is_finished]
        candidate = verdict.by_batch.get(size)
        reached = [trial for trial in finished if trial.state is TrialState.REACHED]
        previous = next((value for value in reversed(steps[:index]) if value), None)
        here = steps[index]
        rising = here is not None and previous is not None and here > 1.1 * previous
        tuned = {trial.configuration.key for trial in reached}
        best = fastest(candidate.runs) if candidate else None
        shown = best or (candidate.runs[0] if candidate else None)
        probe = probes.get(size)
        rows.append(
            Batch(
                batch_size=size,
                trials=len(finished),
                reached=len(reached),
                best=BestTrial(trial=best.number, parameters=parameters_of(best.configuration)) if best else None,
                time_to_target_s=_time(candidate) if candidate else None,
                lower_bound_s=candidate.lower_bound_s if candidate else None,
                steps_to_target=here,
                step_time_s=probe.step_seconds if probe else None,
                final_metric=shown.outcome.final_metric if shown and shown.outcome else None,
                regime=regime(sizes, steps, index),
                untuned=bool(best and spec.space.at_edge(best.configuration)) or rising or len(tuned) == 1,
                ended=dict(sorted(Counter(trial.state.value for trial in finished).items())),
            )
        )
    return rows


def _may_fit(memory: MemoryBoundary, trial: TrialRecord) -> bool:
    return memory.may_fit(trial.configuration.micro_batch_size)


def _largest(spec: StudySpec, verdict: Verdict, batches: Sequence[Batch], memory: MemoryBoundary) -> Largest:
    """Return the largest batch size that ran without accumulation; where none did, the largest that ran."""
    ran = [one for one in verdict.by_batch.values() if one.fits]
    whole = [one for one in ran if one.configuration.accumulation_steps == 1 and _may_fit(memory, one.runs[0])]
    candidate = (whole or ran)[-1]
    size = candidate.configuration.batch_size
    limit = min(spec.space.max_micro_batch_size or math.inf, batches[-1].batch_size)
    if memory.too_large is not None and memory.too_large <= limit:
        reason = f"a micro-batch of {memory.too_large} ran out of memory"
    elif not whole:
        reason = "every batch size of the study accumulates micro-batches; this is the largest that ran"
    elif any(row.batch_size > size for row in batches):
        reason = "larger batch sizes of the study accumulate micro-batches, or did not run"
    else:
        reason = "the largest batch size of the study"
    return Largest(
        batch_size=size, time_to_target_s=_time(candidate), lower_bound_s=candidate.lower_bound_s, reason=reason
    )


def _default(spec: StudySpec, trials: Sequence[TrialRecord]) -> Candidate | None:
    default = spec.default_configuration
    for phase in (Phase.CONFIRM, Phase.SEARCH):
        runs = [trial for trial in trials if trial.phase is phase and trial.configuration.trains_like(default)]
        ended = [run for run in runs if run.state.is_finished and not run.state.is_missing]
        counted = tuple(run for run in ended if run.state is not TrialState.OOM)
        if counted:
            return Candidate(counted[0].configuration, counted)
    return None


def _ratio(verdict: Verdict, other: Candidate | None) -> Ratio | None:
    if other is None:
        return None
    if math.isfinite(other.seconds):
        return Ratio(value=other.seconds / verdict.optimal.seconds, at_least=False)
    bound = other.lower_bound_s or 0.0
    return Ratio(value=bound / verdict.optimal.seconds, at_least=True) if bound > verdict.optimal.seconds else None


def _not_reached(study: StudyRecord, trials: Sequence[TrialRecord]) -> TargetNotReachedError:
    target = study.target
    tried = [
        (target.shortfall(trial.outcome.best_metric), trial.number, trial)
        for trial in trials
        if trial.outcome is not None and trial.outcome.best_metric is not None
    ]
    if not trials:
        return TargetNotReachedError(f"study {study.name!r} has no trial yet", hint="bssearch run goes on with it")
    if not tried:
        ended = ", ".join(f"{count} {state.value}" for state, count in Counter(trial.state for trial in trials).items())
        return TargetNotReachedError(
            f"no trial of study {study.name!r} measured anything: {ended}",
            hint=f"bssearch trial {study.name} {trials[-1].number} says why one ended",
        )
    nearest: Any = min(tried)[2]
    return TargetNotReachedError(
        f"none of {len(tried)} trials reached {target.metric} {target.value:g}; nearest came trial {nearest.number} "
        f"(batch {nearest.configuration.batch_size}) with {nearest.outcome.best_metric:.4g} "
        f"after {nearest.outcome.train_seconds:.3g} s",
        hint="raise budget.trial_train_seconds, ask for an easier target under a new name, or widen the space",
    )
