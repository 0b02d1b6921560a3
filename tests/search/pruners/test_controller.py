"""The pruning of one study: its standings, and the end of a trial after an evaluation."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bssearch.records import Phase, TrialRecord, TrialState
from bssearch.search.history import INTERRUPTED, SEED_NOISE, SEED_NOISE_FREEDOM, History
from bssearch.search.pruners.base import Pruner, PruningController
from bssearch.search.pruners.pace import Race
from bssearch.spec import StudySpec
from tests.factories import EPOCH, make_curve, make_spec, make_trial, with_outcome

PAUSED, PRUNED, REACHED, RUNNING = TrialState.PAUSED, TrialState.PRUNED, TrialState.REACHED, TrialState.RUNNING
LIMIT, RUNG = 160.0, 10.0  # the first rung is at 1/16 of the limit


def spec(name: str = "balanced", **pruner: Any) -> StudySpec:
    return make_spec(pruner={"name": name, **pruner}, budget={"trials": 50, "trial_train_seconds": LIMIT})


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
def told() -> Told:
    return Told()


def test_confirmation_runs_are_no_part_of_the_race(told: Told) -> None:
    told.take(make_trial(1, phase=Phase.CONFIRM, seconds=1.0))
    assert (told.standings.curves, told.standings.states, told.standings.cap) == ({}, {}, math.inf)


def test_a_trial_past_the_cap_is_capped_and_a_hopeless_one_pauses_with_a_reason() -> None:
    told = Told(spec(slack=1.5))
    told.winner(1)
    assert told.seen(2, (0.0, 0.0), (2.0, 0.4), (14.0, 0.85)) is None
    state, reason = told.seen(3, (15.1, 0.85)) or (None, "")
    assert state is TrialState.CAPPED and "1.5 × the 10 train seconds" in reason
    state, reason = told.seen(4, (7.0, 0.05)) or (None, "")
    assert state is PAUSED and "the fastest trial took 10 train seconds" in reason
    assert told.seen(5, (7.0, 0.05), uncapped=True) is None, "evidence runs on"
    assert told.seen(6, (99.0, 0.05), uncapped=True) is None


def test_before_the_first_hit_trials_pause_at_their_rung_or_go_on_if_they_cannot(told: Told) -> None:
    assert (told.seen(1, (RUNG, 0.3)) or [None])[0] is PAUSED
    told.controller.standings.can_wait = False
    assert told.seen(2, (RUNG, 0.3)) is None
    told.winner(3)
    assert (told.seen(4, (8.0, 0.05)) or [None])[0] is PRUNED, "the hopeless stop for good"
    assert not Told(spec(checkpoint_gib=0.0)).controller.standings.can_wait, "no checkpoint may be saved"


def test_only_trials_saved_here_pause(told: Told) -> None:
    for number in (1, 2, 3):
        told.paused(number, (RUNG, 0.1 * number))
    assert told.standings.waiting == {}
    told.controller.found_saved([1, 2])
    assert set(told.standings.waiting) == {1, 2}
    assert (going := told.controller.next_waiting(fresh=False)) and going.number == 2
    told.controller.found_saved([1])
    assert (going := told.controller.next_waiting(fresh=False)) and going.number == 1, "the other's file has gone"
    told.take(make_trial(1, state=RUNNING))
    assert told.standings.waiting == {} and told.standings.running == {1}, "it goes on, here or elsewhere"
    assert told.controller.next_waiting(fresh=False) is None
    assert told.controller.least_promising() is None


def test_a_trial_that_pauses_again_keeps_its_whole_curve(told: Told) -> None:
    told.controller.found_saved([1])
    told.paused(1, (RUNG, 0.3))
    told.take(make_trial(1, state=RUNNING))
    told.paused(1, (RUNG, 0.3), (2 * RUNG, 0.4))
    assert told.standings.waiting[1].gains == [0.3, 0.4]
    told.take(make_trial(1, seconds=25.0))
    assert told.standings.waiting == {}
    assert told.standings.curves[1].train_seconds == [RUNG, 2 * RUNG, 25.0], "its end says when it got there"


def test_an_interrupted_trial_resumes_first_and_no_pruner_gives_it_up(told: Told) -> None:
    told.controller.found_saved([1, 2, 3])
    told.paused(1, (RUNG, 0.8))
    cut = make_trial(2, state=PAUSED, seconds=RUNG)
    cut = told.take(with_outcome(cut, reason=INTERRUPTED), (RUNG, 0.1))
    assert set(told.standings.waiting) == {1}
    assert told.controller.next_waiting(fresh=True) is cut
    assert told.controller.least_promising() == 1
    told.controller.found_saved([1])
    assert told.controller.next_waiting(fresh=True) is None, "without its file it cannot"


@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5], [5, 3, 1, 4, 2], [2, 2, 4, 1, 1, 3, 5]])
def test_the_winners_do_not_depend_on_the_order_of_the_trials(order: Any) -> None:
    """A driver sees another driver's hit late."""
    ends = {1: (10.0, 100.0), 2: (12.0, 50.0), 3: (8.0, 200.0), 4: (11.0, 70.0), 5: (9.0, 300.0)}
    told = Told(spec("cap", slack=1.0))
    for number in order:
        seconds, ended = ends[number]
        told.winner(number, seconds, ended)
    assert told.controller.standings.slack == 1.0
    assert [seconds for _, seconds in told.standings.winners] == [8.0, 10.0, 11.0, 12.0]
    assert told.standings.cap == 8.0


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
    told = Told(make_spec(pruner={"name": "race"}, **objective))
    assert type(told.controller.pruner) is (Race if races else Pruner)
    assert told.controller.limits, "trials are limited when they begin all the same"
    told.winner(1, seconds=1.0)
    assert (told.seen(2, (9.0, 0.1)) is not None) is races


def slack_after(*trials: TrialRecord, **pruner: Any) -> float:
    told = Told(spec(**pruner))
    for trial in trials:
        told.take(trial)
    return told.controller.standings.slack


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
    told = [
        make_trial(10 * place + seed, seconds=seconds, learning_rate=0.1 * (place + 1))
        for place, of_one in enumerate(times)
        for seed, seconds in enumerate(of_one, start=1)
    ]
    assert slack_after(*told) == pytest.approx(1 + 2 * noise)
