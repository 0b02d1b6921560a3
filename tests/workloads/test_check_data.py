"""What `load` may return as inputs and targets, and how anything else is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bssearch.errors import WorkloadError
from bssearch.executors.base import ExecutorSettings
from bssearch.executors.inline import InlineExecutor
from bssearch.workloads.base import Data, Part, check_data

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
