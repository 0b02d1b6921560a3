"""Recorded trials run again on a virtual clock: on some workers, under a pruning policy, until a budget is spent."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from bssearch.errors import UsageError
from bssearch.pruners.base import Action, Policy, Progress
from bssearch.recorded import RecordedTable
from bssearch.records import Target


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded trial: gains at train seconds, when it meets the target (∞: never), and its limit."""

    train_seconds: Sequence[float]
    gains: Sequence[float]
    target_seconds: float
    limit: float

    @property
    def end(self) -> float:
        """Return the train seconds at which it ends if nothing stops it."""
        return min(self.target_seconds, self.train_seconds[-1])


def replays(table: RecordedTable) -> list[Replay]:
    """Return a table's trials as they can be run again; without a limit in it, each ran for its own.

    Raises `UsageError` where none reaches the target, and where one ends at 0 train seconds.
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
        found.append(Replay(trial.train_seconds, gains, next(hits, math.inf), limit))
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
    """Return a table with another target. Raises `UsageError` where it is not a finite number."""
    if not math.isfinite(value):
        raise UsageError(f"target = {value:g} must be a finite number: a value of {table.target.metric}")
    return replace(table, target=replace(table.target, value=value))


def ended_before(table: RecordedTable, target: Target) -> int:
    """Return how many trials cannot say when they meet a target, for they ended when they had met the table's.

    That is 0 where any trial of the table went on after it.
    """
    if any(table.target.is_met_by(metric) for trial in table.trials for metric in trial.metrics[:-1]):
        return 0
    last = (trial.metrics[-1] for trial in table.trials)
    return sum(table.target.is_met_by(metric) and not target.is_met_by(metric) for metric in last)


class State(StrEnum):
    """What a trial has come to."""

    RUNNING = "running"
    WAITING = "waiting"
    REACHED = "reached"
    ENDED = "ended"


class Source(Protocol):
    """Where the next trial comes from."""

    @property
    def has_more(self) -> bool:
        """Whether there is a trial to begin."""

    @property
    def charged(self) -> float:
        """The train seconds that were spent on other things than trials until now."""

    def begin(self, progress: Progress) -> Replay:
        """Return the next trial; ``progress`` grows as it runs."""


class Order:
    """Trials in a fixed order."""

    charged = 0.0

    def __init__(self, trials: Sequence[Replay]) -> None:
        self._left = list(reversed(trials))

    @property
    def has_more(self) -> bool:
        """Whether one is left."""
        return bool(self._left)

    def begin(self, progress: Progress) -> Replay:
        """Return the next one."""
        return self._left.pop()


@dataclass(order=True, slots=True)
class _Busy:
    """A worker's next event, at ``time``: its trial has trained ``until`` then, and ``since`` before.

    ``at_cap``: nothing is seen there, and the trial ends.
    """

    time: float
    worker: int
    trial: int
    evaluation: int
    since: float
    until: float
    at_cap: bool

    @property
    def seconds(self) -> float:
        """Return what is trained from now on until the event."""
        return self.until - self.since


class VirtualClock:
    """Runs trials from a source on some workers, under a policy; events happen in the order of their time.

    Trials are numbered in the order in which they begin. What would happen past ``budget``, in train seconds of all
    workers and charges, does not happen. The policy has no say over trials in ``exempt``, but that its cap holds.
    """

    def __init__(
        self,
        source: Source,
        policy: Policy,
        workers: int,
        *,
        budget: float = math.inf,
        exempt: Collection[int] = (),
    ) -> None:
        self.now = 0.0
        self._source = source
        self._policy = policy
        self._workers = workers
        self._budget = budget
        self._exempt = exempt
        self._spent = 0.0
        self._trials: list[Replay] = []
        self._busy: list[_Busy] = []
        self._paused: dict[int, tuple[int, float]] = {}

    @property
    def cost(self) -> float:
        """Return the train seconds spent until now: on all trials, those under way included, and charges."""
        return self._cost_at(self.now)

    def run(self) -> Iterator[tuple[int, State]]:
        """Run until the budget is spent, or all have ended or wait for nothing; yield each trial whose state changes.

        The next one begins when the caller goes on.
        """
        idle = list(range(self._workers))
        while True:
            while idle and (begun := self._begin()) is not None:
                trial, evaluation, trained = begun
                heapq.heappush(self._busy, self._event(idle.pop(), trial, evaluation, trained))
                yield trial, State.RUNNING
            if not self._busy or self._cost_at(self._busy[0].time) > self._budget:
                return
            event = heapq.heappop(self._busy)
            state = self._happen(event)
            if state is State.RUNNING:
                heapq.heappush(self._busy, self._event(event.worker, event.trial, event.evaluation + 1, event.until))
            else:
                idle.append(event.worker)
                yield event.trial, state

    def _cost_at(self, time: float) -> float:
        under_way = math.fsum(event.seconds - (event.time - time) for event in self._busy)
        return self._spent + under_way + self._source.charged

    def _begin(self) -> tuple[int, int, float] | None:
        """Return (trial, its next evaluation, train seconds so far) of what a free worker goes on with."""
        waiting = self._policy.next_waiting(fresh=self._source.has_more)
        if waiting is not None:
            return waiting, *self._paused.pop(waiting)
        if not self._source.has_more:
            return None
        trial = len(self._trials)
        self._policy.started(trial)
        self._trials.append(self._source.begin(self._policy.curves[trial]))
        return trial, 0, 0.0

    def _event(self, worker: int, trial: int, evaluation: int, trained: float) -> _Busy:
        due, cap = self._trials[trial].train_seconds[evaluation], self._policy.cap
        until = max(trained, min(due, cap))
        return _Busy(self.now + until - trained, worker, trial, evaluation, trained, until, due > cap)

    def _happen(self, event: _Busy) -> State:
        """Take in an event, and return what its trial has come to."""
        self.now = event.time
        self._spent += event.seconds
        trial, trained = event.trial, event.until
        if event.at_cap or trained > self._policy.cap:
            self._policy.ended(trial)
            return State.ENDED
        replay = self._trials[trial]
        gain = replay.gains[event.evaluation]
        if trained >= replay.target_seconds:
            self._policy.reached(trial, trained, gain)
            self._end_at_the_cap()
            return State.REACHED
        action = self._verdict(trial, trained, gain)
        if event.evaluation + 1 == len(replay.train_seconds):
            self._policy.ended(trial)
            return State.ENDED
        if action is Action.WAIT:
            self._paused[trial] = (event.evaluation + 1, trained)
            return State.WAITING
        return State.RUNNING if action is Action.GO_ON else State.ENDED

    def _verdict(self, trial: int, trained: float, gain: float) -> Action:
        if trial not in self._exempt:
            return self._policy.observe(trial, trained, gain)
        self._policy.watch(trial, trained, gain)
        return Action.GO_ON

    def _end_at_the_cap(self) -> None:
        """Have trials that are under way end where they come to the cap, which may have fallen."""
        cap = self._policy.cap
        for event in self._busy:
            so_far = event.until - (event.time - self.now)
            if event.until > cap:
                event.until = max(cap, so_far)
                event.time = self.now + event.until - so_far
                event.at_cap = True
        heapq.heapify(self._busy)
