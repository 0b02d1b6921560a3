"""The contract of every registered pruner, at every evaluation of simulated searches."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from bssearch import registry
from bssearch.records import TrialState
from bssearch.search.history import History
from bssearch.search.pruners.base import Action, Pruner, PruningController, Standings, make_pruner
from bssearch.search.pruners.optuna import OptunaPruner
from bssearch.spec import PrunerSpec
from tests.benchmarks.simulate.replay import Replay
from tests.factories import make_curve, make_trial
from tests.simulation.played import Played, search_spec

LIMIT = 20.0
NAMES = registry.names("pruners")
SEEDS = range(3)
WORKERS = [*zip(NAMES, itertools.cycle((1, 3)))]  # each pruner with one worker or with three


def maker(name: str) -> Callable[[], Pruner]:
    return lambda: make_pruner(PrunerSpec.model_validate({"name": name}))


def random_curves(seed: int, count: int) -> list[Replay]:
    """Trials with rising, noisy gains, gaps and plateaus; about half reach a gain of 1."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        moments, gains, now, gain, pace = [], [], 0.0, rng.uniform(0, 0.3), rng.uniform(0.2, 1.5)
        while now < LIMIT:
            now += rng.uniform(0.2, 1.0)
            gain += pace * rng.uniform(-0.05, 0.15)
            moments.append(now)
            gains.append(math.nan if rng.random() < 0.1 else gain)
            if gain >= 1 and not math.isnan(gains[-1]):
                break
        found.append(Replay(moments, gains, moments[-1] if gains[-1] >= 1 else math.inf, LIMIT))
    return found


def told(standings: Standings) -> object:
    """Standings as comparable values."""
    curves = {number: (tuple(one.train_seconds), tuple(one.gains)) for number, one in standings.curves.items()}
    return (
        *(standings.limit, standings.slack, standings.can_wait, curves, dict(standings.states)),
        *(sorted(standings.waiting), set(standings.uncapped), set(standings.running)),
        [seconds for _, seconds in standings.winners],
    )


class Checked(Pruner):
    """Checks a pruner's answers; with ``remade``, a new pruner must give the same answers."""

    def __init__(self, make: Callable[[], Pruner], *, remade: bool = True) -> None:
        self._make, self._pruner, self._remade = make, make(), remade
        self.caps = self._pruner.caps
        self.judged = 0

    def judge(self, number: int, standings: Standings) -> Action:
        before = told(standings)
        action = self._pruner.judge(number, standings)
        assert self._pruner.judge(number, standings) is action, "asked twice"
        if self._remade:
            assert self._make().judge(number, standings) is action, "a new pruner"
        assert told(standings) == before
        assert standings.can_wait or action is not Action.WAIT
        self.judged += 1
        return action

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        before = told(standings)
        number = self._pruner.next_waiting(standings, fresh=fresh)
        assert number is None or number in standings.waiting
        assert number == self._pruner.next_waiting(standings, fresh=fresh)
        assert number == self._make().next_waiting(standings, fresh=fresh)
        assert self.least_promising(standings) is not None
        assert told(standings) == before
        return number

    def least_promising(self, standings: Standings) -> int | None:
        number = self._pruner.least_promising(standings)
        assert (number in standings.waiting) if standings.waiting else (number is None)
        assert number == self._make().least_promising(standings)
        return number

    def paces_itself(self, standings: Standings) -> bool:
        return self._pruner.paces_itself(standings)


@pytest.mark.parametrize(("name", "workers"), WORKERS)
def test_the_pruner_depends_on_the_standings_and_does_not_change_them(name: str, workers: int) -> None:
    """Optuna's rungs keep the order of running trials, which the standings lack: see their tests."""
    remade = not isinstance(maker(name)(), OptunaPruner)
    for seed in SEEDS:
        pruner = Checked(maker(name), remade=remade)
        Played(random_curves(seed, 14), pruner, workers=workers, limit=LIMIT)
        assert pruner.judged > 30


@pytest.mark.parametrize("name", NAMES)
def test_it_manages_with_no_trial_and_with_one(name: str) -> None:
    pruner, nobody = Checked(maker(name)), Standings(LIMIT)
    assert pruner.least_promising(nobody) is None
    assert [maker(name)().next_waiting(nobody, fresh=fresh) for fresh in (True, False)] == [None, None]
    for trial in random_curves(1, 5):
        found = Played([trial], Checked(maker(name)), limit=LIMIT)
        ((state, seconds),) = found.ends
        if found.hits:
            assert seconds == trial.target_seconds, "alone, it always comes to its target"
        assert state in {TrialState.REACHED, TrialState.EXHAUSTED, TrialState.PAUSED}


class Capped(Pruner):
    """Counts trials that continue after an evaluation past the cap."""

    def __init__(self, pruner: Pruner) -> None:
        self._pruner, self.caps = pruner, pruner.caps
        self._last: dict[int, tuple[float, float]] = {}
        self.went_on = 0

    def judge(self, number: int, standings: Standings) -> Action:
        now, cap = self._last.get(number, (0.0, math.inf))
        self.went_on += now > cap
        self._last[number] = standings.curves[number].now, standings.cap
        return self._pruner.judge(number, standings)

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        return self._pruner.next_waiting(standings, fresh=fresh)


@pytest.mark.parametrize(("name", "workers"), WORKERS)
def test_only_a_pruner_that_caps_ends_trials_past_the_cap(name: str, workers: int) -> None:
    pruner = maker(name)()
    for seed in SEEDS:
        capped = Capped(pruner)
        found = Played(random_curves(seed, 14), capped, workers=workers, limit=LIMIT)
        is_capped = TrialState.CAPPED in {state for state, _ in found.ends}
        assert capped.went_on == 0 if pruner.caps else (capped.went_on > 0 and not is_capped)
        pruner = maker(name)()


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_past_the_cap_ends_a_capped_trial_only(name: str) -> None:
    spec = search_spec(LIMIT, name=name)
    history = History(spec)
    controller = PruningController(spec, history)

    def take(number: int, seconds: float | None, *points: tuple[float, float], uncapped: bool = False) -> None:
        state = TrialState.RUNNING if seconds is None else TrialState.REACHED
        trial = make_trial(number, state=state, seconds=seconds or 0.0, uncapped=uncapped)
        history.observe(number, points)
        history.take(trial)
        controller.take(trial)

    take(1, 4.0, (1.0, 0.3), (2.0, 0.5), (3.0, 0.7))
    for number, uncapped in ((2, False), (3, True)):
        points = [(float(moment), 0.01) for moment in range(1, 6)]
        take(number, None, *points, uncapped=uncapped)
        halt = controller.judge(number, make_curve(*points)[-1], uncapped=uncapped)
        if uncapped or name == "none":
            assert halt is None
        else:
            assert halt is not None and halt.state is TrialState.CAPPED


@pytest.mark.parametrize("name", NAMES)
def test_nan_gains_change_no_decision(name: str) -> None:
    for seed in SEEDS:
        trials = random_curves(seed, 10)
        assert any(math.isnan(gain) for one in trials for gain in one.gains)
        without = [replace(one, gains=best_so_far(one.gains)) for one in trials]
        found, expected = (Played(one, maker(name)(), workers=2, limit=LIMIT) for one in (trials, without))
        assert (found.ends, found.hits, found.cost) == (expected.ends, expected.hits, expected.cost)


def best_so_far(gains: Sequence[float]) -> list[float]:
    """Gains with each NaN replaced by the best before it."""
    best, found = -1e9, []
    for gain in gains:
        found.append(best if math.isnan(gain) else gain)
        best = max(best, found[-1])
    return found
