import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from bssearch import Configuration, Data, Part, UsageError, WorkloadError
from bssearch.training.computation import Computation
from bssearch.training.gradient_noise import GradientPasses
from bssearch.training.loop import describe_model
from bssearch.training.schedule import RateSchedule, horizon_steps, schedule_of, warmup_steps
from bssearch.training.trainer import AveragedWeights, Trainer, seed_everything, warm_up
from bssearch.workloads.base import WeightedLoss, check_takes
from tests.training.toys import CPU, Toy, configuration, on_cpu, toy_data


def trainer_of(trial_configuration: Configuration, workload: Any = None, seed: int = 3) -> Trainer:
    workload = workload or Toy()
    return Trainer(workload, trial_configuration, workload.load(CPU).train, on_cpu(), seed)


def weights_after(steps: int, trial_configuration: Configuration, workload: Any = None, seed: int = 3) -> torch.Tensor:
    trainer = trainer_of(trial_configuration, workload, seed)
    for _ in range(steps):
        trainer.step()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


class Weighted(Toy):
    """Each sample has a weight from 0 to 3, which follows from its first input."""

    def __init__(self, weight_dtype: torch.dtype | None = torch.float64, **members: Any) -> None:
        super().__init__(dtype=torch.float64, **members)
        self.weight_dtype = weight_dtype

    def weights(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs[:, 0].abs() * 2).floor().clamp(max=3)

    def loss(  # type: ignore[override]
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> WeightedLoss:
        weights = self.weights(inputs)
        losses = nn.functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing, reduction="none")
        weight = weights.sum()
        return WeightedLoss(
            (losses * weights).sum(), weight.item() if self.weight_dtype is None else weight.to(self.weight_dtype)
        )


