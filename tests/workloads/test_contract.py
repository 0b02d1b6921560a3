"""The contract of every shipped workload: name, settings, study, models of images and order of calls."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from bssearch import WorkloadError, load_spec
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.inline import InlineExecutor
from bssearch.settings import shipped_studies
from bssearch.workloads.base import SHIPPED, Workload, resolve
from bssearch.workloads.char_lm import CharLM
from bssearch.workloads.data import Data, Part, check_data
from bssearch.workloads.digits import Digits
from bssearch.workloads.fashion_mnist import FashionMnist, ResidualBlock
from bssearch.workloads.transformer import Block
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
"""A workload of each model of images, and the number of the model's parameters."""


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
        ("digits", {"validation_samples": 0}, "validation_samples = 0 must be a whole number >= 1"),
        ("digits", {"test_samples": 1.5}, "test_samples = 1.5 must be"),
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
def test_wrong_settings_are_refused(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(said)):
        resolve(name, settings, Path())


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
def test_a_model_scores_every_class_and_learns_in_every_parameter(workload: Workload, parameters: int) -> None:
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


@pytest.mark.parametrize(
    ("workload", "kind", "count"),
    [
        (FashionMnist(), ResidualBlock, 3),
        (FashionMnist(model="mlp"), ResidualBlock, 0),
        (VitTiny(depth=3), Block, 3),
        (CharLM(max_characters=50_000, layers=3), Block, 3),
    ],
    ids=["resnet", "perceptron", "transformer", "language model"],
)
def test_the_blocks_of_a_model_may_be_checkpointed(workload: Any, kind: type, count: int) -> None:
    if isinstance(workload, CharLM):
        workload.load(torch.device("cpu"))
    blocks = workload.checkpointed_modules(build(workload))
    assert len(blocks) == count and all(isinstance(block, kind) for block in blocks)


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
        ("mine.py:Other", {}, ["mine.py has no 'Other'; choose from Mine, ready"]),
        ("mine.py:Mine", {"hight": 3}, ["unexpected keyword argument 'hight'"]),
        ("half.py:Half", {}, ["lacks metrics (a mapping of names to MetricInfo), loss, evaluate"]),
        (
            "raising.py:Mine",
            {"depth": 3},
            ["workload_settings {'depth': 3}", "ValueError: depth 3 is odd", "raising.py:3: raise ValueError"],
        ),
    ],
)
def test_a_wrong_workload_is_refused_with_its_name_and_the_users_own_line(
    folder: Path, name: str, settings: dict[str, int], said: list[str]
) -> None:
    with pytest.raises(WorkloadError) as error:
        resolve(name, settings, folder)
    message = str(error.value).replace(str(folder), "{folder}")
    assert [one for one in (name, *said) if one not in message] == []


def test_modules_are_found_beside_the_spec_and_nowhere_else_once_the_folder_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert resolve("mine:ready", {}, Path()).width == 9  # type: ignore[attr-defined]
    assert str(folder) in sys.path and "." not in sys.path


def test_a_part_comes_in_chunks_in_order() -> None:
    part = Part(torch.arange(7), torch.arange(7) * 2)
    assert [(len(inputs), targets[0].item()) for inputs, targets in part.chunks(3)] == [(3, 0), (3, 6), (1, 12)]


# Data that are checked ------------------------------------------------------------------------------------------------


GOOD = Part(torch.zeros(4, 5), torch.zeros(4))


def refusal(inputs: Any, targets: Any = GOOD.targets) -> str:
    with pytest.raises(WorkloadError) as caught:
        check_data(Data(train=Part(inputs, targets), validation=GOOD, test=GOOD))
    assert caught.value.hint is not None
    return caught.value.message


def test_tensors_with_a_row_a_sample_are_taken() -> None:
    data = Data(train=GOOD, validation=GOOD, test=GOOD)
    assert check_data(data) == data


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"ids": torch.zeros(4, 7), "mask": [1]}, ["dict", "'ids': a Tensor of shape (4, 7)", "'mask': a list"]),
        ([torch.zeros(5), torch.zeros(5), torch.zeros(7)], ["a list of 3", "[0] is", "(5,)", "[2] is", "(7,)"]),
        ([torch.zeros(5)] * 4, ["a list of 4", "[0] is a Tensor of shape (5,)"]),
        ((torch.zeros(4), "mask"), ["a tuple of 2", "[1] is a str"]),
        (torch.zeros(4).numpy(), ["a ndarray of shape (4,)"]),
        (torch.tensor(3.0), ["a Tensor of shape ()"]),
        (None, ["a NoneType"]),
        (
            {"ids": torch.zeros(4, 7), "mask": torch.zeros(3, 7)},
            ["'ids': a Tensor of shape (4, 7)", "'mask': a Tensor of shape (3, 7)", "a Tensor of shape (4,) as"],
        ),
    ],
)
def test_inputs_without_rows_are_named_with_their_place_and_type(inputs: Any, said: list[str]) -> None:
    message = refusal(inputs)
    assert "train.inputs" in message
    assert [one for one in said if one not in message] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    assert "nested" in refusal(torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)]))


