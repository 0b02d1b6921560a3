"""The pruner interface.

Pruners decide from `Standings` alone, so a new driver can resume a search.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from bssearch import registry
from bssearch.records import Observation, Phase, Progress, TrialRecord, TrialState, TrialStop
from bssearch.search.history import History, is_interrupted, measured_seconds
from bssearch.spec import StudySpec
from bssearch.spec.parts import PrunerSpec, made_with


class Action(StrEnum):
    """The decision about a trial after an evaluation."""

    GO_ON = "go_on"
    STOP = "stop"
    WAIT = "wait"


@dataclass(slots=True)
class Standings:
    """A study's search trials, by number.

    ``limit``: a trial's full limit in train seconds. ``waiting``: curves of paused trials that the pruner may resume.
    ``winners``: curves and seconds of trials that set a record time to the target, the fastest first. ``can_wait``:
    whether trials can save checkpoints; if not, trials stop instead of pausing. ``target_gain``: `Target.gain` of
    the target's value.
    """

    limit: float
    slack: float = 1.0
    can_wait: bool = True
    curves: Mapping[int, Progress] = field(default_factory=dict)
    states: dict[int, TrialState] = field(default_factory=dict)
    waiting: dict[int, Progress] = field(default_factory=dict)
    uncapped: set[int] = field(default_factory=set)
    winners: list[tuple[Progress, float]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    target_gain: float = math.inf

    @property
    def cap(self) -> float:
        """The cap in train seconds: ``slack`` × the fastest trial's seconds, or infinity before the first success."""
        return self.slack * self.winners[0][1] if self.winners else math.inf


class Pruner:
    """Runs each trial to the target or the limit.

    Constructor parameters are options of a spec. ``caps``: True if trials end at `Standings.cap` (adaptive capping;
    Hutter et al. 2009, ParamILS).
    """

    caps = False

    def judge(self, number: int, standings: Standings) -> Action:
        """Return the action for a trial after an evaluation that missed the target."""
        return Action.GO_ON

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        """Return the paused trial to resume, if any. ``fresh`` is True if a new trial may start instead."""
        return None

    def least_promising(self, standings: Standings) -> int | None:
        """Return the paused trial to end first if checkpoints exceed the disk limit, by default the newest."""
        return max(standings.waiting, default=None)

    def paces_itself(self, standings: Standings) -> bool:
        """True if this pruner limits trials before the first success; otherwise the planner does."""
        return False


class Cap(Pruner):
    """Stops trials only at the cap. With a ``slack`` of at least 1, the cap never stops the fastest trial."""

    caps = True


def slack_for(seed_noise: float) -> float:
    """Return a cap's slack that allows for the seed-to-seed spread of log time."""
    # The incumbent may be lucky and a rival unlucky.
    return 1 + 2 * seed_noise


def make_pruner(settings: PrunerSpec) -> Pruner:
    return made_with(registry.load_class("pruners", settings.name, Pruner), settings.options, "pruner.options")


