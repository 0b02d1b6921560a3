"""Common behaviour of the Trainers of Lightning and Hugging Face as trials."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bssearch import Trial, UsageError
from bssearch.executors.loops.transformers import training_arguments
from bssearch.records import TrialState
from tests.executors.loops import test_lightning
from tests.executors.loops.loops import Started, asked
from tests.executors.loops.test_growing import grows
from tests.executors.loops.trainers import trainer_of
from tests.training.toys import configuration

pytestmark = pytest.mark.filterwarnings("ignore")
Prepare = Callable[[Trial], object]


def with_lightning(found: Started, folder: Path, prepare: Prepare) -> None:
    found.trial.given = test_lightning.GIVEN
    prepare(found.trial)
    test_lightning.fit(found.trial, found.time)


def with_transformers(found: Started, folder: Path, prepare: Prepare) -> None:
    arguments = training_arguments(found.trial, output_dir=str(folder), remove_unused_columns=False)
    prepare(found.trial)
    metric = lambda _: {"accuracy": found.trial.steps / 1000}  # noqa: E731
    trainer_of(found.trial, folder, arguments=arguments, compute_metrics=metric).train()


TWO_RANKS = configuration(20, micro_batch_size=10, world_size=2)

every_fit = pytest.mark.parametrize("fit", [with_lightning, with_transformers])


@every_fit
@pytest.mark.parametrize(("target", "steps"), [(0.0035, 4), (0.0, 0)])
def test_a_target_that_is_reached_ends_the_fit_at_its_evaluation(
    fit: Any, target: float, steps: int, tmp_path: Path
) -> None:
    found = Started(asked(target=target))
    fit(found, tmp_path, lambda trial: None)
    assert (found.line.outcome.state, found.line.outcome.steps) == (TrialState.REACHED, steps)


@every_fit
@pytest.mark.parametrize(
    ("changes", "prepare", "message"),
    [
        (
            {},
            lambda trial: trial.state(model=torch.nn.Linear(1, 1)),
            r"the script calls trial\.state\(\.\.\.\), but a Trainer",
        ),
        ({}, lambda trial: setattr(trial, "device", "cuda:1"), "trains on cpu, but the trial runs on cuda:1"),
        ({"configuration": grows()}, lambda trial: None, "Trainer cannot grow the batch"),
        ({"configuration": TWO_RANKS}, lambda trial: None, "world size is 1, but the trial needs 2"),
        ({"configuration": TWO_RANKS}, lambda trial: trial.sampler(range(40)), "shares them again"),
    ],
    ids=["a state beside it", "another device", "a batch that grows", "other ranks", "a second share"],
)
def test_what_a_trainer_cannot_do_is_refused_before_it_trains(
    fit: Any, changes: dict[str, Any], prepare: Prepare, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        fit(Started(asked(**changes)), tmp_path, prepare)
    assert caught.value.hint
