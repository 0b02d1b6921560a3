"""A search without bssearch: trials from a source, one after the other, and a pruner."""

import math
from collections.abc import Callable
from typing import Protocol

from bssearch.records import Configuration, Phase, TrialPlan, TrialRecord, TrialState
from bssearch.search.engine import Planner
from bssearch.search.history import History, trial_seed
from bssearch.search.pruners.base import PruningController
from bssearch.search.samplers.base import Sampler
from bssearch.spec import StudySpec


class Source(Protocol):
    """A source of trials."""

    @property
    def has_more(self) -> bool: ...

    def begin(self) -> Configuration:
        """Return the configuration of the next trial."""
        ...


class PlainPlanner(Planner):
    """Takes trials from a source, each to its recorded end or the pruner's cap; promising paused trials go first."""

    def __init__(self, source: Source, spec: StudySpec, history: History, pruning: PruningController) -> None:
        self._source = source
        self._spec = spec
        self._history = history
        self._pruning = pruning

    def next_trial(self) -> tuple[TrialPlan | None, str | None]:
        """Return the next trial, or None with a reason."""
        waiting = self._pruning.next_waiting(fresh=self._source.has_more)
        if waiting is not None:
            return self._plain_plan(waiting.configuration, waiting), None
        if not self._source.has_more:
            return None, "all have run"
        return self._plain_plan(self._source.begin()), None

    def _plain_plan(self, configuration: Configuration, waiting: TrialRecord | None = None) -> TrialPlan:
        length = self._history.length
        limit = self._pruning.standings.cap if self._pruning.pruner.caps else math.inf
        return TrialPlan(
            configuration=configuration,
            sampled=None,
            phase=Phase.SEARCH,
            seed=waiting.seed if waiting else trial_seed(self._spec.seed, Phase.SEARCH, length),
            train_seconds_limit=limit,
            limit_state=TrialState.EXHAUSTED if math.isinf(limit) else TrialState.CAPPED,
            resumed=waiting.number if waiting else None,
            after=length,
        )


def plain(source: Source) -> Callable[[StudySpec, History, PruningController, Sampler], PlainPlanner]:
    """Return the factory of a planner that takes trials from a source."""
    return lambda spec, history, pruning, sampler: PlainPlanner(source, spec, history, pruning)
