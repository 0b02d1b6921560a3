"""What a loop of the user's own is told, and which mistakes it is told of."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bssearch.errors import UsageError
from bssearch.executors.loops.own_loop import READINGS_PER_MICRO_BATCH
from bssearch.executors.loops.passes import SeededSampler
from bssearch.training.batches import _epochs
from tests.executors.loops.loops import ROWS, Started, Training, asked, trained
from tests.training.toys import configuration


def test_evaluations_draw_random_numbers_that_the_training_does_not_miss() -> None:
    weights = []
    for every in (1, 3):
        for form in ("batches", "body"):
            started = Started(asked(eval_every_steps=every, target=0.006))
            weights.append(Training(started.trial, started.time, metric=lambda step: float(step >= 5)).go(form))
    (first, second), (third, fourth) = weights[:2], weights[2:]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(third, fourth, strict=True))


@pytest.mark.parametrize(("asks", "said"), [(True, r"no report\(\) after step 2"), (False, "no evaluation after")])
def test_going_on_without_a_report_or_without_asking_is_an_error(asks: bool, said: str) -> None:
    started = Started(asked())
    training = Training(started.trial, started.time)
    with pytest.raises(UsageError, match=said):
        for batch in started.trial.batches(training.loader):
            training.step(batch)
            assert not asks or started.trial.evaluation_due == (started.trial.steps == 1)
    started = Started(asked())
    assert started.trial.batch_size == 20
    started.trial.step()
    started.trial.step()
    with pytest.raises(UsageError, match="no evaluation after step 2"):
        started.trial.step()


def test_a_report_where_none_is_due_is_an_error() -> None:
    trial = Started(asked()).trial
    assert trial.batch_size == 20
    trial.step()
    with pytest.raises(UsageError, match="after 1 steps, but no evaluation is due"):
        trial.report(accuracy=0.5)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": 1.0}, "reports loss; the study's target is of 'accuracy'"),
        ({"accuracy": "high"}, "accuracy = 'high': not a number"),
        (0.9, "a float; it must return a mapping"),
        ({}, "reports nothing"),
    ],
)
def test_an_evaluation_reports_the_targets_metric_as_a_number(metrics: Any, message: str) -> None:
    started = Started(asked())
    training = Training(started.trial, started.time)
    with pytest.raises(UsageError, match=message):
        next(iter(started.trial.batches(training.loader, lambda: metrics)))


def test_further_metrics_are_let_be() -> None:
    started = Started(asked(target=0.5))
    training = Training(started.trial, started.time)
    for batch in started.trial.batches(training.loader, lambda: {"accuracy": 0.7, "f1": 0.1, "note": "good"}):
        training.step(batch)
    assert started.line.outcome.final_metric == 0.7


def test_a_loop_that_goes_round_without_a_step_is_an_error() -> None:
    trial = Started(asked()).trial
    assert trial.batch_size == 20
    with pytest.raises(UsageError, match=rf"read trial\.should_stop {READINGS_PER_MICRO_BATCH} times after step 0"):
        while not trial.should_stop:
            pass


def test_an_empty_loader_and_an_exhausted_one_are_errors() -> None:
    loaders: list[Any] = [[], iter([torch.zeros(20, 3)])]
    for loader in loaders:
        trial = Started(asked(eval_every_steps=100)).trial
        assert trial.batch_size == 20
        with pytest.raises(UsageError, match="the loader of batches"):
            for _ in trial.batches(loader, lambda: {"accuracy": 0.1}):
                pass


def test_one_loop_at_a_time_and_no_step_in_its_body() -> None:
    started = Started(asked())
    training = Training(started.trial, started.time)
    for mistake in (started.trial.step, lambda: next(iter(started.trial.batches(training.loader)))):
        with pytest.raises(UsageError, match=r"in the body of batches|inside the body of batches"):
            for _ in started.trial.batches(training.loader, training.evaluate):
                mistake()


@pytest.mark.parametrize(
    ("accumulation_steps", "asks", "said"),
    [
        (1, (), r"without reading trial\.batch_size"),
        (4, ("batch_size",), r"does not read trial\.micro_batch_size"),
        (4, ("micro_batch_size",), r"does not read trial\.accumulation_steps"),
        (4, ("batch_size", "micro_batch_size"), None),
    ],
)
def test_a_script_must_ask_for_its_batch_size_and_for_what_it_accumulates(
    accumulation_steps: int, asks: tuple[str, ...], said: str | None
) -> None:
    split = {"micro_batch_size": 20 // accumulation_steps, "accumulation_steps": accumulation_steps}
    trial = Started(asked(configuration=configuration(20, **split))).trial
    for name in asks:
        assert getattr(trial, name)
    with pytest.raises(UsageError, match=said) if said else nullcontext():
        trial.step()


@pytest.mark.parametrize(
    ("batch", "warns"),
    [
        ((torch.zeros(20, 3), torch.zeros(20)), False),
        ({"ids": torch.zeros(7, 20), "mask": torch.zeros(7, 20)}, False),
        ((torch.zeros(16, 3), torch.zeros(16)), True),
        (["no", "tensor"], False),
        ((torch.zeros(()), torch.zeros(20, 3)), False),
    ],
)
def test_a_loader_of_another_batch_size_is_warned_of(batch: Any, warns: bool) -> None:
    started = Started(asked(target=0.5, eval_every_steps=1))
    assert started.trial.micro_batch_size == 20
    for _ in started.trial.batches([batch, batch], lambda: {"accuracy": started.trial.steps}):
        started.time.pass_by(1.0)
    found = [one for one in started.line.outcome.warnings if "first batch has 16 samples" in one]
    assert len(found) == warns


@pytest.mark.parametrize("size", [1, 7, 20, 50])
@pytest.mark.parametrize("after", [0, 1, 2, 9])
def test_the_sampler_has_the_rows_of_bssearchs_own_loop(size: int, after: int) -> None:
    sampler = SeededSampler(ROWS, size, seed=3, after_steps=after)
    epochs = _epochs(ROWS, size, 3)
    whole = torch.cat([next(epochs) for _ in range(12)])[after * size :]
    drawn = [row for _ in range(3) for row in sampler]
    assert drawn == whole[: len(drawn)].tolist()
    assert len(sampler) == ROWS - ROWS % size
    assert list(SeededSampler(ROWS, size, seed=4)) != list(SeededSampler(ROWS, size, seed=3))


def test_the_sampler_refuses_a_batch_larger_than_the_data() -> None:
    with pytest.raises(UsageError, match="batch_size = 51 must be <= 50"):
        SeededSampler(ROWS, 51, seed=0)


def test_parameters_cannot_be_changed() -> None:
    started, _ = trained("batches", asked(target=0.001))
    with pytest.raises(TypeError):
        started.trial.parameters["depth"] = 3  # type: ignore[index]
