"""Synthetic trials on a virtual clock, one after the other in a fixed order, with a pruner."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bssearch.records import Configuration, TrialState
from bssearch.search.engine import Engine
from bssearch.search.history import measured_seconds
from bssearch.search.pruners.base import Pruner
from bssearch.spec import StudySpec
from tests.benchmarks.simulate.draws import Order, Recorded
from tests.benchmarks.simulate.plain import plain
from tests.benchmarks.simulate.replay import Replay, VirtualClock
from tests.factories import make_probe, make_spec


def search_spec(limit: float = 100.0, **pruner: Any) -> StudySpec:
    """Return the spec of a search for a gain of 1, with a default slack of 1."""
    return make_spec(
        target={"metric": "accuracy", "value": 1.0},
        pruner={"name": "none", "slack": 1.0, **pruner},
        budget={"trials": 1_000_000, "trial_train_seconds": limit},
    )


def recorded(*trials: Replay) -> list[Recorded]:
    at = Configuration(batch_size=32, micro_batch_size=32, learning_rate=0.1)
    return [Recorded(replace(at, parameters={"place": place}), one) for place, one in enumerate(trials)]


class Played:
    """A clock run to its end.

    ``changes`` are the (number, state) of yielded trials, ``hits`` the (train seconds spent by then, time to the
    target) of each hit.
    """

    def __init__(
        self, trials: Sequence[Replay], pruner: Pruner, *, workers: int = 1, limit: float = 100.0, **options: Any
    ) -> None:
        rows = iter(trials)
        probes = {size: make_probe(size) for size in search_spec().batch_sizes}
        self.engine = engine_of(trials, pruner, workers=workers, limit=limit)
        self.clock = VirtualClock(
            self.engine, lambda plan: next(rows), probes=probes, workers=workers, searches_only=True, **options
        )
        self.changes: list[tuple[int, TrialState]] = []
        self.hits: list[tuple[float, float]] = []
        for trial in self.clock.run():
            self.changes.append((trial.number, trial.state))
            if trial.state is TrialState.REACHED:
                self.hits.append((self.clock.cost, measured_seconds(trial)))
        self.now, self.cost = self.clock.now, self.clock.cost

    @property
    def ends(self) -> list[tuple[TrialState, float]]:
        """The state of each trial, by number, and its train seconds; 0 while it runs."""
        trials = [self.clock.trials[number] for number in sorted(self.clock.trials)]
        return [(one.state, 0.0 if one.outcome is None else one.outcome.train_seconds or 0.0) for one in trials]


def engine_of(trials: Sequence[Replay], pruner: Pruner, *, workers: int = 1, limit: float = 100.0) -> Engine:
    return Engine(search_spec(limit), slots=workers, pruner=pruner, make_planner=plain(Order(recorded(*trials))))
