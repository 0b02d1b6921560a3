"""The step time of each batch size, from repeated short timings, called visits.

Step times vary more between visits than within a visit, so errors come from differences between visits only.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from bssearch.records.batch_schedule import batch_schedule_of
from bssearch.records.grouping import grouped
from bssearch.records.intervals import median_known, student_t
from bssearch.records.measured import StepTime, StepTimeError, Timing, Visit
from bssearch.records.question import BATCH_STAGES, Configuration, ModelParameters, model_parameters
from bssearch.records.requests import ProbeRecord, TrialRecord

# Prior deviation of a log step time between visits (measured 0.05 to 0.14)
VISIT_DEVIATION = 0.1
VISIT_FREEDOM = 4

STEP_DEVIATION = 0.3  # prior deviation within one trial; lessens the weight of short trials

UNDISTURBED = 3  # with this many uncontended trials of each compared kind, contended trials do not count

PACED = 20  # the first trials set the reference pace, so later trials change only their own batch size

SMALLEST_PENALTY = 0.01  # below this penalty, visits are fixed effects

MIDMEAN_ERROR = 1.09  # ratio to the standard error of the mean: 84 % efficiency (Rosenberger & Gasko 1983)

ROUNDS = 30  # the alternating fit converges in a few rounds

Split = tuple[int, int, int]  # (batch size, micro-batch size, world size)

Timed = tuple[object, ...]  # (*split, (name, value) of model parameters)

StepSeconds = Mapping[Timed, float]

Key = TypeVar("Key", bound=Hashable)


def split(one: Configuration | Timing) -> Split:
    return one.batch_size, one.micro_batch_size, one.world_size


def timed_as(configuration: Configuration) -> Timed:
    grows = ((BATCH_STAGES, configuration.parameters.get(BATCH_STAGES)),) if configuration.grows else ()
    return *split(configuration), *model_parameters(configuration), *grows


def step_seconds_of(probes: Iterable[StepTime], model: ModelParameters = ()) -> StepSeconds:
    """Return measured step times, preferably from uncontended probes."""
    timed = [(one.contended, (*split(one), *model), one.step_seconds) for one in probes]
    known: dict[Timed, float] = {}
    for _, place, seconds in sorted(timed, key=lambda one: one[0]):
        if seconds is not None:
            known.setdefault(place, seconds)
    return known


def with_step_time(trial: TrialRecord, step_seconds: StepSeconds) -> TrialRecord:
    steps = None if trial.outcome is None else trial.outcome.steps_to_target
    product = None if steps is None else seconds_of_steps(trial.configuration, steps, step_seconds)
    if product is None or trial.steps_x_step_time_s == product:
        return trial
    return replace(trial, steps_x_step_time_s=product)


def seconds_of_steps(configuration: Configuration, steps: float, step_seconds: StepSeconds) -> float | None:
    """Return the seconds of a trial's first ``steps``, or None for a `noise_scale` schedule or an unknown step time."""
    schedule = batch_schedule_of(configuration) if configuration.grows else None
    if schedule is None:
        seconds = step_seconds.get(timed_as(configuration))
        return None if seconds is None else steps * seconds
    if schedule.is_measured:
        return None
    further = configuration.world_size, *model_parameters(configuration)
    stages = schedule.steps_by_stage(steps)
    times = [step_seconds.get((stage.batch_size, stage.micro_batch_size, *further)) for stage, _ in stages]
    if any(one is None for one in times):
        return None
    return math.fsum(taken * (time or 0.0) for (_, taken), time in zip(stages, times, strict=True))


def steps_at_first_size(configuration: Configuration, steps: float, step_seconds: StepSeconds) -> float | None:
    """Return the steps at a schedule's first batch size that take as long as ``steps``, or None if unknown."""
    if not configuration.grows:
        return steps
    seconds = seconds_of_steps(configuration, steps, step_seconds)
    first = step_seconds.get((*split(configuration), *model_parameters(configuration)))
    return None if seconds is None or first is None else seconds / first


@dataclass(frozen=True, slots=True)
class FittedStepTime:
    """The seconds per step at one `Split`."""

    seconds: float
    error: StepTimeError


