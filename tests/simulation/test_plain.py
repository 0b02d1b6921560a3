"""A search as people have it without bssearch: the trials of a source in their order, and a pruner."""

import math

import pytest

from bssearch.records import TrialState
from bssearch.search.history import History
from bssearch.search.pruners.base import PruningController
from bssearch.search.samplers.base import make_sampler
from tests.benchmarks.simulate.draws import Order
from tests.benchmarks.simulate.plain import PlainPlanner, plain
from tests.factories import make_trial
from tests.simulation.lines import line
from tests.simulation.played import recorded, search_spec


class Search:
    def __init__(self, pruner: str, *seconds: float) -> None:
        self.spec = search_spec(160.0, name=pruner, slack=1.5)
        self.history = History(self.spec)
        self.pruning = PruningController(self.spec, self.history)
        make = plain(Order(recorded(*(line(one) for one in seconds))))
        self.planner: PlainPlanner = make(self.spec, self.history, self.pruning, make_sampler(self.spec))

    def take(self, number: int, seconds: float, state: TrialState = TrialState.REACHED, gain: float = 0.1) -> None:
        trial = make_trial(number, state=state, seconds=seconds, seed=77)
        self.history.observe_all(number, [(seconds - 0.5, gain)])
        self.history.take(trial)
        self.pruning.take(trial)


@pytest.mark.parametrize(
    ("pruner", "limit", "state"),
    [("none", math.inf, TrialState.EXHAUSTED), ("cap", 60.0, TrialState.CAPPED), ("safe", 60.0, TrialState.CAPPED)],
)
def test_trials_run_to_their_end_or_to_the_cap(pruner: str, limit: float, state: TrialState) -> None:
    search = Search(pruner, 5, 6)
    plan, _ = search.planner.next_trial()
    assert plan is not None and math.isinf(plan.train_seconds_limit)
    search.take(1, 40.0)
    plan, _ = search.planner.next_trial()
    assert plan is not None and (plan.train_seconds_limit, plan.limit_state) == (limit, state)


def test_what_waits_and_has_hope_goes_on_before_another_begins_with_its_own_seed() -> None:
    search = Search("balanced", 5)
    for number, gain in ((1, 0.1), (2, 0.5), (3, 0.2)):
        search.take(number, 10.5, TrialState.PAUSED, gain)
    search.pruning.found_saved([1, 2, 3])
    plan, _ = search.planner.next_trial()
    assert plan is not None and (plan.resumed, plan.seed) == (2, 77)
