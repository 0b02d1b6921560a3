"""The state machine of a search, and the planner of the next trial.

Each event is a method of `Engine` that returns actions. Trials and step times are stored, so a new engine can
resume a study.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from types import MappingProxyType

from bssearch.analysis.build_answer import NAN_DATA, are_nan_at_any_rate
from bssearch.analysis.law.quick import QuickAnswer
from bssearch.analysis.optimum import says_something
from bssearch.errors import BSSearchError, InterruptedRunError, LaunchError, SpecError, TargetNotReachedError
from bssearch.records import (
    FIRST_LOSS,
    Configuration,
    Observation,
    Phase,
    ProbeRecord,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialState,
    TrialStop,
)
from bssearch.records.text import percent, plural
from bssearch.search import confirmation
from bssearch.search.history import FAILURES, INTERRUPTED, History, is_interrupted, trial_seed
from bssearch.search.pruners.base import Pruner, PruningController
from bssearch.search.samplers import allocation
from bssearch.search.samplers.base import Choice, Sampler, decoded, default_choice, make_sampler
from bssearch.spec import StudySpec

# If no trial has reached the target by this share of the budget, paused trials resume before new trials start.
LATE = 0.5

# Trials of a contending batch size, with and without a success
RETUNED = 3
RETUNED_IN_VAIN = 5

# Limit of an uncapped trial at a batch size without a success, as a multiple of the fastest trial's objective value:
# no tuning makes up for this factor.
FIRST_HERE = 4.0

ENDED_BEFORE = 2  # ended trials before little improvement ends the search, if no ended trial has an expectation


class Planner:
    """Plans trials from the sampler's proposals and the pruner's paused trials."""

    def __init__(self, spec: StudySpec, history: History, pruning: PruningController, sampler: Sampler) -> None:
        self.spec = spec
        self._history = history
        self._pruning = pruning
        self._sampler = sampler

    def next_trial(self) -> tuple[TrialPlan | None, str | None]:
        """Return the next search trial or None, and the reason if the search ends.

        The order is: enqueued, retried, paused, default and evidence trials (see `allocation`), then the sampler's
        proposal. Enqueued, retried uncapped and promising paused trials run even beyond the budget of trials.
        """
        history, ending = self._history, self._spent()
        if asked_for := self.asked_for():
            return asked_for, None
        if (
            ending is None
            and (retry := history.to_retry(uncapped=False))
            and self._sampler.ending(history) is None  # without refitting the sampler's model
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
            elif (expected := choice.expected_improvement) is not None and self._is_little(expected):
                choice, ending = self._last(expected)
        following = choice or self._next_waiting(fresh=False)
        return (None if following is None else self._plan(following)), ending

    def asked_for(self) -> TrialPlan | None:
        queued = next(iter(self._history.in_state(TrialState.QUEUED)), None)
        trial = queued or self._history.to_retry(uncapped=True)
        return None if trial is None else self._plan(trial)

    def _needed(self) -> Choice | None:
        history = self._history
        if allocation.default_is_due(history):
            return default_choice(self.spec, uncapped=not self._pruning.paces_itself())
        compares = history.incumbent is not None and allocation.evidence_is_due(history)
        return self._compared() if self._sampler.models_time and compares else None

    def _last(self, expected: float) -> tuple[Choice | None, str]:
        ending = (
            f"the sampler expects a further trial to improve the time to the target by {percent(expected, 2)}, "
            f"less than budget.least_improvement = {percent(self.spec.budget.least_improvement, 2)}; lower "
            "budget.least_improvement to continue"
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
            if len(history.at(size)) < (RETUNED_IN_VAIN if history.best_at(size) is None else RETUNED):
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
                f"search trials of all drivers spent budget.wall_seconds = {budget.wall_seconds:g}; raise "
                "budget.wall_seconds to continue"
            )
        if self._history.spent < budget.trials:
            return None
        return f"the budget of {plural(budget.trials, 'trial')} is spent; raise budget.trials to continue"

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
        here = history.best_at(size) if uncapped else None
        best = here or history.incumbent
        if not self._pruning.limits or (uncapped and best is None):
            return full
        slack = FIRST_HERE if uncapped and here is None else self._pruning.standings.slack
        probe = history.probes[size]
        timed = replace(probe, step_seconds=history.step_seconds(configuration))
        seconds = history.objective.seconds_as_good_as(best, timed, full)
        limit = slack * seconds if isfinite(seconds) else self._first_limit()
        # until the second evaluation, because shorter curves are hardly informative
        return min(full, max(limit, 2 * history.eval_every_steps(size) * (probe.step_seconds or 0.0)))

    def _first_limit(self) -> float:
        # Before a success, the limit is a quarter of the full limit in the first sweep of batch sizes, then half.
        if self._pruning.paces_itself():
            return self._full_limit
        return self._full_limit * min(1.0, 2.0 ** (self._history.spent // len(self._history.feasible) - 2))

    @property
    def _full_limit(self) -> float:
        return self.spec.budget.trial_train_seconds


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Time untimed batch sizes, and ``compared`` sizes again. Then call `Engine.timed`."""

    compared: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class ClaimConfirmation:
    """Request this host's right to confirm. Then call `Engine.claimed`."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release the right to confirm."""