@dataclass(frozen=True, slots=True)
class PooledStepTime(Generic[Key]):
    """The step time of one kind of configuration, with the standard error of its logarithm.

    Attributes:
        common: Error of the reference kernel's time, which cancels in ratios.
        excess: Mean log ratio of wall time per step to ``seconds``, about the size of the bias.
    """

    kind: Key
    seconds: float
    error: float
    freedom: float
    excess: float  # in the study digits, the bias was 0.5–1.2 × excess
    common: float = 0.0


@lru_cache(maxsize=64)  # without the cache, each read of a study would fit the same visits again
def fit_step_times(visits: tuple[Visit, ...]) -> Mapping[Split, FittedStepTime]:
    """Fit log t = split + visit + residual by penalised least squares, and return the step time of each split.

    t is undelayed step time / reference kernel time if known, else the wall time of the uncontended visits. If all
    visits to a split are contended, t is the wall time of all visits.
    """
    # Visits are random effects, so that a visit to one batch size still adds information.
    if not (chosen := _comparable(visits)):
        return {}
    splits, rounds = _fit(chosen)
    residuals = [log - splits[split] - rounds[visit] for split, visit, log in chosen]
    counts = Counter(split for split, _, _ in chosen)
    freedom = max(0, len(chosen) - len(splits) - len(rounds) + 1) + VISIT_FREEDOM
    variance = (sum(one * one for one in residuals) + VISIT_FREEDOM * VISIT_DEVIATION**2) / freedom
    spread = math.fsum(effect**2 for effect in rounds.values()) + VISIT_FREEDOM * VISIT_DEVIATION**2
    common = math.sqrt(spread / (len(rounds) - 1 + VISIT_FREEDOM) / len(rounds))
    return {
        split: FittedStepTime(
            seconds=math.exp(log),
            error=StepTimeError(
                own=math.sqrt(variance / counts[split]), common=common, freedom=float(freedom), visits=counts[split]
            ),
        )
        for split, log in splits.items()
    }


def with_visits(probes: Iterable[ProbeRecord], visits: Sequence[Visit]) -> list[ProbeRecord]:
    """Fit the probes' step times to visits on equally many devices. `with_intervals` adds intervals."""
    fitted: dict[Split, FittedStepTime] = {}
    for here in grouped((one.world_size, one) for one in visits).values():
        fitted |= fit_step_times(tuple(here))
    by_split = _by_split(visits)
    splits = ((probe, split(probe)) for probe in probes)
    return [_fitted(probe, fitted[place], by_split[place]) if place in by_split else probe for probe, place in splits]


def with_intervals(probes: Iterable[ProbeRecord]) -> list[ProbeRecord]:
    return [one if one.error is None else _with_interval(one, one.error) for one in probes]


@dataclass(frozen=True, slots=True)
class TrialPace:
    """The seconds per step of a trial, also without waits for a CPU, and the reference kernel's seconds."""

    steps: float
    step_seconds: float
    undelayed_step_seconds: float
    reference_seconds: float
    contended: bool
    number: int = 0

    @property
    def weight(self) -> float:
        return self.steps / (self.steps + (STEP_DEVIATION / VISIT_DEVIATION) ** 2)


def pool_paces(paces: Mapping[Key, Sequence[TrialPace]], compared: Collection[Key]) -> dict[Key, PooledStepTime[Key]]:
    """Return the step time of each kind of configuration, without waits for a CPU.

    The step time is a geometric mean over trials, weighted by `TrialPace.weight`. If every ``compared`` kind has at
    least `UNDISTURBED` uncontended trials, contended trials count only for kinds without uncontended trials. The
    reference kernel's time is the midmean of at most `PACED` early trials.
    """
    alone = {key: [one for one in found if not one.contended] for key, found in paces.items()}
    are_enough = all(len(alone[key]) >= UNDISTURBED for key in compared)
    counted = {key: (are_enough and alone[key]) or list(found) for key, found in paces.items()}
    ordered = sorted((one for found in paces.values() for one in found), key=lambda one: one.number)
    quiet = [one for one in ordered if not one.contended]
    first = (quiet if len(quiet) >= UNDISTURBED else ordered)[:PACED]
    references = sorted(math.log(one.reference_seconds) for one in first)
    quarter = len(references) // 4
    reference = math.exp(statistics.fmean(references[quarter : len(references) - quarter]))
    spread = statistics.stdev(references) if len(references) > 1 else 0.0
    logs = {
        key: [math.log(one.undelayed_step_seconds * reference / one.reference_seconds) for one in found]
        for key, found in counted.items()
    }
    weights = {key: [one.weight for one in found] for key, found in counted.items()}
    means = {key: statistics.fmean(values, weights[key]) for key, values in logs.items()}
    squares = math.fsum(
        weight * (log - means[key]) ** 2
        for key, values in logs.items()
        for log, weight in zip(values, weights[key], strict=True)
    )
    freedom = sum(len(values) - 1 for values in logs.values()) + VISIT_FREEDOM
    variance = (squares + VISIT_FREEDOM * VISIT_DEVIATION**2) / freedom
    return {
        key: PooledStepTime(
            kind=key,
            seconds=math.exp(mean),
            error=math.sqrt(variance / math.fsum(weights[key])),
            freedom=float(freedom),
            excess=0.0
            if are_enough and alone[key]
            else max(0.0, statistics.fmean((math.log(one.step_seconds) for one in counted[key]), weights[key]) - mean),
            common=MIDMEAN_ERROR * spread / math.sqrt(len(references)),
        )
        for key, mean in means.items()
    }


