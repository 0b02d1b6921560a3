"""What `load` may return as inputs and targets, and how anything else is named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from bssearch.errors import WorkloadError
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.inline import InlineExecutor
from bssearch.workloads.data import Data, Part, check_data

GOOD = Part(torch.zeros(4, 5), torch.zeros(4))


def refusal(inputs: Any, targets: Any = GOOD.targets) -> str:
    with pytest.raises(WorkloadError) as caught:
        check_data(Data(train=Part(inputs, targets), validation=GOOD, test=GOOD))
    assert caught.value.hint is not None
    return caught.value.message


def test_tensors_with_a_row_a_sample_are_taken() -> None:
    data = Data(train=GOOD, validation=GOOD, test=GOOD)
    assert check_data(data) is data


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
    ],
)
def test_what_is_no_tensor_of_rows_is_named_with_its_place_and_what_it_is(inputs: Any, said: list[str]) -> None:
    message = refusal(inputs)
    assert "train.inputs" in message
    assert [one for one in said if one not in message] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_none_of_rows() -> None:
    assert "nested" in refusal(torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)]))


def test_targets_are_looked_at_too() -> None:
    assert "train.targets" in refusal(GOOD.inputs, [1, 2, 3, 4])


WORKLOAD = """
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
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
    """A Dataset that is only gone through."""

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
    data = check_data(dataset_data(part), Sampled(collate=collated))
    ((inputs, targets),) = data.train.chunks(3)
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
        ([(1, 2, 3)] * 2, "a list of 3 as a batch", ""),
        ([], "no samples as train", ""),
        (None, "whose train is a NoneType", ""),
        ((torch.zeros(3), torch.zeros(3)), "whose train is a tuple", ""),
        (DataLoader(TensorDataset(torch.zeros(3))), "whose train is a DataLoader", "collate_fn"),
        (Endless(), "whose train is a Endless", "train_batches(batch_size, seed)"),
    ],
)
def test_what_is_no_part_is_named_with_what_to_do(train: Any, said: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        check_data(dataset_data(train))
    assert said in caught.value.message and hint in (caught.value.hint or "")


def test_nestings_differ_in_their_rows_by_name() -> None:
    inputs = {"ids": torch.zeros(4, 7), "mask": torch.zeros(3, 7)}
    assert "4 inputs['ids'], 3 inputs['mask'], 4 targets" in refusal(inputs)


@pytest.mark.parametrize("samples", [None, 0, 2.5, "9"])
def test_own_batches_without_a_number_of_samples_are_refused(samples: Any) -> None:
    with pytest.raises(WorkloadError, match=f"train_samples = {samples!r} must be an integer >= 1"):
        check_data(dataset_data(None), Sampled(train_batches=lambda size, seed: [], train_samples=samples))


def test_the_samples_of_an_epoch_of_own_batches_are_those_of_the_training_part_where_there_is_one() -> None:
    workload = Sampled(train_batches=lambda size, seed: [], train_samples=99)
    assert len(check_data(dataset_data(None), workload).train) == 99
    assert len(check_data(dataset_data(ROWS), workload).train) == 3


def test_a_part_made_of_samples_has_no_whole_tensors() -> None:
    with pytest.raises(WorkloadError, match="a part made of a list has no inputs as a whole") as caught:
        _ = Part.of(ROWS).inputs
    assert "part.chunks" in str(caught.value.hint)