@dataclass(frozen=True, slots=True)
class SettlePaused:
    """End paused trials of this driver and of drivers that left.

    If checkpoints exceed the disk limit (``for_disk``), end paused trials of any driver.
    """

    numbers: Sequence[int]
    state: TrialState
    for_disk: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `Engine.slot_free` again when a trial ends or after a while.

    ``for_others``: numbers of other drivers' running trials. ``for_claim``: True if another driver confirms.
    """

    for_others: tuple[int, ...] = ()
    for_claim: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """The search ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Show a line to the user."""

    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is complete."""


# A `TrialPlan` starts a trial; the driver then calls `Engine.started`, unless another driver was first. An error ends
# the run.
Action = (
    TrialPlan
    | TimeSteps
    | ClaimConfirmation
    | Release
    | TrialStop
    | SettlePaused
    | Wait
    | SearchEnded
    | Tell
    | Finished
    | BSSearchError
)


STOPPED = "the run stopped; all trials are stored"
CONTINUE = "run the same command again to resume"

Evaluations = Sequence[tuple[float, float]]  # (train seconds, metric) pairs in time order

FAILURES_IN_A_ROW = 5  # this many failures end the run if no trial ran before

LEAST_STEPS = 10  # steps of the default in a full trial; with fewer steps, the limit is probably in another unit

NextRun = Callable[[History], TrialPlan | None]  # returns None if all runs have started


class EngineStage(StrEnum):
    """The engine's stage: CLAIM waits for the right to confirm, and REPEAT makes confirmation or planned runs."""

    SEARCH = "search"
    CLAIM = "claim"
    REPEAT = "repeat"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(slots=True)
class Running:
    """A running trial of this driver. ``stopping`` is the end state that the engine requested."""

    plan: TrialPlan
    is_savable: bool
    step_seconds: float | None
    last: Observation | None = None
    stopping: TrialState | None = None


