import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState as OptunaState

from bssearch.errors import UsageError
from bssearch.exchange.optuna_study import OptunaStudy, phases_of, quiet
from bssearch.records import Configuration, Phase, StudyRecord, TrialRecord, TrialState
from bssearch.spec import StudySpec
from tests.factories import EPOCH, make_environment, make_spec, make_trial, not_none

CURVE = {0: 0.1, 10: 0.5, 20: 0.8}


def record(spec: StudySpec) -> StudyRecord:
    return StudyRecord(
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        spec_hash="abc",
        objective=spec.objective,
        target=spec.record_target,
        created_by="someone",
        created_at=EPOCH,
        environment=make_environment(),
    )


def as_optuna(*trials: TrialRecord, curve: dict[int, float] = CURVE, **changes: Any) -> optuna.Study:
    """Return the Optuna study of some trials, all with one curve."""
    made = OptunaStudy.of(record(make_spec(**changes)), trials, {trial.number: curve for trial in trials})
    with quiet():
        study = optuna.create_study(study_name=made.name, directions=made.directions)
        study.set_metric_names(list(made.metric_names))
    study.add_trials(made.trials)
    return study


@pytest.mark.parametrize(
    ("given", "phases"),
    [
        ("search", {Phase.SEARCH}),
        (Phase.CONFIRM, {Phase.CONFIRM}),
        (["search", Phase.AUDIT], {Phase.SEARCH, Phase.AUDIT}),
        ((), set()),
    ],
)
def test_phases_are_one_or_several(given: Any, phases: set[Phase]) -> None:
    assert phases_of(given) == phases


@pytest.mark.parametrize(("given", "named"), [("serach", "'serach'"), (["search", "x"], "'x'"), ([3], "3")])
def test_a_phase_that_there_is_not_is_named_with_those_that_there_are(given: Any, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        phases_of(given)
    assert named in caught.value.message and "search, confirm" in caught.value.message


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (TrialState.REACHED, OptunaState.COMPLETE),
        (TrialState.PRUNED, OptunaState.PRUNED),
        (TrialState.CAPPED, OptunaState.PRUNED),
        (TrialState.EXHAUSTED, OptunaState.PRUNED),
        (TrialState.PAUSED, OptunaState.PRUNED),
        (TrialState.DIVERGED, OptunaState.PRUNED),
        (TrialState.RUNNING, OptunaState.RUNNING),
        (TrialState.QUEUED, OptunaState.WAITING),
        (TrialState.OOM, OptunaState.FAIL),
        (TrialState.FAILED, OptunaState.FAIL),
        (TrialState.LOST, OptunaState.FAIL),
        (TrialState.CANCELLED, OptunaState.FAIL),
    ],
)
def test_only_a_trial_that_reached_its_target_has_a_value(state: TrialState, expected: OptunaState) -> None:
    study = as_optuna(make_trial(7, state=state, seconds=2.5))
    (trial,) = study.trials
    assert trial.state is expected
    assert trial.value == (2.5 if state is TrialState.REACHED else None)
    assert trial.user_attrs["state"] == state.value
    assert trial.user_attrs["number"] == 7
    assert trial.user_attrs.get("reason") == ("as the test has it" if state.is_finished else None)


def test_a_trial_is_told_as_it_was_measured() -> None:
    study = as_optuna(make_trial(3, batch_size=16, learning_rate=0.2, seconds=2.0, steps=40, seed=5, contended=True))
    (trial,) = study.trials
    assert trial.intermediate_values == CURVE
    assert trial.params == {"batch_size": 16, "learning_rate": 0.2, "weight_decay": 0.0, "dropout": 0.0}
    assert trial.duration == timedelta(seconds=5)
    assert not_none(trial.datetime_start).astimezone(EPOCH.tzinfo) == EPOCH + timedelta(seconds=30)
    expected = {
        "phase": "search",
        "seed": 5,
        "batch_size": 16,
        "micro_batch_size": 16,
        "steps_to_target": 40,
        "train_seconds": 2.0,
        "time_to_target_s": 2.0,
        "contended": True,
    }
    assert {name: trial.user_attrs[name] for name in expected} == expected
    assert study.direction is optuna.study.StudyDirection.MINIMIZE
    assert study.metric_names == ["time_to_target_s"]


def test_the_distributions_are_the_spaces() -> None:
    (trial,) = as_optuna(make_trial(1)).trials
    low, high = 0.01 * math.sqrt(8 / 32), 1.0 * math.sqrt(128 / 32)
    assert trial.distributions == {
        "batch_size": IntDistribution(8, 128, log=True),
        "learning_rate": FloatDistribution(low, high, log=True),
        "weight_decay": CategoricalDistribution((0.0, 1e-4, 1e-3)),
        "dropout": FloatDistribution(0.0, 0.5),
    }


def test_a_trial_outside_the_space_widens_the_distribution_of_all() -> None:
    outside = Configuration(
        batch_size=200,
        micro_batch_size=50,
        accumulation_steps=4,
        learning_rate=5.0,
        weight_decay=0.5,
        dropout=0.9,
        label_smoothing=0.1,
    )
    first, second = as_optuna(make_trial(1), make_trial(2, configuration=outside)).trials
    assert first.distributions == second.distributions
    assert first.distributions["batch_size"] == IntDistribution(8, 200, log=True)
    assert first.distributions["weight_decay"] == CategoricalDistribution((0.0, 1e-4, 1e-3, 0.5))
    assert first.distributions["dropout"] == FloatDistribution(0.0, 0.9)
    assert first.distributions["label_smoothing"] == CategoricalDistribution((0.0, 0.1))
    assert second.params["learning_rate"] == 5.0
    for trial in (first, second):
        assert all(one._contains(one.to_internal_repr(trial.params[name])) for name, one in trial.distributions.items())


