"""Warnings of a user's loop that distorts a comparison of batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from bssearch.commands.opening import program_of
from bssearch.executors.loops.measuring import DescribedLoop
from bssearch.executors.loops.own_loop import Trial
from bssearch.executors.loops.pitfalls import Averages, about_ranks, trained_modules
from bssearch.records import WorkloadDescription
from tests.executors.loops.loops import FakeLine, Started, asked, assign
from tests.factories import SPEC, make_spec, not_none
from tests.training.toys import configuration

DATA = TensorDataset(torch.randn(64, 4))


def warnings_of(train: Any, **changes: Any) -> list[str]:
    """Warnings of a trial of four steps of 16 samples in micro-batches of 8, trained by a function."""
    sizes = {"batch_size": 16, "micro_batch_size": 8, "accumulation_steps": 2, **changes}
    started = Started(asked(configuration=configuration(**sizes))).stop_at(4)
    train(started.trial)
    started.run.finish()
    return [one for one in started.line.outcome.warnings if not one.startswith("contended")]


def loop(trial: Trial, *, norm: bool = False, averages_at: str | None = None, shuffle: bool = True) -> None:
    """Train a small network; its average of weights follows each step or each micro-batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
    average = AveragedModel(model)
    state = {"model": model, "optimizer": optimizer}
    trial.state(**state, **({"average": average} if averages_at else {}))
    loader = DataLoader(DATA, batch_size=trial.micro_batch_size, shuffle=shuffle)
    for number, (rows,) in enumerate(trial.batches(loader, evaluate=lambda: {"accuracy": 0.5}), start=1):
        (model(rows).sum() / trial.accumulation_steps).backward()
        is_whole = number % trial.accumulation_steps == 0
        if is_whole:
            optimizer.step()
            optimizer.zero_grad()
        if averages_at == "micro-batch" or (averages_at == "step" and is_whole):
            average.update_parameters(model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"norm": True}, "batch normalisation"),
        ({"averages_at": "micro-batch"}, "average of trial.state changes between"),
        ({"shuffle": False}, "does not shuffle"),
        ({"averages_at": "step"}, None),
        ({}, None),
    ],
)
def test_a_loop_is_warned_of_what_distorts_a_comparison(settings: dict[str, Any], said: str | None) -> None:
    found = warnings_of(lambda trial: loop(trial, **settings))
    assert found == [] if said is None else any(said in one for one in found)


def test_batch_normalisation_of_ranks_is_to_be_synchronised() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    (alone,) = about_ranks([nn.Sequential(model, nn.SyncBatchNorm(4))])
    assert alone.startswith("1 batch normalisation layer")
    assert about_ranks([nn.SyncBatchNorm.convert_sync_batchnorm(model)]) == []  # type: ignore[no-untyped-call]
    assert about_ranks([nn.Linear(4, 4)]) == []


def test_only_trained_modules_count_and_each_once() -> None:
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner)
    assert trained_modules({"inner": inner, "outer": outer, "number": 3}) == [outer]
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    assert trained_modules({"model": outer, "average": AveragedModel(outer), "optimizer": optimizer}) == [outer]


class Kept:
    """An object with a state."""

    def __init__(self, values: Any, *, copies: bool = False) -> None:
        self.values, self._copies = values, copies

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone() if self._copies else self.values}


@pytest.mark.parametrize(
    ("kept", "change", "is_told"),
    [
        (Kept(torch.zeros(2)), lambda kept: kept.values.add_(1), True),
        (Kept(torch.zeros(2)), lambda kept: setattr(kept, "values", torch.ones(2)), True),
        (Kept(torch.zeros(2)), lambda kept: None, False),
        (Kept(torch.zeros(2), copies=True), lambda kept: None, False),
        (Kept(torch.zeros(2).to_sparse()), lambda kept: None, False),
        (nn.BatchNorm1d(4), lambda norm: norm(torch.randn(8, 4)), False),
        (Kept(torch.inference_mode()(torch.zeros)(2)), lambda kept: None, False),
    ],
)
def test_an_average_is_told_by_its_tensors_alone(kept: Any, change: Any, is_told: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    averages = Averages({"optimizer": optimizer, "kept": kept})
    averages.step_begins()
    change(kept)
    assert (averages.changed() is not None) is is_told


@pytest.mark.parametrize(("averages_at", "is_told"), [("micro-batch", True), ("step", False)])
def test_a_study_that_accumulates_is_told_of_a_wrong_average_before_it_trains(averages_at: str, is_told: bool) -> None:
    space = {**SPEC["space"], "max_micro_batch_size": 32}
    program = not_none(program_of(make_spec(space=space, workload="train.py", workload_settings={})))
    assert (program.default.batch_size, program.default.accumulation_steps) == (32, 2)
    line = FakeLine()
    loop(Trial(DescribedLoop(assign("describe", at=program.default), line)), averages_at=averages_at)
    (described,) = line.replies
    assert isinstance(described, WorkloadDescription)
    assert ("average of trial.state changes" in (described.notice or "")) == is_told


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_description_says_whether_the_first_step_has_the_whole_rate(factor: float) -> None:
    line = FakeLine()
    trial = Trial(DescribedLoop(assign("describe"), line))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate * factor)
    trial.state(model=model, optimizer=optimizer)
    loader = DataLoader(DATA, batch_size=trial.micro_batch_size, shuffle=True)
    for (rows,) in trial.batches(loader, evaluate=lambda: {"accuracy": 0.5}):
        model(rows).sum().backward()
        optimizer.step()
    (described,) = line.replies
    assert isinstance(described, WorkloadDescription)
    assert described.starts_at_peak == (factor == 1.0)
