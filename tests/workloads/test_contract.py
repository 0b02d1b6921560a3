"""What every shipped workload keeps to: its name, settings, study, models of images and order of calls."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.settings import shipped_studies
from bssearch.spec import load_spec
from bssearch.workloads.base import SHIPPED, Workload, resolve
from bssearch.workloads.data import Part
from bssearch.workloads.digits import Digits
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


WHOLE = """
class Mine:
    metrics = {"accuracy": None}
    def __init__(self, width=3):
        self.width = width
    def load(self, device): ...
    def build_model(self, *, dropout): ...
    def loss(self, model, inputs, targets, *, label_smoothing): ...
    def evaluate(self, model, part): ...

ready = Mine(width=9)
"""


FILES = {
    "mine.py": WHOLE,
    "broken.py": "x = 1\ndef f(:\n    pass\n",
    "failing.py": "import math\n\nx = math.nothing_there\n",
    "raising.py": "class Mine:\n    def __init__(self, depth):\n        raise ValueError(f'depth {depth} is odd')\n",
    "half.py": "class Half:\n    load = build_model = lambda self: None\n    loss = 3\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("name", "settings", "width"), [("mine.py:Mine", {"width": 5}, 5), ("mine.py:ready", {}, 9)])
def test_a_class_of_a_file_gets_the_settings_and_an_object_is_taken_as_it_is(
    folder: Path, name: str, settings: dict[str, int], width: int
) -> None:
    assert resolve(name, settings, folder).width == width  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["digits", "bssearch.workloads.digits:Digits"])
def test_a_shipped_workload_is_found_by_its_name_and_its_import_path(tmp_path: Path, name: str) -> None:
    workload = resolve(name, {"test_samples": 100}, tmp_path)
    assert isinstance(workload, Digits) and workload.test_samples == 100


FORMS = f"neither a shipped workload ({', '.join(sorted(SHIPPED))}) nor of the form"


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        *((name, {}, [FORMS]) for name in ("cifar", "mine.py", "mine.py:", ":Mine")),
        ("other.py:Mine", {}, ["no file {folder}/other.py"]),
        ("nowhere_at_all:Mine", {}, ["No module named 'nowhere_at_all'"]),
        ("broken.py:Mine", {}, ["SyntaxError", "{folder}/broken.py:2"]),
        ("failing.py:Mine", {}, ["AttributeError", "failing.py:3: x = math.nothing_there"]),
        ("mine.py:Other", {}, ["no 'Other' in it; it has Mine, ready"]),
        ("mine.py:Mine", {"hight": 3}, ["unexpected keyword argument 'hight'"]),
        ("half.py:Half", {}, ["lacks metrics (a mapping of names to MetricInfo), loss, evaluate"]),
        (
            "raising.py:Mine",
            {"depth": 3},
            ["workload_settings {'depth': 3}", "ValueError: depth 3 is odd", "raising.py:3: raise ValueError"],
        ),
    ],
)
def test_what_is_no_workload_is_refused_with_its_name_and_the_users_own_line(
    folder: Path, name: str, settings: dict[str, int], said: list[str]
) -> None:
    with pytest.raises(WorkloadError) as error:
        resolve(name, settings, folder)
    told = str(error.value).replace(str(folder), "{folder}")
    assert [one for one in (name, *said) if one not in told] == []


def test_modules_are_found_beside_the_spec_and_nowhere_else_once_the_folder_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert resolve("mine:ready", {}, Path()).width == 9  # type: ignore[attr-defined]
    assert str(folder) in sys.path and "." not in sys.path


def test_a_part_comes_in_chunks_in_order() -> None:
    part = Part(torch.arange(7), torch.arange(7) * 2)
    assert [(len(inputs), targets[0].item()) for inputs, targets in part.chunks(3)] == [(3, 0), (3, 6), (1, 12)]
