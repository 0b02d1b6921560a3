"""Finalists trained to the same full limit: their choice, seeds and resumption."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bssearch.analysis.answer import Answer
from bssearch.commands.launch import Launch
from bssearch.commands.opening import stored_spec
from bssearch.commands.run import confirm_study, run_study
from bssearch.records import Configuration, Phase, TrialOutcome, TrialRecord, TrialRequest, TrialState
from bssearch.search.after_search import finalists, more_regularised, next_run
from bssearch.search.history import History, trial_seed
from bssearch.spec.space import SearchSpace
from tests.factories import SPEC as RAW, make_probe, make_spec, make_trial, not_none
from tests.search import study
from tests.search.law import LawExecutor
from tests.search.study import url_in

LIMIT = 100.0
SPEC = make_spec(budget={"trials": 16, "trial_train_seconds": LIMIT}, confirm={"top": 2, "runs": 3})


def train_on(request: TrialRequest, outcome: TrialOutcome) -> TrialOutcome:
    """End a trial that trains past the target at its limit, with a metric that falls with the batch size."""
    if request.plan.stop_at_target:
        return outcome
    final = 0.99 - 0.0005 * request.plan.configuration.batch_size + 0.1 * request.plan.configuration.dropout
    limit = request.plan.train_seconds_limit
    return replace(outcome, train_seconds=limit, final_metric=final, test_metric=final - 0.01)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Database of a finished study; tests continue copies of it."""
    folder = tmp_path_factory.mktemp("searched")
    run_study(SPEC, Launch(db=url_in(folder), make_executor=lambda *_: LawExecutor(ended_as=train_on)))
    return folder / "study.db"


@pytest.fixture
def folder(searched: Path, tmp_path: Path) -> Path:
    shutil.copy(searched, tmp_path / "study.db")
    return tmp_path


def go_on(folder: Path, executor: LawExecutor, runs: int = 2) -> Answer:
    spec, _ = stored_spec("toy", Launch(db=url_in(folder)))
    return confirm_study(spec, Launch(db=url_in(folder), make_executor=lambda *_: executor), to_budget_runs=runs)


def trials_in(folder: Path, phase: Phase = Phase.TO_BUDGET) -> list[TrialRecord]:
    return study.trials_in(folder, phase)


def at(size: int, **changes: Any) -> Configuration:
    return Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.1, **changes)


def history(*trials: TrialRecord, spec: Any = SPEC) -> History:
    return History(spec, trials, {size: make_probe(size) for size in (8, 16, 32, 64, 128)})


def confirmed(configuration: Configuration, start: int, *seconds: float) -> list[TrialRecord]:
    return [
        make_trial(start + n, configuration=configuration, phase=Phase.CONFIRM, seed=n, seconds=value)
        for n, value in enumerate(seconds)
    ]


def test_finalists_are_what_was_confirmed_else_the_best_trial_of_each_batch_size_that_reached() -> None:
    lucky, steady = at(32, weight_decay=1e-3), at(32)
    seen = history(
        make_trial(1, configuration=lucky, seconds=0.5),
        make_trial(2, configuration=steady, seconds=1.0),
        make_trial(3, configuration=at(64), seconds=3.0),
        make_trial(4, configuration=at(64, weight_decay=1e-3), seconds=2.0),
        make_trial(5, configuration=at(128), state=TrialState.CAPPED, seconds=9.0),
        *confirmed(lucky, 10, 1.5, 1.5, 1.5),
        *confirmed(steady, 20, 1.0, 1.0, 1.0),
    )
    assert finalists(seen) == [steady, at(64, weight_decay=1e-3)]
    assert finalists(history(make_trial(1, state=TrialState.CAPPED))) == []


def test_the_largest_is_also_run_with_more_regularisation_in_the_micro_batches_of_its_batch_size() -> None:
    best, largest = at(32, dropout=0.2, weight_decay=1e-4), at(128, dropout=0.1, weight_decay=1e-4)
    trials = [make_trial(1, configuration=best), make_trial(2, configuration=largest, seconds=2.0)]
    harder = replace(largest, dropout=0.4, weight_decay=1e-3)
    assert finalists(history(*trials)) == [best, largest, harder]
    accumulated = History(SPEC, trials, {32: make_probe(32), 128: make_probe(128, micro_batch_size=64)})
    assert finalists(accumulated)[1:] == [largest.in_micro_batches(64), harder.in_micro_batches(64)]