def _fitted(probe: ProbeRecord, fit: FittedStepTime, visits: Sequence[Visit]) -> ProbeRecord:
    contended = all(one.contended for one in visits)
    return replace(
        probe,
        step_seconds=fit.seconds,
        error=replace(fit.error, visits=len(visits)),
        host_bound_share=median_known(one.host_bound_share for one in visits if one.contended is contended),
        steps_timed=sum(one.steps_timed for one in visits),
        settled=any(one.settled for one in visits),
        contended=contended,
        reason=next((one.reason for one in reversed(visits) if one.contended), None) if contended else None,
    )


def _with_interval(probe: ProbeRecord, error: StepTimeError) -> ProbeRecord:
    assert probe.step_seconds is not None, "a probe with an error has known seconds"
    widest = math.exp(student_t(error.freedom) * math.hypot(error.own, error.common))
    return replace(probe, step_seconds_low=probe.step_seconds / widest, step_seconds_high=probe.step_seconds * widest)


def _by_split(visits: Iterable[Visit]) -> dict[Split, list[Visit]]:
    return grouped((split(one), one) for one in visits)


def _comparable(visits: Sequence[Visit]) -> list[tuple[Split, int, float]]:
    references = [one.reference_seconds for one in visits if one.reference_seconds and one.undelayed_step_seconds]
    found: list[tuple[Split, int, float]] = []
    quiet = statistics.median(references) if references else 1.0
    for place, here in _by_split(visits).items():
        corrected = [
            (place, one.visit, math.log(one.undelayed_step_seconds * quiet / one.reference_seconds))
            for one in here
            if one.undelayed_step_seconds and one.reference_seconds
        ]
        undisturbed = [one for one in here if not one.contended] or here
        found += corrected or [(place, one.visit, math.log(one.step_seconds)) for one in undisturbed]
    return found


def _fit(chosen: Sequence[tuple[Split, int, float]]) -> tuple[dict[Split, float], dict[int, float]]:
    by_split = grouped((split, (visit, log)) for split, visit, log in chosen)
    by_visit = grouped((visit, (split, log)) for split, visit, log in chosen)
    rounds = dict.fromkeys(by_visit, 0.0)
    splits: dict[Split, float] = {}
    penalty = SMALLEST_PENALTY
    for _ in range(ROUNDS):
        splits = {
            split: statistics.fmean(log - rounds[visit] for visit, log in seen) for split, seen in by_split.items()
        }
        effects = {
            visit: math.fsum(log - splits[split] for split, log in made) / (len(made) + penalty)
            for visit, made in by_visit.items()
        }
        middle = statistics.fmean(effects.values())
        rounds = {visit: effect - middle for visit, effect in effects.items()}
        residuals = math.fsum((log - splits[split] - rounds[visit]) ** 2 for split, visit, log in chosen)
        residuals = (residuals + VISIT_FREEDOM * VISIT_DEVIATION**2) / (len(chosen) + VISIT_FREEDOM)
        between = math.fsum(effect**2 for effect in rounds.values()) / len(rounds)
        penalty = min(1.0, max(SMALLEST_PENALTY, residuals / between if between > 0 else 1.0))
    return splits, rounds
