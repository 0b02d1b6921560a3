"""Pruners evaluation by evaluation: pace, rungs, capping, the race and Optuna's pruners."""

import math
import random
from typing import Any

import pytest
from pydantic import ValidationError

from bssearch.errors import UsageError
from bssearch.records import Progress, TrialState
from bssearch.search.pruners.base import Action, Cap, Pruner, Standings, make_pruner, slack_for
from bssearch.search.pruners.optuna import GRID, Asha, Hyperband, Median
from bssearch.search.pruners.pace import (
    FIRST,
    FROM,
    LATE,
    LEADERS,
    PROMOTED,
    Balanced,
    Fast,
    Pace,
    Race,
    Safe,
    rung_of,
    seconds_of,
)
from bssearch.spec import PrunerSpec


def progress(*points: tuple[float, float]) -> Progress:
    """A curve of (train seconds, gain) points."""
    found = Progress()
    for train_seconds, gain in points:
        found.add(train_seconds, gain)
    return found


class Field:
    """Asks a pruner at each evaluation and carries out its decision."""

    def __init__(self, pruner: Pruner, limit: float = 100.0, *, slack: float = 1.0, can_wait: bool = True) -> None:
        self.pruner = pruner
        self.curves: dict[int, Progress] = {}
        self.standings = Standings(limit, slack, can_wait, curves=self.curves)

    def observe(self, number: int, train_seconds: float, gain: float) -> Action:
        """Evaluate a running trial; return the pruner's action."""
        self.told(number, (train_seconds, gain))
        action = self.pruner.judge(number, self.standings)
        if action is not Action.GO_ON:
            state = TrialState.PAUSED if action is Action.WAIT else TrialState.PRUNED
            self.ended(number, state)
        return action

    def told(self, number: int, *points: tuple[float, float]) -> None:
        """Evaluate a running trial without asking the pruner."""
        curve = self.curves.setdefault(number, Progress())
        for train_seconds, gain in points:
            curve.add(train_seconds, gain)
        self.standings.running.add(number)
        self.standings.waiting.pop(number, None)
        self.standings.states[number] = TrialState.RUNNING

    def ended(self, number: int, state: TrialState) -> None:
        """End a trial in a state, or pause it."""
        self.standings.running.discard(number)
        self.standings.waiting.pop(number, None)
        self.standings.states[number] = state
        if state is TrialState.PAUSED:
            self.standings.waiting[number] = self.curves[number]

    def reached(self, number: int, seconds: float) -> None:
        """Let a trial reach a gain of 1."""
        self.told(number, (seconds, 1.0))
        self.ended(number, TrialState.REACHED)
        winners = self.standings.winners
        if not winners or seconds < winners[0][1]:
            winners.insert(0, (self.curves[number], seconds))

    def winner(self, number: int = 0, seconds: float = 10.0) -> None:
        """Let a trial reach a gain of 1 on a straight line."""
        self.told(number, *((seconds * tenth / 10, tenth / 10) for tenth in range(1, 10)))
        self.reached(number, seconds)

    def goes_on(self, *, fresh: bool) -> int | None:
        """Resume the next paused trial; return its number."""
        number = self.pruner.next_waiting(self.standings, fresh=fresh)
        if number is not None:
            self.told(number)
        return number

    def given_up(self) -> int | None:
        """End the least promising paused trial; return its number."""
        number = self.pruner.least_promising(self.standings)
        if number is not None:
            self.ended(number, TrialState.PRUNED)
        return number


def pace(*, patience: float = 3.0, limit: float = 160.0, slack: float = 1.0, can_wait: bool = True) -> Field:
    return Field(Pace(patience), limit, slack=slack, can_wait=can_wait)


def is_hopeless(field: Field, seconds: float, gain: float) -> bool:
    assert isinstance(field.pruner, Pace)
    return field.pruner.is_hopeless(progress((seconds, gain)), field.standings)


@pytest.fixture
def field() -> Field:
    return pace()