def test_targets_are_looked_at_too() -> None:
    assert "train.targets" in refusal(GOOD.inputs, [1, 2, 3, 4])


WORKLOAD = """
import torch
import bssearch


class Ragged:
    metrics = {"accuracy": bssearch.MetricInfo()}

    def load(self, device):
        rows = [torch.zeros(3), torch.zeros(5)]
        part = bssearch.Part(rows, torch.zeros(2))
        return bssearch.Data(train=part, validation=part, test=part)

    def build_model(self, *, dropout): ...
    def loss(self, model, inputs, targets, *, label_smoothing): ...
    def evaluate(self, model, part): ...
"""


def test_the_refusal_of_an_executor_names_the_workload(tmp_path: Path) -> None:
    (tmp_path / "ragged.py").write_text(WORKLOAD)
    executor = InlineExecutor(ExecutorSettings(workload="ragged.py:Ragged", folder=tmp_path, device="cpu"))
    try:
        with pytest.raises(WorkloadError) as caught:
            executor.describe()
    finally:
        executor.close()
    assert "'ragged.py:Ragged'" in caught.value.message and "train.inputs" in caught.value.message
    assert caught.value.hint is not None


class Endless(IterableDataset[int]):
    """A Dataset without rows."""

    def __iter__(self) -> Iterator[int]:
        yield 0


class Sampled:
    """A workload that collates, or makes its own batches."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


ROWS = [([1, 2], 0), ([3], 1), ([4, 5, 6], 0)]


def dataset_data(train: Any = ROWS, **others: Any) -> Data:
    return Data(**{"train": train, "validation": GOOD, "test": GOOD, **others})


def collated(samples: list[Any]) -> Any:
    return {"ids": [ids for ids, _ in samples]}, torch.tensor([label for _, label in samples])


@pytest.mark.parametrize("train", [ROWS, Subset(ROWS, [2, 0, 1]), Part.of(ROWS)])  # type: ignore[arg-type]
def test_samples_of_unequal_length_are_a_part_with_the_collate_of_the_workload(train: Any) -> None:
    data = check_data(dataset_data(train), Sampled(collate=collated))
    chunks = list(data.train.chunks(2))
    assert len(data.train) == 3 and [len(targets) for _, targets in chunks] == [2, 1]
    assert sorted(ids for inputs, _ in chunks for ids in inputs["ids"]) == [[1, 2], [3], [4, 5, 6]]


def test_a_collate_of_the_part_comes_before_that_of_the_workload() -> None:
    part = Part.of(ROWS, collate=lambda samples: torch.tensor([len(ids) for ids, _ in samples]))
    ((inputs, targets),) = check_data(dataset_data(part), Sampled(collate=collated)).train.chunks(3)
    assert inputs.tolist() == [2, 1, 3] and targets is None


def test_the_default_collate_makes_batches_of_samples_that_are_alike() -> None:
    mappings = [{"pixels": torch.ones(2), "label": 1}] * 3
    data = check_data(dataset_data(TensorDataset(torch.zeros(5, 2), torch.arange(5)), validation=mappings))
    assert [len(one) for one in data.train.gather(torch.tensor([3, 4]))] == [2, 2]
    ((inputs, targets),) = data.validation.chunks(3)
    assert inputs["pixels"].shape == (3, 2) and targets is None


@pytest.mark.parametrize(
    ("train", "said", "hint"),
    [
        (ROWS, "train[0] is a tuple of 2", "collate(samples)"),
        ([(1, 2, 3)] * 2, "a list of length 3 as a batch", ""),
        ([], "no samples as train", ""),
        (None, "whose train is a NoneType", ""),
        ((torch.zeros(3), torch.zeros(3)), "whose train is a tuple", ""),
        (DataLoader(TensorDataset(torch.zeros(3))), "whose train is a DataLoader", "collate_fn"),
        (Endless(), "whose train is a Endless", "train_batches(batch_size, seed)"),
    ],
)
def test_a_wrong_part_is_named_with_a_remedy(train: Any, said: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        check_data(dataset_data(train))
    assert said in caught.value.message and hint in (caught.value.hint or "")


@pytest.mark.parametrize("samples", [None, 0, 2.5, "9"])
def test_own_batches_without_a_number_of_samples_are_refused(samples: Any) -> None:
    with pytest.raises(WorkloadError, match=f"train_samples = {samples!r} must be an integer >= 1"):
        check_data(dataset_data(None), Sampled(train_batches=lambda size, seed: [], train_samples=samples))


def test_the_training_part_decides_the_samples_of_an_epoch_of_own_batches() -> None:
    workload = Sampled(train_batches=lambda size, seed: [], train_samples=99)
    assert len(check_data(dataset_data(None), workload).train) == 99
    assert len(check_data(dataset_data(ROWS), workload).train) == 3


def test_a_part_made_of_samples_has_no_whole_tensors() -> None:
    with pytest.raises(
        WorkloadError, match="a part made from a list has samples, not whole tensors of inputs and targets"
    ) as caught:
        _ = Part.of(ROWS).inputs
    assert "part.chunks" in str(caught.value.hint)
