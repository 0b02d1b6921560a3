"""The contract of every registered pruner, at every evaluation of simulated searches, and the controller of pruners."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bssearch import registry
from bssearch.records import Phase, TrialRecord, TrialState
from bssearch.search.history import INTERRUPTED, SEED_NOISE, SEED_NOISE_FREEDOM, History
from bssearch.search.pruners.base import Action, Pruner, PruningController, Standings, make_pruner
from bssearch.search.pruners.optuna import OptunaPruner
from bssearch.search.pruners.pace import Race
from bssearch.spec import PrunerSpec, StudySpec
from tests.benchmarks.simulate.replay import Replay
from tests.factories import EPOCH, make_curve, make_spec, make_trial, with_outcome
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


# The controller -------------------------------------------------------------------------------------------------------


PAUSED, PRUNED, REACHED, RUNNING = TrialState.PAUSED, TrialState.PRUNED, TrialState.REACHED, TrialState.RUNNING
FULL, RUNG = 160.0, 10.0  # the first rung is at 1/16 of the limit


def spec(name: str = "balanced", **pruner: Any) -> StudySpec:
    return make_spec(pruner={"name": name, **pruner}, budget={"trials": 50, "trial_train_seconds": FULL})


class Told:
    """A controller that is updated trial by trial."""

    def __init__(self, of: StudySpec | None = None) -> None:
        self.spec = of or spec()
        self.history = History(self.spec)
        self.controller = PruningController(self.spec, self.history)
        self.standings = self.controller.standings

    def take(self, trial: TrialRecord, *points: tuple[float, float]) -> TrialRecord:
        self.history.observe(trial.number, points)
        self.history.take(trial)
        self.controller.take(trial)
        return trial

    def winner(self, number: int, seconds: float = 10.0, ended: float | None = None) -> None:
        """Add a trial that rose evenly from 0 to the target of 0.9."""
        trial = make_trial(number, seconds=seconds)
        if ended is not None:
            trial = replace(trial, ended_at=EPOCH + timedelta(seconds=ended))
        self.take(trial, *((seconds * tenth / 10, 0.9 * tenth / 10) for tenth in range(10)))

    def seen(self, number: int, *points: tuple[float, float], uncapped: bool = False) -> tuple[TrialState, str] | None:
        """Evaluate a running trial; return the state to end in after the last evaluation, and the reason."""
        self.take(make_trial(number, state=RUNNING, uncapped=uncapped), *points)
        halt = self.controller.judge(number, make_curve(*points)[-1], uncapped=uncapped)
        return None if halt is None else (halt.state, halt.reason)

    def paused(self, number: int, *points: tuple[float, float], **options: Any) -> TrialRecord:
        return self.take(make_trial(number, state=PAUSED, seconds=points[-1][0], **options), *points)


@pytest.fixture
def taken() -> Told:
    return Told()


def test_confirmation_runs_are_no_part_of_the_race(taken: Told) -> None:
    taken.take(make_trial(1, phase=Phase.CONFIRM, seconds=1.0))
    assert (taken.standings.curves, taken.standings.states, taken.standings.cap) == ({}, {}, math.inf)


def test_a_trial_past_the_cap_is_capped_and_a_hopeless_one_pauses_with_a_reason() -> None:
    taken = Told(spec(slack=1.5))
    taken.winner(1)
    assert taken.seen(2, (0.0, 0.0), (2.0, 0.4), (14.0, 0.85)) is None
    state, reason = taken.seen(3, (15.1, 0.85)) or (None, "")
    assert state is TrialState.CAPPED and "1.5 × the 10 train seconds" in reason
    state, reason = taken.seen(4, (7.0, 0.05)) or (None, "")
    assert state is PAUSED and "the fastest trial took 10 train seconds" in reason
    assert taken.seen(5, (7.0, 0.05), uncapped=True) is None, "evidence runs on"
    assert taken.seen(6, (99.0, 0.05), uncapped=True) is None


def test_before_the_first_hit_trials_pause_at_their_rung_or_go_on_if_they_cannot(taken: Told) -> None:
    assert (taken.seen(1, (RUNG, 0.3)) or [None])[0] is PAUSED
    taken.controller.standings.can_wait = False
    assert taken.seen(2, (RUNG, 0.3)) is None
    taken.winner(3)
    assert (taken.seen(4, (8.0, 0.05)) or [None])[0] is PRUNED, "the hopeless stop for good"
    assert not Told(spec(checkpoint_gib=0.0)).controller.standings.can_wait, "no checkpoint may be saved"


def test_only_trials_saved_here_pause(taken: Told) -> None:
    for number in (1, 2, 3):
        taken.paused(number, (RUNG, 0.1 * number))
    assert taken.standings.waiting == {}
    taken.controller.found_saved([1, 2])
    assert set(taken.standings.waiting) == {1, 2}
    assert (going := taken.controller.next_waiting(fresh=False)) and going.number == 2
    taken.controller.found_saved([1])
    assert (going := taken.controller.next_waiting(fresh=False)) and going.number == 1, "the other's file has gone"
    taken.take(make_trial(1, state=RUNNING))
    assert taken.standings.waiting == {} and taken.standings.running == {1}, "it goes on, here or elsewhere"
    assert taken.controller.next_waiting(fresh=False) is None
    assert taken.controller.least_promising() is None


def test_a_trial_that_pauses_again_keeps_its_whole_curve(taken: Told) -> None:
    taken.controller.found_saved([1])
    taken.paused(1, (RUNG, 0.3))
    taken.take(make_trial(1, state=RUNNING))
    taken.paused(1, (RUNG, 0.3), (2 * RUNG, 0.4))
    assert taken.standings.waiting[1].gains == [0.3, 0.4]
    taken.take(make_trial(1, seconds=25.0))
    assert taken.standings.waiting == {}
    assert taken.standings.curves[1].train_seconds == [RUNG, 2 * RUNG, 25.0], "its end says when it got there"


def test_an_interrupted_trial_resumes_first_and_no_pruner_gives_it_up(taken: Told) -> None:
    taken.controller.found_saved([1, 2, 3])
    taken.paused(1, (RUNG, 0.8))
    cut = make_trial(2, state=PAUSED, seconds=RUNG)
    cut = taken.take(with_outcome(cut, reason=INTERRUPTED), (RUNG, 0.1))
    assert set(taken.standings.waiting) == {1}
    assert taken.controller.next_waiting(fresh=True) is cut
    assert taken.controller.least_promising() == 1
    taken.controller.found_saved([1])
    assert taken.controller.next_waiting(fresh=True) is None, "without its file it cannot"


@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5], [5, 3, 1, 4, 2], [2, 2, 4, 1, 1, 3, 5]])
def test_the_winners_do_not_depend_on_the_order_of_the_trials(order: Any) -> None:
    """A driver sees another driver's hit late."""
    ends = {1: (10.0, 100.0), 2: (12.0, 50.0), 3: (8.0, 200.0), 4: (11.0, 70.0), 5: (9.0, 300.0)}
    taken = Told(spec("cap", slack=1.0))
    for number in order:
        seconds, ended = ends[number]
        taken.winner(number, seconds, ended)
    assert taken.controller.standings.slack == 1.0
    assert [seconds for _, seconds in taken.standings.winners] == [8.0, 10.0, 11.0, 12.0]
    assert taken.standings.cap == 8.0


