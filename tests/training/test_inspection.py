from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.records import MetricInfo
from bssearch.training.loop import describe_model, tokens_per_sample
from tests.training.toys import Frozen, Toy, on_cpu, toy_data


def toy_with(*layers: nn.Module) -> Any:
    """Return a workload whose model has these layers before those of the toy."""

    class Layered(Toy):
        def build_model(self, *, dropout: float) -> nn.Module:
            return nn.Sequential(*layers, super().build_model(dropout=dropout))

    return Layered()


def test_the_trainable_parameters_are_counted_once_each() -> None:
    assert describe_model(Toy(), toy_data(), on_cpu()).parameters == 6 * 16 + 16 + 16 * 2 + 2
    shared = nn.Linear(6, 6, bias=False)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    assert describe_model(toy_with(shared, shared, frozen), toy_data(), on_cpu()).parameters == 36 + 146


@pytest.mark.parametrize(
    ("layer", "counted"),
    [
        (lambda: nn.BatchNorm1d(6), 1),
        (lambda: nn.SyncBatchNorm(6), 1),
        (lambda: nn.BatchNorm1d(6, track_running_stats=False), 1),
        (lambda: Frozen(6), 0),
        (lambda: Frozen(6, track_running_stats=False), 1),
        (lambda: nn.LayerNorm(6), 0),
        (lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6), nn.Flatten()), 0),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten()), 0),
        (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6))), 2),
    ],
)
def test_only_layers_that_normalise_over_the_batch_are_counted(layer: Callable[[], nn.Module], counted: int) -> None:
    assert describe_model(toy_with(layer()), toy_data(), on_cpu()).batch_norm_layers == counted


def test_the_metrics_are_those_of_the_validation_part_before_any_step() -> None:
    found = describe_model(Toy(), toy_data(), on_cpu(), seed=5).initial_metrics
    torch.manual_seed(5)
    toy = Toy()
    with torch.no_grad():
        assert found == toy.evaluate(toy.build_model(dropout=0.0).eval(), toy_data().validation)
    assert found == describe_model(Toy(), toy_data(), on_cpu(), seed=5).initial_metrics
    assert found != describe_model(Toy(), toy_data(), on_cpu(), seed=6).initial_metrics


def test_the_model_is_built_once_with_the_dropout_given() -> None:
    asked: list[float] = []

    class Watched(Toy):
        def build_model(self, *, dropout: float) -> nn.Module:
            asked.append(dropout)
            return super().build_model(dropout=dropout)

    describe_model(Watched(), toy_data(), on_cpu(), dropout=0.25)
    assert asked == [0.25]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_told_as_none(value: float) -> None:
    toy = Toy(on_evaluate=lambda metrics: {"accuracy": 0.5, "loss": value})
    toy.metrics = {"accuracy": MetricInfo(), "loss": MetricInfo()}
    assert describe_model(toy, toy_data(), on_cpu()).initial_metrics == {"accuracy": 0.5, "loss": None}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": 1.0}, "no metric 'accuracy'; it offers loss"),
        ({"accuracy": 0.5, "loss": "low"}, "returned 'low' as 'loss': not a number"),
        ({"accuracy": 1.5, "loss": 1.0}, r"accuracy = 1.5, outside the \[0.0, 1.0\] declared"),
        (0.5, "returned a float; it must be a mapping"),
    ],
)
def test_an_evaluation_that_lacks_what_the_workload_declares_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe_model(Toy(on_evaluate=lambda metrics: returned), toy_data(), on_cpu())


@pytest.mark.parametrize("value", [None, 32])
def test_tokens_are_counted_only_where_the_workload_says_how_many(value: int | None) -> None:
    toy: Any = Toy()
    if value is not None:
        toy.tokens_per_sample = value
    assert tokens_per_sample(toy) == value


@pytest.mark.parametrize("value", [0, -3, 1.5, "64", True])
def test_tokens_that_are_no_count_are_refused(value: object) -> None:
    toy: Any = Toy()
    toy.tokens_per_sample = value
    with pytest.raises(WorkloadError, match=r"tokens_per_sample = .* must be an integer >= 1"):
        tokens_per_sample(toy)
