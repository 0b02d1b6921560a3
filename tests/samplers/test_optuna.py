from __future__ import annotations

import optuna
import pytest

from bssearch.history import History
from bssearch.pruners.base import Progress
from bssearch.records import ParameterValue, TrialRecord, TrialState
from bssearch.samplers.optuna import CENSORED_STEP, Sampler, neighbours
from tests.factories import make_probe, make_spec, make_trial

SPEC = make_spec()
SIZES = (8, 16, 32, 64, 128)


def coordinates(rate: float, decay: float = 1e-4, dropout: float = 0.1) -> dict[str, ParameterValue]:
    return {"reference_learning_rate": rate, "weight_decay": decay, "dropout": dropout}


def history(*trials: TrialRecord) -> History:
    return History(SPEC, trials, {size: make_probe(size) for size in SIZES})


def sampler(name: str = "tpe") -> Sampler:
    return Sampler(name, SPEC.space.dimensions(), seed=3, startup_trials=4)


REFERENCE = Progress()
for point in ((0.0, 0.1), (1.0, 0.5), (2.0, 0.9)):
    REFERENCE.add(*point)


def told(*trials: TrialRecord) -> list[optuna.trial.FrozenTrial]:
    past = history(*trials)
    return sampler().study(past, past.trials, REFERENCE).trials


def test_a_reached_trial_is_told_its_seconds() -> None:
    (trial,) = told(make_trial(0, seconds=2.5, sampled=coordinates(0.1)))
    assert (trial.state, trial.value) == (optuna.trial.TrialState.COMPLETE, 2.5)


def test_a_capped_trial_is_told_its_shortfall_at_equal_time_never_its_cap() -> None:
    (_, trial) = told(
        make_trial(0, seconds=2.0, sampled=coordinates(0.1)),
        make_trial(1, state=TrialState.CAPPED, seconds=1.0, best_metric=0.3, sampled=coordinates(0.2)),
    )
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert trial.intermediate_values == {CENSORED_STEP: pytest.approx(0.2)}


def test_a_diverged_trial_ranks_behind_every_other() -> None:
    (trial,) = told(make_trial(0, state=TrialState.DIVERGED, best_metric=0.1, sampled=coordinates(0.9)))
    assert trial.intermediate_values[CENSORED_STEP] > 1e6


def test_out_of_memory_is_a_violated_constraint() -> None:
    (trial,) = told(make_trial(0, state=TrialState.OOM, sampled=coordinates(0.1)))
    assert trial.constraints == {"oom": 1.0}


def test_running_trials_are_told_as_running_missing_ones_not_at_all() -> None:
    trials = told(
        make_trial(0, state=TrialState.RUNNING, sampled=coordinates(0.1)),
        make_trial(1, state=TrialState.LOST, sampled=coordinates(0.1)),
        make_trial(2, seconds=1.0, sampled=None),
    )
    assert [trial.state for trial in trials] == [optuna.trial.TrialState.RUNNING]


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_asked_twice_with_the_same_history_it_answers_the_same(name: str) -> None:
    trials = [make_trial(n, seconds=1.0 + n, sampled=coordinates(0.02 * (n + 1))) for n in range(8)]
    first = sampler(name).ask(history(*trials), 32, REFERENCE)
    assert first == sampler(name).ask(history(*trials), 32, REFERENCE)
    assert set(first) == {"reference_learning_rate", "weight_decay", "dropout"}
    assert first["weight_decay"] in (0.0, 1e-4, 1e-3)
    configuration = SPEC.space.decode(32, first)
    assert configuration.learning_rate == pytest.approx(first["reference_learning_rate"])


def test_tpe_learns_where_the_target_is_reached_soonest() -> None:
    trials = []
    for number in range(30):
        rate = 0.01 * 100 ** (number / 29)
        near = abs(number - 20)
        trials.append(make_trial(number, seconds=1.0 + near, sampled=coordinates(rate)))
    asked = []
    for extra in range(10):
        past = history(*trials, *(make_trial(30 + n, state=TrialState.FAILED) for n in range(extra)))
        asked.append(float(sampler().ask(past, 32, REFERENCE)["reference_learning_rate"] or 0))
    best = 0.01 * 100 ** (20 / 29)
    assert sum(best / 3 < rate < best * 3 for rate in asked) >= 7


def test_the_sampler_is_shown_the_trials_near_the_batch_size() -> None:
    trials = [make_trial(n, batch_size=SIZES[n % 5]) for n in range(20)]
    sizes = {trial.configuration.batch_size for trial in neighbours(history(*trials), 128, enough=4)}
    assert sizes == {64, 128}
    few = neighbours(history(make_trial(0, batch_size=8), make_trial(1, batch_size=128)), 128, enough=4)
    assert len(few) == 2
