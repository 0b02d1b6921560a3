"""What a driver knows of the curves of its study, and what the pruning policy makes of them.

Its own trials it is told of as they run; those of other drivers, and of earlier runs, it reads once they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from bssearch.analysis.objectives.base import objective_of
from bssearch.history import History, measured_seconds
from bssearch.pruners.base import Action, Cap, Policy, Progress, Race, slack_for
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.pruners.pace import Pace
from bssearch.pruners.registry import policy_maker
from bssearch.pruners.seed_noise import seed_noise
from bssearch.records import Observation, TrialRecord, TrialState
from bssearch.spec import StudySpec

INTERRUPTED = "stopped by the user"
"""The reason of what was running when somebody interrupted it: it goes on before what waits and what is new."""


class Watch:
    """Watches the search trials of one study; ``observations`` reads those of a trial by its number."""

    def __init__(
        self, spec: StudySpec, observations: Callable[[int], Sequence[Observation]], checkpoints: Checkpoints
    ) -> None:
        self.policy = policy_for(spec)
        self.checkpoints = checkpoints
        self._spec = spec
        self._target = spec.record_target
        self._observations = observations
        self._interrupted: list[int] = []
        self._known: dict[int, tuple[TrialState, datetime | None]] = {}
        self._keys: dict[int, str] = {}
        """What tells a trial's configuration from others, however it is split into micro-batches."""

    @property
    def curves(self) -> dict[int, Progress]:
        """Return the curve of each trial that has been evaluated, by its number."""
        return self.policy.curves

    def update(self, history: History) -> None:
        """Take in what has ended since the last time, and what the seeds have shown of their noise."""
        ended = False
        for trial in history.trials:
            if trial.state.is_finished and self._known.get(trial.number) != (trial.state, trial.ended_at):
                self._take(trial)
                ended = True
        if ended and isinstance(self.policy, Cap) and self._spec.pruner.slack is None:
            self.policy.allow(slack_for(self._noise(history.all_trials)))

    def started(self, number: int) -> None:
        """Take note that a trial begins, or goes on, here."""
        self._known[number] = (TrialState.RUNNING, None)
        if number not in self.curves:
            self.policy.started(number)

    def observe(self, number: int, observation: Observation, *, may_stop: bool) -> tuple[TrialState, str] | None:
        """Take in an evaluation; return the state and reason in which the trial is to be stopped, or None."""
        now, gain = observation.train_seconds, self._target.gain(observation.metric)
        if self._target.is_met_by(observation.metric):
            return None  # Its end says when it got there.
        if not may_stop:
            self.policy.watch(number, now, gain)
            return None
        action = self.policy.observe(number, now, gain)
        if now > self.policy.cap:
            return TrialState.CAPPED, f"past {self._bound()}"
        if action is Action.GO_ON:
            return None
        return (TrialState.PAUSED if action is Action.WAIT else TrialState.PRUNED), self._reason(now)

    def next_waiting(self, history: History, *, fresh: bool) -> TrialRecord | None:
        """Return the trial that goes on before another begins, if any; ``fresh``: there are others to begin.

        It counts as going on from then.
        """
        paused = {trial.number: trial for trial in history.trials if trial.state is TrialState.PAUSED}
        while self._interrupted:
            interrupted = self._interrupted.pop(0)
            if interrupted in paused and self.checkpoints.has(interrupted):
                return paused[interrupted]
        while (number := self.policy.next_waiting(fresh=fresh, among=paused)) is not None:
            if self.checkpoints.has(number):
                return paused[number]
            self.policy.ended(number)
        return None

    def forget(self, number: int) -> None:
        """Take note that a trial that waited goes on elsewhere, or never."""
        self.policy.ended(number)

    def cannot_wait(self) -> bool:
        """Take note that trials cannot be saved; return whether that is news to the policy."""
        if not isinstance(self.policy, Pace) or not self.policy.can_wait:
            return False
        self.policy.can_wait = False
        return True

    def excess(self) -> int | None:
        """Return the waiting trial to give up where all take more disk than they may: the least promising."""
        if self.checkpoints.bytes <= self._spec.pruner.checkpoint_gib * 2**30:
            return None
        return self.policy.least_promising()

    def _take(self, trial: TrialRecord) -> None:
        """Take in a trial that has ended, by what the store has of it."""
        number = trial.number
        if number not in self.curves:
            self.policy.started(number)
        if self._known.get(number) != (TrialState.RUNNING, None):
            for observation in self._observations(number)[len(self.curves[number].gains) :]:
                if not self._target.is_met_by(observation.metric):
                    gain = self._target.gain(observation.metric)
                    self.policy.watch(number, observation.train_seconds, gain)
        self._known[number] = trial.state, trial.ended_at
        if trial.state is TrialState.REACHED:
            self.policy.reached(number, measured_seconds(trial), self._target.gain(self._target.value))
        elif trial.state is TrialState.PAUSED and self.checkpoints.has(number):
            if is_interrupted(trial):
                self._interrupted.append(number)
            else:
                self.policy.waits(number)
        elif trial.state is TrialState.PRUNED:
            self.policy.stopped(number)
        else:
            self.policy.ended(number)
        if trial.state is not TrialState.PAUSED:
            self.checkpoints.forget(number)

    def _noise(self, trials: Sequence[TrialRecord]) -> float:
        """Return the noise of the seeds, from the configurations of which no run was stopped for being slow.

        Of the others only the lucky runs have a time.
        """
        told = [trial for trial in trials if trial.state.is_censored or trial.state is TrialState.REACHED]
        for trial in told:
            if trial.number not in self._keys:
                self._keys[trial.number] = trial.configuration.in_micro_batches(1).key
        stopped = {self._keys[trial.number] for trial in told if trial.state.is_censored}
        hits = (trial for trial in told if trial.state is TrialState.REACHED)
        return seed_noise(((self._keys[trial.number], measured_seconds(trial)) for trial in hits), stopped)

    def _bound(self) -> str:
        assert isinstance(self.policy, Cap), "only a cap bounds"
        return f"{self.policy.slack:.3g} × the {self.policy.winners[0][1]:.3g} s of the fastest trial"

    def _reason(self, now: float) -> str:
        policy = self.policy
        if isinstance(policy, Cap) and policy.winners:
            return f"at {now:.3g} s too far behind the fastest trial, which took {policy.winners[0][1]:.3g} s"
        return f"at {now:.3g} s others were ahead, and none had reached the target yet"


def is_interrupted(trial: TrialRecord) -> bool:
    """Return whether somebody interrupted a trial that is paused."""
    return trial.outcome is not None and trial.outcome.reason == INTERRUPTED


def policy_for(spec: StudySpec) -> Policy:
    """Return the pruning policy that a spec asks for."""
    pruner, limit = spec.pruner, spec.budget.trial_train_seconds
    if not objective_of(spec).trials_race:
        return Policy(limit)
    if pruner.name == "race":
        policy: Policy = Race(limit, pruner.lag)
    else:
        policy = policy_maker(pruner.name)(limit)
    if isinstance(policy, Cap):
        policy.allow(first_slack(spec))
    if isinstance(policy, Pace) and pruner.checkpoint_gib == 0:
        policy.can_wait = False
    return policy


def first_slack(spec: StudySpec) -> float:
    """Return the slack that a spec gives, or what it is before the seeds have shown their noise."""
    return slack_for(seed_noise(())) if spec.pruner.slack is None else spec.pruner.slack
