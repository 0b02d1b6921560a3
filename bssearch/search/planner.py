"""Decides the next search trial from the history."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from bssearch.records import (
    Configuration,
    Phase,
    ProbeRecord,
    TrialPlan,
    TrialRecord,
    TrialState,
)
from bssearch.search.history import History, trial_seed
from bssearch.search.pruners.base import PruningController
from bssearch.search.samplers import allocation
from bssearch.search.samplers.base import Choice, Sampler, decoded, default_choice
from bssearch.spec import StudySpec

LATE = 0.5  # budget share after which, without a hit, paused trials resume before new ones start

# Trials that a contending batch size needs, with and without a hit
RETUNED = 3
RETUNED_IN_VAIN = 5

ENDED_BEFORE = 2  # ended trials needed if no trial stores an expectation (older versions)


class Planner:
    """Plans trials from the sampler's proposals and the pruner's paused trials."""

    def __init__(self, spec: StudySpec, history: History, pruning: PruningController, sampler: Sampler) -> None:
        self.spec = spec
        self._history = history
        self._pruning = pruning
        self._sampler = sampler

    def next_trial(self) -> tuple[TrialPlan | None, str | None]:
        """Next search trial, or None and the reason if the search ended.

        Order: enqueued, lost, paused, default, comparison trials, then the sampler's proposal. Lost uncapped trials are
        retried and promising paused ones resumed regardless of the budget.
        """
        history, ending = self._history, self._spent()
        if queued := history.in_state(TrialState.QUEUED):
            return self._plan(queued[0]), None
        if retry := history.to_retry(uncapped=True):
            return self._plan(retry), None
        if (
            ending is None
            and (retry := history.to_retry(uncapped=False))
            and self._sampler.ending(history) is None  # as far as known without refitting the sampler's model
            and not self._is_little(history.last_expectation)
        ):
            return self._plan(retry), None
        is_late = history.incumbent is None and history.budget_share >= LATE
        if waiting := self._next_waiting(fresh=ending is None and not is_late):
            return self._plan(waiting), None
        choice = None
        if ending is None:
            choice = self._needed() or self._sampler.choose(history)
            if choice is None:
                ending = self._sampler.ending(history)
            elif self._is_little(choice.expected_improvement):
                choice, ending = self._last(choice.expected_improvement)
        if choice is not None:
            return self._plan(choice), ending
        if waiting := self._next_waiting(fresh=False):
            return self._plan(waiting), ending
        return None, ending

    def _needed(self) -> Choice | None:
        history = self._history
        if allocation.propose_default(history) is not None:
            return default_choice(self.spec)
        compares = history.incumbent is not None and allocation.evidence_is_due(history)
        return self._compared() if self._sampler.models_time and compares else None

    def _last(self, expected: float | None) -> tuple[Choice | None, str]:
        ending = (
            f"a further trial is expected to better the time to the target by {expected:.2%}, "
            f"less than budget.least_improvement = {self.spec.budget.least_improvement:.2%}"
        )
        last = self._retuned() or self._compared()
        return (None if last is None else replace(last, expected_improvement=expected)), ending

    def _is_little(self, expected: float | None) -> bool:
        least, history = self.spec.budget.least_improvement, self._history
        if expected is None or expected >= least or history.spent < self.spec.budget.least_trials:
            return False
        before = history.last_expectation
        return history.ended >= ENDED_BEFORE if before is None else before < least

    def _retuned(self) -> Choice | None:
        history = self._history
        for size in self._sampler.contenders(history):
            if history.count_at(size) < (RETUNED_IN_VAIN if history.best_at(size) is None else RETUNED):
                return self._sampler.choose(history, batch_size=size)
        return None

    def _compared(self) -> Choice | None:
        proposal = allocation.propose_evidence(self._history)
        if proposal is None:
            return None
        sampled = allocation.known_coordinates(self._history, proposal)
        if sampled is not None:
            return decoded(self.spec, proposal.batch_size, sampled, uncapped=True)
        chosen = self._sampler.choose(self._history, batch_size=proposal.batch_size)
        return None if chosen is None else replace(chosen, uncapped=True, expected_improvement=None)

    def _spent(self) -> str | None:
        budget = self.spec.budget
        if self._history.time_share >= 1:
            return (
                f"budget.wall_seconds = {budget.wall_seconds:g} is spent by the search trials of all runs of the "
                "study; raise it to continue"
            )
        if self._history.spent >= budget.trials:
            return f"the budget of {budget.trials} trials is spent"
        return None

    def _next_waiting(self, *, fresh: bool) -> TrialRecord | None:
        return None if self._history.time_share >= 1 else self._pruning.next_waiting(fresh=fresh)

    def _plan(self, of: Choice | TrialRecord) -> TrialPlan:
        history, earlier = self._history, of if isinstance(of, TrialRecord) else None
        number, state = (None, None) if earlier is None else (earlier.number, earlier.state)
        is_queued, resumes = state is TrialState.QUEUED, state is TrialState.PAUSED
        uncapped = of.uncapped or is_queued
        limit = self._limit(of.configuration, uncapped, earlier)
        return TrialPlan(
            configuration=of.configuration if resumes else history.as_run(of.configuration),
            sampled=of.sampled,
            phase=Phase.SEARCH,
            seed=earlier.seed if earlier else trial_seed(self.spec.seed, Phase.SEARCH, history.length),
            train_seconds_limit=limit,
            limit_state=TrialState.EXHAUSTED if limit >= self._full_limit else TrialState.CAPPED,
            eval_every_steps=history.eval_every_steps(of.configuration.batch_size),
            threads=self.spec.executor.threads,
            uncapped=uncapped,
            expected_improvement=of.expected_improvement if earlier is None or resumes else None,
            stop_at_target=history.objective.stops_at_target,
            retry_of=None if is_queued or resumes else number,
            queued=number if is_queued else None,
            resumed=number if resumes else None,
            after=None if resumes else history.length,
        )

    def _limit(self, configuration: Configuration, uncapped: bool, earlier: TrialRecord | None) -> float:
        history, size, full = self._history, configuration.batch_size, self._full_limit
        if uncapped and earlier is not None:
            return full if earlier.state is TrialState.QUEUED else min(full, earlier.train_seconds_limit)
        best = history.best_at(size) if uncapped else history.incumbent
        if not self._pruning.limits or (uncapped and best is None):
            return full
        timed = replace(history.probes[size], step_seconds=history.step_seconds(configuration))
        seconds = history.objective.seconds_as_good_as(best, timed, full)
        limit = self._pruning.slack * seconds if isfinite(seconds) else self._first_limit()
        return min(full, max(limit, _seconds_to_look_twice(history.probes[size])))

    def _first_limit(self) -> float:
        """A quarter in the first sweep of batch sizes, then half."""
        if self._pruning.paces_itself():
            return self._full_limit
        return self._full_limit * min(1.0, 2.0 ** (self._history.spent // len(self._history.feasible) - 2))

    @property
    def _full_limit(self) -> float:
        return self.spec.budget.trial_train_seconds


def _seconds_to_look_twice(probe: ProbeRecord) -> float:
    """Earlier curves say little."""
    assert probe.eval_every_steps is not None and probe.step_seconds is not None, "the batch size is feasible"
    return 2 * probe.eval_every_steps * probe.step_seconds
