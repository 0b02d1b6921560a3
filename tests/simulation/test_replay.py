"""Recorded trials on a virtual clock, under an engine that decides: what they cost, as counted by hand."""

from __future__ import annotations

import math

import pytest

from bssearch.errors import UsageError
from bssearch.records import Observation, TrialOutcome, TrialRequest, TrialState
from bssearch.search.pruners.base import Action, Cap, Pruner, Standings
from tests.benchmarks.simulate.replay import Playing, Replay, ended_before, replays, with_target
from tests.factories import make_plan
from tests.simulation.lines import TARGET, line, table
from tests.simulation.played import Played

PAUSED, REACHED, RUNNING = TrialState.PAUSED, TrialState.REACHED, TrialState.RUNNING


def played(pruner: Pruner, *seconds: float, workers: int = 1) -> Played:
    return Played([line(one) for one in seconds], pruner, workers=workers)


def test_without_pruning_every_trial_runs_to_its_target_or_its_end() -> None:
    found = played(Pruner(), 10, 4, 300)
    assert found.cost == 10 + 4 + 100
    assert found.hits == [(10.0, 10.0), (14.0, 4.0)]
    assert found.now == found.cost
    assert found.ends == [(REACHED, 10.0), (REACHED, 4.0), (TrialState.EXHAUSTED, 100.0)]


def test_workers_run_at_once_and_a_new_incumbent_caps_those_that_run_at_their_next_evaluation() -> None:
    found = played(Cap(), 10, 4, 300, workers=2)
    # 10 and 4 begin together; at 4 s the first has come to the cap, and 300 runs from there for 4 s.
    assert found.now == 8.0
    assert found.cost == 5 + 4 + 4
    assert found.ends[0] == (TrialState.CAPPED, 5.0)


class OnceInTheMiddle(Pruner):
    """Lets every trial wait at its fifth second, and go on when nothing is left to begin."""

    def judge(self, number: int, standings: Standings) -> Action:
        return Action.WAIT if standings.curves[number].now == 5.0 else Action.GO_ON

    def next_waiting(self, standings: Standings, *, fresh: bool) -> int | None:
        return None if fresh else max(standings.waiting)


def test_what_waited_goes_on_from_where_it_was() -> None:
    found = played(OnceInTheMiddle(), 10, 8)
    assert found.cost == 18.0
    assert found.hits == [(13.0, 8.0), (18.0, 10.0)], "the second goes on first, and no second is paid twice"
    assert found.changes == [
        (1, RUNNING),
        (1, PAUSED),
        (2, RUNNING),
        (2, PAUSED),
        (2, RUNNING),
        (2, REACHED),
        (1, RUNNING),
        (1, REACHED),
    ]


@pytest.mark.parametrize(("budget", "hits"), [(3.49, 0), (3.5, 1), (9.4, 2), (9.5, 3)])
def test_what_comes_after_the_budget_does_not_happen(budget: float, hits: int) -> None:
    found = Played([line(3)] * 9, Pruner(), budget=budget, charged=0.5)
    assert found.hits == [(0.5 + 3 * (one + 1), 3.0) for one in range(hits)]
    assert not found.clock.is_done
    assert found.changes[-1] == (hits + 1, RUNNING), "it is under way when all is spent"


def playing(replay: Replay, limit: float, state: TrialState = TrialState.CAPPED) -> Playing:
    plan = make_plan(train_seconds_limit=limit, limit_state=state)
    return Playing(replay, TrialRequest(number=1, plan=plan, target=TARGET))


@pytest.mark.parametrize(
    ("limit", "evaluations", "state", "ended"),
    [(2.5, 2, TrialState.CAPPED, 2.5), (3.0, 3, TrialState.EXHAUSTED, 3.0), (9.0, 3, TrialState.EXHAUSTED, 3.0)],
)
def test_a_trial_ends_at_its_limit_or_where_its_record_does(
    limit: float, evaluations: int, state: TrialState, ended: float
) -> None:
    trial = playing(Replay([1.0, 2.0, 3.0], [0.2, 0.6, 0.4], math.inf, 3.0, [10, 20, 30]), limit)
    found = [trial.advance() for _ in range(evaluations)]
    assert [(one.step, one.metric) for one in found if isinstance(one, Observation)] == [
        (10, 0.2),
        (20, 0.6),
        (30, 0.4),
    ][:evaluations]
    outcome = trial.advance()
    assert isinstance(outcome, TrialOutcome)
    assert (outcome.state, outcome.train_seconds, outcome.best_metric) == (state, ended, 0.6)
    assert (outcome.steps, outcome.samples) == (10 * evaluations, 320 * evaluations)


def test_a_trial_has_reached_the_target_with_the_evaluation_that_meets_it() -> None:
    trial = playing(Replay([1.0, 2.0], [0.2, 1.1], 2.0, 3.0, [10, 20]), 3.0)
    reached = []
    for _ in range(2):
        trial.advance()
        reached.append(trial.has_reached)
    assert reached == [False, True]
    outcome = trial.outcome(REACHED, "")
    assert (outcome.time_to_target_s, outcome.steps_to_target) == (2.0, 20)


def test_another_target_changes_when_trials_reach() -> None:
    lines = table(10, 20)
    assert [one.target_seconds for one in replays(with_target(lines, 0.5))] == [5.0, 10.0]
    with pytest.raises(UsageError, match="target = nan"):
        with_target(lines, math.nan)
    with pytest.raises(UsageError, match="reaches accuracy ≥ 2") as raised:
        replays(with_target(lines, 2.0))
    assert raised.value.hint == "the best accuracy in it is 1"


def test_trials_that_ended_at_the_target_cannot_say_when_they_meet_a_harder_one() -> None:
    lines = table(10, 20, 30)
    assert ended_before(lines, with_target(lines, 2.0).target) == 2
    assert ended_before(lines, with_target(lines, 0.5).target) == 0
    easy = with_target(lines, 0.5)
    assert ended_before(easy, lines.target) == 0, "they went on after it"