def test_choices_of_numbers_are_in_order_and_those_equal_up_to_rounding_are_one() -> None:
    space = {
        "batch_size": [16, 32],
        "learning_rate": 0.1,
        "weight_decay": [1e-3, 0.0, 1e-4],
        "optimizer": [{"name": "sgd"}, {"name": "adamw"}],
    }
    default = {"batch_size": 32, "learning_rate": 0.1, "weight_decay": 0.0, "optimizer": {"name": "sgd"}}
    spec = make_spec(space=space, default=default)
    rounded = replace(spec.default_configuration, weight_decay=1e-4 * (1 + 1e-12))
    first, second = as_optuna(
        make_trial(1, configuration=rounded),
        make_trial(2, configuration=replace(rounded, weight_decay=1e-4 * 1.01)),
        space=space,
        default=default,
    ).trials
    assert first.params["weight_decay"] == 1e-4
    assert second.params["weight_decay"] == 1e-4 * 1.01
    found = first.distributions["weight_decay"]
    assert isinstance(found, CategoricalDistribution)
    assert found.choices == (0.0, 1e-4, 1e-4 * 1.01, 1e-3)
    assert first.distributions["optimizer"] == CategoricalDistribution(("sgd", "adamw")), "not by the alphabet"


def test_what_another_optimizer_has_is_left_out() -> None:
    space = {
        "batch_size": [16, 32],
        "learning_rate": [0.1, 0.2],
        "optimizer": [{"name": "sgd", "momentum": [0.8, 0.9]}, {"name": "adamw", "beta2": {"low": 0.9, "high": 0.99}}],
    }
    default = {"batch_size": 32, "learning_rate": 0.1, "optimizer": {"name": "sgd", "momentum": 0.9}}
    spec = make_spec(space=space, default=default)
    sampled = {"reference_learning_rate": 0.1, "sgd.momentum": 0.8, "adamw.beta2": 0.95}
    sgd = spec.space.decode(16, {**sampled, "optimizer": "sgd"})
    adamw = spec.space.decode(16, {**sampled, "optimizer": "adamw"})
    trials = make_trial(1, configuration=sgd), make_trial(2, configuration=adamw)
    first, second = (trial.params for trial in as_optuna(*trials, space=space, default=default).trials)
    assert (first["optimizer"], first["sgd.momentum"], "adamw.beta2" in first) == ("sgd", 0.8, False)
    assert (second["optimizer"], second["adamw.beta2"], "sgd.momentum" in second) == ("adamw", 0.95, False)


def test_under_metric_in_budget_the_value_is_the_metric() -> None:
    trials = [
        make_trial(1, state=TrialState.EXHAUSTED, best_metric=0.7),
        make_trial(2, state=TrialState.REACHED, seconds=10.0, best_metric=0.92),
        make_trial(3, state=TrialState.PRUNED, best_metric=0.6),
    ]
    study = as_optuna(*trials, objective="metric_in_budget")
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["accuracy"]
    assert [trial.value for trial in study.trials] == [0.7, 0.92, None]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert study.best_trial.user_attrs["number"] == 2
    loss = {"metric": "loss", "value": 0.5, "goal": "minimize"}
    down = as_optuna(*trials, objective="metric_in_budget", target=loss)
    assert down.direction is optuna.study.StudyDirection.MINIMIZE


def test_a_figure_that_was_not_measured_is_not_made_up() -> None:
    study = as_optuna(make_trial(1), objective="energy_to_target")
    (trial,) = study.trials
    assert (trial.state, trial.value) == (OptunaState.FAIL, None)
    assert trial.user_attrs["state"] == "reached"
    assert "was not measured" in trial.user_attrs["reason"]


def many() -> list[TrialRecord]:
    states = [TrialState.REACHED] * 3 + [TrialState.PRUNED, TrialState.DIVERGED, TrialState.FAILED, TrialState.RUNNING]
    trials = []
    for number in range(1, 22):
        trial = make_trial(
            number,
            batch_size=2 ** (3 + number % 5),
            learning_rate=0.02 * number,
            state=states[number % 7],
            seconds=1 + number % 6,
        )
        configuration = replace(trial.configuration, dropout=0.02 * number, weight_decay=(0.0, 1e-4, 1e-3)[number % 3])
        trials.append(replace(trial, configuration=configuration))
    return trials


def test_optuna_ranks_the_parameters_and_counts_the_trials_that_reached_the_target() -> None:
    trials = many()
    study = as_optuna(*trials)
    assert {"batch_size", "learning_rate"} <= set(optuna.importance.get_param_importances(study))
    complete = study.get_trials(states=[OptunaState.COMPLETE])
    assert sorted(trial.value or 0.0 for trial in complete) == sorted(
        trial.outcome.time_to_target_s or 0.0
        for trial in trials
        if trial.state is TrialState.REACHED and trial.outcome is not None
    )


def test_the_importance_of_a_parameter_is_of_the_search_trials() -> None:
    study = as_optuna(*many())
    importances = optuna.importance.get_param_importances(study)
    assert set(importances) == {"batch_size", "learning_rate", "weight_decay", "dropout"}
    assert {trial.user_attrs["phase"] for trial in study.trials} == {Phase.SEARCH.value}


def test_a_study_goes_on_in_optuna() -> None:
    study = as_optuna(*many())
    study.sampler = optuna.samplers.TPESampler(seed=0)
    assert 8 <= study.ask(study.trials[0].distributions).params["batch_size"] <= 128
