"""Pruning policies behind one interface: at every evaluation a trial goes on, stops for good, or waits.

A policy sees best-so-far curves over train seconds as far as they were run, and when trials reached the target; never
anything else. Gains are metrics with their sign set so that more is better.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from enum import StrEnum


class Action(StrEnum):
    """What becomes of a trial after an evaluation; one that waits may go on later, from where it was."""

    GO_ON = "go_on"
    STOP = "stop"
    WAIT = "wait"


class Progress:
    """The best-so-far gains of one trial at its evaluations, as far as it ran."""

    __slots__ = ("gains", "train_seconds")

    def __init__(self) -> None:
        self.train_seconds: list[float] = []
        self.gains: list[float] = []

    @property
    def now(self) -> float:
        """Return the train seconds of the last evaluation, 0 before the first."""
        return self.train_seconds[-1] if self.train_seconds else 0.0

    @property
    def gain(self) -> float:
        """Return the best gain so far, −∞ before the first evaluation."""
        return self.gains[-1] if self.gains else -math.inf

    def add(self, train_seconds: float, gain: float) -> None:
        """Take in an evaluation; a gain that is not a number changes nothing."""
        self.train_seconds.append(train_seconds)
        self.gains.append(gain if gain > self.gain else self.gain)

    @property
    def when_best(self) -> float:
        """Return the train seconds of the first evaluation that had the best gain."""
        return self.train_seconds[bisect_left(self.gains, self.gain)]

    def index_from(self, train_seconds: float) -> int:
        """Return the place of the first evaluation at a moment or later."""
        return bisect_left(self.train_seconds, train_seconds)

    def at(self, train_seconds: float) -> float | None:
        """Return the best gain at a moment, that of the last evaluation until then; None before the first."""
        index = bisect_right(self.train_seconds, train_seconds) - 1
        return self.gains[index] if index >= 0 else None

    def when(self, gain: float) -> float:
        """Return the last train seconds at which the trial had no more than a gain, interpolated between evaluations.

        On a plateau that is its end. Of what the first evaluation exceeds, those of the first; of what none exceeds,
        those of the last.
        """
        index = bisect_right(self.gains, gain)
        if index == 0:
            return self.train_seconds[0]
        if index == len(self.gains):
            return self.train_seconds[-1]
        low, start = self.gains[index - 1], self.train_seconds[index - 1]
        if low == -math.inf:
            return self.train_seconds[index]
        share = (gain - low) / (self.gains[index] - low)
        return start + (self.train_seconds[index] - start) * share


class Policy:
    """No pruning. ``limit`` is the longest that a trial trains, in seconds; ``cap`` is what none may pass now."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.cap = math.inf
        self.curves: dict[int, Progress] = {}

    @property
    def paces_itself(self) -> bool:
        """Whether it says how long trials run before any has reached the target: otherwise somebody else must."""
        return False

    def started(self, number: int) -> None:
        """Take note that a trial has begun."""
        self.curves[number] = Progress()

    def watch(self, number: int, train_seconds: float, gain: float) -> None:
        """Take in an evaluation of a trial over which the policy has no say: the baseline's, for one."""
        self.curves[number].add(train_seconds, gain)

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Take in an evaluation that missed the target, and return what becomes of the trial."""
        self.watch(number, train_seconds, gain)
        return Action.GO_ON

    def reached(self, number: int, train_seconds: float, gain: float) -> None:
        """Take note that a trial has reached the target."""
        self.curves[number].add(train_seconds, gain)

    def ended(self, number: int) -> None:
        """Take note that a trial came to its end without the target, or was stopped at the cap."""

    def stopped(self, number: int) -> None:
        """Take note that a trial was stopped for good, here or elsewhere."""
        self.ended(number)

    def waits(self, number: int) -> None:
        """Take note that a trial waits that was stopped before this policy watched it."""

    def least_promising(self) -> int | None:
        """Return the waiting trial that would be missed least, None where none waits; it waits no more."""
        return None

    def next_waiting(self, *, fresh: bool, among: Collection[int] | None = None) -> int | None:
        """Return the trial that goes on before another begins, None for none; ``fresh``: there are others to begin.

        It is one of those ``among`` which there is a choice, where that is given, and counts as going on from then.
        """
        return None


class Cap(Policy):
    """No trial runs past ``slack`` × the incumbent's time-to-target (adaptive capping; Hutter et al. 2009, ParamILS).

    Lossless for single runs with a slack of 1; `slack_for` gives what seeds ask for that differ.
    """

    def __init__(self, limit: float, slack: float = 1.0) -> None:
        super().__init__(limit)
        self.slack = slack
        self.winners: list[tuple[Progress, float]] = []
        """Each trial that was the fastest when it reached the target, with its seconds, the fastest first."""

    def reached(self, number: int, train_seconds: float, gain: float) -> None:
        """Take note of a trial that reached the target: where it was faster, it is the incumbent."""
        super().reached(number, train_seconds, gain)
        if not self.winners or train_seconds < self.winners[0][1]:
            self.winners.insert(0, (self.curves[number], train_seconds))
            self.cap = self.slack * train_seconds

    def allow(self, slack: float) -> None:
        """Set the slack from now on, as the noise of the seeds becomes known."""
        self.slack = slack
        self.cap = slack * self.winners[0][1] if self.winners else math.inf


def slack_for(seed_noise: float) -> float:
    """Return the slack that keeps what is as good as the incumbent, where log times differ by so much between seeds.

    1 + 2 c: the incumbent's own run may have been a lucky one, by one deviation, and the other's an unlucky one.
    """
    return 1 + 2 * seed_noise


class Race(Cap):
    """Cap, and stop what is worse at t than the incumbent was at t / ``lag`` (de Souza et al. 2022).

    Not before a tenth of the incumbent's time.
    """

    FROM = 0.1

    def __init__(self, limit: float, lag: float, slack: float = 1.0) -> None:
        super().__init__(limit, slack)
        self.lag = lag

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Stop a trial that lags behind the incumbent."""
        super().observe(number, train_seconds, gain)
        if not self.winners or train_seconds < self.FROM * self.cap:
            return Action.GO_ON
        expected = self.winners[0][0].at(train_seconds / self.lag)
        behind = expected is not None and self.curves[number].gain < expected
        return Action.STOP if behind else Action.GO_ON
