from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import UsageError
from bssearch.training.trainer import AveragedWeights, Trainer, ema_decay_of
from tests.training.toys import Toy, configuration, on_cpu, toy_data


class Normed(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))


def fill(model: Normed, value: float) -> None:
    mean, count = model.norm.running_mean, model.norm.num_batches_tracked
    assert mean is not None and count is not None
    with torch.no_grad():
        for tensor in (*model.parameters(), mean, count):
            tensor.fill_(value)


def test_the_average_follows_its_formula_and_stands_in_for_the_weights_of_an_evaluation() -> None:
    model = Normed()
    fill(model, 1.0)
    average = AveragedWeights(model, 0.75)
    for value in (5.0, 9.0):
        fill(model, value)
        average.update()
    expected = 0.75 * (0.75 * 1 + 0.25 * 5) + 0.25 * 9
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with average.in_place():
        assert all((parameter == expected).all() for parameter in model.parameters())
        assert model.norm.running_mean is not None and (model.norm.running_mean == expected).all()
        assert model.norm.num_batches_tracked == 9
        assert torch.equal(model.mask, torch.full((2, 2), float("-inf")).triu(1))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all((parameter == 9).all() for parameter in model.parameters())


def test_the_weights_come_back_where_an_evaluation_fails() -> None:
    model = Normed()
    average = AveragedWeights(model, 0.5)
    fill(model, 3.0)
    with pytest.raises(KeyError), average.in_place():
        raise KeyError
    assert all((parameter == 3).all() for parameter in model.parameters())


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_the_average_moves_once_per_optimizer_step_whatever_the_accumulation(accumulation_steps: int) -> None:
    settings: dict[str, Any] = {"micro_batch_size": 20 // accumulation_steps, "accumulation_steps": accumulation_steps}
    data = toy_data()
    trainer = Trainer(Toy(), configuration(20, parameters={"ema_decay": 0.8}, **settings), data.train, on_cpu(), seed=3)
    plain = Trainer(Toy(), configuration(20, **settings), data.train, on_cpu(), seed=3)
    expected = nn.utils.parameters_to_vector(plain.model.parameters()).detach().clone()
    for _ in range(6):
        trainer.step()
        plain.step()
        expected = 0.8 * expected + 0.2 * nn.utils.parameters_to_vector(plain.model.parameters()).detach()
    live = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    assert torch.equal(live, nn.utils.parameters_to_vector(plain.model.parameters()))
    metric = trainer.evaluate(data.validation, "loss")
    nn.utils.vector_to_parameters(expected, plain.model.parameters())
    assert metric == pytest.approx(plain.evaluate(data.validation, "loss"), rel=1e-6)
    assert metric != pytest.approx(0.0)
    nn.utils.vector_to_parameters(live, plain.model.parameters())
    assert metric != pytest.approx(plain.evaluate(data.validation, "loss"), rel=1e-4)
    assert torch.equal(live, nn.utils.parameters_to_vector(trainer.model.parameters()))


@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, "slow", True])
def test_a_decay_outside_its_bounds_is_refused(value: Any) -> None:
    assert ema_decay_of(configuration()) is None
    with pytest.raises(UsageError, match=rf"ema_decay = {value!r} must be a number in \(0, 1\)"):
        ema_decay_of(configuration(parameters={"ema_decay": value}))
