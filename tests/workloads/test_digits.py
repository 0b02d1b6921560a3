import math
import runpy
import sys
from dataclasses import replace

import pytest
import torch

from bssearch import Data, Part, WorkloadError, load_spec
from bssearch.records import MetricInfo, TrialState
from bssearch.workloads import digits
from bssearch.workloads.digits import Digits
from bssearch.workloads.ten_classes import CLASSES
from bssearch.workloads.vit_tiny import VisionTransformer, VitTiny
from tests.training.toys import Run, request

CPU = torch.device("cpu")


def rows(inputs: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in inputs}


def test_the_parts_have_their_sizes_and_shapes_and_every_digit_in_proportion() -> None:
    data = Digits().load(CPU)
    assert (len(data.train), len(data.validation), len(data.test)) == (1077, 360, 360)
    assert data.train.inputs.shape == (1077, 1, 8, 8)
    assert (data.train.inputs.dtype, data.train.targets.dtype) == (torch.float32, torch.int64)
    assert data.train.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train.inputs.std().item() == pytest.approx(1, abs=1e-3)
    for part in (data.train, data.validation, data.test):
        shares = torch.bincount(part.targets, minlength=CLASSES) / len(part)
        assert shares.min() > 0.09 and shares.max() < 0.11


def test_its_metrics_have_bounds_and_the_value_of_chance() -> None:
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


def test_a_split_without_training_samples_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"1800 leaves no training samples; choose a sum < 1797"):
        Digits(validation_samples=900, test_samples=900).load(CPU)


def test_scikit_learn_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "sklearn"]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(digits.__file__)["Digits"]().load(CPU)
    assert imported() == []


SMALL = {"patch": 14, "width": 16, "depth": 1, "heads": 2}


def build(dropout: float = 0.0, **settings: int) -> VisionTransformer:
    torch.manual_seed(0)
    model = VitTiny(**{**SMALL, **settings}).build_model(dropout=dropout)
    assert isinstance(model, VisionTransformer)
    return model


def bright(count: int, seed: int = 0) -> Part:
    """Return noise whose class is the tenth of its height at which it has a bright line."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (count,), generator=generator)
    inputs = torch.randn(count, 1, 28, 28, generator=generator)
    inputs[torch.arange(count), 0, 2 * targets] += 5
    return Part(inputs, targets)


def test_without_positions_the_order_of_the_patches_does_not_matter() -> None:
    model, images = build(), bright(4).inputs
    turned = torch.cat([images[..., 14:], images[..., :14]], dim=3)
    assert not torch.allclose(model(turned), model(images), atol=1e-4)
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(turned), model(images))


def test_dropout_is_after_the_embedding_and_every_dense_layer_but_that_of_queries_keys_and_values() -> None:
    model, seen = build(dropout=0.5, depth=2), []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[-1]))
    model(bright(2).inputs)
    assert seen == [16, 16, 64, 16, 16, 64, 16]


def test_scores_of_an_image_do_not_depend_on_the_other_images_of_a_batch() -> None:
    model, images = build(), bright(4).inputs
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


@pytest.mark.slow
def test_the_shipped_study_does_all_of_the_worked_example_and_a_trial_of_it_learns() -> None:
    spec = load_spec("vit_tiny")
    assert spec.space.max_micro_batch_size is not None and spec.space.max_micro_batch_size < spec.batch_sizes[-1]
    names = {one.name for one in spec.space.dimensions()}
    assert {"reference_learning_rate", "warmup_epochs", "schedule", "horizon_samples"} <= names
    default = spec.default_configuration
    assert (default.optimizer, default.parameters["clip_norm"]) == ("adamw", 1.0)
    assert default.weight_decay > 0 and default.warmup_epochs > 0
    data = Data(train=bright(1000), validation=bright(200, seed=1), test=bright(200, seed=2))
    cosine = {**default.parameters, "schedule": "cosine", "horizon_samples": 6400}
    one = replace(default, batch_size=32, micro_batch_size=16, accumulation_steps=2, parameters=cosine)
    run = Run(request(replace(one, learning_rate=0.01), target=1.0), VitTiny(**SMALL), data)
    assert (run.outcome.state, run.outcome.steps) == (TrialState.EXHAUSTED, 200)
    assert (run.outcome.best_metric or 0) > 0.5
    rates = [seen.learning_rate for seen in run.observations]
    assert rates[0] < max(rates) > 50 * rates[-1]
