"""Recorded trials on a virtual clock: a study's engine sees them as running trials."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from bssearch.errors import BSSearchError, UsageError
from bssearch.exchange.exporters.exports import RecordedTable
from bssearch.records import (
    Lease,
    Observation,
    ProbeRecord,
    Target,
    TrialObserved,
    TrialOutcome,
    TrialPlan,
    TrialRecord,
    TrialRequest,
    TrialState,
    TrialStop,
)
from bssearch.search import engine as actions
from bssearch.search.engine import Engine

BEGIN = datetime(2000, 1, 1, tzinfo=UTC)  # start of every simulation on its clock

LEASE = Lease(owner="simulation", seconds=0.0)  # lease of every trial; no other driver exists

Rows = Callable[[TrialPlan], "Replay"]  # the recorded trial of a plan: always the same for a configuration and a seed


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded trial: gains at train seconds, when it meets the target (∞: never), its limit, and its steps."""

    train_seconds: Sequence[float]
    gains: Sequence[float]
    target_seconds: float
    limit: float
    steps: Sequence[int] = ()

    @property
    def end(self) -> float:
        """Train seconds at its end if it is not stopped."""
        return min(self.target_seconds, self.train_seconds[-1])


def replays(table: RecordedTable) -> list[Replay]:
    """Return a table's trials for a replay; without a limit in the table, each trial's end is its limit.

    Raises `UsageError` if no trial reaches the target, or a trial ends at 0 train seconds.
    """
    found = []
    for trial in table.trials:
        hits = (
            seconds
            for seconds, metric in zip(trial.train_seconds, trial.metrics, strict=True)
            if table.target.is_met_by(metric)
        )
        gains = [table.target.gain(metric) for metric in trial.metrics]
        limit = table.max_train_seconds or trial.train_seconds[-1]
        found.append(Replay(trial.train_seconds, gains, next(hits, math.inf), limit, trial.steps))
    if all(math.isinf(one.target_seconds) for one in found):
        target = table.target
        nearest = max((gain for one in found for gain in one.gains if not math.isnan(gain)), default=math.nan)
        raise UsageError(
            f"no trial of table {table.name!r} reaches {target.metric} {target.goal.sign} {target.value:g}",
            hint=f"the best {target.metric} in it is {target.gain(nearest):g}",
        )
    at_once = [trial.number for trial, one in zip(table.trials, found, strict=True) if one.end <= 0]
    if at_once:
        raise UsageError(f"trial {at_once[0]} of table {table.name!r} ends, or meets the target, at 0 train seconds")
    return found


def with_target(table: RecordedTable, value: float) -> RecordedTable:
    """Return a table with another target. Raises `UsageError` unless it is a finite number."""
    if not math.isfinite(value):
        raise UsageError(f"target = {value:g} must be a finite number: a value of {table.target.metric}")
    return replace(table, target=replace(table.target, value=value))


def ended_before(table: RecordedTable, target: Target) -> int:
    """Return the number of trials that ended at the table's target, and so cannot reach a harder target.

    The number is 0 if any trial of the table continued after its target.
    """
    if any(table.target.is_met_by(metric) for trial in table.trials for metric in trial.metrics[:-1]):
        return 0
    last = (trial.metrics[-1] for trial in table.trials)
    return sum(table.target.is_met_by(metric) and not target.is_met_by(metric) for metric in last)