@pytest.mark.parametrize(
    ("seconds", "gain", "expected"),
    [
        (5.0, 0.5, False),
        (5.0, 0.2, True),  # 0.5 / 0.2 · √(0.8 / 0.5) = 3.16
        (5.0, 0.22, False),  # 2.84
        (9.5, 0.8, False),  # 0.95 / 0.8 · √(0.2 / 0.05) = 2.37
        (9.5, 0.7, True),  # 3.32
        (0.9, 0.0, False),
        (10.0, 0.9, True),
    ],
)
def test_pace_weighs_elapsed_and_remaining_time(seconds: float, gain: float, expected: bool, field: Field) -> None:
    field.winner()
    assert seconds >= FROM * field.standings.cap or not expected
    assert is_hopeless(field, seconds, gain) is expected
    assert field.observe(1, seconds, gain) is (Action.WAIT if expected else Action.GO_ON)


@pytest.mark.parametrize(
    ("seconds", "gain", "expected"),
    [
        (5.0, 0.14, True),  # 0.5 / 0.14 · (0.86 / 0.5)^1.6 = 8.51
        (5.0, 0.15, False),  # 7.79
        (9.0, 0.65, True),  # 10.3
        (9.0, 0.7, False),  # 7.46
    ],
)
def test_safe_is_patient_early_and_strict_late(seconds: float, gain: float, expected: bool) -> None:
    field = Field(Safe(), 160.0)
    field.winner()
    assert is_hopeless(field, seconds, gain) is expected


@pytest.mark.parametrize(("pruner", "expected"), [(Safe(), False), (Balanced(), False), (Fast(), True)])
def test_fast_pauses_trials_that_would_end_within_the_noise_of_seeds(pruner: Pace, expected: bool) -> None:
    field = Field(pruner, 160.0, slack=1.3)
    field.winner()
    assert is_hopeless(field, 9.9, 0.85) is expected  # at its pace it ends at 1.16 of the winner's time


def test_the_luckiest_winner_counts(field: Field) -> None:
    field.told(0, (18.0, 0.2))
    field.reached(0, 20.0)
    assert not is_hopeless(field, 5.0, 0.2), "the slow starter had 0.2 at nine tenths of its way"
    field.winner(1)
    assert not is_hopeless(field, 5.0, 0.2), "and still counts beside a faster one that started well"


def test_a_first_evaluation_at_no_seconds_is_no_progress(field: Field) -> None:
    field.told(0, (0.0, 0.5))
    field.reached(0, 10.0)
    assert is_hopeless(field, 5.0, 0.4)


@pytest.mark.parametrize("speed", [1.0, 0.8, 0.5])
def test_the_winners_own_curve_is_never_hopeless_on_its_own_clock(speed: float) -> None:
    shape = [(0.0, 0.1), (2.0, 0.1), (4.0, 0.1), (5.0, 0.6), (8.0, 0.6), (9.0, 0.9)]
    field = pace(patience=2.0)
    field.told(0, *shape)
    field.reached(0, 10.0)
    actions = [field.observe(1, speed * moment, gain) for moment, gain in shape]
    assert set(actions) == {Action.GO_ON}, "a plateau is passed at its end"


def test_a_paused_trial_goes_on_when_a_better_winner_gives_it_hope() -> None:
    field = pace(limit=16.0 / FIRST)
    field.winner(0, seconds=10.0)
    assert [field.observe(number, 5.0, gain) for number, gain in ((1, 0.15), (2, 0.18))] == [Action.WAIT] * 2
    assert field.goes_on(fresh=True) is None
    field.told(3, (8.0, 0.17), (8.5, 0.18))  # what they have now, this winner had when it was nearly there
    field.reached(3, 9.0)
    assert [field.goes_on(fresh=True) for _ in range(3)] == [2, 1, None], "the least predicted time first"


def test_a_paused_trial_predicted_to_end_above_the_cap_resumes_only_after_the_last_new_trial() -> None:
    field = pace(limit=16.0 / FIRST, slack=1.2)
    for number, gain in ((1, 0.4), (2, 0.45)):  # predicted to end after 12.5 and 11.1 s
        field.told(number, (5.0, gain))
        field.ended(number, TrialState.PAUSED)
    field.winner(0, seconds=10.0)
    assert [field.goes_on(fresh=True) for _ in range(2)] == [2, None]
    assert [field.goes_on(fresh=False) for _ in range(2)] == [1, None]


def test_a_trial_past_the_cap_never_pauses() -> None:
    field = pace(limit=1000.0)
    field.winner(0, seconds=10.0)
    assert field.observe(1, 8.0, 0.0) is Action.WAIT
    field.winner(2, seconds=7.0)
    assert field.goes_on(fresh=False) is None
    assert field.given_up() == 1


