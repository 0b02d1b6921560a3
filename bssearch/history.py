"""What a search has seen so far, as questions with answers: the incumbent, each batch size's trials, what is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from bssearch.analysis.objectives.base import Objective, objective_of
from bssearch.records import Configuration, ParameterValue, Phase, ProbeRecord, TrialRecord, TrialState
from bssearch.spec import StudySpec

FAILURES = 3
TRIED_AGAIN = frozenset({TrialState.LOST, TrialState.CANCELLED, TrialState.OOM})
"""After these a configuration counts as not tried."""

ATTEMPTS = 5


class History:
    """A study's search trials in the order of their numbers, running ones included, and its step-time probes.

    ``probes`` holds by batch size the step time of the split into micro-batches that its trials run in.
    ``all_trials`` are those of every phase, ``length`` is how many that are: the number of the newest.
    """

    def __init__(self, spec: StudySpec, trials: Sequence[TrialRecord], probes: Mapping[int, ProbeRecord]) -> None:
        self.spec = spec
        self.probes = probes
        self.length = len(trials)
        self.all_trials = trials
        self.trials = [trial for trial in trials if trial.phase is Phase.SEARCH]

    @cached_property
    def spent(self) -> int:
        """Return how many trials count against the budget: all but the missing."""
        return sum(not trial.state.is_missing for trial in self.trials)

    @cached_property
    def objective(self) -> Objective:
        """Return what the study minimises."""
        return objective_of(self.spec)

    def value(self, trial: TrialRecord | None) -> float:
        """Return the objective's figure of a trial, infinite where it has none: it did not reach the target."""
        found = self.objective.figure(trial) if trial is not None else None
        return math.inf if found is None else found

    def figure_text(self, trial: TrialRecord) -> str:
        """Return a trial's figure for people, with its unit."""
        return f"{self.objective.shown(self.value(trial)):.3g}{self.objective.unit}"

    @cached_property
    def incumbent(self) -> TrialRecord | None:
        """Return the trial with the least figure, if any has one."""
        return self.best_of(self.trials)

    @cached_property
    def incumbent_value(self) -> float:
        """Return the incumbent's figure, infinite without one."""
        return self.value(self.incumbent)

    @cached_property
    def reference(self) -> TrialRecord | None:
        """Return the trial that others are compared with at equal time: the incumbent, else the first that ran on."""
        ran = (trial for trial in self.trials if trial.state.is_censored)
        return self.incumbent or next(ran, None)

    @cached_property
    def feasible(self) -> tuple[int, ...]:
        """Return the batch sizes that may run, ascending.

        Those of `untimed` may not yet. `FAILURES` failed trials, and more than ran, exclude a batch size.
        """
        return tuple(size for size in sorted(self.probes) if not self._is_broken(size))

    @cached_property
    def untimed(self) -> tuple[int, ...]:
        """Return the batch sizes without a step time, which an out-of-memory leaves behind: of them nothing runs."""
        return tuple(size for size in self.spec.batch_sizes if size not in self.probes)

    @cached_property
    def largest(self) -> int | None:
        """Return the largest feasible batch size that runs without accumulation."""
        whole = [size for size in self.feasible if self.probes[size].micro_batch_size == size]
        return max(whole, default=None)

    def at(self, batch_size: int) -> list[TrialRecord]:
        """Return the trials at a batch size that are running or say something about it.

        Running out of memory is about a micro-batch: the trial is run again in smaller ones.
        """
        here = (trial for trial in self.trials if trial.configuration.batch_size == batch_size)
        return [trial for trial in here if not trial.state.is_missing and trial.state is not TrialState.OOM]

    def best_at(self, batch_size: int) -> TrialRecord | None:
        """Return the trial with the least figure at a batch size."""
        return self.best_of(self.at(batch_size))

    def tried(self, configuration: Configuration) -> bool:
        """Return whether a configuration runs or has run, in whatever micro-batches.

        One whose trial is missing, or ran out of memory, will be tried again.
        """
        tried = (trial for trial in self.trials if trial.state not in TRIED_AGAIN)
        return any(trial.configuration.trains_like(configuration) for trial in tried)

    def as_run(self, configuration: Configuration) -> Configuration:
        """Return a configuration in the micro-batches that its batch size runs in; it must be timed."""
        return configuration.in_micro_batches(self.probes[configuration.batch_size].micro_batch_size)

    def coordinates_near(self, batch_size: int) -> Mapping[str, ParameterValue] | None:
        """Return the best coordinates known at the nearest batch size that reached the target, else the default's."""
        winners = [trial for size in self.feasible if (trial := self.best_at(size)) and trial.sampled is not None]
        if not winners:
            return self.spec.space.encode(self.spec.default_configuration)
        return min(
            winners, key=lambda trial: (octaves(trial.configuration.batch_size, batch_size), self.value(trial))
        ).sampled

    def to_retry(self, *, uncapped: bool) -> TrialRecord | None:
        """Return a trial to run again: one lost or out of memory (`ATTEMPTS` in all), or failed and no second try.

        Of ``evidence`` trials, which somebody or the answer asks for, one that was cancelled too; of the others, the
        search finds something as good.
        """
        retried = {trial.retry_of for trial in self.trials}
        for trial in self.trials:
            again = (
                trial.state in {TrialState.LOST, TrialState.OOM}
                or (trial.state is TrialState.FAILED and trial.retry_of is None)
                or (trial.state is TrialState.CANCELLED and uncapped)
            )
            fits = trial.configuration.batch_size in self.feasible and self._attempts(trial) < ATTEMPTS
            if again and trial.uncapped is uncapped and trial.number not in retried and fits:
                return trial
        return None

    def _attempts(self, trial: TrialRecord | None) -> int:
        """Return how often a trial has been tried: it may be what kills its drivers."""
        by_number = {one.number: one for one in self.trials}
        attempts = 0
        while trial is not None:
            attempts += 1
            trial = by_number.get(trial.retry_of) if trial.retry_of is not None else None
        return attempts

    def _is_broken(self, batch_size: int) -> bool:
        here = [trial for trial in self.trials if trial.configuration.batch_size == batch_size]
        failures = sum(trial.state is TrialState.FAILED for trial in here)
        return failures >= FAILURES and failures > sum(_has_run(trial) for trial in here)

    def best_of(self, trials: Sequence[TrialRecord]) -> TrialRecord | None:
        """Return the trial with the least figure among those that have one."""
        return min((trial for trial in trials if math.isfinite(self.value(trial))), key=self.value, default=None)


def _has_run(trial: TrialRecord) -> bool:
    """Return whether a trial came to an end of its own, and so fits and works."""
    return trial.state.is_finished and not trial.state.is_missing and trial.state is not TrialState.OOM


def measured_seconds(trial: TrialRecord | None) -> float:
    """Return a trial's time-to-target on the clock that its curve and all running trials have, contended or not."""
    value = trial.outcome.time_to_target_s if trial is not None and trial.outcome is not None else None
    return math.inf if value is None else value


def octaves(one: int, other: int) -> float:
    """Return how many doublings lie between two batch sizes."""
    return abs(math.log2(one / other))
