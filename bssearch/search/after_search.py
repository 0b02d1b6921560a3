"""Plan runs after the search: batch schedules, finalists trained past the target, and runs on more devices.

After the schedules of `FIRST`, Optuna's TPE proposes a schedule's start, end, timing and initial learning rate. Other
parameters are the best trial's at the starting batch size; for Seesaw, or if no trial succeeded there, they are the
best constant batch's.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from bssearch.analysis.answer import OnDevices
from bssearch.analysis.certainty import carries
from bssearch.analysis.generalisation import is_to_budget
from bssearch.analysis.growing import has_grown
from bssearch.analysis.optimum import Verdict
from bssearch.records import (
    REGULARISERS,
    Configuration,
    LearningRateRule,
    ParameterValue,
    Phase,
    TrialPlan,
    TrialRecord,
    TrialState,
    median_known,
)
from bssearch.records.batch_schedule import (
    MOST_STAGES,
    NOISE_SCALE,
    SEESAW,
    BatchSchedule,
    BatchScheduleName,
    Stage,
    growing,
    growing_schedule,
    with_batch_schedule,
)
from bssearch.search.confirmation import CompletedRuns, interleaved, repeat, verdict_of
from bssearch.search.history import History, trial_seed
from bssearch.spec import RETUNED, BatchGrowth, Dimension, Domain, SearchSpace, are_coordinates, bounds
from bssearch.spec.parts import MOST_DEVICES
from bssearch.spec.space.domains import FOLLOWED, Range, RelativeLearningRate
from bssearch.training.schedule import schedule_of

BELOW, ABOVE = 8, 16  # default range of schedules: these factors of the best constant batch size

# First trials: start and end as multiples of the best constant batch size, and the share of samples before the end
FIRST = ((0.5, 2.0, 0.5), (1.0, 4.0, 1.0), (0.25, 1.0, 0.25))

RANDOM_TRIALS = 3  # random trials before TPE

ASKED_AGAIN = 20  # after this many proposals of tried schedules, no new schedule is left

MISSED = 1e9  # an objective value worse than any success


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best constant-batch configuration, and the median number of samples to the target."""

    configuration: Configuration
    samples_to_target: float


def propose(
    history: History, tuned: Tuned, tried: Sequence[TrialRecord]
) -> tuple[Configuration, dict[str, ParameterValue]] | None:
    """Return the next configuration and its coordinates; None if no new schedule grows within a trial's time limit."""
    space = history.spec.space
    if space.batch_schedule is None:
        return None
    names = _names(history, space.batch_schedule, tuned)
    starts, ends = _sizes(history, space.batch_schedule, names, tuned)
    if not starts:
        return None
    dimensions = _dimensions(space, names, starts, ends)
    first = _usual(names, dimensions, tuned)
    # the space's schedules or the optimum may have changed
    known = [trial for trial in tried if are_coordinates(trial.sampled, dimensions)]
    keys = {trial.configuration.key for trial in tried}
    startup = len(first) + RANDOM_TRIALS
    for count in range(len(tried), len(tried) + ASKED_AGAIN):
        sampled = first[count] if count < len(first) else _asked(history, dimensions, known, startup, count)
        configuration = decode(history, tuned, sampled)
        if configuration.key not in keys and _grows_in_time(history, configuration):
            return configuration, sampled
    return None


def _grows_in_time(history: History, configuration: Configuration) -> bool:
    seconds = history.probes[configuration.batch_size].step_seconds or 0.0
    steps = growing_schedule(configuration).stages[1].start_samples / configuration.batch_size
    return steps * seconds < history.spec.budget.trial_train_seconds


def _in_known_micro_batches(history: History, configuration: Configuration) -> Configuration:
    schedule = growing_schedule(configuration)
    stages = [
        replace(stage, micro_batch_size=history.probes[stage.batch_size].micro_batch_size)
        if stage.batch_size in history.feasible
        else stage
        for stage in schedule.stages
    ]
    return with_batch_schedule(configuration, replace(schedule, stages=tuple(stages)))


