"""A loop that ignores what the study searches is told so, by the end of its first step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bssearch.errors import UsageError
from bssearch.executors.loops.measuring import DescribedLoop
from bssearch.executors.loops.own_loop import LoopTrial
from bssearch.executors.loops.trial_run import TrialRun
from bssearch.records import ParameterValue, WorkloadDescription
from bssearch.training.trainer import seed_everything
from tests.executors.loops.loops import FakeLine, Started, asked, assign

PARAMETERS: dict[str, ParameterValue] = {"weight_decay": 0.1, "depth": 3, "device_name": "x"}
SEARCHED = ("batch_size", "learning_rate", "weight_decay", "depth")


def loop(reads: Callable[[LoopTrial], object]) -> tuple[Started, LoopTrial]:
    """Return a trial of a study that searches more than the loop may read, after its first steps."""
    started = Started(asked())
    run = TrialRun(started.request, assign(started.request, given=PARAMETERS), started.line)
    trial = LoopTrial(run, searched=SEARCHED)
    seed_everything(trial.seed)
    for _ in trial.batches(range(trial.batch_size), evaluate=lambda: {"accuracy": trial.steps / 3}):
        reads(trial)
    return started, trial


def test_a_loop_that_never_asks_for_a_learning_rate_that_is_searched_is_refused() -> None:
    with pytest.raises(UsageError, match=r"searches learning_rate, .* trial\.learning_rate"):
        loop(lambda trial: dict(trial.parameters))


@pytest.mark.parametrize(
    ("reads", "ignored"),
    [
        (lambda trial: (trial.learning_rate, trial.parameters["depth"]), ["weight_decay"]),
        (lambda trial: (trial.learning_rate, trial.parameters.get("nothing")), ["weight_decay", "depth"]),
        (lambda trial: (trial.learning_rate, "depth" in trial.parameters), ["weight_decay", "depth"]),
        (lambda trial: (trial.learning_rate, dict(trial.parameters)), []),
        (lambda trial: (trial.learning_rate, list(trial.parameters.items())), []),
    ],
)
def test_a_loop_is_warned_of_each_other_parameter_that_it_did_not_ask_for(
    reads: Callable[[LoopTrial], object], ignored: list[str]
) -> None:
    started, trial = loop(reads)
    assert trial.steps > 1
    warnings = started.line.outcome.warnings
    assert [name for name in PARAMETERS if any(f"searches {name}," in one for one in warnings)] == ignored
    assert len([one for one in warnings if "searches" in one]) == len(ignored)


@pytest.mark.parametrize(("searched", "told"), [((), None), (("depth",), "the study searches depth, and")])
def test_what_a_loop_ignores_is_told_with_its_description(searched: tuple[str, ...], told: str | None) -> None:
    line = FakeLine()
    described = DescribedLoop(assign("describe", given=PARAMETERS), line)
    trial = LoopTrial(described, searched=searched)
    for _ in trial.batches([[0] * trial.batch_size] * 2, evaluate=lambda: {"accuracy": 0.5}):
        pass
    assert isinstance(line.replies[0], WorkloadDescription)
    notice = line.replies[0].notice
    assert notice is None if told is None else (notice is not None and told in notice)


@pytest.mark.parametrize(("rate", "is_told"), [(0.5, True), (None, False)])
def test_an_optimizer_that_does_not_have_the_trials_learning_rate_is_told(rate: float | None, is_told: bool) -> None:
    started = Started(asked())
    run = TrialRun(started.request, assign(started.request), started.line)
    trial = LoopTrial(run, searched=SEARCHED)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate or trial.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    trial.state(model=model, optimizer=optimizer, schedule=schedule)
    assert trial.learning_rate
    for _ in trial.batches(range(trial.batch_size), evaluate=lambda: {"accuracy": trial.steps / 3}):
        optimizer.step()
    assert any("has the trial's learning rate" in one for one in started.line.outcome.warnings) is is_told
