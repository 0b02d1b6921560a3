from __future__ import annotations

import math
from typing import Any

import pytest

from bssearch.commands.trials import configuration_of
from bssearch.errors import UsageError
from bssearch.records import Configuration
from tests.factories import SPEC, make_spec


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
    values = {"optimizer": "adamw", "beta2": 0.95}
    found = configure(values, space=space, default=default)
    assert found.optimizer == "adamw"
    assert found.parameters["beta2"] == 0.95
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
    with pytest.raises(UsageError, match="horizon_samples = 2000: a constant schedule takes none"):
        configure({"schedule": "constant", "horizon_samples": 2000}, **changes)
    with pytest.raises(UsageError, match="horizon_samples = 2000: a constant schedule takes none"):
        configure({"horizon_samples": 2000})


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
        ({"optimizer": "lamb"}, r"optimizer = 'lamb' is not sgd"),
        ({"drop_out": 0.1}, r"unknown parameter 'drop_out'; did you mean 'dropout'"),
        ({"batch_size": "many"}, r"batch_size = 'many': must be a valid integer"),
        ({"batch_size": 0}, r"batch_size = 0: must be >= 1"),
        ({"clip_norm": 1.0}, r"clip_norm = 1\.0 is not in the space, which has no clip_norm"),
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