def test_if_trials_cannot_pause_hopeless_ones_stop_and_all_go_on_before_the_first_hit() -> None:
    field = pace(can_wait=False)
    assert not field.pruner.paces_itself(field.standings), "so the planner must"
    assert {field.observe(number, 80.0, 0.1) for number in range(4)} == {Action.GO_ON}
    field.winner(9)
    assert field.observe(4, 5.0, 0.1) is Action.STOP
    assert field.given_up() is None


def test_if_trials_can_pause_the_pruner_paces_them_before_the_first_hit(field: Field) -> None:
    assert field.pruner.paces_itself(field.standings)


def test_the_least_promising_trial_is_given_up_first(field: Field) -> None:
    for number, gain in enumerate((0.3, 0.1, 0.2)):
        field.observe(number, 10.0, gain)
    assert field.given_up() == 1, "before the first hit, the one with the least gain"
    field.winner(9)
    assert field.goes_on(fresh=False) is None, "they are past the cap"
    assert {field.given_up(), field.given_up()} == {0, 2}
    assert [field.observe(number, 5.0, gain) for number, gain in ((3, 0.15), (4, 0.05))] == [Action.WAIT] * 2
    assert [field.given_up() for _ in range(3)] == [4, 3, None], "the greatest predicted time"
    assert field.goes_on(fresh=False) is None


# No pruning, capping, and the race ------------------------------------------------------------------------------------


def test_the_cap_is_the_slack_times_the_fastest_hit_and_infinite_before_a_hit() -> None:
    field = Field(Cap(), slack=1.5)
    assert field.standings.cap == math.inf
    field.winner(0)
    assert field.standings.cap == 15.0
    field.winner(1, seconds=20.0)
    assert [seconds for _, seconds in field.standings.winners] == [10.0]
    field.winner(2, seconds=5.0)
    assert field.standings.cap == 7.5
    field.standings.slack = 1.0
    assert field.standings.cap == 5.0


@pytest.mark.parametrize("pruner", [Pruner(), Cap()])
def test_without_a_pruner_no_trial_stops_before_the_cap(pruner: Pruner) -> None:
    field = Field(pruner)
    field.winner()
    assert field.observe(1, 9.0, 0.0) is Action.GO_ON
    assert (pruner.caps, field.goes_on(fresh=False), field.given_up()) == (isinstance(pruner, Cap), None, None)


def test_a_race_stops_trials_behind_the_incumbent() -> None:
    field = Field(Race(lag=2.0))
    assert field.observe(7, 5.0, 0.0) is Action.GO_ON, "there is no incumbent yet"
    field.winner()
    assert field.observe(1, FROM * 10 - 0.1, -1.0) is Action.GO_ON, "before a tenth of the incumbent's time"
    assert field.observe(1, 4.0, 0.21) is Action.GO_ON
    assert field.observe(1, 6.0, 0.29) is Action.STOP, "the incumbent had 0.3 at half the time"