def decode(history: History, tuned: Tuned, sampled: Mapping[str, ParameterValue]) -> Configuration:
    space, growth = history.spec.space, history.spec.space.batch_schedule
    assert growth is not None, "the space has schedules"
    _, ends = _sizes(history, growth, _names(history, growth, tuned), tuned)
    start, name = int(sampled["start"] or 0), str(sampled["name"])
    milestones = _milestones(history, growth)
    if name == "milestones" and start >= milestones[0][1]:
        start = max(size for size in history.feasible if size < milestones[0][1])
    base = _best_at(history, start, tuned.configuration, is_carried=name == SEESAW)
    rate = base.learning_rate * float(sampled.get("learning_rate") or 1.0)
    if name == "milestones":
        changes = milestones
    else:
        end = max(int(sampled["end"] or 0), min(size for size in ends if size > start))
        sizes = _thinned([size for size in history.feasible if start <= size <= end])
        begin, until = (float(sampled[key] or 0.0) * tuned.samples_to_target for key in ("begin", "until"))
        if name == NOISE_SCALE:
            changes = [(0, size) for size in sizes[1:]]
        elif name == SEESAW:
            changes = changes_at_decay(base, sizes)
        else:
            changes = growing(name, sizes, begin, max(begin + 1, until))
    schedule = BatchSchedule(
        name=cast(BatchScheduleName, name),
        stages=tuple(_stages(history, start, changes, spread=name not in {NOISE_SCALE, "milestones"})),
        rate_rule=LearningRateRule.SQRT if name == SEESAW else growth.rate_rule or space.rate_rule(base.optimizer),
        noise_share=float(sampled["noise_share"] or 0.0) if name == NOISE_SCALE else None,
    )
    return with_batch_schedule(replace(base, learning_rate=rate), schedule)


