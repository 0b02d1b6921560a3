"""What Optuna's samplers are told of a study's trials, and how they are asked."""

from __future__ import annotations

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from bssearch.history import History
from bssearch.records import ParameterValue, TrialRecord, TrialState
from bssearch.samplers.optuna import (
    CENSORED_STEP,
    TPE,
    WORSE_THAN_ANY,
    Random,
    distribution,
    from_optuna,
    neighbours,
    to_optuna,
)
from bssearch.space import Dimension
from tests.factories import make_probe, make_trial
from tests.samplers.made_up import study_spec

SPEC = study_spec("tpe", seed=3)
SIZES = (8, 16, 32, 64, 128)


def coordinates(rate: float, decay: float = 1e-4, dropout: float = 0.1) -> dict[str, ParameterValue]:
    return {"reference_learning_rate": rate, "weight_decay": decay, "dropout": dropout}


def history(*trials: TrialRecord) -> History:
    return History(SPEC, trials, {size: make_probe(size) for size in SIZES})


def told(*trials: TrialRecord) -> list[optuna.trial.FrozenTrial]:
    """Return what is told of trials; the first, where it reached the target, had half of it after half its time."""
    past = history()
    for trial in trials:
        if trial.state is TrialState.REACHED and trial.outcome is not None:
            past.observe_all(trial.number, [(0.0, 0.1), (trial.outcome.train_seconds / 2, 0.5)])
        past.take(trial)
    return told_of(past)


def told_of(past: History) -> list[optuna.trial.FrozenTrial]:
    sampler = TPE(SPEC)
    return list(sampler.asker.study(sampler.told(past, past.trials), seed=0).trials)


def test_a_reached_trial_is_told_its_seconds() -> None:
    (trial,) = told(make_trial(1, seconds=2.5, sampled=coordinates(0.1)))
    assert (trial.state, trial.value) == (optuna.trial.TrialState.COMPLETE, 2.5)


@pytest.mark.parametrize("state", [TrialState.CAPPED, TrialState.PRUNED, TrialState.PAUSED, TrialState.EXHAUSTED])
def test_a_stopped_trial_is_told_its_shortfall_at_equal_time_never_its_seconds(state: TrialState) -> None:
    (_, trial) = told(
        make_trial(1, seconds=2.0, sampled=coordinates(0.1)),
        make_trial(2, state=state, seconds=1.0, best_metric=0.3, sampled=coordinates(0.2)),
    )
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert trial.intermediate_values == {CENSORED_STEP: pytest.approx(0.2)}


def test_before_a_hit_the_first_that_ran_on_is_what_others_are_compared_with() -> None:
    past = history()
    past.observe_all(1, [(0.0, 0.1), (1.0, 0.4)])
    past.take(make_trial(1, state=TrialState.CAPPED, seconds=1.0, best_metric=0.4, sampled=coordinates(0.1)))
    past.take(make_trial(2, state=TrialState.CAPPED, seconds=1.0, best_metric=0.5, sampled=coordinates(0.2)))
    first, second = told_of(past)
    assert first.intermediate_values == {CENSORED_STEP: pytest.approx(0.0)}
    assert second.intermediate_values == {CENSORED_STEP: pytest.approx(-0.1)}


def test_a_diverged_trial_ranks_behind_every_other() -> None:
    (trial,) = told(make_trial(1, state=TrialState.DIVERGED, best_metric=0.1, sampled=coordinates(0.9)))
    assert trial.intermediate_values == {CENSORED_STEP: WORSE_THAN_ANY}


def test_running_trials_are_told_as_running_missing_ones_and_those_outside_the_space_not_at_all() -> None:
    trials = told(
        make_trial(1, state=TrialState.RUNNING, sampled=coordinates(0.1)),
        *(make_trial(n, state=state, sampled=coordinates(0.1)) for n, state in enumerate(MISSING, 2)),
        make_trial(9, seconds=1.0, sampled=None),
    )
    assert [trial.state for trial in trials] == [optuna.trial.TrialState.RUNNING]


MISSING = tuple(state for state in TrialState if state.is_missing)


def test_the_sampler_is_shown_the_trials_near_the_batch_size() -> None:
    trials = [make_trial(n + 1, batch_size=SIZES[n % 5]) for n in range(20)]
    sizes = {trial.configuration.batch_size for trial in neighbours(history(*trials), 128, enough=4)}
    assert sizes == {64, 128}
    few = neighbours(history(make_trial(1, batch_size=8), make_trial(2, batch_size=128)), 128, enough=4)
    assert len(few) == 2


def test_numbers_are_told_as_their_places_in_ascending_order_and_names_as_they_are() -> None:
    numbers, names = Dimension("decay", choices=(1e-3, 0.0, 1e-4)), Dimension("kind", choices=("b", "a"))
    assert distribution(numbers) == IntDistribution(0, 2)
    assert [to_optuna(numbers, one) for one in (0.0, 1e-4, 1e-3)] == [0, 1, 2]
    assert [from_optuna(numbers, place) for place in range(3)] == [0.0, 1e-4, 1e-3]
    assert distribution(names) == CategoricalDistribution(("b", "a"))
    assert (to_optuna(names, "a"), from_optuna(names, "a")) == ("a", "a")
    switch = Dimension("nesterov", choices=(True, False))
    assert distribution(switch) == CategoricalDistribution((True, False))
    rate = Dimension("rate", low=0.01, high=1.0, log=True)
    assert distribution(rate) == FloatDistribution(0.01, 1.0, log=True)
    assert from_optuna(rate, to_optuna(rate, 0.3)) == 0.3


def test_a_stopped_trial_without_a_metric_or_before_the_first_evaluation_ranks_behind() -> None:
    winner = make_trial(1, seconds=2.0, sampled=coordinates(0.1))
    silent = make_trial(2, state=TrialState.CAPPED, seconds=1.0, best_metric=None, sampled=coordinates(0.2))
    assert told(winner, silent)[1].intermediate_values == {CENSORED_STEP: WORSE_THAN_ANY}
    past = history()
    past.observe_all(1, [(1.0, 0.5)])
    past.take(winner)
    past.take(make_trial(2, state=TrialState.CAPPED, seconds=0.5, best_metric=0.4, sampled=coordinates(0.2)))
    assert told_of(past)[1].intermediate_values == {CENSORED_STEP: WORSE_THAN_ANY}


def test_each_choice_draws_with_a_seed_of_its_own() -> None:
    drawn = {
        Random(SPEC).ask(history(*(make_trial(n, state=TrialState.FAILED) for n in range(1, count + 1))), 32)[
            "reference_learning_rate"
        ]
        for count in range(4)
    }
    assert len(drawn) == 4
    other = study_spec("tpe", seed=4)
    assert Random(other).ask(history(), 32) != Random(SPEC).ask(history(), 32)