@pytest.mark.parametrize(
    ("toy", "optimizer", "clip_norm", "accumulation_steps"),
    [
        (Toy(dtype=torch.float64), "sgd", None, 20),
        (Toy(dtype=torch.float64), "adamw", 0.05, 4),
        (Weighted(), "sgd", 0.05, 2),
        (Weighted(), "adamw", None, 20),
    ],
    ids=["mean-sgd", "mean-adamw-clipped", "weighted-sgd-clipped", "weighted-adamw"],
)
def test_micro_batches_add_up_to_the_batch_exactly(
    toy: Toy, optimizer: str, clip_norm: float | None, accumulation_steps: int
) -> None:
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "weight_decay": 0.01,
        "warmup_epochs": 1.0,
        "parameters": {"clip_norm": clip_norm},
    }
    whole = weights_after(30, configuration(20, **settings), toy)
    split = {"micro_batch_size": 20 // accumulation_steps, "accumulation_steps": accumulation_steps}
    assert (whole - weights_after(30, configuration(20, **settings, **split), toy)).abs().max() < 1e-12
    assert (whole - weights_after(29, configuration(20, **settings), toy)).abs().max() > 1e-6


@pytest.mark.parametrize("weight_dtype", [torch.int64, torch.float32, None])
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_a_weighted_step_is_that_of_the_mean_over_the_weights(
    weight_dtype: torch.dtype | None, accumulation_steps: int
) -> None:
    toy = Weighted(weight_dtype)
    divided = configuration(20, micro_batch_size=20 // accumulation_steps, accumulation_steps=accumulation_steps)
    trainer = trainer_of(divided, toy)
    torch.manual_seed(3)
    model = toy.build_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    train = toy_data(dtype=torch.float64).train
    totals, counts = 0.0, 0.0
    for batch in torch.randperm(100, generator=torch.Generator().manual_seed(3)).split(20):  # type: ignore[no-untyped-call]
        trainer.step()
        whole = toy.loss(model, train.inputs[batch], train.targets[batch], label_smoothing=0.0)
        optimizer.zero_grad()
        (whole.total / whole.weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        totals, counts = totals + whole.total.item(), counts + float(whole.weight)
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert (expected - nn.utils.parameters_to_vector(trainer.model.parameters())).abs().max() < 1e-12
    assert trainer.take_mean_loss() == pytest.approx(totals / counts, rel=1e-12)


@pytest.mark.parametrize(("accumulation_steps", "weight_dtype"), [(1, torch.int64), (2, None)])
def test_a_batch_of_weight_zero_has_a_loss_that_is_not_a_number(
    weight_dtype: torch.dtype | None, accumulation_steps: int
) -> None:
    empty = Weighted(weight_dtype, weights=lambda inputs: torch.zeros(len(inputs)))
    divided = configuration(20, micro_batch_size=20 // accumulation_steps, accumulation_steps=accumulation_steps)
    warm_up(empty, divided, toy_data(dtype=torch.float64), on_cpu(), "accuracy", 0)
    trainer = trainer_of(divided, empty)
    trainer.step()
    problem = trainer.first_step_problem()
    assert problem is not None and problem.startswith("the loss of the first step is nan: batch size 20")


class Ragged(Toy):
    """Sequences padded with zeros, cut to the longest in their batch; a batch of padding alone is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[torch.Tensor] = []

    def loss(self, model: Any, inputs: torch.Tensor, targets: torch.Tensor, **settings: Any) -> Any:
        lengths = (inputs != 0).sum(1)
        assert int(lengths.max()) > 0, "nothing but padding"
        self.batches.append(inputs.clone())
        shortened = inputs[:, : int(lengths.max())]
        return super().loss(model, nn.functional.pad(shortened, (0, 6 - shortened.shape[1])), targets, **settings)


def sorted_by_length(lengths: list[int]) -> Data:
    """Return the toy's data with training rows cut to the given lengths, the shortest first."""
    data = toy_data(len(lengths))
    kept = torch.arange(6)[None, :] < torch.tensor(sorted(lengths))[:, None]
    return replace(data, train=Part(data.train.inputs * kept, data.train.targets))


@pytest.mark.parametrize("placed", ["device", "host"])
@pytest.mark.parametrize(("size", "micro"), [(20, 20), (20, 5), (100, 50)])
def test_the_warm_up_meets_the_batches_of_the_trials_own_first_steps(placed: str, size: int, micro: int) -> None:
    data = sorted_by_length([0] * 20 + [1] * 30 + [6] * 50)
    divided = configuration(size, micro_batch_size=micro, accumulation_steps=size // micro)
    computation = on_cpu(data=placed, loader_workers=0)
    warmed, trained = Ragged(), Ragged()
    warm_up(warmed, divided, data, computation, "accuracy", seed=3)
    with Trainer(trained, divided, data.train, computation, seed=3) as trainer:
        trainer.step()
        trainer.step()
    assert len(warmed.batches) == len(trained.batches) == 2 * size // micro
    assert all(map(torch.equal, warmed.batches, trained.batches))


def test_a_loss_that_is_weighted_only_at_times_is_refused() -> None:
    class Moody(Weighted):
        def loss(self, *arguments: Any, **settings: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            loss = super().loss(*arguments, **settings)
            return loss if self.calls % 2 else loss.total

    trainer = trainer_of(configuration(20, micro_batch_size=10, accumulation_steps=2), Moody())
    with pytest.raises(WorkloadError, match="WeightedLoss for only some micro-batches"):
        trainer.step()


class Scaled(Computation):
    """Scales the loss as in fp16, by a factor that the test chooses."""

    def __init__(self, scale: float) -> None:
        super().__init__(CPU)
        self.scale = scale

    def new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=self.scale)


@pytest.mark.parametrize(("optimizer", "clip_norm"), [("sgd", None), ("sgd", 0.05), ("muon", 0.05)])
def test_scaling_the_loss_changes_only_the_skipped_steps(optimizer: str, clip_norm: float | None) -> None:
    divided = configuration(
        20,
        micro_batch_size=10,
        accumulation_steps=2,
        warmup_epochs=1.0,
        optimizer=optimizer,
        parameters={"clip_norm": clip_norm},
    )
    train = toy_data().train
    plain = Trainer(Toy(), divided, train, on_cpu(), seed=3)
    scaled = Trainer(Toy(), divided, train, Scaled(2.0**10), seed=3)
    for _ in range(8):
        plain.step()
        scaled.step()
    assert plain.skipped_steps is None and scaled.skipped_steps == 0
    one, other = (nn.utils.parameters_to_vector(trainer.model.parameters()) for trainer in (plain, scaled))
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)


def test_a_step_that_several_optimizers_leave_out_counts_once() -> None:
    toy = Toy(build_optimizer=lambda model, now: [torch.optim.SGD([one], lr=0.02) for one in model.parameters()])
    trainer = Trainer(toy, configuration(20), toy_data().train, Scaled(2.0**126), seed=3)
    assert len(trainer.optimizers) > 1
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
    trainer.step()
    assert trainer.skipped_steps == 1


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_step_with_gradients_out_of_range_is_left_out_and_counted(optimizer: str) -> None:
    steep = Toy(loss=lambda *arguments, **settings: 64 * Toy().loss(*arguments, **settings))
    warmed_up = configuration(20, warmup_epochs=2.0, optimizer=optimizer)
    trainer = Trainer(steep, warmed_up, toy_data().train, Scaled(2.0**126), seed=3)
    before = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
    trainer.step()
    assert trainer.first_step_problem() is None
    assert torch.equal(before, nn.utils.parameters_to_vector(trainer.model.parameters()))
    for _ in range(9):
        trainer.step()
    skipped = trainer.skipped_steps
    assert skipped is not None and 0 < skipped < 10
    assert not torch.equal(before, nn.utils.parameters_to_vector(trainer.model.parameters()))
    assert trainer.steps == 10
    assert trainer.learning_rate == pytest.approx(0.02 * 10 / 11)


def test_a_first_step_without_a_finite_loss_names_batch_rate_and_parameter() -> None:
    def problem_of(spoil: Callable[[nn.Module, torch.Tensor], torch.Tensor], **changes: Any) -> str | None:
        spoilt = Toy(loss=lambda model, *inputs, **settings: spoil(model, Toy().loss(model, *inputs, **settings)))
        trainer = trainer_of(configuration(20, learning_rate=10.0, **changes), spoilt)
        assert trainer.first_step_problem() is None
        trainer.step()
        return trainer.first_step_problem()

    start = "the loss of the first step is nan: batch size 20, learning rate 10; "
    assert problem_of(lambda model, loss: loss) is None
    assert problem_of(lambda model, loss: loss * math.nan) == start + "first non-finite parameter: 0.weight"
    # Only the second layer is hurt; a frozen learning rate of 0 · nan would be nan as well.
    last_layer = problem_of(lambda model, loss: loss.detach() + model.get_parameter("3.bias").sum() * math.nan)
    assert last_layer == start + "first non-finite parameter: 3.bias"
    assert problem_of(lambda model, loss: loss + math.nan) == start + "all parameters and gradients are finite"


def test_a_gradient_that_is_not_finite_is_named_if_the_parameters_are_finite() -> None:
    trainer = trainer_of(configuration())
    assert trainer.first_non_finite() is None
    trainer.step()
    assert trainer.first_non_finite() is None
    trainer.model.get_parameter("0.bias").grad = torch.full((16,), math.inf)
    assert trainer.first_non_finite() == "first non-finite gradient: 0.bias"
    with torch.no_grad():
        trainer.model.get_parameter("3.weight")[1, 2] = math.nan
    assert trainer.first_non_finite() == "first non-finite parameter: 3.weight"


def test_augmentation_is_for_training_alone_and_follows_the_seed() -> None:
    augmented = Toy(augment=lambda inputs: inputs * torch.rand_like(inputs))
    first = weights_after(3, configuration(), augmented)
    assert not torch.equal(weights_after(3, configuration()), first)
    assert torch.equal(first, weights_after(3, configuration(), augmented))
    assert not torch.equal(first, weights_after(3, configuration(), augmented, seed=4))
    trainer = trainer_of(configuration(), augmented)
    expected = trainer_of(configuration()).evaluate(toy_data().validation, "loss")
    assert trainer.evaluate(toy_data().validation, "loss") == expected


def test_the_augmentation_gets_its_parameters_from_the_configuration() -> None:
    scaled = Toy(augment=lambda inputs, *, strength: inputs * (1 - strength))

    def after(strength: float) -> torch.Tensor:
        return weights_after(3, configuration(parameters={"augmentation.strength": strength}), scaled)

    assert torch.equal(after(0.0), weights_after(3, configuration()))
    assert not torch.equal(after(0.5), after(0.0))


def test_a_step_equals_the_step_of_a_handwritten_loop() -> None:
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


@pytest.mark.parametrize(("seed", "of_numpy"), [(0, 0), (2**32 - 1, 2**32 - 1), (2**32 + 5, 5)])
def test_one_seed_is_that_of_every_generator_and_numpys_are_below_2_to_the_32(seed: int, of_numpy: int) -> None:
    seed_everything(seed)
    drawn = random.random(), np.random.random(), torch.rand(()).item()
    expected = random.Random(seed).random(), np.random.RandomState(of_numpy).random()
    assert drawn[:2] == expected
    assert drawn[2] == torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


def test_the_learning_rate_follows_the_schedule_in_every_group() -> None:
    trainer = trainer_of(configuration(20, warmup_epochs=0.6, weight_decay=0.1, learning_rate=0.4))
    seen: list[Sequence[float]] = []
    for _ in range(5):
        trainer.step()
        seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        assert trainer.learning_rate == pytest.approx(seen[-1][0])
    assert seen == [pytest.approx([lr, lr]) for lr in (0.1, 0.2, 0.3, 0.4, 0.4)]


def test_a_rate_that_the_workload_sets_stays_while_the_schedule_is_constant() -> None:
    trainer = trainer_of(configuration(20, learning_rate=0.4))
    trainer.step()
    trainer.optimizers[0].param_groups[0]["lr"] = 0.1
    trainer.step()
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1


def test_the_mean_loss_is_that_since_it_was_last_taken() -> None:
    trainer = trainer_of(configuration(learning_rate=0.0, batch_size=25, micro_batch_size=5, accumulation_steps=5))
    assert trainer.take_mean_loss() is None
    for _ in range(4):
        trainer.step()
    assert trainer.take_mean_loss() == pytest.approx(trainer.evaluate(toy_data().train, "loss"), rel=1e-5)
    assert trainer.take_mean_loss() is None


def test_label_smoothing_and_clipping_reach_the_step() -> None:
    plain = weights_after(3, configuration())
    assert not torch.equal(plain, weights_after(3, configuration(label_smoothing=0.2)))
    assert not torch.equal(plain, weights_after(3, configuration(parameters={"clip_norm": 0.01})))


def test_a_batch_larger_than_the_training_part_is_refused_with_both_sizes() -> None:
    with pytest.raises(WorkloadError, match="batch_size = 128 must be <= 100, the number of training samples"):
        trainer_of(configuration(128))
    with pytest.raises(WorkloadError, match="128 must be <= 100"):
        warm_up(Toy(), configuration(128), toy_data(), on_cpu(), "accuracy", 0)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (0.5, "returned float; expected a scalar tensor"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\); expected a scalar"),
        (WeightedLoss(torch.ones(3), 3), r"WeightedLoss whose total is Tensor of shape \(3,\)"),
        (torch.tensor(0.5), "without a gradient; let the loss depend on the model"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss: object, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        trainer_of(configuration(), Toy(loss=lambda *_, **__: loss)).step()


@pytest.mark.parametrize(("batch_size", "steps"), [(10, 20), (20, 10), (30, 7), (400, 0)])
def test_warmup_is_the_same_in_samples_at_every_batch_size(batch_size: int, steps: int) -> None:
    assert warmup_steps(2.0, 100, batch_size) == steps


def test_a_horizon_is_rounded_up_to_whole_steps() -> None:
    assert [horizon_steps(samples, 32) for samples in (1, 32, 33, 320)] == [1, 1, 2, 10]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (RateSchedule(), {0: 1}),
        (RateSchedule(warmup_steps=4), {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1, 5: 1}),
        (
            RateSchedule(kind="linear", warmup_steps=1, horizon_steps=5),
            {0: 0.5, 1: 1, 2: 0.75, 3: 0.5, 4: 0.25, 5: 0},
        ),
        (
            RateSchedule(kind="cosine", warmup_steps=2, horizon_steps=10),
            {2: 1, 4: (1 + math.cos(math.pi / 4)) / 2, 6: 0.5},
        ),
        (
            RateSchedule(kind="warmup_stable_decay", warmup_steps=2, horizon_steps=20, decay_share=0.4),
            {0: 1 / 3, 2: 1, 11: 1, 12: 1, 14: 1 - math.sqrt(0.25), 19: 1 - math.sqrt(7 / 8), 20: 0},
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, RateSchedule) else "",
)
def test_each_schedule_follows_its_formula(schedule: RateSchedule, factors: dict[int, float]) -> None:
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize(("warmup", "rise"), [(0, 0.3), (10, 0.1)])
def test_one_cycle_is_that_of_torch_with_the_warmup_as_its_rise(warmup: int, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=100, pct_start=rise, cycle_momentum=False
    )
    schedule = RateSchedule(kind="one_cycle", warmup_steps=warmup, horizon_steps=100)
    for step in range(100):
        (rate,) = theirs.get_last_lr()
        assert 0.5 * schedule.factor(step) == pytest.approx(rate, rel=1e-12)
        optimizer.step()
        theirs.step()
    assert schedule.is_over(100)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "warmup_stable_decay"])
@pytest.mark.parametrize("horizon", [2, 4, 5])
def test_a_horizon_within_the_warmup_cuts_it_off(kind: str, horizon: int) -> None:
    schedule = schedule_of(
        configuration(10, warmup_epochs=0.4, parameters={"schedule": kind, "horizon_samples": horizon * 10.0}), 100
    )
    assert schedule.factor(1) == pytest.approx(0.4)
    assert [schedule.is_over(step) for step in (horizon - 1, horizon)] == [False, True]


def test_a_constant_rate_has_no_horizon_unless_given() -> None:
    assert not schedule_of(configuration(), 100).is_over(10**9)
    assert schedule_of(configuration(20, parameters={"horizon_samples": 100}), 100).is_over(5)


def test_a_decay_without_a_horizon_is_refused() -> None:
    with pytest.raises(UsageError, match="horizon_samples"):
        schedule_of(configuration(parameters={"schedule": "cosine"}), 100)


class Normed(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))


def fill(model: Normed, value: float) -> None:
    mean, count = model.norm.running_mean, model.norm.num_batches_tracked
    assert mean is not None and count is not None
    with torch.no_grad():
        for tensor in (*model.parameters(), mean, count):
            tensor.fill_(value)


def test_the_average_follows_its_formula_and_replaces_the_weights_in_an_evaluation() -> None:
    model = Normed()
    fill(model, 1.0)
    average = AveragedWeights(model, 0.75)
    for value in (5.0, 9.0):
        fill(model, value)
        average.update()
    expected = 0.75 * (0.75 * 1 + 0.25 * 5) + 0.25 * 9
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with average.in_place():
        assert all((parameter == expected).all() for parameter in model.parameters())
        assert model.norm.running_mean is not None and (model.norm.running_mean == expected).all()
        assert model.norm.num_batches_tracked == 9
        assert torch.equal(model.mask, torch.full((2, 2), float("-inf")).triu(1))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all((parameter == 9).all() for parameter in model.parameters())


def test_the_weights_are_restored_if_an_evaluation_fails() -> None:
    model = Normed()
    average = AveragedWeights(model, 0.5)
    fill(model, 3.0)
    with pytest.raises(KeyError), average.in_place():
        raise KeyError
    assert all((parameter == 3).all() for parameter in model.parameters())


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_the_average_moves_once_per_optimizer_step_whatever_the_accumulation(accumulation_steps: int) -> None:
    settings: dict[str, Any] = {"micro_batch_size": 20 // accumulation_steps, "accumulation_steps": accumulation_steps}
    data = toy_data()
    trainer = Trainer(Toy(), configuration(20, parameters={"ema_decay": 0.8}, **settings), data.train, on_cpu(), seed=3)
    plain = Trainer(Toy(), configuration(20, **settings), data.train, on_cpu(), seed=3)
    expected = nn.utils.parameters_to_vector(plain.model.parameters()).detach().clone()
    for _ in range(6):
        trainer.step()
        plain.step()
        expected = 0.8 * expected + 0.2 * nn.utils.parameters_to_vector(plain.model.parameters()).detach()
    live = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    assert torch.equal(live, nn.utils.parameters_to_vector(plain.model.parameters()))
    metric = trainer.evaluate(data.validation, "loss")
    nn.utils.vector_to_parameters(expected, plain.model.parameters())
    assert metric == pytest.approx(plain.evaluate(data.validation, "loss"), rel=1e-6)
    assert metric != pytest.approx(0.0)
    nn.utils.vector_to_parameters(live, plain.model.parameters())
    assert metric != pytest.approx(plain.evaluate(data.validation, "loss"), rel=1e-4)
    assert torch.equal(live, nn.utils.parameters_to_vector(trainer.model.parameters()))


class Own(Toy):
    """Takes a width for its model and a factor for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []

    def build_model(self, *, dropout: float, hidden: int = 16) -> nn.Module:
        return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 2))

    def loss(
        self,
        model: nn.Module,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        label_smoothing: float,
        factor: float = 1.0,
    ) -> torch.Tensor:
        self.factors.append(factor)
        return factor * functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)


def test_the_model_and_the_loss_get_theirs_in_training_and_in_noise_passes() -> None:
    workload: Any = Own()
    trial = configuration(parameters={"model.hidden": 5, "loss.factor": 0.25})
    trainer = Trainer(workload, trial, toy_data().train, on_cpu(), seed=0)
    assert trainer.model[0].out_features == 5  # type: ignore[index]
    trainer.step()
    assert set(workload.factors) == {0.25}
    workload.factors.clear()
    GradientPasses(trainer, seed=0).measure(2)
    assert set(workload.factors) == {0.25}


def test_the_model_that_is_described_is_the_default_s() -> None:
    assert describe_model(Own(), toy_data(), on_cpu(), own={"hidden": 3}).parameters == 6 * 3 + 3 + 3 * 2 + 2


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("model.hidden", "build_model(*, dropout: 'float') -> 'nn.Module'"),
        ("loss.factor", "label_smoothing: 'float') -> 'torch.Tensor'"),
    ],
)
def test_a_parameter_that_a_method_does_not_take_is_named_with_its_signature(name: str, takes: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(f"space.{name}: ") + ".*" + re.escape(takes)):
        check_takes(Toy(), [name])
    check_takes(Own(), [name])
    check_takes(Toy(build_model=lambda **_: None, loss=lambda *_, **__: None), [name])
