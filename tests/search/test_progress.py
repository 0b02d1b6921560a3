"""How much of a study is left: of the search by its own pace, of the confirmation by the runs it may still make."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bssearch.commands.display import confirmation_left, search_left
from bssearch.records import Configuration, Phase, TrialRecord, TrialState
from bssearch.search.confirmation import most_left, next_run
from bssearch.search.history import History, trial_seed
from bssearch.spec import StudySpec
from tests.factories import EPOCH, make_probe, make_spec, make_trial, not_none

SIZES = (8, 16, 32, 64, 128)
PROBES = {size: make_probe(size) for size in SIZES}


def searched(count: int, seconds: float = 3.0) -> list[TrialRecord]:
    """Return search trials that ran one after the other, each for so many wall seconds."""
    return [
        replace(
            make_trial(n, batch_size=SIZES[n % 5], learning_rate=0.01 * n, seconds=seconds),
            created_at=EPOCH + timedelta(seconds=seconds * n),
            ended_at=EPOCH + timedelta(seconds=seconds * (n + 1)),
        )
        for n in range(1, count + 1)
    ]


def history(trials: list[TrialRecord], spec: StudySpec | None = None) -> History:
    return History(spec or make_spec(), trials, PROBES, now=EPOCH.timestamp() + 1e6)


def test_the_search_goes_on_at_its_own_pace_whoever_ran_it_and_whatever_time_has_passed_since() -> None:
    assert search_left(history(searched(5))) == search_left(history(searched(5)))
    left = search_left(history(searched(5)))
    assert left.runs == 15
    assert left.seconds == pytest.approx(45.0), "though the last trial ended long ago"
    assert search_left(history([])).seconds is None


def test_what_ran_side_by_side_goes_on_side_by_side_and_lost_trials_are_no_progress() -> None:
    beside = [replace(one, created_at=two.created_at, ended_at=two.ended_at) for one, two in
              zip(searched(4), [*searched(2), *searched(2)], strict=True)]  # fmt: skip
    assert search_left(history(beside)).seconds == pytest.approx(16 * 1.5)
    lost = replace(make_trial(9, state=TrialState.LOST), ended_at=EPOCH)
    assert search_left(history([*searched(5), lost])).runs == 15


def test_a_budget_of_wall_seconds_ends_the_search_sooner() -> None:
    spec = make_spec(budget={"trials": 20, "trial_train_seconds": 10.0, "wall_seconds": 20.0})
    assert search_left(history(searched(5), spec)).seconds == pytest.approx(5.0)
    assert search_left(history(searched(10), spec)).seconds == 0.0


def test_nothing_is_left_of_a_spent_budget() -> None:
    assert search_left(history(searched(20))).runs == 0


def confirm(known: History, seconds: float = 3.0) -> list[tuple[int, float, int]]:
    """Make every confirmation run; return (runs left, seconds left, runs made) before each and at the end."""
    told = []
    while True:
        left = confirmation_left(known)
        made = sum(trial.phase is Phase.CONFIRM for trial in known.all_trials)
        told.append((left.runs, not_none(left.seconds), made))
        plan = next_run(known)
        if plan is None:
            return told
        time = seconds * (1.0 + plan.configuration.batch_size / 100) * (1.0 + 0.001 * (known.length % 3))
        trial = make_trial(
            known.length + 1, configuration=plan.configuration, seed=plan.seed, phase=Phase.CONFIRM, seconds=time
        )
        known.take(trial)


@pytest.mark.parametrize(
    "settings", [{"top": 1, "runs": 3}, {"top": 2, "runs": 2}, {"top": 1, "runs": 3, "max_runs": 6}]
)
def test_confirmation_makes_no_more_runs_than_were_said_to_be_left(settings: dict[str, Any]) -> None:
    told = confirm(history(searched(10), make_spec(confirm=settings)))
    last = told[-1]
    assert last[:2] == (0, 0.0)
    for runs, _, made in told:
        assert last[2] - made <= runs
    assert all(later[0] <= earlier[0] for earlier, later in itertools.pairwise(told))


def test_a_run_that_is_being_made_is_left_and_its_seconds_are_those_of_its_configuration() -> None:
    known = history(searched(10), make_spec(confirm={"top": 1, "runs": 3}))
    plan = not_none(next_run(known))
    before = Counter(one.key for one in most_left(known))
    running = make_trial(
        11, configuration=plan.configuration, seed=plan.seed, phase=Phase.CONFIRM, state=TrialState.RUNNING
    )
    known.take(running)
    assert Counter(one.key for one in most_left(known)) == before
    untried = Configuration(batch_size=8, micro_batch_size=8, learning_rate=0.9)
    assert untried.key not in before
    assert confirmation_left(known).seconds == pytest.approx(3.0 * sum(before.values()))
    known.take(
        make_trial(
            11, configuration=plan.configuration, seed=trial_seed(0, Phase.CONFIRM, 0), phase=Phase.CONFIRM, seconds=9.0
        )
    )
    assert confirmation_left(known).seconds == pytest.approx(3.0 * (sum(before.values()) - 3) + 2 * 6.0)