class PruningController:
    """Keeps the standings of search trials. If trials race to the target, the spec's pruner decides.

    A paused trial can resume only if this driver can read the checkpoint.
    """

    def __init__(self, spec: StudySpec, history: History, pruner: Pruner | None = None) -> None:
        self._spec = spec
        self._history = history
        races = history.objective.trials_race
        self._asked_for = pruner or make_pruner(spec.pruner)
        self.pruner = self._asked_for if races else Pruner()
        self._saved: frozenset[int] = frozenset()
        self._noise_is_old = False
        self._winners_are_old = False
        self._hits: list[tuple[datetime, int]] = []
        self._standings = Standings(
            limit=spec.budget.trial_train_seconds,
            target_gain=spec.record_target.gain(spec.target.value),
            slack=first_slack(spec),
            can_wait=spec.pruner.checkpoint_gib > 0,
            curves=history.curves,
        )

    @property
    def standings(self) -> Standings:
        if self._winners_are_old:
            self._winners_are_old, self._standings.winners = False, []
            for _, number in self._hits:
                self._note_winner(number)
        if self._noise_is_old and self.pruner.caps and self._spec.pruner.slack is None:
            self._standings.slack = slack_for(self._history.seed_noise)
        self._noise_is_old = False
        return self._standings

    def take(self, trial: TrialRecord) -> None:
        """Update the standings with a search trial. Other trials only update the seed-to-seed spread."""
        self._noise_is_old |= trial.state.is_finished
        if trial.phase is not Phase.SEARCH:
            return
        number, standings = trial.number, self._standings
        standings.states[number] = trial.state
        (standings.running.add if trial.state is TrialState.RUNNING else standings.running.discard)(number)
        (standings.uncapped.add if trial.uncapped else standings.uncapped.discard)(number)
        if trial.state is TrialState.REACHED:
            self._reached(trial)
        self._note_waiting(number)

    def found_saved(self, numbers: Collection[int]) -> None:
        changed = self._saved ^ frozenset(numbers)
        self._saved = frozenset(numbers)
        for number in changed:
            self._note_waiting(number)

    def judge(self, number: int, observation: Observation, *, uncapped: bool) -> TrialStop | None:
        """Return the stop that `Pruner.judge` or the cap decides, or None to continue the trial."""
        if uncapped:
            return None
        now, standings = observation.train_seconds, self.standings
        action = self.pruner.judge(number, standings)
        took = f"{standings.winners[0][1]:.3g} train seconds" if standings.winners else ""
        if self.pruner.caps and now > standings.cap:
            reason = f"exceeded {standings.slack:.3g} × the {took} of the fastest trial"
            return TrialStop(number, TrialState.CAPPED, reason)
        if action is Action.GO_ON:
            return None
        state = TrialState.PAUSED if action is Action.WAIT else TrialState.PRUNED
        since = f"; the fastest trial took {took}" if took else ", before the first success"
        return TrialStop(number, state, f"{state} by {self._spec.pruner.name} at {now:.3g} train seconds{since}")

    def next_waiting(self, *, fresh: bool) -> TrialRecord | None:
        """Return a trial that a user interrupted, else the trial of `Pruner.next_waiting`."""
        for trial in self._history.in_state(TrialState.PAUSED):
            if is_interrupted(trial) and trial.number in self._saved:
                return trial
        standings = self.standings
        number = self.pruner.next_waiting(standings, fresh=fresh) if standings.waiting else None
        return None if number is None else self._history.trial(number)

    def least_promising(self) -> int | None:
        return self.pruner.least_promising(self.standings)

    def paces_itself(self) -> bool:
        return self.pruner.paces_itself(self.standings)

    @property
    def limits(self) -> bool:
        return self._asked_for.caps

    def _reached(self, trial: TrialRecord) -> None:
        assert trial.ended_at is not None
        hit = (trial.ended_at, trial.number)
        place = bisect_left(self._hits, hit)
        if self._hits[place : place + 1] == [hit]:
            return
        self._hits.insert(place, hit)
        if place < len(self._hits) - 1:  # another driver's success arrived late, so recompute the winners
            self._winners_are_old = True
        else:
            self._note_winner(trial.number)

    def _note_winner(self, number: int) -> None:
        seconds, winners = measured_seconds(self._history.trial(number)), self._standings.winners
        if not winners or seconds < winners[0][1]:
            winners.insert(0, (self._history.curves[number], seconds))

    def _note_waiting(self, number: int) -> None:
        # without user-interrupted trials, which resume regardless of the pruner
        trial, curve = self._history.trial(number), self._history.curves.get(number)
        waits = trial is not None and trial.state is TrialState.PAUSED and number in self._saved
        if waits and curve is not None and trial is not None and not is_interrupted(trial):
            self._standings.waiting[number] = curve
        else:
            self._standings.waiting.pop(number, None)


def first_slack(spec: StudySpec) -> float:
    return slack_for(History(spec).seed_noise) if spec.pruner.slack is None else spec.pruner.slack
