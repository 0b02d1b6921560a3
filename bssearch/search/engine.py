"""The one that decides what a search does: a state machine over one study, told by events, answering with actions.

It knows no store, no executor, no files and no clock: the driver of a study tells it what happened there, and a
simulation what happened in its own time (`bssearch.search.events`). What it decides follows from the events alone, and
but for what runs here at the moment, from what the store holds: one that is made anew in the middle of a study goes on
as the one before it would have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, assert_never

from bssearch.errors import BSSearchError, InterruptedRunError
from bssearch.history import INTERRUPTED, History, is_interrupted
from bssearch.pruners.base import Pruner
from bssearch.pruners.controller import PruningController
from bssearch.records import Observation, Phase, TrialOutcome, TrialPlan, TrialRecord, TrialState
from bssearch.samplers.base import Sampler, make_sampler
from bssearch.search import confirmation
from bssearch.search.ended import Refusals, could_not_pause, lines_about, met_at_once
from bssearch.search.events import (
    Action,
    CannotSave,
    CanSave,
    Changed,
    Claim,
    Claimed,
    Ended,
    Evaluated,
    Event,
    Failed,
    Finished,
    Interrupted,
    Release,
    SavedTrials,
    SearchEnded,
    Settle,
    SlotFree,
    Start,
    Started,
    Stop,
    Tell,
    Timed,
    TimeSteps,
    Wait,
)
from bssearch.search.planner import Planner
from bssearch.spec import StudySpec

CONTINUE = "the same command goes on where this one stopped"

NextRun = Callable[[History], TrialPlan | None]
"""A plan of runs to be made one after the other: the next one, None where all are made or running."""


class PlansTrials(Protocol):
    """Plans the trials of a search: `Planner`, or a plainer one."""

    def next_trial(self) -> tuple[TrialPlan | None, str | None]:
        """Return the next search trial, or None and why the search is at its end, where it is."""
        ...


MakePlanner = Callable[[StudySpec, History, PruningController, Sampler], PlansTrials]


class Stage(StrEnum):
    """Where a run of the engine stands.

    SEARCH: trials of the search. CLAIM: it waits to be the only one that confirms here. REPEAT: confirmation, or other
    runs of a plan. STOPPING: interrupted, until what runs has ended. DONE: nothing follows.
    """

    SEARCH = "search"
    CLAIM = "claim"
    REPEAT = "repeat"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(slots=True)
class Running:
    """A trial that runs here; ``stopping`` is the state that it was asked to end in."""

    plan: TrialPlan
    is_savable: bool
    step_seconds: float | None
    last: Observation | None = None
    stopping: TrialState | None = None


class Engine:
    """Decides for one driver of a study with ``slots``, ``slots_apart`` where each has a device of its own.

    It searches, then confirms; with ``next_run`` it makes the runs of that plan instead, of one ``phase``, one at a
    time, each to its own limit. ``sampler`` and ``pruner`` are those of the spec where none is given; another planner
    than a study's is for simulations of what people do without one.
    """

    def __init__(
        self,
        spec: StudySpec,
        *,
        slots: int = 1,
        slots_apart: bool = False,
        next_run: NextRun | None = None,
        phase: Phase = Phase.CONFIRM,
        sampler: Sampler | None = None,
        pruner: Pruner | None = None,
        make_planner: MakePlanner = Planner,
        device_name: str = "the device",
    ) -> None:
        self.spec = spec
        self._sampler = sampler or make_sampler(spec)
        self._pruner = pruner
        self._make_planner = make_planner
        self._refusals = Refusals(spec, device_name)
        self._remember(History(spec))
        self._slots = slots
        self._slots_apart = slots_apart
        self._searches = next_run is None
        self._next_run: NextRun = next_run or confirmation.next_run
        self._phase = phase
        self._stage = Stage.SEARCH if self._searches else Stage.CLAIM
        self._running: dict[int, Running] = {}
        self._is_new = True
        self._was_timed = False
        self._has_claim = False
        self._has_repeated = False
        self._ending: str | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """Return the trials that run here."""
        return tuple(self._running)

    def handle(self, event: Event) -> list[Action]:
        """Take in an event; return what is to be done now, in this order."""
        match event:
            case Evaluated():
                return self._evaluated(event)
            case SlotFree():
                self.history.now = event.now
                return self._next()
            case Started():
                return self._started(event)
            case Ended():
                return self._ended(event.trial)
            case Changed():
                return self._changed(event)
            case SavedTrials():
                return self._found_saved(event)
            case Timed():
                self.history.probes = dict(event.probes)
                self._was_timed = True
            case Claimed(granted):
                return self._claimed(granted)
            case CannotSave():
                return self._wait_no_more(event.reason)
            case CanSave():
                self.pruning.standings.can_wait = self.spec.pruner.checkpoint_gib > 0
            case Interrupted():
                return self._interrupted()
            case _:
                assert_never(event)
        return []

    def as_stored(self, number: int, outcome: TrialOutcome) -> TrialOutcome:
        """Return the outcome of a trial that runs here as it counts.

        What could not go on from its checkpoint is no fault of the configuration: it is lost, and tried again.
        """
        running = self._running[number]
        if running.plan.resumed is not None and outcome.state is TrialState.FAILED and running.last is None:
            return replace(outcome, state=TrialState.LOST)
        if running.stopping is None and outcome.state is TrialState.PRUNED:
            return replace(outcome, state=TrialState.CANCELLED)  # Interrupted, and not saved.
        return outcome

    def step_seconds(self, number: int) -> float | None:
        """Return the isolated step time of a trial that runs here, as it was known when it began."""
        return self._running[number].step_seconds

    def last_observation(self, number: int) -> Observation | None:
        """Return the newest evaluation of a trial that runs here."""
        return self._running[number].last

    def _claimed(self, granted: bool) -> list[Action]:
        """Confirm, or wait for the other driver that does."""
        if not granted:
            return [Wait(for_claim=self._stage is Stage.CLAIM)]
        self._has_claim = True
        if self._stage is Stage.CLAIM:
            self._stage = Stage.REPEAT
        return []

    def _next(self) -> list[Action]:
        """Decide what a free slot is for."""
        if self._stage in {Stage.STOPPING, Stage.DONE}:
            return []
        if not self._was_timed or self.history.untimed:
            return [Wait()] if self._running else [TimeSteps()]
        if self._stage is Stage.SEARCH:
            return self._search()
        if self._stage is Stage.CLAIM:
            return [Claim()]
        return self._repeat()

    def _search(self) -> list[Action]:
        plan, self._ending = self._planner.next_trial()
        if plan is not None:
            self._has_repeated = False
            return [Start(plan)]
        if self._has_repeated:
            return self._done()
        if self._running:
            return self._fill()
        others = [trial.number for trial in self.history.in_state(TrialState.RUNNING)]
        if others:
            return [Wait(for_others=tuple(others))]
        actions = self._settle()
        self._stage = Stage.CLAIM
        if self._next_run(self.history) is not None:
            actions.append(TimeSteps(to_compare=True))
        return [*actions, Claim()]

    def _fill(self) -> list[Action]:
        """Give a slot that the last search trials leave idle to a confirmation run, on a device of its own."""
        plan = self._next_run(self.history) if self._slots_apart else None
        if plan is None:
            return [Wait()]
        return [Start(plan)] if self._has_claim else [Claim()]

    def _repeat(self) -> list[Action]:
        """Make the next run of the plan; where all are made, here and by others, see whether a search trial is left."""
        slots = self._slots if self._slots_apart and self._searches else 1
        if len(self._running) >= slots:
            return [Wait()]
        plan = self._next_run(self.history)
        if plan is not None:
            return [Start(plan)]
        if self._running:
            return [Wait()]
        others = [trial for trial in self.history.all_trials if trial.state is TrialState.RUNNING]
        if any(trial.phase is self._phase for trial in others):
            return [Wait(for_others=tuple(trial.number for trial in others if trial.phase is self._phase))]
        self._has_claim = False
        if not self._searches:
            return [Release(), *self._done()]
        end = confirmation.in_vain if self.spec.confirm.max_runs is None else confirmation.ending
        told = end(self.history)
        self._stage, self._has_repeated = Stage.SEARCH, True
        return [*([] if told is None else [Tell(told)]), Release()]

    def _done(self) -> list[Action]:
        self._stage = Stage.DONE
        return [Finished()]

    def _settle(self) -> list[Action]:
        """End the search: what waits now will not go on."""
        paused = self.history.in_state(TrialState.PAUSED)
        cut_short = [trial.number for trial in paused if trial.uncapped or is_interrupted(trial)]
        others = [trial.number for trial in paused if trial.number not in cut_short]
        settled = [Settle(cut_short, TrialState.CANCELLED), Settle(others, TrialState.PRUNED)]
        ended = [] if self._ending is None else [SearchEnded(self._ending)]
        return [*ended, *(one for one in settled if one.numbers)]

    def _started(self, event: Started) -> list[Action]:
        number, step_seconds = event.trial.number, self.history.step_seconds(event.plan.configuration)
        self._running[number] = Running(event.plan, event.is_savable, step_seconds)
        self._take(event.trial)
        return []

    def _evaluated(self, event: Evaluated) -> list[Action]:
        running, observation = self._running[event.number], event.observation
        running.last = observation
        if running.plan.phase is not Phase.SEARCH:
            return []
        self.history.observe(event.number, observation.train_seconds, observation.metric)
        if self.spec.record_target.is_met_by(observation.metric):
            return []  # Its end says when it got there.
        is_exempt = not self._searches or running.plan.uncapped or running.stopping is not None
        halt = self.pruning.judge(event.number, observation, uncapped=is_exempt)
        if halt is None:
            return []
        running.stopping = halt.state
        return [Stop(event.number, halt.state, halt.reason)]

    def _ended(self, trial: TrialRecord) -> list[Action]:
        running = self._running.pop(trial.number)
        self._take(trial)
        actions: list[Action] = []
        if running.stopping is TrialState.PAUSED and trial.state is TrialState.PRUNED and trial.outcome is not None:
            actions += self._wait_no_more(trial.outcome.reason)
        actions += [Tell(line) for line in lines_about(trial, self.history)]
        if not (trial.is_refused and not running.plan.is_new_search):
            actions += self._failed(self._refusals.of(trial, self.history))
        if self._stage is Stage.STOPPING and not self._running:
            actions += self._stopped()
        return actions

    def _changed(self, event: Changed) -> list[Action]:
        if event.is_rewritten:
            self._forget()
        if event.probes is not None:
            self.history.probes = dict(event.probes)
        if event.quick is not None:
            self.history.quick = event.quick
        for trial in event.trials:
            if trial.number in event.evaluations:
                self.history.observe_all(trial.number, event.evaluations[trial.number])
            self._take(trial)
        if self._is_new:
            self._is_new = False
            if any(could_not_pause(trial) for trial in event.trials):
                self.pruning.wait_no_more()
        problems = (met_at_once(trial, self.history) for trial in event.trials)
        return self._failed(next((problem for problem in problems if problem is not None), None))

    def _forget(self) -> None:
        """Begin a history anew, for what was known counts no more; whether trials can be saved is not of the store."""
        can_wait, quick = self.pruning.can_wait, self.history.quick
        self._remember(History(self.spec, (), self.history.probes, now=self.history.now))
        self.pruning.standings.can_wait, self.history.quick = can_wait, quick

    def _remember(self, history: History) -> None:
        """Decide by a history from now on."""
        self.history = history
        self.pruning = PruningController(self.spec, history, self._pruner)
        self._planner = self._make_planner(self.spec, history, self.pruning, self._sampler)

    def _take(self, trial: TrialRecord) -> None:
        self.history.take(trial)
        self.pruning.take(trial)

    def _found_saved(self, event: SavedTrials) -> list[Action]:
        """Take note of the checkpoints that lie here; give one up where all take more disk than they may."""
        self.pruning.found_saved(event.saved)
        if event.bytes <= self.spec.pruner.checkpoint_gib * 2**30:
            return []
        number = self.pruning.least_promising()
        return [] if number is None else [Settle([number], TrialState.PRUNED, for_disk=True)]

    def _wait_no_more(self, reason: str) -> list[Action]:
        """Take note that trials cannot be saved here: those that would have waited are stopped from now on."""
        if not self.pruning.can_wait:
            return []
        self.pruning.wait_no_more()
        return [Tell(f"trials are stopped for good from now on where they would have waited: {reason}")]

    def _interrupted(self) -> list[Action]:
        """Stop what runs, saved where it can be; the run fails once all has ended."""
        self._stage = Stage.STOPPING
        if not self._running:
            return self._stopped()
        return [
            Stop(number, TrialState.PAUSED if running.is_savable else TrialState.CANCELLED, INTERRUPTED)
            for number, running in self._running.items()
            if running.stopping is None
        ]

    def _stopped(self) -> list[Action]:
        self._stage = Stage.DONE
        return [Failed(InterruptedRunError("stopped; every trial is stored", hint=CONTINUE))]

    def _failed(self, error: BSSearchError | None) -> list[Action]:
        if error is None:
            return []
        self._stage = Stage.DONE
        return [Failed(error)]


class Host(ABC):
    """The driver of a study, or a simulation; a list as ``journal`` keeps every event that the engine is told."""

    def __init__(self, engine: Engine, journal: list[Event] | None) -> None:
        self.engine = engine
        self.journal = journal

    def _feed(self, event: Event) -> None:
        """Tell the engine of an event, and do what it asks for."""
        if self.journal is not None:
            self.journal.append(event)
        for action in self.engine.handle(event):
            self._carry_out(action)

    @abstractmethod
    def _carry_out(self, action: Action) -> None:
        """Do what the engine asks for; what comes of it is the next event."""