class Engine:
    """Decides the actions of a driver with ``slots`` slots.

    If ``next_run`` is given, the engine plans only runs of ``phase``. For ``slots_apart``, see
    `bssearch.executors.base.Executor`.
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
        make_planner: Callable[[StudySpec, History, PruningController, Sampler], Planner] = Planner,
        device_name: str = "the device",
    ) -> None:
        self.spec = spec
        self._sampler = sampler or make_sampler(spec)
        self._pruner = pruner
        self._make_planner = make_planner
        self._device_name = device_name
        self._failures = 0
        self._any_ran = False
        self._remember(History(spec))
        self._slots = slots
        self._slots_apart = slots_apart
        self._searches = next_run is None
        self._next_run: NextRun = next_run or confirmation.next_run
        self._phase = phase
        self._stage = EngineStage.SEARCH if self._searches else EngineStage.CLAIM
        self.running: dict[int, Running] = {}
        self._was_timed = False
        self._has_claim = False
        self._has_repeated = False
        self._ending: str | None = None

    def as_stored(self, number: int, outcome: TrialOutcome) -> TrialOutcome:
        """Return the outcome, but LOST if a resume failed, or CANCELLED if an interrupted trial saved no checkpoint."""
        running = self.running[number]
        if running.plan.resumed is not None and outcome.state is TrialState.FAILED and running.last is None:
            return replace(outcome, state=TrialState.LOST)
        if running.stopping is None and outcome.state is TrialState.PRUNED:
            return replace(outcome, state=TrialState.CANCELLED)  # interrupted without a checkpoint
        return outcome

    def claimed(self, granted: bool) -> list[Action]:
        if not granted:
            self._has_claim = False
            if self._stage is EngineStage.REPEAT:  # this driver lost the claim while suspended
                self._stage = EngineStage.CLAIM
            return [Wait(for_claim=self._stage is EngineStage.CLAIM)]
        self._has_claim = True
        if self._stage is EngineStage.CLAIM:
            self._stage = EngineStage.REPEAT
        return []

    def slot_free(self, now: float) -> list[Action]:
        """Fill a free slot at ``now``, in seconds since 1970."""
        self.history.now = now
        if self._stage in {EngineStage.STOPPING, EngineStage.DONE}:
            return []
        if not self._was_timed or self.history.untimed:
            return [Wait()] if self.running else [TimeSteps()]
        if self._stage is EngineStage.CLAIM:
            return [ClaimConfirmation()]
        if self._stage is EngineStage.REPEAT:
            return self._repeat()
        if self._has_repeated:  # new step times do not reopen a search that has been confirmed
            plan = self._planner.asked_for()
        else:
            plan, self._ending = self._planner.next_trial()
        if plan is None:
            return self._searched()
        self._has_repeated = False
        return [plan]

    def _searched(self) -> list[Action]:
        if self._has_repeated:
            return self._done(Finished())
        if self.running:
            return self._fill()
        if others := tuple(trial.number for trial in self.history.in_state(TrialState.RUNNING)):
            return [Wait(for_others=others)]
        actions = self._settle()
        self._stage = EngineStage.CLAIM
        if self._next_run(self.history) is not None:
            actions.append(TimeSteps(confirmation.compared_sizes(self.history)))
        return [*actions, ClaimConfirmation()]

    def _fill(self) -> list[Action]:
        # Beside the last search trials, only the best configuration is confirmed: surely a finalist, with the shortest
        # runs. All other runs follow the comparison of step times, which needs idle slots.
        best = self.history.incumbent
        searches = any(one.plan.phase is Phase.SEARCH for one in self.running.values())
        if not (self._slots_apart and searches and best is not None):
            return [Wait()]
        left = confirmation.remaining(self.history, self.history.of_phase(Phase.CONFIRM))
        plan = next((one for one in left if one.configuration.trains_like(best.configuration)), None)
        return [Wait() if plan is None else plan if self._has_claim else ClaimConfirmation()]

    def _repeat(self) -> list[Action]:
        slots = self._slots if self._slots_apart and self._searches else 1
        if len(self.running) >= slots:
            return [Wait()]
        plan = self._next_run(self.history)
        if plan is not None:
            return [plan]
        if self.running:
            return [Wait()]
        phase = self.history.of_phase(self._phase)
        if others := tuple(trial.number for trial in phase if trial.state is TrialState.RUNNING):
            return [Wait(for_others=others)]
        self._has_claim = False
        if not self._searches:
            return [Release(), *self._done(Finished())]
        end = confirmation.in_vain if self.spec.confirm.max_runs is None else confirmation.ending
        told = end(self.history)
        self._stage, self._has_repeated = EngineStage.SEARCH, True
        return [*([] if told is None else [Tell(told)]), Release()]

    def _done(self, last: Action) -> list[Action]:
        self._stage = EngineStage.DONE
        return [last]

    def _settle(self) -> list[Action]:
        paused = self.history.in_state(TrialState.PAUSED)
        cut_short = [trial.number for trial in paused if trial.uncapped or is_interrupted(trial)]
        others = [trial.number for trial in paused if trial.number not in cut_short]
        settled = [SettlePaused(cut_short, TrialState.CANCELLED), SettlePaused(others, TrialState.PRUNED)]
        ended = [] if self._ending is None else [SearchEnded(self._ending)]
        return [*ended, *(one for one in settled if one.numbers)]

    def timed(self, probes: Mapping[int, ProbeRecord]) -> list[Action]:
        self.history.probes = dict(probes)
        self._was_timed = True
        return []

    def started(self, plan: TrialPlan, trial: TrialRecord, *, is_savable: bool) -> list[Action]:
        self.running[trial.number] = Running(plan, is_savable, self.history.step_seconds(plan.configuration))
        self._take(trial)
        return []

    def evaluated(self, observed: TrialObserved) -> list[Action]:
        number, observation = observed.number, observed.observation
        running = self.running[number]
        running.last = observation
        if running.plan.phase is not Phase.SEARCH:
            return []
        self.history.observe(number, [(observation.train_seconds, observation.metric)])
        if self.spec.record_target.is_met_by(observation.metric):
            return []  # `ended` handles a success
        is_exempt = not self._searches or running.plan.uncapped or running.stopping is not None
        # A trial with a target in another unit runs to the full limit, so that `_in_other_unit` ends the study
        is_exempt |= _best_in_other_unit(number, self.history) is not None
        halt = self.pruning.judge(number, observation, uncapped=is_exempt)
        if halt is None:
            return []
        running.stopping = halt.state
        return [halt]

    def ended(self, trial: TrialRecord) -> list[Action]:
        running = self.running.pop(trial.number)
        self._take(trial)
        actions: list[Action] = []
        if running.stopping is TrialState.PAUSED and trial.state is TrialState.PRUNED and trial.outcome is not None:
            actions += self.cannot_save(trial.outcome.reason)
        lines = _default_missed(trial, self.history), confirmation.miss_of(self.history, trial)
        actions += [Tell(line) for line in lines if line is not None]
        if not (trial.is_refused and not running.plan.is_new_search):
            actions += self._failed(self._problem(trial))
        if self._stage is EngineStage.STOPPING and not self.running:
            actions += self._stopped()
        return actions

    def changed(
        self,
        trials: Sequence[TrialRecord] = (),
        evaluations: Mapping[int, Evaluations] = MappingProxyType({}),
        probes: Mapping[int, ProbeRecord] | None = None,
        *,
        is_rewritten: bool = False,
        quick: QuickAnswer | None = None,
    ) -> list[Action]:
        """Apply changes of the store. Returns the error that ends the run, if any.

        ``is_rewritten``: discard earlier trials. ``evaluations``, by trial number: of search trials that ended at other
        drivers, or of all search trials if ``is_rewritten``. ``probes``, ``quick``: None if unchanged.
        """
        if is_rewritten:
            self._forget()
        if probes is not None:
            self.history.probes = dict(probes)
        if quick is not None:
            self.history.quick = quick
        for trial in trials:
            if trial.number in evaluations:
                self.history.observe(trial.number, evaluations[trial.number])
            self._take(trial)
        problems = (_wrong_target(trial, self.history) for trial in trials)
        return self._failed(next((problem for problem in problems if problem is not None), None))

    def _forget(self) -> None:
        # Forget all trials, but not the quick answer and `can_wait`, because changes lack both
        can_wait, quick = self.pruning.standings.can_wait, self.history.quick
        self._remember(History(self.spec, (), self.history.probes, now=self.history.now))
        self.pruning.standings.can_wait, self.history.quick = can_wait, quick

    def _remember(self, history: History) -> None:
        self.history = history
        self.pruning = PruningController(self.spec, history, self._pruner)
        self._planner = self._make_planner(self.spec, history, self.pruning, self._sampler)

    def _take(self, trial: TrialRecord) -> None:
        self.history.take(trial)
        self.pruning.take(trial)

    def found_saved(self, saved: frozenset[int], size: int) -> list[Action]:
        """Set the readable checkpoints.

        If ``size``, the bytes of all checkpoints, exceeds the disk limit, end the least promising paused trial.
        """
        self.pruning.found_saved(saved)
        if size <= self.spec.pruner.checkpoint_gib * 2**30:
            return []
        number = self.pruning.least_promising()
        return [] if number is None else [SettlePaused([number], TrialState.PRUNED, for_disk=True)]

    def cannot_save(self, reason: str) -> list[Action]:
        """From now on, stop trials instead of pausing."""
        if not self.pruning.standings.can_wait:
            return []
        self.pruning.standings.can_wait = False
        return [Tell(f"stopping trials instead of pausing, because checkpoints cannot be saved: {reason}")]

    def interrupted(self) -> list[Action]:
        self._stage = EngineStage.STOPPING
        if not self.running:
            return self._stopped()
        return [
            TrialStop(number, TrialState.PAUSED if running.is_savable else TrialState.CANCELLED, INTERRUPTED)
            for number, running in self.running.items()
            if running.stopping is None
        ]

    def _stopped(self) -> list[Action]:
        return self._done(InterruptedRunError(STOPPED, hint=CONTINUE))

    def _failed(self, error: BSSearchError | None) -> list[Action]:
        return [] if error is None else self._done(error)

    def _problem(self, trial: TrialRecord) -> BSSearchError | None:
        # The error that ends the run after this trial, if any
        history = self.history
        problem = _wrong_target(trial, history) or history.objective.measurement_problem(trial, self._device_name)
        problem = problem or self._too_many_failures(trial)
        return problem or (_nan_at_any_rate(history) if trial.state is TrialState.DIVERGED else None)

    def _too_many_failures(self, trial: TrialRecord) -> LaunchError | None:
        if trial.state is TrialState.LOST:
            return None
        self._failures = self._failures + 1 if trial.state is TrialState.FAILED else 0
        self._any_ran |= trial.state is not TrialState.FAILED
        allowed = FAILURES * len(self.spec.batch_sizes) if self._any_ran else FAILURES_IN_A_ROW
        if self._failures < allowed:
            return None
        reason = "" if trial.outcome is None else trial.outcome.reason
        return LaunchError(
            f"{self._failures} trials in a row failed, most recently trial {trial.number}: {reason}",
            hint=f"see the traceback with `bssearch trial show {self.spec.name} {trial.number}`",
        )


def _wrong_target(trial: TrialRecord, history: History) -> BSSearchError | None:
    # An error if a trial met the target without training, or if the target's unit or the limit is wrong
    return history.objective.target_problem(trial) or _in_other_unit(trial, history) or _too_short(trial, history)


def _best_in_other_unit(number: int, history: History) -> float | None:
    # The best metric of a trial with metrics in [0, 1] if the target is in percent
    target, curve = history.spec.record_target, history.curves.get(number)
    if curve is None or not history.objective.stops_at_target:
        return None
    first, best = target.gain(curve.gains[0]), target.gain(curve.gain)
    return best if target.is_percent_of_share(min(first, best), max(first, best)) else None


def _in_other_unit(trial: TrialRecord, history: History) -> BSSearchError | None:
    target, full = history.spec.record_target, history.spec.budget.trial_train_seconds
    best = _best_in_other_unit(trial.number, history)
    if best is None or trial.state is not TrialState.EXHAUSTED or trial.train_seconds_limit < full:
        return None
    return SpecError(
        f"{target.in_words} is out of reach if {target.metric} is at most 1, and trial {trial.number} reached "
        f"{best:.4g}; did you mean {target.in_unit_of(best):g}?",
        hint="correct target.value and rename the study, or raise budget.trial_train_seconds to continue",
    )


def _too_short(trial: TrialRecord, history: History) -> BSSearchError | None:
    limit, outcome = history.spec.budget.trial_train_seconds, trial.outcome
    is_default = trial.configuration.trains_like(history.spec.default_configuration)
    if trial.state is not TrialState.EXHAUSTED or outcome is None or not is_default or not limit:
        return None
    if not 0 < outcome.steps < LEAST_STEPS or outcome.train_seconds < limit:
        return None
    steps = plural(outcome.steps, "step")
    return SpecError(
        f"budget.trial_train_seconds = {limit:g} allows only {steps} of the default configuration",
        hint="set budget.trial_train_seconds to about 3 × the seconds of a training run",
    )


def _nan_at_any_rate(history: History) -> BSSearchError | None:
    # An error if all trials diverged at the first step, at any learning rate
    ran = [trial for trial in history.trials if says_something(trial)]
    if not are_nan_at_any_rate(ran):
        return None
    return TargetNotReachedError(f"all trials ({len(ran)}) diverged at the first step", hint=NAN_DATA)


def _default_missed(trial: TrialRecord, history: History) -> str | None:
    spec, outcome = history.spec, trial.outcome
    is_default = trial.configuration.trains_like(spec.default_configuration)
    stopped_or_reached = {TrialState.REACHED, TrialState.PRUNED, TrialState.CAPPED}
    has_missed = says_something(trial) and trial.state not in stopped_or_reached
    if not (is_default and has_missed and history.objective.stops_at_target) or outcome is None:
        return None
    target, best = spec.record_target, outcome.best_metric
    came = "" if best is None else f" with best {target.metric} {best:.4g}"
    seconds, limit = outcome.undelayed_train_seconds or outcome.train_seconds, spec.budget.trial_train_seconds
    missed = (
        f"the default configuration (batch {trial.configuration.batch_size}) missed {target.in_words} in trial "
        f"{trial.number}{came} after {seconds:.3g} train seconds"
    )
    if trial.state is TrialState.DIVERGED:
        cure = NAN_DATA if FIRST_LOSS in outcome.reason else "change default.learning_rate or the model"
        return f"{missed}: {outcome.reason}; {cure}"
    advice = "" if history.incumbent else "; find a reachable target with `bssearch check SPEC --suggest-target`"
    return f"{missed}; the limit of {limit:g} s ends a trial at the next step or report{advice}"