@dataclass(slots=True)
class Playing:
    """A recorded trial during its replay, from its first evaluation or from its pause.

    ``place`` is the next evaluation's, ``trained`` the train seconds until now.
    """

    replay: Replay
    request: TrialRequest
    place: int = 0
    trained: float = 0.0
    last: Observation | None = None
    best: float = -math.inf

    @property
    def next_at(self) -> float:
        """Train seconds of the next event: an evaluation, or the end at the limit."""
        if self._ends_next:
            return max(self.trained, min(self.request.plan.train_seconds_limit, self.replay.train_seconds[-1]))
        return self.replay.train_seconds[self.place]

    def advance(self) -> Observation | TrialOutcome:
        """Train until the next event and return it: an evaluation, or the end without an evaluation."""
        self.trained, ends = self.next_at, self._ends_next
        if ends:
            is_over = self.place == len(self.replay.train_seconds)
            return self.outcome(TrialState.EXHAUSTED if is_over else self.request.plan.limit_state, "as recorded")
        gain = self.replay.gains[self.place]
        # Without steps in the table, any train seconds count as a step, so that no target is met before the first.
        step = max(self.replay.steps[self.place] if self.replay.steps else self.place, int(self.trained > 0))
        self.place += 1
        self.best = max(self.best, gain) if not math.isnan(gain) else self.best
        self.last = Observation(
            step=step,
            samples=step * self.request.plan.configuration.batch_size,
            train_seconds=self.trained,
            metric=self.request.target.gain(gain),
            loss=None,
            learning_rate=self.request.plan.configuration.learning_rate,
        )
        return self.last

    @property
    def has_reached(self) -> bool:
        """Whether the newest evaluation met the target."""
        return self.last is not None and self.trained >= self.replay.target_seconds

    def outcome(self, state: TrialState, reason: str) -> TrialOutcome:
        """Return the trial's outcome in a state."""
        reached = state is TrialState.REACHED
        step = self.last.step if self.last is not None else 0
        best = None if math.isinf(self.best) else self.request.target.gain(self.best)
        return TrialOutcome(
            state=state,
            reason=reason,
            steps=step,
            samples=step * self.request.plan.configuration.batch_size,
            train_seconds=self.trained,
            wall_seconds=self.trained,
            time_to_target_s=self.replay.target_seconds if reached else None,
            steps_to_target=step if reached else None,
            last_miss_step=None if reached else step,
            last_miss_seconds=None if reached else (self.last.train_seconds if self.last is not None else 0.0),
            final_metric=None if self.last is None else self.last.metric,
            best_metric=best,
        )

    @property
    def _ends_next(self) -> bool:
        place, rows = self.place, self.replay.train_seconds
        return place == len(rows) or rows[place] > self.request.plan.train_seconds_limit


