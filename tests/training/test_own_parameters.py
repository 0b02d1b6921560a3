"""The user's own parameters reach the methods of a workload; a method that does not take one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import WorkloadError
from bssearch.training.gradient_noise import GradientPasses
from bssearch.training.loop import describe_model
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import check_takes
from tests.training.toys import Toy, configuration, on_cpu, toy_data


class Own(Toy):
    """Takes a width for its model and a factor for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []

    def build_model(self, *, dropout: float, hidden: int = 16) -> nn.Module:
        return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 2))

    def loss(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        label_smoothing: float,
        factor: float = 1.0,
    ) -> torch.Tensor:
        self.factors.append(factor)
        return factor * functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)


def test_the_model_and_the_loss_get_theirs_in_training_and_in_noise_passes() -> None:
    workload: Any = Own()
    trial = configuration(parameters={"model.hidden": 5, "loss.factor": 0.25})
    trainer = Trainer(workload, trial, toy_data().train, on_cpu(), seed=0)
    assert trainer.model[0].out_features == 5  # type: ignore[index]
    trainer.step()
    assert set(workload.factors) == {0.25}
    workload.factors.clear()
    GradientPasses(workload, on_cpu(), trainer, trial, toy_data().train, seed=0).measure(2)
    assert set(workload.factors) == {0.25}


def test_the_model_that_is_described_is_the_default_s() -> None:
    assert describe_model(Own(), toy_data(), on_cpu(), own={"hidden": 3}).parameters == 6 * 3 + 3 + 3 * 2 + 2


class Anything:
    """Takes all."""

    def build_model(self, *, dropout: float, **parameters: object) -> None: ...

    def loss(self, model: object, inputs: object, targets: object, **parameters: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("model.hidden", "build_model(*, dropout: 'float') -> 'nn.Module'"),
        ("loss.factor", "label_smoothing: 'float') -> 'torch.Tensor'"),
    ],
)
def test_a_parameter_that_a_method_does_not_take_is_named_with_its_signature(name: str, takes: str) -> None:
    toy: Any = Toy()
    with pytest.raises(WorkloadError) as caught:
        check_takes(toy, [name])
    assert f"space.{name}: " in str(caught.value)
    assert takes in str(caught.value)
    check_takes(Own(), ["model.hidden", "loss.factor"])
    anything: Any = Anything()
    check_takes(anything, [name])
