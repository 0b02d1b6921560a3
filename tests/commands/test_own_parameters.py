"""A whole study over the user's own parameters, and configurations that a person adds."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from bssearch import Launch, Store, UsageError, WorkloadError, check, load_optuna_study, open_store, run_study
from bssearch.analysis.answer import Answer
from bssearch.analysis.build_answer import build_answer, predict_for_device
from bssearch.commands.trials import configuration_of, enqueue
from bssearch.exchange.trial_rows import trial_table
from bssearch.records import Configuration, Phase, StudyRecord, TrialRecord, model_parameters, own_parameters
from bssearch.search import finding
from bssearch.search.finding import compute_answer
from bssearch.spec import StudySpec, spec_of
from tests.analysis.test_report import study as study_record
from tests.factories import SPEC, make_probe, make_spec, make_trial

WORKLOAD = """
import torch
from torch import nn
from torch.nn import functional

from bssearch import Data, MetricInfo, Part


def part(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return Part(inputs, (inputs[:, 0] * inputs[:, 1] + inputs[:, 2] > 0).long())


class Own:
    metrics = {"accuracy": MetricInfo(low=0.0, high=1.0, chance=0.5)}

    def load(self, device):
        return Data(train=part(256, 1), validation=part(128, 2), test=part(64, 3))

    def build_model(self, *, dropout, hidden, activation):
        between = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()
        return nn.Sequential(nn.Linear(6, hidden), between, nn.Linear(hidden, 2))

    def loss(self, model, inputs, targets, *, label_smoothing, power, ignored=0):
        return functional.cross_entropy(model(inputs), targets) ** power

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).float().mean().item()}
"""
SPACE: dict[str, Any] = {
    "batch_size": [16, 32],
    "learning_rate": {"low": 0.05, "high": 0.5},
    "model": {"hidden": {"low": 8, "high": 64}, "activation": ["tanh", "relu"]},
    "loss": {"power": [1.0, 2.0]},
}
DEFAULT: dict[str, Any] = {
    "batch_size": 32,
    "learning_rate": 0.1,
    "model": {"hidden": 8, "activation": "relu"},
    "loss": {"power": 1.0},
}


def spec_for(name: str = "own", **changes: Any) -> StudySpec:
    values = {
        "name": name,
        "workload": "own.py:Own",
        "target": {"metric": "accuracy", "value": 0.8},
        "space": SPACE,
        "default": DEFAULT,
        "sampler": {"name": "auto"},
        "pruner": {"name": "none"},
        "budget": {"trials": 6, "trial_train_seconds": 0.2, "least_improvement": 0.0},
        "confirm": {"top": 1, "runs": 1},
        "executor": {"name": "inline", "device": "cpu"},
    }
    return make_spec(**{**values, **changes})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with a study that was run, one enqueued configuration among its trials."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(WORKLOAD)
    url = f"sqlite:///{folder / 'own.db'}"
    spec = spec_for()
    with open_store(url) as store:
        store.studies.create(spec.new_study("tester"))
        enqueue(store, "own", {"model.hidden": 48, "model.activation": "tanh", "loss.power": 1.0, "batch_size": 16})
        run_study(spec, Launch(folder=folder, db=url))
        yield store


def test_trials_keep_what_they_ran_with_and_the_answer_holds_it(store: Store) -> None:
    trials = store.trials.of("own")
    assert own_parameters(trials[0].configuration) == {"hidden": 48, "activation": "tanh", "power": 1.0}
    assert len({own_parameters(one.configuration)["hidden"] for one in trials}) > 2
    confirmed = next(one for one in trials if one.phase is Phase.CONFIRM)
    assert confirmed.configuration in [one.configuration for one in trials if one.phase is Phase.SEARCH]
    found = compute_answer(store, "own")
    assert (
        found.optimal.parameters["model.hidden"]
        == trials[found.optimal.trial_numbers[0] - 1].configuration.parameters["model.hidden"]
    )
    assert "default_model_timed" in {one.code for one in found.warnings}
    columns, rows = trial_table(trials)
    assert {"model.hidden", "model.activation", "loss.power", "sampled.model.hidden"} <= set(columns)
    text = io.StringIO()
    csv.DictWriter(text, columns).writerows(rows)
    assert "tanh" in text.getvalue()


def test_steps_are_multiplied_with_the_step_time_of_their_own_model_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(store.studies.get("own"))
    moved: list[TrialRecord] = []

    def noted(study: StudyRecord, spec: StudySpec, trials: Sequence[TrialRecord], *rest: Any) -> Answer:
        moved.extend(trials)
        return build_answer(study, spec, trials, *rest)

    monkeypatch.setattr(finding, "build_answer", noted)
    compute_answer(store, "own", 0.795)
    for trials in (store.trials.of("own"), moved):
        reached = [one for one in trials if one.outcome and one.outcome.steps_to_target]
        has_product = {model_parameters(one.configuration): one.steps_x_step_time_s is not None for one in reached}
        assert has_product == {model: model == spec.timed_model for model in has_product}
        assert set(has_product.values()) == {True, False}


def test_optuna_s_form_has_them_with_whole_numbers_and_categories(store: Store) -> None:
    found = load_optuna_study("own", store=store)
    distributions = found.trials[0].distributions
    assert isinstance(distributions["model.hidden"], optuna.distributions.IntDistribution)
    assert isinstance(distributions["model.activation"], optuna.distributions.CategoricalDistribution)
    assert found.trials[0].params["model.hidden"] == 48


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(WORKLOAD)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "local"])
def test_a_key_that_no_method_takes_is_refused_before_anything_is_written(folder: Path, executor: str) -> None:
    spec = spec_for(
        space={**SPACE, "model": {**SPACE["model"], "depth": 2}}, executor={"name": executor, "device": "cpu"}
    )
    url = f"sqlite:///{folder / 'none.db'}"
    with pytest.raises(
        WorkloadError, match=r"space\.model\.depth: build_model\(.*hidden, activation\).* has no parameter 'depth'"
    ):
        run_study(spec, Launch(folder=folder, db=url))
    assert not (folder / "none.db").exists()


@pytest.mark.slow
def test_check_finds_an_own_parameter_that_changes_nothing(folder: Path) -> None:
    found = {
        one.code: one.message
        for one in check(
            spec_for(
                space={**SPACE, "loss": {"power": [1.0, 2.0], "ignored": [0, 1]}},
                default={**DEFAULT, "loss": {"power": 1.0, "ignored": 0}},
            ),
            Launch(folder=folder),
        ).findings
    }
    assert "loss.ignored seems to have no effect" in found["parameter_ignored"]
    assert "are equal with loss.ignored = 0 and 1" in found["parameter_ignored"]
    assert "hidden 8" in found["default_model_timed"]


SIZES = (16, 32, 64)


def wide(size: int, hidden: int) -> Configuration:
    parameters = {**spec_for().default_configuration.parameters, "model.hidden": hidden}
    return Configuration(batch_size=size, micro_batch_size=size, learning_rate=0.1, parameters=parameters)


def runs_of(hidden: dict[int, int]) -> list[TrialRecord]:
    """Three runs of a model of so many units at each batch size; a step of theirs takes 2 ms."""
    steps = {16: 400, 32: 250, 64: 180}
    return [
        make_trial(
            100 * size + seed, configuration=wide(size, hidden[size]), steps=steps[size] + seed, seed=seed,
            seconds=0.002 * (steps[size] + seed), phase=Phase.CONFIRM,
        )
        for size in SIZES
        for seed in range(3)
    ]  # fmt: skip


def law_spec() -> StudySpec:
    return spec_for(space={**SPACE, "batch_size": list(SIZES)}, confirm={"top": 3, "runs": 3})


def probes() -> dict[int, Any]:
    return {size: make_probe(size, step_seconds=0.01) for size in SIZES}


def test_a_law_over_several_models_is_none_and_of_another_model_than_the_timed_one_gives_no_seconds() -> None:
    spec = law_spec()
    kinds: dict[str, tuple[bool, bool, str | None]] = {}
    for name, hidden in (
        ("default's", {16: 8, 32: 8, 64: 8}),
        ("another", {16: 48, 32: 48, 64: 48}),
        ("several", {16: 8, 32: 8, 64: 48}),
    ):
        found = build_answer(study_record(spec), spec, runs_of(hidden), probes())
        told = {"models_differ", "law_not_timed"} & {one.code for one in found.warnings}
        has_seconds = found.fit is not None and found.fit.predicted is not None
        kinds[name] = (found.fit is not None, has_seconds, min(told, default=None))
    assert kinds == {
        "default's": (True, True, None),
        "another": (True, False, "law_not_timed"),
        "several": (False, False, "models_differ"),
    }


def test_an_untried_size_is_a_rival_of_another_model_than_the_timed_one() -> None:
    spec = law_spec()
    trials, untried = runs_of({16: 48, 32: 48, 64: 48}), {128: make_probe(128, step_seconds=0.01)}
    sure, with_untried = (
        build_answer(study_record(spec), spec, trials, known).within_5_percent
        for known in (probes(), probes() | untried)
    )
    assert sure is not None and with_untried is not None and with_untried < sure


def test_a_row_of_another_model_has_its_runs_own_step_time_and_no_product() -> None:
    spec = law_spec()
    trials = [
        replace(one, outcome=replace(one.outcome, steps=200, train_seconds=0.6)) if one.outcome else one
        for one in runs_of({16: 8, 32: 8, 64: 48})
    ]
    rows = {row.batch_size: row for row in build_answer(study_record(spec), spec, trials, probes()).batches}
    assert rows[32].step_time_s == 0.01
    assert rows[32].steps_x_step_time_s == pytest.approx(251 * 0.01)
    assert rows[64].steps_x_step_time_s is None
    assert rows[64].step_time_s == pytest.approx(0.003)


def test_a_prediction_for_another_device_leaves_out_models_that_its_step_times_are_not_of() -> None:
    spec = law_spec()
    found = predict_for_device(study_record(spec), spec, runs_of({16: 8, 32: 8, 64: 48}), probes(), "tiny")
    assert found.optimal.batch_size == 32
    assert [row.trials for row in found.batches] == [3, 3, 0]
    assert "other_models_left_out" in {one.code for one in found.warnings}


def configure(values: dict[str, Any], **changes: Any) -> Configuration:
    return configuration_of(make_spec(**changes), values)


def test_what_is_left_out_is_the_defaults_and_the_learning_rate_follows_the_rule() -> None:
    default = make_spec().default_configuration
    assert configure({}) == default
    moved = configure({"batch_size": 128, "dropout": 0.2})
    assert moved.learning_rate == pytest.approx(0.1 * 2)  # the square root of 128 / 32
    assert (moved.batch_size, moved.micro_batch_size, moved.dropout) == (128, 128, 0.2)
    assert moved.weight_decay == default.weight_decay
    assert configure({"batch_size": 128, "learning_rate": 0.3}).learning_rate == 0.3


def test_another_optimizer_takes_its_own_parameters() -> None:
    space = {**SPEC["space"], "optimizer": [{"name": "sgd"}, {"name": "adamw", "beta2": [0.95, 0.999]}]}
    default = {**SPEC["default"], "optimizer": {"name": "sgd"}}
    found = configure({"optimizer": "adamw", "beta2": 0.95}, space=space, default=default)
    assert (found.optimizer, found.parameters["beta2"]) == ("adamw", 0.95)
    with pytest.raises(UsageError, match=r"optimizer\.beta2 is searched"):
        configure({"optimizer": "adamw"}, space=space, default=default)


def test_a_learning_rate_left_out_follows_the_scale_of_another_optimizer() -> None:
    optimizers = [{"name": "sgd", "learning_rate_scale": 2.0}, {"name": "adamw", "learning_rate_scale": 0.02}]
    changes = {
        "space": {**SPEC["space"], "optimizer": optimizers},
        "default": {**SPEC["default"], "optimizer": {"name": "sgd"}},
    }
    assert configure({"optimizer": "adamw"}, **changes).learning_rate == pytest.approx(0.1 * 0.02 / 2)
    assert configure({"optimizer": "adamw", "batch_size": 128}, **changes).learning_rate == pytest.approx(0.002)
    assert configure({"dropout": 0.2}, **changes).learning_rate == 0.1
    assert configure({"optimizer": "adamw", "learning_rate": 0.005}, **changes).learning_rate == 0.005


def test_a_horizon_goes_with_a_decaying_schedule_only() -> None:
    schedule = {"name": ["constant", "cosine"], "horizon_samples": {"low": 1000, "high": 9000}}
    changes = {
        "space": {**SPEC["space"], "schedule": schedule},
        "default": {**SPEC["default"], "schedule": "cosine", "horizon_samples": 5000},
    }
    assert configure({"horizon_samples": 2000}, **changes).parameters["horizon_samples"] == 2000
    assert "horizon_samples" not in configure({"schedule": "constant"}, **changes).parameters
    with pytest.raises(UsageError, match="horizon_samples = 2000: a constant schedule has no horizon_samples"):
        configure({"schedule": "constant", "horizon_samples": 2000}, **changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 100}, r"batch_size = 100 is not one of 8, 16, 32, 64, 128"),
        ({"dropout": 0.9}, r"dropout = 0\.9 is not in \[0, 0\.5\]"),
        ({"dropout": 1.5}, r"dropout = 1\.5: 1\.5 must be in \[0, 1\)"),
        ({"weight_decay": 0.5}, r"weight_decay = 0\.5 is not one of 0, 0\.0001, 0\.001"),
        ({"learning_rate": 3.0}, r"learning_rate = 3 at batch_size 32 is not in \[0\.01, 1\]"),
        ({"batch_size": 128, "learning_rate": 3.0}, r"learning_rate = 3 at batch_size 128 is not in \[0\.02, 2\]"),
        ({"label_smoothing": 0.1}, r"label_smoothing = 0\.1 is not the fixed 0"),
        ({"momentum": 0.5}, r"momentum = 0\.5 is not the fixed 0\.9"),
        ({"optimizer": "lamb"}, r"optimizer = 'lamb' must be sgd"),
        ({"drop_out": 0.1}, r"unknown parameter 'drop_out'; did you mean 'dropout'"),
        ({"batch_size": "many"}, r"batch_size = 'many': must be a valid integer"),
        ({"batch_size": 0}, r"batch_size = 0: must be >= 1"),
        ({"clip_norm": 1.0}, r"clip_norm = 1\.0 is not in the space, which has no clip_norm"),
        ({"horizon_samples": 2000}, "horizon_samples = 2000: a constant schedule has no horizon_samples"),
        ({"dropout": math.nan}, r"^dropout = nan: must be a finite number$"),
        ({"learning_rate": math.inf}, r"^learning_rate = inf: must be a finite number$"),
        ({"momentum": math.nan}, r"^momentum = nan: must be a finite number$"),
    ],
)
def test_outside_the_space_each_value_is_named_with_its_bound(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configure(values)


def test_a_default_outside_the_space_can_still_be_varied_inside_it() -> None:
    default = {**SPEC["default"], "batch_size": 100}
    assert configure({"dropout": 0.2}, default=default).batch_size == 100
    assert configure({"batch_size": 64}, default=default).batch_size == 64