class VirtualClock:
    """Hosts an engine with recorded trials, on some workers; time is their train seconds.

    ``probes`` are the step times, which cost ``charged`` train seconds. The clock stops before the event that would
    exceed ``budget``, in train seconds of all workers and charges. With ``searches_only`` it ends with the search.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        *,
        probes: Mapping[int, ProbeRecord],
        workers: int = 1,
        budget: float = math.inf,
        charged: float = 0.0,
        searches_only: bool = False,
    ) -> None:
        if untimed := [size for size in engine.spec.batch_sizes if size not in probes]:
            raise ValueError(f"batch sizes {untimed} of the study have no step time")
        self.engine = engine
        self.now = 0.0
        self.trials: dict[int, TrialRecord] = {}
        self.charged = charged
        self._rows = rows
        self._probes = probes
        self._workers = workers
        self._budget = budget
        self._searches_only = searches_only
        self._ended_seconds = 0.0
        self._playing: dict[int, Playing] = {}
        # Of each running trial, the time of its start or resumption, and its earlier train seconds
        self._begun: dict[int, tuple[float, float]] = {}
        self._due: list[tuple[float, int]] = []
        self._is_waiting = False
        self.is_done = False
        self._changed: deque[TrialRecord] = deque()

    @property
    def cost(self) -> float:
        """Train seconds of all trials until now, running trials and charges included."""
        return self._cost_at(self.now)

    def run(self) -> Iterator[TrialRecord]:
        """Run until the engine has finished or the budget is spent; yield each trial that starts, stops or ends."""
        self._do(self.engine.changed())
        while not self.is_done:
            while not self.is_done and not self._is_waiting and len(self._begun) < self._workers:
                self._do(self.engine.slot_free((BEGIN + timedelta(seconds=self.now)).timestamp()))
                yield from self._news()
            if self.is_done or not self._due or self._cost_at(self._due[0][0]) > self._budget:
                return
            moment, number = heapq.heappop(self._due)
            self.now = moment
            self._happen(number)
            yield from self._news()

    def _news(self) -> Iterator[TrialRecord]:
        while self._changed:
            yield self._changed.popleft()

    def _cost_at(self, moment: float) -> float:
        under_way = math.fsum(moment - begun for begun, _ in self._begun.values())
        return self._ended_seconds + under_way + self.charged

    def _happen(self, number: int) -> None:
        playing = self._playing[number]
        found = playing.advance()
        if isinstance(found, TrialOutcome):
            self._end(number, found)
            return
        self._do(self.engine.evaluated(TrialObserved(number, found)))
        if number not in self._begun:
            return
        if playing.has_reached and playing.request.plan.stop_at_target:
            self._end(number, playing.outcome(TrialState.REACHED, "as recorded"))
        else:
            self._schedule(number)

    def _schedule(self, number: int) -> None:
        begun, before = self._begun[number]
        heapq.heappush(self._due, (begun + self._playing[number].next_at - before, number))

    def _do(self, found: Sequence[actions.Action]) -> None:
        for action in found:
            match action:
                case TrialPlan():
                    self._start(action)
                case TrialStop(number, state, reason):
                    self._end(number, self._playing[number].outcome(state, reason))
                case actions.TimeSteps():
                    self._do(self.engine.timed(self._probes))
                case actions.ClaimConfirmation() if not self._searches_only:
                    self._do(self.engine.claimed(True))
                case actions.SettlePaused(numbers, state, _):
                    self._settle(numbers, state)
                case actions.Wait():
                    self._is_waiting = True
                case actions.Finished() | actions.ClaimConfirmation():
                    self.is_done = True
                case BSSearchError():
                    raise action
                case actions.Release() | actions.SearchEnded() | actions.Tell():
                    pass

    def _start(self, plan: TrialPlan) -> None:
        number = plan.resumed if plan.resumed is not None else len(self.trials) + 1
        request = TrialRequest(number=number, plan=plan, target=self.engine.spec.record_target)
        if plan.resumed is None:
            self._playing[number] = Playing(self._rows(plan), request)
            trial = TrialRecord.planned(plan, number=number, lease=LEASE, created_at=self._moment)
        else:
            playing = self._playing[number]
            playing.request = request
            trial = replace(
                self.trials[number],
                state=TrialState.RUNNING,
                train_seconds_limit=plan.train_seconds_limit,
                created_at=self._moment,
                ended_at=None,
                outcome=None,
            )
        self._begun[number] = self.now, self._playing[number].trained
        self._store(trial)
        self._do(self.engine.started(plan, trial, is_savable=True))
        self._schedule(number)

    def _end(self, number: int, outcome: TrialOutcome) -> None:
        begun, _ = self._begun.pop(number)
        self._ended_seconds += self.now - begun
        self._due = [(moment, one) for moment, one in self._due if one != number]
        heapq.heapify(self._due)
        outcome = self.engine.as_stored(number, outcome)
        step_seconds = self.engine.running[number].step_seconds
        steps = outcome.steps_to_target
        product = None if steps is None or step_seconds is None else steps * step_seconds
        trial = replace(
            self.trials[number],
            state=outcome.state,
            ended_at=self._moment,
            outcome=outcome,
            steps_x_step_time_s=product,
        )
        self._store(trial)
        self._is_waiting = False
        self._do(self.engine.ended(trial))
        self._find_saved()

    def _settle(self, numbers: Sequence[int], state: TrialState) -> None:
        for number in numbers:
            trial = self.trials[number]
            assert trial.outcome is not None
            self._store(replace(trial, state=state, outcome=replace(trial.outcome, state=state)))
        self._do(self.engine.changed([self.trials[number] for number in numbers]))
        self._find_saved()

    def _find_saved(self) -> None:
        saved = (number for number, trial in self.trials.items() if trial.state is TrialState.PAUSED)
        self._do(self.engine.found_saved(frozenset(saved), 0))

    def _store(self, trial: TrialRecord) -> None:
        self.trials[trial.number] = trial
        self._changed.append(trial)

    @property
    def _moment(self) -> datetime:
        return BEGIN + timedelta(seconds=self.now)
