"""The pruner interface.

A pruner decides from `Standings` alone, so that a resumed search decides as an uninterrupted one.
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
    """Decision about a trial after an evaluation."""

    GO_ON = "go_on"
    STOP = "stop"
    WAIT = "wait"


@dataclass(slots=True)
class Standings:
    """Search trials of a study, by number.

    ``limit``: longest train seconds of a trial. ``waiting``: curves of trials that can resume. ``winners``: curve and
    seconds of trials that set a record, fastest first. ``can_wait``: whether trials can be checkpointed. If not, they
    are stopped instead of paused.
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
        """Train seconds past which no trial can win: ``slack`` × the incumbent's, else ∞."""
        return self.slack * self.winners[0][1] if self.winners else math.inf


class Pruner:
    """Runs every trial to its target or limit.

    Constructor parameters are options of a spec. ``caps``: whether trials end at `Standings.cap` (adaptive capping;
    Hutter et al. 2009, ParamILS).
    """

    caps = False

    def judge(self, number: int, standings: Standings) -> Action:
        """Action for a trial whose newest evaluation, already in its curve, missed the target."""
        return Action.GO_ON

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        """Paused trial to resume first; ``fresh``: whether new trials remain."""
        return None

    def least_promising(self, standings: Standings) -> int | None:
        """Least promising paused trial, if any."""
        return max(standings.waiting, default=None)

    def paces_itself(self, standings: Standings) -> bool:
        """True if this pruner limits trials before the first success; otherwise the planner does."""
        return False


class Cap(Pruner):
    """Stops trials only at the cap; lossless for single runs with a slack of 1."""

    caps = True


def slack_for(seed_noise: float) -> float:
    """1 + 2c for a seed-to-seed standard deviation c of log time: for a lucky incumbent and an unlucky rival."""
    return 1 + 2 * seed_noise


def make_pruner(settings: PrunerSpec) -> Pruner:
    """Pruner of a spec; raises `UsageError` for an unknown name or invalid option."""
    kind = registry.load_class("pruners", settings.name, Pruner)
    return made_with(kind, settings.options, "pruner.options")
