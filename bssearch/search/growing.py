"""Search for batch schedules, and repeats of the best ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from bssearch.analysis.growing import has_grown
from bssearch.records import Configuration, ParameterValue, Phase, TrialPlan, TrialRecord, TrialState
from bssearch.search.confirmation import CompletedRuns, confirmation_trials, interleaved, verdict_of
from bssearch.search.history import History, trial_seed
from bssearch.search.samplers.batch_schedules import Tuned, in_known_micro_batches, propose

REPEATED = 2
"""A single one may be lucky."""

ATTEMPTS = 2
"""Times the budgeted trials, failed and lost ones included."""

SLACK = 1.5
"""Times the best constant batch's seconds."""


def next_trial(history: History) -> TrialPlan | None:
    """Next schedule trial; enqueued trials come first.

    None if the budget is spent, no batch can grow, or no constant batch reached the target.
    """
    trials = growth_trials(history)
    if queued := next((one for one in trials if one.state is TrialState.QUEUED or _is_to_retry(one, trials)), None):
        configuration = in_known_micro_batches(history, queued.configuration)
        return _plan(history, configuration, None, uncapped=True, earlier=queued)
    searched = [one for one in trials if not one.uncapped]
    tried, most = [one for one in searched if not one.state.is_missing], history.spec.budget.schedule_trials
    failed = sum(one.state in {TrialState.FAILED, TrialState.LOST} for one in searched)
    if len(tried) >= most or len(tried) + failed >= ATTEMPTS * most:
        return None
    tuned = tuned_constant(history)
    proposed = None if tuned is None else propose(history, tuned, tried)
    return None if proposed is None else _plan(history, *proposed, uncapped=False)


def next_repeat(history: History) -> TrialPlan | None:
    """Next repeat of the best schedules, with a confirmation seed."""
    trials = [one for one in history.all_trials if one.phase is Phase.AUDIT and one.configuration.grows]
    made = CompletedRuns.of(history, trials)
    return next(interleaved(history, made, best_schedules(history), history.spec.confirm.runs, Phase.AUDIT), None)


def growth_trials(history: History) -> list[TrialRecord]:
    """Schedule search's trials, by number."""
    return [trial for trial in history.all_trials if trial.phase is Phase.GROWTH]


def best_schedules(history: History) -> list[Configuration]:
    """`REPEATED` best distinct schedules that grew and reached the target."""
    reached = [one for one in growth_trials(history) if one.state is TrialState.REACHED and has_grown(one)]
    ranked = sorted(reached, key=lambda one: (history.value(one), one.number))
    return list({one.configuration.key: one.configuration for one in ranked}.values())[:REPEATED]


def tuned_constant(history: History) -> Tuned | None:
    """Recommended constant-batch configuration and its median samples; None without a hit."""
    verdict = verdict_of(history, confirmation_trials(history))
    if verdict is None or not math.isfinite(verdict.optimal.value):
        return None
    configuration = verdict.optimal.configuration
    outcomes = [run.outcome for run in verdict.optimal.runs if run.outcome is not None]
    steps = [one.steps_to_target for one in outcomes if one.steps_to_target is not None]
    samples = [configuration.batch_size * count for count in steps]
    if not samples or configuration.batch_size not in history.feasible:
        return None
    return Tuned(configuration, median(samples))


def _is_to_retry(trial: TrialRecord, trials: Sequence[TrialRecord]) -> bool:
    came_to_nothing = trial.uncapped and trial.state in {TrialState.LOST, TrialState.CANCELLED}
    return came_to_nothing and trial.retry_of is None and all(one.retry_of != trial.number for one in trials)


def _seconds_of_best(history: History, full: float) -> float:
    best = history.incumbent
    if best is None:
        return full
    return history.objective.seconds_as_good_as(best, history.probes[best.configuration.batch_size], full)


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
    limit = full if uncapped else min(full, SLACK * _seconds_of_best(history, full))
    return TrialPlan(
        configuration=configuration,
        sampled=sampled,
        phase=Phase.GROWTH,
        seed=earlier.seed if earlier else trial_seed(history.spec.seed, Phase.GROWTH, len(growth_trials(history))),
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