@pytest.mark.parametrize(
    ("objective", "races"),
    [
        ({"objective": "samples_to_target"}, False),
        ({"objective": "cost_to_target", "price_per_device_hour": 2.0}, True),
        ({}, True),
    ],
)
def test_objectives_that_do_not_grow_with_the_seconds_alone_have_no_race(
    objective: dict[str, Any], races: bool
) -> None:
    taken = Told(make_spec(pruner={"name": "race"}, **objective))
    assert type(taken.controller.pruner) is (Race if races else Pruner)
    assert taken.controller.limits, "trials are limited when they begin all the same"
    taken.winner(1, seconds=1.0)
    assert (taken.seen(2, (9.0, 0.1)) is not None) is races


def slack_after(*trials: TrialRecord, **pruner: Any) -> float:
    taken = Told(spec(**pruner))
    for trial in trials:
        taken.take(trial)
    return taken.controller.standings.slack


def test_the_slack_follows_from_repeats_unless_one_was_stopped() -> None:
    first = 1 + 2 * SEED_NOISE
    repeats = [make_trial(number, seconds=seconds) for number, seconds in enumerate((1.0, 2.0, 4.0), start=1)]
    alone = [replace(one, configuration=replace(one.configuration, learning_rate=0.1 * one.number)) for one in repeats]
    stopped = make_trial(4, state=TrialState.CAPPED, seconds=5.0)
    squares = 2 * math.log(2) ** 2
    wide = 1 + 2 * math.sqrt((SEED_NOISE_FREEDOM * SEED_NOISE**2 + squares) / (SEED_NOISE_FREEDOM + 2))
    assert slack_after() == pytest.approx(first)
    assert slack_after(*alone) == pytest.approx(first)
    assert slack_after(*repeats) == pytest.approx(wide)
    assert slack_after(*repeats, stopped) == pytest.approx(first), "of these only the lucky ones have a time"
    assert slack_after(*repeats, slack=1.2) == 1.2, "as the spec says"
    micro = replace(repeats[1], configuration=repeats[1].configuration.in_micro_batches(8))
    assert slack_after(repeats[0], micro, repeats[2]) == pytest.approx(wide), "micro-batches make no difference"


@pytest.mark.parametrize(
    ("times", "noise"),
    [
        ([[1.0] * 5], SEED_NOISE / math.sqrt(2)),
        ([[1.0, math.e**2]] * 2, math.sqrt((SEED_NOISE_FREEDOM * SEED_NOISE**2 + 4) / (SEED_NOISE_FREEDOM + 2))),
    ],
)
def test_the_noise_of_seeds_is_pooled_over_configurations(times: list[list[float]], noise: float) -> None:
    taken = [
        make_trial(10 * place + seed, seconds=seconds, learning_rate=0.1 * (place + 1))
        for place, of_one in enumerate(times)
        for seed, seconds in enumerate(of_one, start=1)
    ]
    assert slack_after(*taken) == pytest.approx(1 + 2 * noise)
