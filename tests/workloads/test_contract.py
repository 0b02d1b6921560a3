"""What every shipped workload keeps to: its settings, its study, its models of images, and its order of calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.settings import shipped_studies
from bssearch.spec import load_spec
from bssearch.workloads.base import Workload, resolve
from bssearch.workloads.fashion_mnist import FashionMnist
from bssearch.workloads.vit_tiny import VitTiny

CLASSES = 10
IMAGES = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(1))
SMALL_VIT = {"patch": 14, "width": 16, "depth": 1, "heads": 2}
MODELS: dict[str, tuple[Workload, int]] = {
    "resnet": (FashionMnist(model="resnet"), 222_570),
    "resnet with batch norm": (FashionMnist(model="resnet", norm="batch"), 222_570),
    "perceptron": (FashionMnist(model="mlp"), 269_322),
    "small transformer": (VitTiny(**SMALL_VIT), 6_698),
    "transformer": (VitTiny(width=48, depth=2, heads=3), 60_298),
}
"""A workload of each model of images, and how many parameters the model has."""


def build(workload: Workload, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return workload.build_model(dropout=dropout)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("char_lm", {"width": 30, "heads": 4}, "width = 30 must be a multiple of heads = 4"),
        ("char_lm", {"context": 0}, "context = 0 must be a whole number >= 1"),
        ("char_lm", {"layers": 1.5}, "layers = 1.5 must be a whole number >= 1"),
        ("char_lm", {"width": "64"}, "width = '64' must be a whole number >= 1"),
        ("char_lm", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("char_lm", {"text": ["a", "b"]}, "text = ['a', 'b'] must be a path or a glob"),
        ("digits", {"validation_samples": 0}, "validation_samples = 0 and test_samples = 360 must be >= 1"),
        ("fashion_mnist", {"model": "vit"}, "model = 'vit' must be one of resnet, mlp"),
        ("fashion_mnist", {"norm": "layer"}, "norm = 'layer' must be one of group, batch"),
        ("fashion_mnist", {"model": "mlp", "norm": "batch"}, "norm = 'batch' has no effect on model = 'mlp'"),
        ("fashion_mnist", {"augment": "yes"}, "augment = 'yes' must be true or false"),
        ("fashion_mnist", {"validation_samples": 0}, "validation_samples = 0 must be a whole number from 1 to 5000"),
        ("fashion_mnist", {"validation_samples": 5001}, "validation_samples = 5001 must be"),
        ("fashion_mnist", {"validation_samples": 1.5}, "validation_samples = 1.5 must be"),
        ("fashion_mnist", {"validation_samples": True}, "validation_samples = True must be"),
        ("fashion_mnist", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("finetune", {"train_samples": 4}, "train_samples = 4 must be a whole number from 5 to 27500"),
        ("finetune", {"train_samples": 27501}, "train_samples = 27501 must be"),
        ("finetune", {"validation_samples": 9}, "validation_samples = 9 must be a whole number from 10 to 5000"),
        ("finetune", {"validation_samples": 2000.0}, "validation_samples = 2000.0 must be"),
        ("finetune", {"classes": 3}, "unexpected keyword argument 'classes'"),
        ("vit_tiny", {"patch": 8}, "patch = 8 must divide the 28 pixels of an image's side"),
        ("vit_tiny", {"patch": 0}, "patch = 0 must be a whole number >= 1"),
        ("vit_tiny", {"width": 50}, "width = 50 must be a multiple of heads = 4"),
        ("vit_tiny", {"depth": True}, "depth = True must be a whole number >= 1"),
        ("vit_tiny", {"validation_samples": 5001}, "validation_samples = 5001 must be a whole number from 1 to 5000"),
        ("vit_tiny", {"model": "vit"}, "unexpected keyword argument 'model'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        resolve(name, settings, Path())
    assert said in str(error.value)


@pytest.mark.parametrize("name", shipped_studies())
def test_a_shipped_study_fits_its_workload(name: str) -> None:
    spec = load_spec(name)
    assert spec.target.metric in resolve(spec.workload, spec.workload_settings, Path()).metrics
    assert spec.batch_sizes[0] < spec.default.batch_size < spec.batch_sizes[-1]
    assert len(spec.batch_sizes) >= 6


@pytest.mark.parametrize("name", ["char_lm", "finetune"])
def test_a_model_before_its_data_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match=r"call load\(\) first"):
        resolve(name, {}, Path()).build_model(dropout=0.0)


@pytest.mark.parametrize(("workload", "parameters"), MODELS.values(), ids=MODELS)
def test_a_model_scores_every_class_has_the_size_it_says_and_learns_in_every_parameter(
    workload: Workload, parameters: int
) -> None:
    model = build(workload)
    assert model(IMAGES).shape == (len(IMAGES), CLASSES)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    workload.loss(model, IMAGES, torch.arange(8), label_smoothing=0.0).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("workload", [workload for workload, _ in MODELS.values()], ids=MODELS)
def test_dropout_is_random_and_without_it_training_is_not(workload: Workload) -> None:
    still, random = build(workload), build(workload, dropout=0.5)
    assert torch.equal(still(IMAGES), still(IMAGES))
    assert not torch.equal(random(IMAGES), random(IMAGES))
    assert torch.equal(random.eval()(IMAGES), random(IMAGES))
