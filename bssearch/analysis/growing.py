"""Growing batches, compared with the best constant batch size."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from bssearch.analysis.answer import BatchScheduleAnswer, SavesTime, StageAnswer
from bssearch.analysis.optimum import Candidate, Verdict, median_steps, says_something
from bssearch.analysis.rules.rule_book import Finding, Judgement, judge
from bssearch.analysis.shape import parameters_of
from bssearch.errors import UsageError
from bssearch.records import (
    Configuration,
    Phase,
    StepSeconds,
    TrialRecord,
    TrialState,
    grouped,
    learning_rate_factor,
    timed_as,
)
from bssearch.records.batch_schedule import (
    PARAMETERS,
    BatchSchedule,
    Stage,
    constant_configurations,
    growing_schedule,
    with_batch_schedule,
)
from bssearch.spec import StudySpec


def batch_schedule_answer(
    spec: StudySpec, trials: Sequence[TrialRecord], verdict: Verdict, step_seconds: StepSeconds
) -> BatchScheduleAnswer | None:
    """Return the answer about growing batches; None unless a schedule grew and reached the target in most runs."""
    tuned = verdict.optimal
    best = _best_schedule(trials, tuned, step_seconds)
    if best is None or not math.isfinite(tuned.value):
        return None
    is_repeated = best.runs[0].phase is not Phase.GROWTH
    wanted, limit = spec.confirm.runs, spec.budget.trial_train_seconds
    found = (
        judge_growing(best, tuned, step_seconds, wanted=wanted, limit=limit)
        if is_repeated
        else Judgement(
            "not_run",
            "no run repeats the schedule with the seeds of the confirmation; "
            f"add such runs with `bssearch run {shlex.quote(spec.name)}`",
        )
    )
    saves: dict[str, SavesTime] = {"held": "yes", "broke": "no", "not_run": "not_run", "undecided": "undecided"}
    schedule = growing_schedule(best.configuration)
    return BatchScheduleAnswer(
        name=schedule.name,
        stages=list(_stages(best, step_seconds)),
        rate_rule=schedule.rate_rule,
        noise_share=schedule.noise_share,
        parameters={name: one for name, one in parameters_of(best.configuration).items() if name not in PARAMETERS},
        time_to_target=best.time.median,
        low=best.time.low if is_repeated else None,
        high=best.time.high if is_repeated else None,
        runs=len(best.runs),
        reached=best.estimate.reached,
        ratio=found.regret,
        saves_time=saves[found.finding],
        reason=found.reason,
        trials=sum(one.phase is Phase.GROWTH for one in trials),
        trial_numbers=[one.number for one in best.runs],
    )


def _best_schedule(trials: Sequence[TrialRecord], tuned: Candidate, step_seconds: StepSeconds) -> Candidate | None:
    # The schedule with the least figure, preferably a repeated schedule; None if all schedules missed
    audits = (one for one in trials if one.phase is Phase.AUDIT and one.configuration.grows and says_something(one))
    repeated = grouped((one.configuration.key, one) for one in audits)
    searched = [[one] for one in trials if one.phase is Phase.GROWTH and one.state is TrialState.REACHED]
    most = max(map(len, repeated.values()), default=0)
    groups = [group for group in repeated.values() if len(group) == most] or searched
    groups = [group for group in groups if any(map(has_grown, group))]
    objective = tuned.objective.between((*chain.from_iterable(groups), *tuned.runs), step_seconds)
    found = [Candidate(group[0].configuration, tuple(group), objective) for group in groups]
    return min([one for one in found if math.isfinite(one.value)], key=lambda one: (one.value, one.mean), default=None)


def typical_run(found: BatchScheduleAnswer, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the best schedule's run with the median steps, or None if no run reached the target."""
    runs = [one for one in trials if one.number in found.trial_numbers and one.state is TrialState.REACHED]
    ranked = sorted(runs, key=lambda one: ((one.outcome and one.outcome.steps_to_target) or 0, one.number))
    return ranked[len(ranked) // 2] if ranked else None


def has_grown(trial: TrialRecord) -> bool:
    schedule, outcome = growing_schedule(trial.configuration), trial.outcome
    assert outcome is not None, "a trial with a result has an outcome"
    if schedule.is_measured:
        return outcome.samples > outcome.steps * trial.configuration.batch_size
    return len(schedule.steps_by_stage(outcome.steps_to_target or outcome.steps)) > 1


def growing_batch(
    spec: StudySpec, trials: Sequence[TrialRecord], tuned: Candidate, found: BatchScheduleAnswer | None
) -> Configuration | str:
    """Return the best schedule, else a doubling schedule around the ``tuned`` batch size, else the reason for none.

    The doubling schedule trains on equal numbers of samples at half, one and two times the batch size.
    """
    by_number = {one.number: one.configuration for one in trials}
    if found is not None and found.trial_numbers[0] in by_number:
        return by_number[found.trial_numbers[0]]
    if spec.is_imported:
        return "the imported study has no run with a growing batch"
    size, steps = tuned.configuration.batch_size, median_steps(tuned)
    smaller, larger = size // 2, 2 * size
    if steps is None:
        return "the optimum's steps to the target are unknown"
    if smaller not in spec.batch_sizes or larger not in spec.batch_sizes:
        return f"a doubling schedule needs the batch sizes {smaller} and {larger} in space.batch_size"
    if spec.is_program:
        return "no trial ran a schedule; set space.batch_schedule to search schedules"
    rule = spec.space.rate_rule(tuned.configuration.optimizer)
    starts = round(steps * size / 3), round(2 * steps * size / 3)
    schedule = BatchSchedule(
        name="geometric",
        stages=(Stage(0, smaller, smaller), Stage(starts[0], size, size), Stage(starts[1], larger, larger)),
        rate_rule=rule,
    )
    started = replace(
        tuned.configuration, learning_rate=tuned.configuration.learning_rate * learning_rate_factor(rule, smaller, size)
    )
    try:
        return with_batch_schedule(started, schedule)
    except UsageError as error:  # the target takes fewer steps than the schedule has stages
        return str(error)


def judge_growing(
    grown: Candidate, tuned: Candidate, step_seconds: StepSeconds, *, wanted: int, limit: float
) -> Judgement:
    """Judge whether a growing batch beats the ``tuned`` constant batch, by the ratio growing / constant.

    The rule held if the ratio's interval is below 1. The rule broke if the interval is above 1, or if `judge` finds
    only missed runs.
    """
    found = judge(grown, tuned, step_seconds, wanted=wanted, limit=limit)
    regret = found.regret
    finding: Finding = "broke" if found.finding == "broke" else "undecided"
    if regret is not None and regret.low is not None and regret.high is not None:
        finding = "held" if regret.high < 1 else "broke" if regret.low > 1 else "undecided"
    return replace(found, finding=finding)


def _stages(candidate: Candidate, step_seconds: StepSeconds) -> Iterator[StageAnswer]:
    configuration = candidate.configuration
    schedule = growing_schedule(configuration)
    steps = median_steps(candidate)
    taken = {} if schedule.is_measured or steps is None else dict(schedule.steps_by_stage(steps))
    for stage, one in zip(schedule.stages, constant_configurations(configuration), strict=True):
        seconds = step_seconds.get(timed_as(one))
        count = None if schedule.is_measured or steps is None else taken.get(stage, 0.0)
        yield StageAnswer(
            start_samples=None if schedule.is_measured else stage.start_samples,
            batch_size=stage.batch_size,
            micro_batch_size=stage.micro_batch_size,
            learning_rate=one.learning_rate,
            steps=count,
            seconds=None if count is None or seconds is None else count * seconds,
        )
