"""What a driver runs next: pure decisions over the history, for the search and then for its confirmation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from bssearch.curves import Envelope
from bssearch.records import Configuration, Objective, ParameterValue, Phase, ProbeRecord, TrialRecord, TrialState
from bssearch.search import allocation, confirm, pruners
from bssearch.search.history import History, measured_seconds
from bssearch.search.job import Job
from bssearch.search.sampler import Sampler
from bssearch.search.seeds import trial_seed
from bssearch.spec import StudySpec


class Planner:
    """Decides the next job of one spec; ``curve`` gives the best-so-far curve of a trial by its number."""

    def __init__(self, spec: StudySpec, curve: Callable[[int], Envelope]) -> None:
        self.spec = spec
        self._curve = curve
        self._sampler = Sampler(
            spec.sampler.name,
            spec.space.dimensions(),
            seed=spec.seed,
            startup_trials=spec.sampler.startup_trials,
        )

    def search_job(self, history: History) -> Job | None:
        """Return the next search trial: what a person enqueued, then what the budget allows, first what was lost.

        Evidence that was lost is run again whatever the budget says: among it is what a person enqueued.
        """
        queued = next((trial for trial in history.trials if trial.state is TrialState.QUEUED), None)
        if queued is not None:
            return self._job(history, queued.configuration, queued.sampled, evidence=True, earlier=queued)
        retry = history.to_retry(evidence=True)
        if retry is None:
            if self._is_spent(history):
                return None
            retry = history.to_retry(evidence=False)
        if retry is not None:
            return self._job(history, retry.configuration, retry.sampled, evidence=retry.evidence, earlier=retry)
        proposal = allocation.propose(history)
        if proposal is None:
            return None
        if proposal.source == "default":
            default = self.spec.default_configuration
            return self._job(history, default, self.spec.space.encode(default), evidence=True)
        sampled = self._known_coordinates(history, proposal)
        if sampled is None:
            reference = self._curve(history.reference.number) if history.reference else None
            sampled = self._sampler.ask(history, proposal.batch_size, reference)
        configuration = self.spec.space.decode(proposal.batch_size, sampled)
        return self._job(history, configuration, sampled, evidence=proposal.evidence)

    def _known_coordinates(
        self, history: History, proposal: allocation.Proposal
    ) -> Mapping[str, ParameterValue] | None:
        """Return the coordinates that a proposal takes over, or None where the sampler is to choose them.

        It is where there are none, and where evidence would repeat a configuration that has had its trial.
        """
        if proposal.source == "sample":
            return None
        if proposal.source == "transfer":
            sampled = history.coordinates_near(proposal.batch_size)
        else:
            sampled = self.spec.space.encode(self.spec.default_configuration)
        if sampled is None or not proposal.evidence:
            return sampled
        configuration = self.spec.space.decode(proposal.batch_size, sampled)
        return None if any(trial.configuration.trains_like(configuration) for trial in history.trials) else sampled

    def _is_spent(self, history: History) -> bool:
        budget = self.spec.budget
        if history.spent >= budget.trials:
            return True
        return budget.wall_seconds is not None and busy_seconds(history.trials, time.time()) >= budget.wall_seconds

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
        evidence: bool,
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
            train_seconds_limit=self._limit(history, configuration, evidence, earlier),
            evidence=evidence,
            retry_of=earlier.number if earlier and not is_queued else None,
            queued=earlier.number if earlier and is_queued else None,
        )

    def _limit(
        self, history: History, configuration: Configuration, evidence: bool, earlier: TrialRecord | None
    ) -> float:
        """Return the cap that the incumbent sets; for evidence, the one that the best of its own batch size sets.

        Evidence that was queued, or is tried again, keeps the limit that it was given then.
        """
        size, full = configuration.batch_size, self._full_limit
        if evidence and earlier is not None:
            return full if earlier.state is TrialState.QUEUED else min(full, earlier.train_seconds_limit)
        best = history.best_at(size) if evidence else history.incumbent
        if evidence and best is None:
            return full
        sweeps = history.spent // len(history.feasible)
        seconds = self._seconds_as_good_as(best, history.probes[size])
        limit = pruners.train_seconds_limit(self.spec.pruner, full, seconds, sweeps)
        return min(full, max(limit, _seconds_to_look_twice(history.probes[size])))

    def _seconds_as_good_as(self, best: TrialRecord | None, probe: ProbeRecord) -> float:
        """Return the train seconds after which a trial at a probed batch size is no better than the best.

        Of the energy nothing is known before a trial, and a metric is what it is at the full limit: that is returned.
        """
        if self.spec.objective is Objective.METRIC_IN_BUDGET:
            return self._full_limit
        if best is None or self.spec.objective in pruners.BY_SECONDS:
            return measured_seconds(best)
        if self.spec.objective is Objective.SAMPLES_TO_TARGET and probe.step_seconds is not None:
            assert best.outcome is not None and best.outcome.steps_to_target is not None, "the best has reached"
            samples = best.outcome.steps_to_target * best.configuration.batch_size
            return samples / probe.batch_size * probe.step_seconds
        return self._full_limit

    @property
    def _full_limit(self) -> float:
        return self.spec.budget.trial_train_seconds


def _seconds_to_look_twice(probe: ProbeRecord) -> float:
    """Return the train seconds until the second evaluation after step 0: before it, nothing is known of a trial."""
    assert probe.eval_every_steps is not None and probe.step_seconds is not None, "the batch size is feasible"
    return 2 * probe.eval_every_steps * probe.step_seconds


def busy_seconds(trials: Sequence[TrialRecord], now: float) -> float:
    """Return how long at least one of the trials was running, in seconds, overlaps counted once."""
    spans = sorted(
        (trial.created_at.timestamp(), trial.ended_at.timestamp() if trial.ended_at else now)
        for trial in trials
        if not trial.state.is_missing and trial.state is not TrialState.QUEUED
    )
    total, end = 0.0, -inf
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
