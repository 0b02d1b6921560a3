"""Which searched parameters `check` finds to change nothing, of real workloads and their few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bssearch.commands.check import LONGEST_S, check
from bssearch.records import StepTime, StepTimeRequest
from bssearch.spec import StudySpec
from tests.factories import SPEC
from tests.search.law import LawExecutor

WORKLOAD = """
import torch
from torch import nn

import bssearch


class Task:
    metrics = {"accuracy": bssearch.MetricInfo(low=0, high=1, chance=0.5)}

    def __init__(self, uses):
        self.uses = uses

    def load(self, device):
        inputs = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
        targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
        cut = lambda a, b: bssearch.Part(inputs[a:b], targets[a:b])
        return bssearch.Data(train=cut(0, 200), validation=cut(200, 300), test=cut(300, 400))

    def build_model(self, *, dropout):
        layer = nn.Dropout(dropout if "dropout" in self.uses else 0.2)
        return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), layer, nn.Linear(8, 2))

    def loss(self, model, inputs, targets, *, label_smoothing):
        smoothing = label_smoothing if "label_smoothing" in self.uses else 0.0
        return nn.functional.cross_entropy(model(inputs), targets, label_smoothing=smoothing)

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).float().mean().item()}
"""


def findings(folder: Path, uses: list[str], space: dict[str, Any]) -> list[tuple[str, str]]:
    (folder / "task.py").write_text(WORKLOAD)
    spec = StudySpec.model_validate(
        {
            **SPEC,
            "workload": "task.py:Task",
            "workload_settings": {"uses": uses},
            "space": {"batch_size": [32], "learning_rate": [0.05, 0.1], **space},
            "default": {"batch_size": 32, "learning_rate": 0.1, "dropout": 0.1, "label_smoothing": 0.0},
            "budget": {"trials": 5, "trial_train_seconds": 0.3},
            "executor": {"name": "inline", "device": "cpu"},
        }
    )
    return [(one.code, one.message) for one in check(spec, folder=folder).findings]


BOTH = {"dropout": {"low": 0.0, "high": 0.5}, "label_smoothing": [0.0, 0.1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uses", "space", "ignored"),
    [
        (["dropout", "label_smoothing"], BOTH, []),
        (["dropout"], BOTH, ["label_smoothing"]),
        (["label_smoothing"], BOTH, ["dropout"]),
        ([], BOTH, ["dropout", "label_smoothing"]),
        ([], {"dropout": 0.1}, []),
    ],
)
def test_a_searched_parameter_that_the_workload_does_not_use_is_named_and_no_other(
    tmp_path: Path, uses: list[str], space: dict[str, Any], ignored: list[str]
) -> None:
    found = [message for code, message in findings(tmp_path, uses, space) if code == "parameter_ignored"]
    assert [message.split()[0] for message in found] == ignored


def test_where_a_few_steps_take_long_they_are_not_made_and_that_is_said() -> None:
    class Slow(LawExecutor):
        def measure_step_time(self, request: StepTimeRequest) -> StepTime:
            size = request.configuration.batch_size
            return StepTime(
                batch_size=size,
                micro_batch_size=size,
                step_seconds=LONGEST_S / 10,
                evaluation_seconds=0.1,
                steps_timed=5,
                peak_memory_bytes=None,
            )

    executor = Slow()
    spec = StudySpec.model_validate({**SPEC, "budget": {"trials": 20, "trial_train_seconds": 1000.0}})
    codes = [one.code for one in check(spec, make_executor=lambda *_: executor).findings]
    assert "parameters_not_tried" in codes
    assert len(executor.requests) == 1, "the short trial alone"