def test_a_spec_has_its_pruner_with_its_settings() -> None:
    race = make_pruner(PrunerSpec(name="race", options={"lag": 2.5}))
    assert isinstance(race, Race) and race.lag == 2.5
    for name, usual in {"safe": 8.3, "balanced": 2.7, "fast": 2.1}.items():
        pace = make_pruner(PrunerSpec(name=name))
        assert isinstance(pace, Pace) and pace.patience == usual
        other = make_pruner(PrunerSpec(name=name, options={"patience": 3}))
        assert isinstance(other, Pace) and other.patience == 3
    assert type(make_pruner(PrunerSpec(name="none"))) is Pruner
    with pytest.raises(UsageError):
        make_pruner(PrunerSpec.model_construct(name="nobody"))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("race", {"lag": 1}, "pruner.options.lag = 1: must be > 1"),
        ("race", {"lag": "slow"}, "pruner.options.lag = 'slow': must be a valid number"),
        ("race", {"lagg": 2}, "pruner.options.lagg: unknown key; did you mean 'lag'?"),
        ("race", {"x": 2}, "pruner.options.x: unknown key; choose from lag"),
        ("fast", {"patience": 1.0}, "pruner.options.patience = 1.0: must be > 1"),
        ("none", {"lag": 2}, "pruner.options.lag: unknown key; remove the key"),
        ("asha", {"lag": 2}, "pruner.options.lag: unknown key; remove the key"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value_and_its_bound(name: str, options: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_pruner(PrunerSpec(name=name, options=options))
    assert raised.value.message.startswith(said)


def test_a_lag_beside_the_name_is_an_option_of_a_race_and_the_usual_one_is_none() -> None:
    assert PrunerSpec.model_validate({"name": "race", "lag": 2.5}) == PrunerSpec(name="race", options={"lag": 2.5})
    assert PrunerSpec.model_validate({"name": "safe", "lag": 3.0}) == PrunerSpec(name="safe")
    with pytest.raises(UsageError):
        make_pruner(PrunerSpec.model_validate({"name": "safe", "lag": 2.5}))
    with pytest.raises(ValidationError):
        PrunerSpec.model_validate({"name": "race", "lag": 2.5, "options": "lag"})


def test_the_slack_allows_two_deviations_between_seeds() -> None:
    assert slack_for(0.0) == 1.0
    assert slack_for(0.15) == pytest.approx(1.3)


# Rungs before the first hit -------------------------------------------------------------------------------------------


LIMIT = 160.0
RUNG = FIRST * LIMIT


@pytest.mark.parametrize(
    ("seconds", "rung"),
    [(0.0, -1), (9.99, -1), (10.0, 0), (math.nextafter(20.0, 0), 0), (20.0, 1), (39.0, 1), (80.0, 3), (160.0, 4)],
)
def test_a_rung_is_twice_as_far_as_the_one_before(seconds: float, rung: int) -> None:
    assert rung_of(progress((seconds, 0.5)), LIMIT) == rung
    assert seconds_of(rung, LIMIT) <= seconds
    assert rung == -1 or seconds_of(rung + 1, LIMIT) == 2 * seconds_of(rung, LIMIT) > seconds


@pytest.mark.parametrize("limit", [0.1, 0.3, 7.0, 1e-9, 1e9])
def test_a_rung_is_reached_at_its_exact_seconds_under_any_limit(limit: float) -> None:
    exact = [seconds_of(rung, limit) for rung in range(5)]
    assert [rung_of(progress((one, 0.5)), limit) for one in exact] == [*range(5)]
    assert [rung_of(progress((math.nextafter(one, 0), 0.5)), limit) for one in exact] == [*range(-1, 4)]


def test_before_the_first_hit_the_best_of_each_rung_goes_on(field: Field) -> None:
    for number, gain in enumerate((0.1, 0.3, 0.2)):
        assert field.observe(number, RUNG / 2, 0.0) is Action.GO_ON
        assert field.observe(number, RUNG, gain) is Action.WAIT
        assert field.goes_on(fresh=True) == (1 if number + 1 == PROMOTED else None)
    assert field.observe(1, 1.5 * RUNG, 0.4) is Action.GO_ON, "it may run to twice the time"
    assert field.observe(1, 2 * RUNG, 0.4) is Action.WAIT
    assert field.goes_on(fresh=True) is None
    assert [field.goes_on(fresh=False) for _ in range(4)] == [1, 2, 0, None], (
        "without a new one: the highest rung first"
    )


def test_the_best_of_a_full_rung_does_not_pause(field: Field) -> None:
    actions = [field.observe(number, RUNG, gain) for number, gain in enumerate((0.1, 0.2, 0.3, 0.25))]
    assert actions == [Action.WAIT, Action.WAIT, Action.GO_ON, Action.WAIT]
    assert field.observe(2, 2 * RUNG, 0.4) is Action.WAIT, "at the next rung it is the first"


@pytest.mark.parametrize(("target", "expected"), [(0.89, Action.GO_ON), (0.91, Action.WAIT)])
def test_the_first_trial_at_a_rung_goes_on_if_its_gains_may_reach_the_target(
    target: float, expected: Action, field: Field
) -> None:
    field.standings.target_gain = target
    field.told(1, (RUNG / 2, 0.3))
    assert field.observe(1, RUNG, 0.42) is expected  # 0.12 for each of the four doublings to the limit
    field.told(2, (RUNG / 2, 0.0))
    assert field.observe(2, RUNG, 0.5) is Action.WAIT, "not the first there"


@pytest.mark.parametrize(("rung", "expected"), [(LATE - 1, Action.WAIT), (LATE, Action.GO_ON)])
def test_the_best_of_two_trials_goes_on_late_if_its_gains_may_reach_the_target(
    rung: int, expected: Action, field: Field
) -> None:
    seconds, field.standings.target_gain = seconds_of(rung, LIMIT), 0.9
    assert field.observe(1, seconds, 0.3) is Action.WAIT
    field.told(2, (seconds / 2, 0.2))
    assert field.observe(2, seconds, 0.8) is expected


def test_one_of_every_three_trials_goes_on_from_a_rung(field: Field) -> None:
    due = []
    for number in range(2 * PROMOTED):
        field.observe(number, RUNG, 0.5 - 0.05 * number)
        due.append(field.goes_on(fresh=True))
    assert due == [None, None, 0, None, None, 1]


def test_with_many_parallel_trials_a_leader_does_not_pause_above_the_first_rung(field: Field) -> None:
    for number in range(LEADERS - 1):
        field.told(number, (RUNG / 2, 0.01))
    assert field.observe(8, RUNG, 0.2) is Action.WAIT, "at the first rung all wait"
    assert field.goes_on(fresh=False) == 8
    assert field.observe(8, 2 * RUNG, 0.3) is Action.GO_ON, "one leader for every two that run"
    assert field.observe(9, 2 * RUNG, 0.2) is Action.WAIT, "the second best of three that run"


def test_after_a_winner_trials_on_rungs_go_on_by_their_pace(field: Field) -> None:
    assert {field.observe(number, RUNG, 0.1 * (2 - number)) for number in range(2)} == {Action.WAIT}
    assert field.goes_on(fresh=True) is None, "two came, of three one goes on"
    field.winner(7, seconds=100.0)  # both are now as fast as the winner
    assert {field.goes_on(fresh=True) for _ in range(2)} == {0, 1}
    assert field.goes_on(fresh=True) is None


def test_the_paused_trial_with_the_least_gain_on_the_lowest_rung_is_given_up_first(field: Field) -> None:
    field.observe(0, 2 * RUNG, 0.05)
    field.observe(1, RUNG, 0.4)
    field.observe(2, RUNG, 0.3)
    assert [field.given_up() for _ in range(4)] == [2, 1, 0, None]


# Optuna's pruners -----------------------------------------------------------------------------------------------------


Kind = type[Median] | type[Asha] | type[Hyperband]
KINDS: list[Kind] = [Median, Asha, Hyperband]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_pruner_rebuilt_from_the_standings_decides_the_same(kind: Kind, seed: int) -> None:
    rng, field, stopped = random.Random(seed), Field(kind(), float(GRID)), 0
    for number in range(1, 13):
        slope = rng.uniform(0.2, 1.0)
        for moment in range(3, GRID, 9):
            gain = math.nan if rng.random() < 0.05 else slope * moment / GRID + rng.gauss(0, 0.03)
            field.told(number, (float(moment), gain))
            action = field.pruner.judge(number, field.standings)
            assert kind().judge(number, field.standings) is action
            if action is Action.STOP:
                field.ended(number, TrialState.PRUNED)
                stopped += 1
                break
        else:
            field.ended(number, rng.choice([TrialState.EXHAUSTED, TrialState.CAPPED, TrialState.FAILED]))
    assert 0 < stopped < 12


def test_a_second_evaluation_at_a_grid_point_is_not_passed_on() -> None:
    field = Field(Median(), float(GRID))
    for number in range(6):
        field.told(number, (40.0, 1.0))
        field.ended(number, TrialState.EXHAUSTED)
    assert field.observe(9, 40.2, 2.0) is Action.GO_ON
    assert field.observe(9, 40.9, 0.0) is Action.GO_ON, "the place of 40.2 s, and the best so far counts"
    assert field.observe(10, 40.2, 0.5) is Action.STOP


def test_trials_of_others_count_for_optunas_median_too() -> None:
    seen, alone = Field(Median(), float(GRID)), Field(Median(), float(GRID))
    for number in range(10):
        seen.told(number, (40.0, 1.0))
        seen.ended(number, TrialState.EXHAUSTED)
    assert (seen.observe(99, 40.0, 0.5), alone.observe(99, 40.0, 0.5)) == (Action.STOP, Action.GO_ON)


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.PAUSED])
def test_a_trial_pruned_elsewhere_is_not_complete_for_optuna(state: TrialState) -> None:
    field = Field(Median(), float(GRID))
    for number in range(10):
        field.told(number, (40.0, 1.0))
        field.ended(number, state)
    assert field.observe(99, 40.0, 0.5) is Action.GO_ON, "it has no complete trial to compare with"
