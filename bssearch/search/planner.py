"""What a driver runs next: decisions over the history, for the search and then for its confirmation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import inf, isfinite

from bssearch.history import History
from bssearch.pruners.base import Cap
from bssearch.pruners.controller import Watch, first_slack
from bssearch.records import Configuration, ParameterValue, Phase, ProbeRecord, TrialRecord, TrialState
from bssearch.samplers.base import chooser_for
from bssearch.search import confirmation as confirm
from bssearch.search.seeds import trial_seed
from bssearch.search.trial_plan import Job
from bssearch.spec import StudySpec

LATE = 0.5
"""From this share of the budget on without a hit, what waits goes on to its limit before anything begins."""


class Planner:
    """Decides the next job of one spec, by what ``watch`` knows of the curves."""

    def __init__(self, spec: StudySpec, watch: Watch) -> None:
        self.spec = spec
        self._watch = watch
        self._chooser = chooser_for(spec, watch)

    def search_job(self, history: History) -> Job | None:
        """Return the next search trial: what a person enqueued, what was lost, what waits, or what the sampler chooses.

        Evidence that was lost is run again whatever the budget says: among it is what a person enqueued. What waits
        and has hope goes on even where the budget takes no new trial.
        """
        queued = next((trial for trial in history.trials if trial.state is TrialState.QUEUED), None)
        if queued is not None:
            return self._job(history, queued.configuration, queued.sampled, uncapped=True, earlier=queued)
        is_spent = self._spent(history) is not None
        is_over = is_spent or self._chooser.ending is not None
        retry = history.to_retry(uncapped=True) or (None if is_over else history.to_retry(uncapped=False))
        if retry is not None:
            return self._job(history, retry.configuration, retry.sampled, uncapped=retry.uncapped, earlier=retry)
        waiting = self._next_waiting(history, fresh=not is_over and not self._is_late(history))
        if waiting is not None:
            return self._resumption(history, waiting)
        choice = None if is_spent else self._chooser.choose(history)
        if choice is None:
            waiting = self._next_waiting(history, fresh=False)
            return None if waiting is None else self._resumption(history, waiting)
        return self._job(history, choice.configuration, choice.sampled, uncapped=choice.uncapped)

    def ending(self, history: History) -> str | None:
        """Say why the search is at its end, None while it goes on."""
        return self._spent(history) or self._chooser.ending

    def _spent(self, history: History) -> str | None:
        budget = self.spec.budget
        if self._share_of_time(history) >= 1:
            return f"the budget of {budget.wall_seconds:g} seconds is spent"
        if history.spent >= budget.trials:
            return f"the budget of {budget.trials} trials is spent"
        return None

    def _next_waiting(self, history: History, *, fresh: bool) -> TrialRecord | None:
        return None if self._share_of_time(history) >= 1 else self._watch.next_waiting(history, fresh=fresh)

    def _is_late(self, history: History) -> bool:
        """Return whether half of the budget went by without a hit: what waits goes on before anything begins."""
        share = max(history.spent / self.spec.budget.trials, self._share_of_time(history))
        return history.incumbent is None and share >= LATE

    def _share_of_time(self, history: History) -> float:
        """Return how much of the wall seconds is spent, 0 where they have no bound."""
        budget = self.spec.budget.wall_seconds
        return 0.0 if budget is None else busy_seconds(history.trials, time.time(), self.spec.executor.slots) / budget

    def confirmation_job(self, history: History) -> Job | None:
        """Return the next confirmation run, or None where all are made or running."""
        made = [trial for trial in history.all_trials if trial.phase is Phase.CONFIRM]
        runs = confirm.remaining(history, made)
        return runs[0].job(history, Phase.CONFIRM) if runs else None

    def _job(
        self,
        history: History,
        configuration: Configuration,
        sampled: Mapping[str, ParameterValue] | None,
        *,
        uncapped: bool,
        earlier: TrialRecord | None = None,
    ) -> Job:
        """Return a search job, in the micro-batches that its batch size runs in.

        ``earlier`` is the trial that waits for it, or that it tries again.
        """
        is_queued = earlier is not None and earlier.state is TrialState.QUEUED
        return Job(
            configuration=history.as_run(configuration),
            sampled=sampled,
            phase=Phase.SEARCH,
            seed=earlier.seed if earlier else trial_seed(self.spec.seed, Phase.SEARCH, history.length),
            train_seconds_limit=self._limit(history, configuration, uncapped, earlier),
            uncapped=uncapped,
            retry_of=earlier.number if earlier and not is_queued else None,
            queued=earlier.number if earlier and is_queued else None,
        )

    def _resumption(self, history: History, waiting: TrialRecord) -> Job:
        """Return the job of a trial that waits or was interrupted, in the micro-batches that it was saved in."""
        return Job(
            configuration=waiting.configuration,
            sampled=waiting.sampled,
            phase=Phase.SEARCH,
            seed=waiting.seed,
            train_seconds_limit=self._limit(history, waiting.configuration, waiting.uncapped, earlier=waiting),
            uncapped=waiting.uncapped,
            resumed=waiting.number,
        )

    def _limit(
        self, history: History, configuration: Configuration, uncapped: bool, earlier: TrialRecord | None
    ) -> float:
        """Return the cap that the incumbent sets; for uncapped, the one that the best of its own batch size sets.

        Evidence that was queued, or is tried again, keeps the limit that it was given then.
        """
        size, full = configuration.batch_size, self._full_limit
        if uncapped and earlier is not None:
            return full if earlier.state is TrialState.QUEUED else min(full, earlier.train_seconds_limit)
        best = history.best_at(size) if uncapped else history.incumbent
        if self.spec.pruner.name == "none" or (uncapped and best is None):
            return full
        seconds = history.objective.seconds_as_good_as(best, history.probes[size], full)
        limit = self._slack * seconds if isfinite(seconds) else self._first_limit(history)
        return min(full, max(limit, _seconds_to_look_twice(history.probes[size])))

    def _first_limit(self, history: History) -> float:
        """Return the limit before the first hit, where the policy does not say itself how long trials run.

        A quarter of the full one while every batch size is tried once, half of it in the second sweep, all of it from
        the third.
        """
        if self._watch.policy.paces_itself:
            return self._full_limit
        return self._full_limit * min(1.0, 2.0 ** (history.spent // len(history.feasible) - 2))

    @property
    def _slack(self) -> float:
        policy = self._watch.policy
        return policy.slack if isinstance(policy, Cap) else first_slack(self.spec)

    @property
    def _full_limit(self) -> float:
        return self.spec.budget.trial_train_seconds


def _seconds_to_look_twice(probe: ProbeRecord) -> float:
    """Return the train seconds until the second evaluation after step 0: before it, nothing is known of a trial."""
    assert probe.eval_every_steps is not None and probe.step_seconds is not None, "the batch size is feasible"
    return 2 * probe.eval_every_steps * probe.step_seconds


def busy_seconds(trials: Sequence[TrialRecord], now: float, slots: int) -> float:
    """Return how long at least one of the trials was running, in seconds, overlaps counted once.

    A trial that waited counts from its last start; once it has ended, what it ran before that adds, spread over the
    ``slots``: it may have run beside others.
    """
    spans, earlier = [], 0.0
    for trial in trials:
        if trial.state.is_missing or trial.state is TrialState.QUEUED:
            continue
        start, end = trial.created_at.timestamp(), trial.ended_at.timestamp() if trial.ended_at else now
        spans.append((start, end))
        if trial.outcome is not None:
            earlier += max(0.0, trial.outcome.wall_seconds - (end - start))
    total, until = earlier / slots, -inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
