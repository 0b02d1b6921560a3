"""Ranks of a trial train as one process does."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from bssearch.executors.base import ExecutorSettings, Load
from bssearch.executors.rank_workers import RankProcesses
from bssearch.records import Configuration
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import resolve
from tests.training.toys import CPU, configuration, on_cpu

SHARED = """
import torch
from torch import nn
from torch.nn import functional

from bssearch import WeightedLoss
from bssearch.records import MetricInfo
from tests.training.toys import toy_data


class Network(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh())
        self.head = nn.Linear(16, 2)
        self.rare = nn.Linear(16, 2)  # without a gradient if no sample of a batch is rare
        self.unused = nn.Parameter(torch.ones(3))

    def logits(self, inputs):  # the loss calls no forward, so that a wrapper around the model would miss it
        hidden = self.body(inputs)
        is_rare = inputs[:, :1] > 2.0
        return self.head(hidden) + (is_rare * self.rare(hidden) if is_rare.any() else 0.0)


class Shared:
    metrics = {"accuracy": MetricInfo(low=0.0, high=1.0, chance=0.5), "loss": MetricInfo(low=0.0)}

    def load(self, device):
        return toy_data(dtype=torch.float64)

    def build_model(self, *, dropout, norm=False, double=False):
        model = Network(norm)
        return model.double() if double else model

    def loss(self, model, inputs, targets, *, label_smoothing, weighted=False):
        inputs = inputs.to(model.head.weight.dtype)
        if not weighted:
            return functional.cross_entropy(model.logits(inputs), targets, label_smoothing=label_smoothing)
        losses = functional.cross_entropy(
            model.logits(inputs), targets, label_smoothing=label_smoothing, reduction="none"
        )
        weights = 1 + (inputs[:, 0] > 0.5).to(losses.dtype) * 3
        return WeightedLoss(total=(losses * weights).sum(), weight=weights.sum())

    def evaluate(self, model, part):
        logits = model.logits(part.inputs.to(model.head.weight.dtype))
        correct = (logits.argmax(1) == part.targets).double().mean().item()
        return {"accuracy": correct, "loss": functional.cross_entropy(logits, part.targets).item()}
"""


def _fail(error: Exception) -> NoReturn:
    pytest.fail(str(error))


class Together:
    """Trainers of `Shared` on any number of ranks, which stay alive between them."""

    def __init__(self, folder: Path) -> None:
        (folder / "shared.py").write_text(SHARED)
        settings = ExecutorSettings(workload="shared.py:Shared", folder=folder, device="cpu")
        self.computation = on_cpu()
        self.workload = resolve("shared.py:Shared", {}, folder)
        self.data = self.workload.load(CPU)
        self.processes = RankProcesses(Load(settings=settings, slot=0), self.computation, _fail)

    @contextmanager
    def trainer(self, configuration: Configuration, size: int = 1, **settings: Any) -> Iterator[Trainer]:
        """Yield a trainer of a configuration whose micro-batches ``size`` ranks share."""
        shared = replace(configuration, world_size=size, micro_batch_size=configuration.micro_batch_size // size)
        with (
            nullcontext() if size == 1 else self.processes.together(size),
            Trainer(self.workload, shared, self.data.train, self.computation, 0) as trainer,
        ):
            yield trainer

    def after(self, steps: int, configuration: Configuration, size: int) -> tuple[dict[str, torch.Tensor], float]:
        """Return parameters and buffers after so many steps, and their mean loss."""
        with self.trainer(configuration, size) as trainer:
            for _ in range(steps):
                trainer.step()
            loss = trainer.take_mean_loss()
            trainer.evaluate(self.data.validation, "loss")
            assert loss is not None
            return {name: one.detach().clone() for name, one in trainer.model.state_dict().items()}, loss

    def close(self) -> None:
        self.processes.kill()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with closing(Together(tmp_path_factory.mktemp("together"))) as made:
        yield made


SGD = configuration(32, learning_rate=0.2, parameters={"momentum": 0.9, "clip_norm": 0.5})
ADAMW = configuration(32, learning_rate=0.01, optimizer="adamw", weight_decay=0.1, label_smoothing=0.1)
IN_FOUR: dict[str, Any] = {"micro_batch_size": 8, "accumulation_steps": 4}
WEIGHTED = {"loss.weighted": True, "clip_norm": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "alone",
    [
        SGD,
        replace(SGD, **IN_FOUR),
        ADAMW,
        replace(ADAMW, parameters=WEIGHTED),
        replace(ADAMW, **IN_FOUR, parameters=WEIGHTED),
    ],
    ids=["sgd", "sgd in micro-batches", "adamw", "weighted", "weighted in micro-batches"],
)
@pytest.mark.parametrize(("double", "within"), [(False, 1e-6), (True, 1e-12)])
def test_ranks_reach_the_parameters_of_one_process(
    together: Together, alone: Configuration, size: int, double: bool, within: float
) -> None:
    alone = replace(alone, parameters={**alone.parameters, "model.double": double})
    expected, expected_loss = together.after(50, alone, 1)
    found, loss = together.after(50, alone, size)
    assert loss == pytest.approx(expected_loss, rel=within)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=within)
