"""What a pruner is: at each evaluation of a trial it says whether the trial goes on, stops for good, or waits.

A pruner sees the best-so-far curves of all search trials over train seconds as far as they were run, which of them run
and wait, and when trials reached the target; never anything else. It keeps nothing of its own that does not follow from
these `Standings`, so that a search that goes on after a stop decides as one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bssearch import registry
from bssearch.records import TrialState
from bssearch.records.curves import Progress
from bssearch.spec.parts import PrunerSpec, made_with


class Action(StrEnum):
    """What becomes of a trial after an evaluation; one that waits may go on later, from where it was."""

    GO_ON = "go_on"
    STOP = "stop"
    WAIT = "wait"


@dataclass(slots=True)
class Standings:
    """How the search trials of a study stand, by their numbers.

    ``limit`` is the longest that a trial trains, in seconds. ``curves`` are those of all trials that have been
    evaluated, ``states`` where each trial stands, ``waiting`` the curves of those that may go on here, ``uncapped`` the
    trials that a pruner has no say over. ``winners`` are the trials that were the fastest when they reached the target,
    each with its curve and seconds, the fastest first. ``slack`` is the factor that seeds ask for; see `slack_for`.
    ``can_wait`` is False where trials cannot be saved: what would wait is stopped for good.
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

    @property
    def cap(self) -> float:
        """Return the train seconds past which no trial can win: ``slack`` × the incumbent's; ∞ without one."""
        return self.slack * self.winners[0][1] if self.winners else math.inf


class Pruner:
    """No pruning: every trial runs to its target or its limit. A pruner is a subclass.

    The parameters of its constructor are the options that a spec may give: ``pruner: {name: race, options: {lag: 2}}``.
    ``caps``: whether no trial runs past `Standings.cap` (adaptive capping; Hutter et al. 2009, ParamILS).
    """

    caps = False

    def judge(self, number: int, standings: Standings) -> Action:
        """Return what becomes of a running trial whose newest evaluation, in its curve already, missed the target."""
        return Action.GO_ON

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        """Return the waiting trial that goes on before another begins, None for none; ``fresh``: there are others."""
        return None

    def least_promising(self, standings: Standings) -> int | None:
        """Return the waiting trial that would be missed least, None where none waits."""
        return max(standings.waiting, default=None)

    def paces_itself(self, standings: Standings) -> bool:
        """Return whether it says how long trials run before any has reached the target: else the planner must."""
        return False


class Cap(Pruner):
    """Nothing is stopped but at the cap. Lossless for single runs with a slack of 1."""

    caps = True


def slack_for(seed_noise: float) -> float:
    """Return the slack that keeps what is as good as the incumbent, where log times differ by so much between seeds.

    1 + 2 c: the incumbent's own run may have been a lucky one, by one deviation, and the other's an unlucky one.
    """
    return 1 + 2 * seed_noise


def make_pruner(settings: PrunerSpec) -> Pruner:
    """Return the pruner that a spec names, with its options.

    Raises `UsageError` for an unknown name or option, an option out of its bounds, and a class that is no pruner.
    """
    kind = registry.load_class("pruners", settings.name, Pruner)
    return made_with(kind, settings.options, "pruner.options")
