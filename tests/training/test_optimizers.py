from __future__ import annotations

import pytest
import torch

from bssearch.errors import UsageError
from bssearch.training.optimizers import build_optimizer
from tests.training.toys import Toy, configuration

MODEL = Toy().build_model(dropout=0.0)


def test_sgd_is_nesterov_with_momentum_unless_told_otherwise() -> None:
    optimizer = build_optimizer(MODEL, configuration(learning_rate=0.3))
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (
        0.3,
        0.9,
        True,
    )
    plain = build_optimizer(MODEL, configuration(parameters={"momentum": 0.8, "nesterov": False}))
    assert (plain.defaults["momentum"], plain.defaults["nesterov"]) == (0.8, False)


def test_sgd_without_momentum_can_be_built() -> None:
    optimizer = build_optimizer(MODEL, configuration(parameters={"momentum": 0.0}))
    assert not optimizer.defaults["nesterov"]


def test_adamw_takes_its_own_parameters() -> None:
    optimizer = build_optimizer(
        MODEL, configuration(optimizer="adamw", parameters={"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6})
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.95), 1e-6)


def test_frozen_parameters_are_left_out() -> None:
    model = Toy().build_model(dropout=0.0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter to train"):
        build_optimizer(model, configuration())


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"optimizer = 'lion' must be one of sgd, adam, adamw, .*lars"):
        build_optimizer(MODEL, configuration(optimizer="lion"))


def test_a_parameter_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="momentum = 'high' must be a number"):
        build_optimizer(MODEL, configuration(parameters={"momentum": "high"}))