def changes_at_decay(base: Configuration, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return Seesaw's changes as (samples, batch size), ignoring the warmup."""
    decay = schedule_of(replace(base, batch_size=1, micro_batch_size=1, accumulation_steps=1, warmup_epochs=0.0), 1)
    samples = range(decay.horizon_steps or 0)
    starts = [bisect_left(samples, -sizes[0] / size, key=lambda one: -decay.factor(one)) for size in sizes[1:]]
    return list(zip(starts, sizes[1:], strict=True))


def _stages(history: History, start: int, changes: Sequence[tuple[int, int]], *, spread: bool) -> list[Stage]:
    stages = [Stage(0, start, history.probes[start].micro_batch_size)]
    for samples, size in changes:
        least = stages[-1].start_samples + stages[-1].batch_size if spread else 0
        stages.append(Stage(max(samples, least), size, history.probes[size].micro_batch_size))
    return stages


def _thinned(sizes: Sequence[int]) -> Sequence[int]:
    if len(sizes) <= MOST_STAGES:
        return sizes
    gap = (len(sizes) - 1) / (MOST_STAGES - 1)
    return [sizes[round(place * gap)] for place in range(MOST_STAGES)]


def _milestones(history: History, growth: BatchGrowth) -> list[tuple[int, int]]:
    found = [one for one in sorted((growth.milestones or {}).items()) if one[1] in history.feasible]
    return found if found and history.feasible[0] < found[0][1] else []


def _names(history: History, growth: BatchGrowth, tuned: Tuned) -> tuple[BatchScheduleName, ...]:
    decays = tuned.configuration.parameters.get("schedule") in FOLLOWED
    possible = {"milestones": bool(_milestones(history, growth)), SEESAW: decays}
    return tuple(name for name in growth.names if possible.get(name, True))


def _sizes(
    history: History, growth: BatchGrowth, names: Sequence[BatchScheduleName], tuned: Tuned
) -> tuple[list[int], list[int]]:
    best, feasible = tuned.configuration.batch_size, history.feasible
    starts = [size for size in growth.starts(feasible) if growth.start or best <= BELOW * size <= BELOW * best]
    ends = [size for size in growth.ends(feasible) if growth.end or size <= ABOVE * best]
    if set(names) <= {"milestones"}:
        reached = [size for _, size in _milestones(history, growth)]
        below = [size for size in feasible if size < min(reached, default=0)]
        return [size for size in below if not growth.start or size in starts], reached
    return (
        [size for size in starts if size in feasible and any(end > size for end in ends)],
        [size for size in ends if size in feasible],
    )


def _dimensions(
    space: SearchSpace, names: Sequence[BatchScheduleName], starts: Sequence[int], ends: Sequence[int]
) -> list[Dimension]:
    growth = space.batch_schedule
    assert growth is not None, "the space has schedules"
    return [
        Dimension("name", choices=tuple(names)),
        Dimension("start", choices=tuple(starts)),
        Dimension("end", choices=tuple(ends)),
        _dimension("begin", growth.begin),
        _dimension("until", growth.until),
        _dimension("noise_share", growth.noise_share),
        *([_dimension("learning_rate", RETUNED)] if isinstance(space.learning_rate, RelativeLearningRate) else []),
    ]


def _dimension(name: str, domain: Domain) -> Dimension:
    if isinstance(domain, Range):
        return Dimension(name, low=domain.low, high=domain.high, log=domain.is_log)
    return Dimension(name, choices=domain if isinstance(domain, tuple) else (domain,))


def _usual(
    names: Sequence[BatchScheduleName], dimensions: Sequence[Dimension], tuned: Tuned
) -> list[dict[str, ParameterValue]]:
    best, found = tuned.configuration.batch_size, list[dict[str, ParameterValue]]()
    for place, (start, end, until) in enumerate(FIRST):
        wanted = {"name": names[place % len(names)], "start": start * best, "end": end * best, "until": until}
        wanted |= {"begin": 0.0, "noise_share": 1.0, "learning_rate": 1.0}
        sampled = {one.name: one.nearest(wanted[one.name]) for one in dimensions}
        if sampled not in found:
            found.append(sampled)
    return found


def _asked(
    history: History, dimensions: Sequence[Dimension], tried: Sequence[TrialRecord], startup: int, count: int
) -> dict[str, ParameterValue]:
    import optuna  # deferred, because this import takes some tenths of a second

    from bssearch.search.samplers.optuna import TPE_OPTIONS, Asker

    asker = Asker(dimensions, optuna.samplers.TPESampler, {**TPE_OPTIONS, "n_startup_trials": startup})
    states = optuna.trial.TrialState
    told = []
    for trial in tried:
        value = history.value(trial)
        if not trial.state.is_finished:
            told.append(asker.told(trial, states.RUNNING))
        elif trial.state is TrialState.REACHED and math.isfinite(value):
            told.append(asker.told(trial, states.COMPLETE, value=math.log(value)))
        else:
            told.append(asker.told(trial, states.PRUNED, shortfall=MISSED))
    return asker.ask(told, history.spec.seed + count)


def _best_at(history: History, batch_size: int, tuned: Configuration, *, is_carried: bool) -> Configuration:
    # The best configuration of a batch size; the tuned values if `is_carried`, or if no trial reached the target there
    if batch_size == tuned.batch_size:
        return history.as_run(tuned)
    best = None if is_carried else history.best_at(batch_size)
    if best is not None:
        return history.as_run(best.configuration)
    return history.as_run(history.spec.space.decode(batch_size, history.spec.space.encode(tuned) or {}))


REPEATED = 2  # repeated schedules, because a single schedule may be lucky

ATTEMPTS = 2  # limit of schedule trials with failed and lost trials, as a multiple of the budgeted trials

SLACK = 1.5  # limit of a schedule's seconds, as a multiple of the best constant batch's


def next_trial(history: History) -> TrialPlan | None:
    """Return the next schedule trial. Queued trials and retries come first.

    Returns None if the budget or the attempts are spent, no schedule is left, or no batch size is tuned.
    """
    trials = history.of_phase(Phase.GROWTH)
    if queued := next((one for one in trials if one.state is TrialState.QUEUED or _is_to_retry(one, trials)), None):
        configuration = _in_known_micro_batches(history, queued.configuration)
        return _plan(history, configuration, None, uncapped=True, earlier=queued)
    searched = [one for one in trials if not one.uncapped]
    tried, most = [one for one in searched if not one.state.is_missing], history.spec.budget.schedule_trials
    failed = sum(one.state in {TrialState.FAILED, TrialState.LOST} for one in searched)
    if len(tried) >= most or len(tried) + failed >= ATTEMPTS * most:
        return None
    tuned = _tuned_constant(history)
    proposed = None if tuned is None else propose(history, tuned, tried)
    return None if proposed is None else _plan(history, *proposed, uncapped=False)


def next_repeat(history: History) -> TrialPlan | None:
    made = CompletedRuns(history, [one for one in history.of_phase(Phase.AUDIT) if one.configuration.grows])
    return next(interleaved(history, made, _best_schedules(history), history.spec.confirm.runs, Phase.AUDIT), None)


def _best_schedules(history: History) -> list[Configuration]:
    reached = [one for one in history.of_phase(Phase.GROWTH) if one.state is TrialState.REACHED and has_grown(one)]
    ranked = sorted(reached, key=lambda one: (history.value(one), one.number))
    return list({one.configuration.key: one.configuration for one in ranked}.values())[:REPEATED]


def _tuned_constant(history: History) -> Tuned | None:
    verdict = verdict_of(history, history.of_phase(Phase.CONFIRM))
    if verdict is None or not math.isfinite(verdict.optimal.value):
        return None
    configuration = verdict.optimal.configuration
    outcomes = [run.outcome for run in verdict.optimal.runs if run.outcome is not None]
    steps = median_known(one.steps_to_target for one in outcomes)
    if steps is None or configuration.batch_size not in history.feasible:
        return None
    return Tuned(configuration, configuration.batch_size * steps)


def _is_to_retry(trial: TrialRecord, trials: Sequence[TrialRecord]) -> bool:
    came_to_nothing = trial.uncapped and trial.state in {TrialState.LOST, TrialState.CANCELLED}
    return came_to_nothing and trial.retry_of is None and all(one.retry_of != trial.number for one in trials)


def _plan(
    history: History,
    configuration: Configuration,
    sampled: Mapping[str, ParameterValue] | None,
    *,
    uncapped: bool,
    earlier: TrialRecord | None = None,
) -> TrialPlan:
    is_queued = earlier is not None and earlier.state is TrialState.QUEUED
    full = history.spec.budget.trial_train_seconds
    best, limit = history.incumbent, full
    if best is not None and not uncapped:
        probe = history.probes[best.configuration.batch_size]
        limit = min(full, SLACK * history.objective.seconds_as_good_as(best, probe, full))
    return TrialPlan(
        configuration=configuration,
        sampled=sampled,
        phase=Phase.GROWTH,
        seed=earlier.seed
        if earlier
        else trial_seed(history.spec.seed, Phase.GROWTH, len(history.of_phase(Phase.GROWTH))),
        train_seconds_limit=limit,
        limit_state=TrialState.EXHAUSTED if limit >= full else TrialState.CAPPED,
        eval_every_steps=history.eval_every_steps(configuration.batch_size),
        threads=history.spec.executor.threads,
        uncapped=uncapped,
        stop_at_target=history.objective.stops_at_target,
        queued=earlier.number if earlier and is_queued else None,
        retry_of=earlier.number if earlier and not is_queued else None,
        after=history.length,
    )


def next_run(history: History, runs: int) -> TrialPlan | None:
    """Return the next run to the full limit, if any. Each finalist gets ``runs`` runs with confirmation seeds."""
    limit = history.spec.budget.trial_train_seconds
    made = CompletedRuns(history, [trial for trial in history.all_trials if is_to_budget(trial, limit)])
    return next(interleaved(history, made, finalists(history), runs, Phase.TO_BUDGET), None)


def finalists(history: History) -> list[Configuration]:
    """Return each batch size's best successful configuration, and a `more_regularised` copy of the largest size's."""
    verdict = verdict_of(history, history.of_phase(Phase.CONFIRM))
    if verdict is None:
        return []
    chosen = [
        history.as_run(one.configuration)
        for size, one in verdict.by_batch.items()
        if math.isfinite(one.value) and size in history.feasible
    ]
    if chosen:
        harder = more_regularised(history.spec.space, chosen[-1], verdict.optimal.configuration)
        chosen += [] if any(harder.trains_like(one) for one in chosen) else [harder]
    return chosen


def more_regularised(space: SearchSpace, configuration: Configuration, optimum: Configuration) -> Configuration:
    """Return a copy with at least √(B / B_opt) times the optimum's regularisation, within the space.

    The factor is a rule of thumb.
    """
    factor = math.sqrt(configuration.batch_size / optimum.batch_size)
    changes: dict[str, Any] = {
        name: max(getattr(configuration, name), _within(getattr(space, name), factor * getattr(optimum, name)))
        for name in REGULARISERS
    }
    return replace(configuration, **changes)


def _within(domain: Domain, value: float) -> float:
    low, high = bounds(domain)
    choices = [choice for choice in domain if choice >= value] if isinstance(domain, tuple) else []
    return float(min(choices, default=min(max(value, low), high)))


def next_run_on_devices(history: History, rows: Sequence[OnDevices], runs_before: int) -> TrialPlan | None:
    """Return the next run on more devices, if any.

    Each number of devices on the Pareto front gets ``confirm.runs`` runs. If these runs are complete and only
    ``runs_before`` runs on more devices exist, one of `OnDevices.contenders` runs.
    """
    confirm, done = history.spec.confirm, history.of_phase(Phase.DEVICES)
    verdict = verdict_of(history, history.of_phase(Phase.CONFIRM))
    if verdict is None:
        return None
    made = CompletedRuns(history, done, as_run=lambda one: one)
    more = [one for one in rows if one.world_size > history.spec.executor.world_size]
    front = [(one.world_size, one.batch_size, one.micro_batch_size) for one in more if one.on_front]
    wanted = list(itertools.product(range(confirm.runs), front))
    if len(done) == runs_before:
        contenders = [(one.world_size, *split) for one in more for split in one.contenders]
        wanted += [(index, one) for one in contenders for index in range(confirm.max_runs or confirm.runs)]
    for index, (world_size, size, micro) in wanted:
        found = _configuration_at(history, verdict, size)
        # each number of devices has fresh seeds, because the runs also refine the steps to the target
        seed = trial_seed(history.spec.seed, Phase.DEVICES, index * MOST_DEVICES + world_size)
        if found is not None and made.is_missing(one := found.on_devices(world_size, micro), seed):
            return repeat(history, one, seed, Phase.DEVICES, retry_of=made.retried(one, seed))
    return None


def _configuration_at(history: History, verdict: Verdict, batch_size: int) -> Configuration | None:
    # The confirmed configuration, else the best values of the search, because a single trial may be badly tuned
    found, sampled = verdict.by_batch.get(batch_size), verdict.least.runs[0].sampled
    if sampled is not None and carries(verdict.least) and not (found is not None and found.is_confirmed):
        return history.spec.space.decode(batch_size, sampled)
    return None if found is None else found.configuration
