"""A workload's own optimizers, schedule and training step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import UsageError, WorkloadError
from bssearch.records import Configuration, TrialState
from bssearch.spec import TrainingSpec
from bssearch.training.trainer import Trainer, own_training_step
from bssearch.workloads.base import TrainingStep, WeightedLoss, resolve
from tests.training.toys import Run, Toy, configuration, on_cpu, request, toy_data

Build = Callable[[nn.Module, Configuration], Any]
DATA = toy_data()


def weights_after(
    workload: Any, split: Configuration, steps: int = 7, *, scaled: bool = False, **settings: Any
) -> torch.Tensor:
    """Return the weights after some steps; ``scaled`` with the loss scaling of fp16."""
    computation: Any = on_cpu(**settings)
    if scaled:
        computation.new_scaler = lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Trainer(workload, split, DATA.train, computation, seed=3) as trainer:
        for _ in range(steps):
            trainer.step()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def sgd(model: nn.Module, configuration: Configuration) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=configuration.learning_rate, momentum=0.9, nesterov=True)


WARMED = configuration(20, warmup_epochs=1.0, parameters={"clip_norm": 0.5})


def test_a_workloads_optimizer_takes_the_steps_of_the_same_optimizer_of_bssearch() -> None:
    assert torch.equal(weights_after(Toy(build_optimizer=sgd), WARMED), weights_after(Toy(), WARMED))


def test_an_optimizer_may_clear_gradients_its_own_way() -> None:
    cleared = list[bool]()

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            cleared.append(set_to_none)

    weights_after(Toy(build_optimizer=lambda model, configuration: Own(model.parameters(), lr=0.1)), WARMED)
    assert cleared == [True] * 7


def test_groups_keep_their_ratio_to_the_learning_rate_of_the_schedule() -> None:
    def two_rates(model: Any, configuration: Configuration) -> torch.optim.Optimizer:
        rate = configuration.learning_rate
        groups = [{"params": model[0].parameters(), "lr": rate / 10}, {"params": model[3].parameters()}]
        return torch.optim.SGD(groups, lr=rate)

    with Trainer(Toy(build_optimizer=two_rates), WARMED, DATA.train, on_cpu(), seed=3) as trainer:
        for step in range(7):
            trainer.step()
            low, high = (group["lr"] for group in trainer.optimizers[0].param_groups)
            factor = min(1.0, (step + 1) / 6)
            assert (low, high) == (pytest.approx(0.002 * factor), pytest.approx(0.02 * factor))
            assert trainer.learning_rate == pytest.approx(high)


def test_several_optimizers_step_together_and_are_clipped_as_one() -> None:
    def halves(model: Any, configuration: Configuration) -> Any:
        return [sgd(model[0], configuration), sgd(model[3], configuration)]

    assert torch.equal(weights_after(Toy(build_optimizer=halves), WARMED), weights_after(Toy(), WARMED))


def test_a_trial_warns_of_an_optimizer_that_does_not_use_the_learning_rate() -> None:
    def fixed(model: nn.Module, configuration: Configuration) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def warns(build: Build) -> bool:
        warnings = Run(request(), Toy(build_optimizer=build)).outcome.warnings
        return any("ignores configuration.learning_rate: if doubled, the rates stay [0.5]" in w for w in warnings)

    assert (warns(fixed), warns(sgd)) == (True, False)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda model, _: model, "returned a Sequential; return a torch.optim.Optimizer"),
        (lambda model, _: None, "returned a NoneType"),
        (lambda model, configuration: [sgd(model, configuration), 1], r"\[1\] is a int"),
        (lambda model, _: {}, r"returned a dict \(\)"),
        (
            lambda model, configuration: sgd(nn.Linear(2, 2), configuration),
            "SGD over parameters outside the model",
        ),
    ],
)
def test_a_wrong_optimizer_is_named(build: Build, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        Trainer(Toy(build_optimizer=build), WARMED, DATA.train, on_cpu(), seed=3)


def test_a_workloads_schedule_replaces_warmup_and_schedule_until_the_horizon_ends_the_trial() -> None:
    asked: list[Any] = []

    def build(configuration: Configuration, steps_per_epoch: int) -> Callable[[int], float]:
        asked.append((configuration.parameters["horizon_samples"], steps_per_epoch))
        return lambda step: 1 / (1 + step)

    split = configuration(20, warmup_epochs=2.0, parameters={"horizon_samples": 300})
    run = Run(request(split, target=1.0, eval_every_steps=4), Toy(build_schedule=build))
    assert set(asked) == {(300, 5)}
    assert (run.outcome.state, run.outcome.steps) == (TrialState.EXHAUSTED, 15)
    rates = [one.learning_rate for one in run.observations]
    assert rates == pytest.approx([0.02 / (1 + step) for step in (0, 3, 7, 11, 14)])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda *_: 0.5, "build_schedule\\(\\) returned a float"),
        (lambda *_: lambda step: None, "gave None at step 0"),
        (lambda *_: lambda step: torch.ones(2), "gave tensor.* at step 0"),
        (lambda *_: lambda step: float("nan"), "gave nan at step 0"),
        (lambda *_: lambda step: -1.0, "gave -1.0 at step 0; expected a number >= 0"),
    ],
)
def test_a_wrong_schedule_is_named(build: Any, said: str) -> None:
    with (
        pytest.raises(WorkloadError, match=said),
        Trainer(Toy(build_schedule=build), WARMED, DATA.train, on_cpu(), seed=3) as trainer,
    ):
        trainer.step()


class Stepping(Toy):
    """Takes the step of bssearch by itself."""

    def training_step(self, step: TrainingStep) -> Any:
        total = torch.zeros(())
        for inputs, targets in step.micro_batches:
            loss = functional.cross_entropy(step.model(inputs), targets) / step.accumulation_steps
            step.backward(loss)
            total += loss.detach()
        step.update(step.optimizers)
        return total


ACCUMULATED = configuration(
    30, micro_batch_size=10, accumulation_steps=3, warmup_epochs=1.0, parameters={"clip_norm": 0.5, "ema_decay": 0.9}
)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"scaled": True}])
def test_a_training_step_equal_to_bssearchs_trains_the_same_weights(settings: dict[str, Any]) -> None:
    own, usual = (weights_after(toy, ACCUMULATED, **settings) for toy in (Stepping(), Toy()))
    assert torch.allclose(own, usual, rtol=0, atol=1e-7)  # the norm of the gradients is summed in another order


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda step: next(step.micro_batches)[0].sum(), "took 1 of 3 micro-batches"),
        (lambda step: list(step.micro_batches) and None, "returned a NoneType; expected the loss to log"),
        (lambda step: next(zip(*step.micro_batches, strict=True))[0], "a Tensor of shape \\(10, 6\\)"),
    ],
)
def test_a_wrong_training_step_is_named(step: Any, said: str) -> None:
    with (
        pytest.raises(WorkloadError, match=said),
        Trainer(Toy(training_step=step), ACCUMULATED, DATA.train, on_cpu(), seed=3) as trainer,
    ):
        trainer.step()


def test_a_forward_pass_uses_weights_changed_within_the_training_step() -> None:
    outputs: list[torch.Tensor] = []

    class Twice(Toy):
        def training_step(self, step: TrainingStep) -> Any:
            ((inputs, targets),) = step.micro_batches
            for _ in range(2):
                scores = step.model(inputs)
                outputs.append(scores.detach())
                loss = functional.cross_entropy(scores, targets)
                step.backward(loss)
                step.update(step.optimizers)
            return loss

    weights_after(Twice(), configuration(20, learning_rate=0.5), 1, precision="bf16")
    assert outputs[0].dtype is torch.bfloat16
    assert not torch.equal(*outputs)


def test_a_first_loss_that_is_not_finite_ends_the_trial() -> None:
    toy = Toy(training_step=lambda step: WeightedLoss(torch.tensor(float(len(list(step.micro_batches)))), 0.0))
    outcome = Run(request(ACCUMULATED), toy).outcome
    assert outcome.state is TrialState.DIVERGED and "the loss of the first step is inf" in outcome.reason


def test_a_training_step_is_refused_with_cuda_graphs() -> None:
    replaying: Any = SimpleNamespace(replays_graphs=True, settings=TrainingSpec(compile="max-autotune"))
    with pytest.raises(UsageError, match="'max-autotune' must be 'default' or 'none'"):
        own_training_step(Stepping(), replaying)


WITHOUT_LOSS = """
class Task:
    metrics = {}
    def load(self, device): ...
    def build_model(self, *, dropout): ...
    def evaluate(self, model, part): ...
    def training_step(self, step): ...

class Neither(Task):
    training_step = None
"""


def test_a_workload_with_a_training_step_needs_no_loss(tmp_path: Any) -> None:
    (tmp_path / "task.py").write_text(WITHOUT_LOSS)
    assert resolve("task.py:Task", {}, tmp_path)
    with pytest.raises(WorkloadError, match="lacks loss"):
        resolve("task.py:Neither", {}, tmp_path)