def test_regularisation_follows_the_square_root_of_the_batch_size_within_the_space() -> None:
    space = SearchSpace.model_validate({**RAW["space"], "label_smoothing": {"low": 0.05, "high": 0.1}})
    optimum = at(8, dropout=0.1, weight_decay=1e-4, label_smoothing=0.08)
    assert more_regularised(space, at(32), optimum) == at(32, dropout=0.2, weight_decay=1e-3, label_smoothing=0.1)
    assert more_regularised(space, at(128), replace(optimum, dropout=0.2)).dropout == 0.5  # 0.8, clipped
    assert more_regularised(space, at(32, dropout=0.3), optimum).dropout == 0.3  # never less than it is
    fixed = SearchSpace.model_validate({**RAW["space"], "weight_decay": 0.0, "dropout": 0.1})
    same = at(128, dropout=0.1)
    assert more_regularised(fixed, same, at(32, dropout=0.1)) == same


def test_all_train_to_the_full_limit_with_the_seeds_of_the_confirmation_interleaved(folder: Path) -> None:
    executor = LawExecutor(ended_as=train_on)
    answer = go_on(folder, executor)
    trials = trials_in(folder)
    assert len(trials) == len(executor.requests)
    assert all(not one.plan.stop_at_target and one.plan.is_tested for one in executor.requests)
    assert {(one.plan.train_seconds_limit, one.plan.limit_state) for one in executor.requests} == {
        (LIMIT, TrialState.EXHAUSTED)
    }
    seeds = [trial.seed for trial in trials]
    half = len(seeds) // 2
    assert (set(seeds[:half]), set(seeds[half:])) == tuple({trial_seed(SPEC.seed, Phase.CONFIRM, n)} for n in range(2))
    orders = [[one.configuration.key for one in trials[part]] for part in (slice(half), slice(half, None))]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    found = not_none(answer.generalisation)
    assert found.train_seconds == LIMIT
    assert {row.batch_size: row.runs for row in found.batches} == dict.fromkeys(
        {trial.configuration.batch_size for trial in trials}, 2
    )
    assert len(go_on(folder, LawExecutor(ended_as=train_on), runs=3).optimal.trial_numbers) == len(
        answer.optimal.trial_numbers
    )
    assert len(trials_in(folder)) == 3 * half  # one more seed each


@pytest.mark.parametrize(
    ("states", "limit", "phase", "is_repeated"),
    [
        ([TrialState.REACHED], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.DIVERGED], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.RUNNING], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.FAILED], LIMIT, Phase.TO_BUDGET, True),
        ([TrialState.FAILED, TrialState.FAILED], LIMIT, Phase.TO_BUDGET, False),
        ([TrialState.LOST, TrialState.CANCELLED], LIMIT, Phase.TO_BUDGET, True),
        ([TrialState.REACHED], LIMIT / 2, Phase.TO_BUDGET, True),  # the budget was raised later
        ([TrialState.REACHED], LIMIT, Phase.AUDIT, True),  # a rule audit stops at the target
    ],
)
def test_a_failed_run_is_repeated_once_and_a_run_with_another_limit_again(
    states: list[TrialState], limit: float, phase: Phase, is_repeated: bool
) -> None:
    base = make_trial(1, configuration=at(32), seconds=1.0)
    run = not_none(next_run(1)(history(base)))
    assert (run.phase, run.uncapped, run.stop_at_target) == (Phase.TO_BUDGET, True, False)
    made: dict[str, Any] = {"configuration": at(32), "seed": run.seed, "phase": phase, "uncapped": True}
    done = [make_trial(10 + n, state=state, **made) for n, state in enumerate(states)]
    known = history(base, *(replace(one, train_seconds_limit=limit) for one in done))
    assert (next_run(1)(known) is not None) is is_repeated
