"""A workload, and a loop of the user's own that obeys seed, order and cadence, take the same steps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bssearch.executors.base import ExecutorSettings, Load, Program
from bssearch.executors.loaded import LoadedWorkload
from bssearch.executors.programs.script import LoadedScript
from bssearch.records import Configuration, Observation, Target, TrialState
from bssearch.spec.parts import TrainingSpec
from tests.executors.test_script import single_threaded
from tests.factories import make_request
from tests.training.toys import run_trial

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import bssearch
from bssearch.workloads.digits import Digits

trial = bssearch.current_trial(batch_size=32, learning_rate=0.05)
digits = Digits()
data = digits.load(torch.device("cpu"))
model = digits.build_model(dropout=0.2)
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate, momentum=0.9, nesterov=True)
train = TensorDataset(data.train.inputs, data.train.targets)
loader = DataLoader(
    train, batch_size=trial.micro_batch_size, sampler=trial.sampler(train), generator=torch.Generator()
)


def evaluate():
    model.eval()
    with torch.no_grad():
        metrics = digits.evaluate(model, data.validation)
    model.train()
    return metrics


optimizer.zero_grad()
for number, (inputs, targets) in enumerate(trial.batches(loader, evaluate), start=1):
    loss = digits.loss(model, inputs, targets, label_smoothing=0.0) / trial.accumulation_steps
    loss.backward()
    if number % trial.accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "seed"), [(64, 5), (32, 6)])
def test_digits_as_a_workload_and_as_a_loop_take_identical_steps_to_the_target(
    micro: int, seed: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    at = Configuration(
        batch_size=64, micro_batch_size=micro, accumulation_steps=64 // micro, learning_rate=0.05, dropout=0.2
    )
    request = make_request(
        number=1,
        configuration=at,
        seed=seed,
        target=Target(metric="accuracy", value=0.95),
        train_seconds_limit=60.0,
        limit_state=TrialState.EXHAUSTED,
        eval_every_steps=7,
    )
    training = TrainingSpec(measure_noise=False)
    there: list[Observation] = []
    here: list[Observation] = []
    workload = LoadedWorkload(load(tmp_path, "digits", training=training))
    with_workload = run_trial(workload.trial(request, stop=lambda: None), there.append)
    program = Program(default=at, metric="accuracy", script="train.py")
    with (
        single_threaded(),
        closing(LoadedScript(load(tmp_path, "train.py", program=program))) as script,
    ):
        with_loop = script.run(request, here.append, stop=lambda: None)
    assert with_loop.state is with_workload.state is TrialState.REACHED
    assert with_loop.steps_to_target == with_workload.steps_to_target
    assert curve(here) == curve(there) and len(here) > 3


def load(folder: Path, workload: str, **given: Any) -> Load:
    """Return what loads a workload on the CPU."""
    return Load(settings=ExecutorSettings(workload=workload, folder=folder, device="cpu", **given), slot=0)


def curve(observations: list[Observation]) -> list[tuple[int, float]]:
    return [(one.step, one.metric) for one in observations]
