from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration
from bssearch.training.trainer import Trainer, warm_up
from tests.training.toys import CPU, Toy, configuration, on_cpu, toy_data


def trainer_of(trial_configuration: Configuration, workload: Any = None, seed: int = 3) -> Trainer:
    workload = workload or Toy()
    return Trainer(workload, trial_configuration, workload.load(CPU).train, on_cpu(), seed)


def weights_after(steps: int, trial_configuration: Configuration, workload: Any = None, seed: int = 3) -> torch.Tensor:
    trainer = trainer_of(trial_configuration, workload, seed)
    for _ in range(steps):
        trainer.step()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("accumulation_steps", [2, 4, 20])
def test_micro_batches_add_up_to_the_batch_exactly(
    optimizer: str, clip_norm: float | None, accumulation_steps: int
) -> None:
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "weight_decay": 0.01,
        "warmup_epochs": 1.0,
        "parameters": {"clip_norm": clip_norm},
    }
    toy = Toy(dtype=torch.float64)
    whole = weights_after(30, configuration(20, **settings), toy)
    parts = weights_after(
        30,
        configuration(
            20, **{**settings, "micro_batch_size": 20 // accumulation_steps, "accumulation_steps": accumulation_steps}
        ),
        toy,
    )
    assert (whole - parts).abs().max() < 1e-12
    assert (whole - weights_after(29, configuration(20, **settings), toy)).abs().max() > 1e-6


def test_a_step_is_what_a_handwritten_loop_does() -> None:
    seed, batch_size, data = 5, 30, toy_data()
    torch.manual_seed(seed)
    model = Toy().build_model(dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        order = torch.randperm(100, generator=generator)
        for start in (0, 30, 60):
            batch = order[start : start + batch_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.train.inputs[batch]), data.train.targets[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(weights_after(6, configuration(batch_size, dropout=0.2), seed=seed), expected)


def test_the_seed_fixes_everything_and_another_seed_changes_it() -> None:
    trial_configuration = configuration(dropout=0.3)
    first = weights_after(7, trial_configuration)
    assert torch.equal(first, weights_after(7, trial_configuration))
    assert not torch.equal(first, weights_after(7, trial_configuration, seed=4))


def test_the_order_of_the_data_does_not_hang_on_dropout() -> None:
    def batches_seen(dropout: float) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        class Watched(Toy):
            def loss(
                self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
            ) -> torch.Tensor:
                seen.append(inputs)
                return super().loss(model, inputs, targets, label_smoothing=label_smoothing)

        weights_after(12, configuration(dropout=dropout), Watched())
        return seen

    without, with_dropout = batches_seen(0.0), batches_seen(0.5)
    assert all(torch.equal(one, other) for one, other in zip(without, with_dropout, strict=True))
    assert torch.equal(torch.cat(without[:5]).sort(0).values, toy_data().train.inputs.sort(0).values)
    assert not torch.equal(torch.cat(without[:5]), torch.cat(without[5:10]))


def test_the_learning_rate_follows_the_schedule_in_every_group() -> None:
    trainer = trainer_of(configuration(20, warmup_epochs=0.6, weight_decay=0.1, learning_rate=0.4))
    seen: list[Sequence[float]] = []
    for _ in range(5):
        trainer.step()
        seen.append([group["lr"] for group in trainer.optimizer.param_groups])
        assert trainer.learning_rate == pytest.approx(seen[-1][0])
    assert seen == [pytest.approx([lr, lr]) for lr in (0.1, 0.2, 0.3, 0.4, 0.4)]


def test_the_mean_loss_is_that_since_it_was_last_taken() -> None:
    trainer = trainer_of(configuration(learning_rate=0.0, batch_size=25, micro_batch_size=5, accumulation_steps=5))
    assert trainer.take_mean_loss() is None
    for _ in range(4):
        trainer.step()
    expected = trainer.evaluate(toy_data().train, "loss")
    assert trainer.take_mean_loss() == pytest.approx(expected, rel=1e-5)
    assert trainer.take_mean_loss() is None


def test_label_smoothing_and_clipping_reach_the_step() -> None:
    plain = weights_after(3, configuration())
    assert not torch.equal(plain, weights_after(3, configuration(label_smoothing=0.2)))
    assert not torch.equal(plain, weights_after(3, configuration(parameters={"clip_norm": 0.01})))


def test_an_incomplete_last_batch_is_dropped() -> None:
    assert [trainer_of(configuration(size)).dropped_samples for size in (20, 30, 100)] == [0, 10, 0]


def test_a_batch_larger_than_the_training_part_is_refused_with_both_sizes() -> None:
    with pytest.raises(WorkloadError, match="batch_size = 128 must be <= 100, the number of training samples"):
        trainer_of(configuration(128))
    with pytest.raises(WorkloadError, match="128 must be <= 100"):
        warm_up(Toy(), configuration(128), toy_data(), on_cpu(), "accuracy", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 6, "accumulation_steps": 3}, "20 must be micro_batch_size × accumulation_steps = 6 × 3"),
        ({"world_size": 2}, "world_size = 2 must be 1"),
        ({"parameters": {"clip_norm": 0.0}}, r"clip_norm = 0\.0 must be a number > 0"),
        ({"parameters": {"clip_norm": "tight"}}, "clip_norm = 'tight' must be a number > 0"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainer_of(configuration(20, **changes))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (0.5, "returned a float; it must be a scalar tensor"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\); it must be a scalar"),
        (torch.tensor(0.5), "without a gradient; it must depend on the model"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss: object, message: str) -> None:
    class Wrong(Toy):
        def loss(self, *_: object, **__: object) -> Any:
            return loss

    with pytest.raises(WorkloadError, match=message):
        trainer_of(configuration(), Wrong()).step()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": 1.0, "f1": 0.5}, "no metric 'accuracy'; it offers f1, loss"),
        ({}, "no metric 'accuracy'; it offers nothing"),
        ({"accuracy": "high"}, "returned 'high' as 'accuracy': not a number"),
        (0.5, "returned a float; it must be a mapping"),
    ],
)
def test_an_evaluation_without_the_metric_is_refused(returned: Any, message: str) -> None:
    trainer = trainer_of(configuration(), Toy(on_evaluate=lambda metrics: returned))
    with pytest.raises(WorkloadError, match=message):
        trainer.evaluate(toy_data().validation, "accuracy")
