from __future__ import annotations

import math
import runpy
import sys

import pytest
import torch

from bssearch.errors import WorkloadError
from bssearch.records import MetricInfo
from bssearch.workloads import digits
from bssearch.workloads.digits import Digits
from bssearch.workloads.ten_classes import CLASSES

CPU = torch.device("cpu")


def rows(inputs: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in inputs}


def test_the_parts_have_the_sizes_and_shapes_they_say() -> None:
    data = Digits().load(CPU)
    assert (len(data.train), len(data.validation), len(data.test)) == (1077, 360, 360)
    assert data.train.inputs.shape == (1077, 1, 8, 8)
    assert (data.train.inputs.dtype, data.train.targets.dtype) == (torch.float32, torch.int64)
    assert data.train.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train.inputs.std().item() == pytest.approx(1, abs=1e-3)


def test_its_metrics_say_what_they_can_be_and_what_chance_gives() -> None:
    assert Digits().metrics == {
        "accuracy": MetricInfo(low=0.0, high=1.0, chance=0.1),
        "loss": MetricInfo(low=0.0, chance=math.log(10)),
    }


def test_no_image_is_in_two_parts() -> None:
    data = Digits(validation_samples=200, test_samples=100).load(CPU)
    train, validation, test = (rows(part.inputs) for part in (data.train, data.validation, data.test))
    assert (len(data.train), len(data.validation), len(data.test)) == (1497, 200, 100)
    assert not train & validation and not train & test and not validation & test
    assert len(train | validation | test) == 1797


def test_every_part_holds_every_digit_in_proportion() -> None:
    data = Digits().load(CPU)
    for part in (data.train, data.validation, data.test):
        shares = torch.bincount(part.targets, minlength=CLASSES) / len(part)
        assert shares.min() > 0.09 and shares.max() < 0.11


def test_the_split_is_always_the_same() -> None:
    torch.manual_seed(1)
    first = Digits().load(CPU)
    torch.manual_seed(2)
    assert torch.equal(first.test.inputs, Digits().load(CPU).test.inputs)
    assert first.validation.targets[::90].tolist() == [0, 2, 4, 7]


def test_the_model_scores_every_digit_and_starts_at_chance() -> None:
    workload = Digits()
    data = workload.load(CPU)
    torch.manual_seed(0)
    model = workload.build_model(dropout=0.1).eval()
    assert model(data.test.inputs[:3]).shape == (3, CLASSES)
    with torch.no_grad():
        metrics = workload.evaluate(model, data.test)
    assert set(metrics) == set(workload.metrics)
    assert 0 <= metrics["accuracy"] < 0.4
    assert metrics["loss"] == pytest.approx(2.3, abs=0.3)


def test_label_smoothing_reaches_the_loss() -> None:
    workload = Digits()
    data = workload.load(CPU)
    model = workload.build_model(dropout=0.0)
    plain, smoothed = (
        workload.loss(model, data.test.inputs, data.test.targets, label_smoothing=smoothing) for smoothing in (0.0, 0.3)
    )
    assert plain.requires_grad and plain.shape == () and not torch.equal(plain, smoothed)


def test_a_split_that_leaves_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"1800 leave no training samples; they must be < 1797"):
        Digits(validation_samples=900, test_samples=900).load(CPU)


def test_scikit_learn_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "sklearn"]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(digits.__file__)["Digits"]().load(CPU)
    assert imported() == []
