import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from bssearch.records import Configuration, GradientNoise, Target
from bssearch.records.noise_scale import FEWEST_PASSES, Pass, gradient_noise, pooled
from bssearch.training.computation import Computation, GhostNorm, convert_batch_norms
from bssearch.training.gradient_noise import (
    FEWEST_SMALL_BATCHES,
    NOISE_SHARE,
    PASSES_AT_ONCE,
    SMALL_BATCHES,
    GradientPasses,
    NoiseBudget,
    NoiseMeter,
    small_batch_size,
)
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import WeightedLoss
from bssearch.workloads.data import DatasetPart, Part, TokenPart
from tests.factories import not_none
from tests.training.test_trainer import trainer_of
from tests.training.toys import FakeTime, Frozen, Toy, configuration, on_cpu, toy_data

TARGET = Target(metric="accuracy", value=0.9)
ADAM = {"optimizer": "adamw", "learning_rate": 0.01}


class ForgetfulNorm(nn.Module):
    """Keeps a running mean by replacing its buffer."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.running = 0.9 * self.running + 0.1 * values.detach().mean(0)
        return values - self.running


class Stateful(Toy):
    """Draws from every generator and keeps statistics of its batches."""

    def build_model(self, *, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), ForgetfulNorm(), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2)
        )

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.random())
        return scale * inputs + 0.1 * torch.randn_like(inputs)


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return copies of the whole state of a training."""
    optimizer = trainer.optimizers[0].state_dict()["state"]
    state: dict[str, Any] = {f"model.{name}": value.clone() for name, value in trainer.model.state_dict().items()}
    for index, values in optimizer.items():
        state |= {f"optimizer.{index}.{name}": torch.as_tensor(value).clone() for name, value in values.items()}
    state |= {
        f"grad.{name}": one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None
    }
    state["torch"] = torch.get_rng_state()
    state["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]
    state["python"] = torch.tensor(random.getstate()[1])
    return state


@pytest.mark.parametrize("changes", [{}, ADAM], ids=["sgd", "adamw"])
def test_the_steps_are_bit_for_bit_the_same_with_and_without_passes(changes: Mapping[str, Any]) -> None:
    wanted = configuration(20, dropout=0.3, **changes)

    def trained(measures: bool) -> tuple[dict[str, Any], list[float | None], int]:
        data, workload = toy_data(), Stateful()
        trainer = Trainer(workload, wanted, data.train, on_cpu(), seed=3)
        passes = GradientPasses(trainer, seed=3)
        made, losses = 0, []
        for _ in range(12):
            trainer.step()
            losses.append(trainer.take_mean_loss())
            if measures:
                made += sum(passes.measure() is not None for _ in range(2))
        return everything(trainer), losses, made

    (with_passes, losses, made), (without, expected, _) = trained(True), trained(False)
    assert made == 24
    assert losses == expected
    assert with_passes.keys() == without.keys()
    assert [name for name in without if not torch.equal(with_passes[name], without[name])] == []


def norms_of_four_passes(dropout: float, train: Part, seed: int) -> list[float]:
    passes = GradientPasses(Trainer(Toy(), configuration(16, dropout=dropout), train, on_cpu(), seed=3), seed)
    torch.manual_seed(seed + 1)
    return [one.plain.big for _ in range(4) if (one := passes.measure()) is not None]


def test_each_pass_draws_its_own_samples() -> None:
    train = toy_data().train
    found = norms_of_four_passes(0.0, train, seed=0)
    assert len(set(found)) == 4
    assert norms_of_four_passes(0.0, train, seed=0) == found
    assert norms_of_four_passes(0.0, train, seed=1)[0] != found[0]


def test_each_pass_draws_its_own_dropout() -> None:
    alike = Part(torch.ones(100, 6), torch.zeros(100, dtype=torch.long))
    assert len(set(norms_of_four_passes(0.0, alike, seed=0))) == 1
    found = norms_of_four_passes(0.5, alike, seed=0)
    assert len(set(found)) == 4
    assert norms_of_four_passes(0.5, alike, seed=0) == found


def exact(
    trainer: Trainer, train: Part, divide: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, gradient: gradient
) -> float:
    """Return tr Σ / ‖G‖² of the whole part from the gradients of its single samples."""
    parameters = {name: one.detach() for name, one in trainer.model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = functional_call(trainer.model, weights, inputs.unsqueeze(0))
        return functional.cross_entropy(scores, target.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, train.inputs, train.targets)
    rows = torch.cat([divide(name, one).flatten(1).double() for name, one in per_sample.items()], dim=1)
    return rows.var(dim=0).sum().item() / rows.mean(dim=0).square().sum().item()


def test_the_noise_scale_is_that_of_exact_per_sample_gradients() -> None:
    workload, wanted, data = Toy(), configuration(256, **ADAM), toy_data(600)
    trainer = Trainer(workload, wanted, data.train, on_cpu(), seed=3)
    for _ in range(5):
        trainer.step()
    passes = GradientPasses(trainer, seed=3)
    found = gradient_noise([one for _ in range(100) if (one := passes.measure()) is not None])

    moments_of = dict(zip(dict(trainer.model.named_parameters()), _second_moments(trainer), strict=True))
    plain = exact(trainer, data.train)
    adam = exact(trainer, data.train, lambda name, one: one / (moments_of[name].sqrt() + 1e-8))
    assert found.scale == pytest.approx(plain, rel=0.15)
    assert found.adam_scale == pytest.approx(adam, rel=0.15)
    assert abs(plain / adam - 1) > 0.2, "the two must differ, or the test shows nothing"


class Bowl(Toy):
    """The quadratic ½‖θ − x‖² of each sample x; the covariance of its gradient θ − x is the samples' covariance."""

    def build_model(self, *, dropout: float) -> nn.Module:
        model = nn.Linear(6, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        return model

    def loss(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> torch.Tensor:
        assert isinstance(model, nn.Linear)
        return 0.5 * (model.weight - inputs).square().sum(dim=1).mean()


@pytest.mark.parametrize("spread", [0.2, 2.0])
def test_short_passes_over_a_quadratic_find_the_trace_and_the_square_that_its_samples_have(spread: float) -> None:
    part = Part(spread * toy_data(600).train.inputs, toy_data(600).train.targets)
    trace = part.inputs.double().var(dim=0).sum().item()
    square = (0.5 - part.inputs.double().mean(dim=0)).square().sum().item()
    trials = []
    for seed in range(40):
        with Trainer(Bowl(), configuration(64), part, on_cpu(), seed) as trainer:
            passes = GradientPasses(trainer, seed)
            made = [passes.measure(FEWEST_SMALL_BATCHES) for _ in range(1 + seed % 4)]
        trials.append(gradient_noise([one for one in made if one is not None]))
    found = pooled(trials)
    assert found.trace == pytest.approx(trace, rel=0.1)
    assert found.square == pytest.approx(square, rel=0.1)
    assert found.low is not None and found.high is not None and found.low < trace / square < found.high


class Sentences(Bowl):
    """Samples of unequal numbers of words; the loss is `Bowl`'s of each word."""

    def collate(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(one) for one in samples])

    def loss(  # type: ignore[override]
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
    ) -> WeightedLoss:
        assert isinstance(model, nn.Linear)
        is_word = torch.arange(inputs.shape[1]) < targets[:, None]
        losses = 0.5 * (model.weight - inputs).square().sum(dim=2)
        return WeightedLoss((losses * is_word).sum(), is_word.sum())


def test_passes_over_token_batches_find_the_trace_and_the_square_of_the_tokens() -> None:
    lengths = [1 + 7 * number % 13 for number in range(580)]
    words = 0.5 * toy_data(sum(lengths)).train.inputs
    trace = words.double().var(dim=0).sum().item()
    square = (0.5 - words.double().mean(dim=0)).square().sum().item()
    part = TokenPart(DatasetPart(torch.split(words, lengths), Sentences().collate), lengths)
    with Trainer(Sentences(), configuration(256), part, on_cpu(batch_unit="tokens", loader_workers=0), 0) as trainer:
        assert trainer.has_noise
        passes = GradientPasses(trainer, seed=1)
        assert passes.small_batch(SMALL_BATCHES) == 32 and passes.small_batch(1000) == 0
        found = gradient_noise([not_none(passes.measure()) for _ in range(300)])
    assert found.trace == pytest.approx(trace, rel=0.1)
    assert found.square == pytest.approx(square, rel=0.1)
    assert not_none(found.low) < trace / square < not_none(found.high)


def test_a_sparse_gradient_is_measured_as_a_dense_one() -> None:
    def measured(sparse: bool) -> Pass:
        words = Toy(
            network=lambda _: nn.Sequential(nn.Embedding(5, 8, sparse=sparse), nn.Flatten(), nn.Linear(48, 2)),
            augment=lambda inputs: inputs.long().clamp(0, 4),
        )
        return not_none(GradientPasses(trainer_of(configuration(20), words), seed=3).measure())

    dense, sparse = measured(False), measured(True)
    assert sparse.plain.small == pytest.approx(dense.plain.small) and sparse.plain.big == pytest.approx(dense.plain.big)


def _second_moments(trainer: Trainer) -> list[torch.Tensor]:
    states = [trainer.optimizers[0].state[one] for one in trainer.model.parameters()]
    return [state["exp_avg_sq"] / (1 - 0.999**trainer.steps) for state in states]


def test_a_weighted_loss_is_measured_by_its_mean() -> None:
    class Weighted(Toy):
        def loss(  # type: ignore[override]
            self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float
        ) -> WeightedLoss:
            mean = super().loss(model, inputs, targets, label_smoothing=label_smoothing)
            return WeightedLoss(7.0 * len(inputs) * mean, 7.0 * len(inputs))

    measured = [GradientPasses(trainer_of(configuration(20), toy), seed=3).measure() for toy in (Toy(), Weighted())]
    plain, weighted = map(not_none, measured)
    assert weighted.plain.small == pytest.approx(plain.plain.small, rel=1e-5)
    assert weighted.plain.big == pytest.approx(plain.plain.big, rel=1e-5)


def test_a_pass_with_a_gradient_that_is_not_finite_is_dropped() -> None:
    trainer = trainer_of(configuration(20))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("inf"))
    assert GradientPasses(trainer, seed=3).measure() is None


@pytest.mark.parametrize(
    ("small_batches", "micro", "samples", "small"),
    [
        *((SMALL_BATCHES, *row) for row in ((512, 10_000, 64), (32, 10_000, 16), (4, 10_000, 4), (32, 40, 5))),
        (SMALL_BATCHES, 8192, 60_000, 256),
        *((FEWEST_SMALL_BATCHES, *row) for row in ((512, 10_000, 256), (64, 10_000, 32), (4, 10_000, 4), (64, 40, 20))),
    ],
)
def test_small_batches_are_an_eighth_of_the_micro_batch_or_half_in_a_short_pass_within_bounds(
    small_batches: int, micro: int, samples: int, small: int
) -> None:
    assert small_batch_size(configuration(micro), samples, small_batches) == small


PASS_SECONDS = 0.3
SMALL_BATCH_SECONDS = PASS_SECONDS / SMALL_BATCHES
SHORT_PASS_SECONDS = FEWEST_SMALL_BATCHES * SMALL_BATCH_SECONDS
ENOUGH = PASS_SECONDS * PASSES_AT_ONCE / NOISE_SHARE


class Meter:
    """A meter of the toy whose passes take ``PASS_SECONDS`` each."""

    def __init__(
        self,
        wanted: Configuration | None = None,
        target: Target = TARGET,
        samples: int = 100,
        computation: Computation | None = None,
        budget: NoiseBudget | None = None,
    ) -> None:
        self.time = FakeTime()
        self.losses = 0
        self.fails = False
        toy = Toy(on_loss=self._on_loss)
        wanted, data = wanted or configuration(4), toy_data(samples)
        self.trainer = Trainer(toy, wanted, data.train, on_cpu(), seed=3)
        self.trainer.computation = computation or on_cpu()
        self.meter = NoiseMeter(self.trainer, target, seed=3, budget=budget, now=lambda: self.time.seconds)

    def _on_loss(self) -> None:
        self.losses += 1
        self.time.pass_by(SMALL_BATCH_SECONDS)
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def begun(self) -> Self:
        """Return the meter after a first evaluation, far from the target."""
        self.small_batches_after(0.5, 0.0)
        return self

    def small_batches_after(self, metric: float, train_seconds: float) -> int:
        """Return the number of small batches made; a step takes as long as a small batch."""
        before = self.losses
        self.trainer.steps = round(train_seconds / SMALL_BATCH_SECONDS)
        self.meter.after_evaluation(metric, train_seconds)
        return self.losses - before

    def passes_after(self, metric: float, train_seconds: float) -> int:
        """Return the number of long passes made."""
        return self.small_batches_after(metric, train_seconds) // SMALL_BATCHES


def test_passes_take_no_more_than_their_share_of_the_train_seconds() -> None:
    meter, made, metric = Meter(), 0, 0.5
    assert meter.small_batches_after(metric, 0.0) == 0
    for train_seconds in range(1, 300):
        made += meter.small_batches_after(0.88, float(train_seconds))
        assert meter.time.seconds <= NOISE_SHARE * train_seconds + 1e-9
    assert made * SMALL_BATCH_SECONDS > 0.9 * NOISE_SHARE * 299
    found = meter.meter.result()
    assert found.passes == made // FEWEST_SMALL_BATCHES
    assert found.seconds == pytest.approx(made * SMALL_BATCH_SECONDS)


@pytest.mark.parametrize(("settings", "slowdown"), [({}, 1), ({"precision": "bf16"}, 2), ({"compile": "default"}, 10)])
def test_the_first_pass_is_made_if_it_fits_even_if_it_is_slow(settings: dict[str, Any], slowdown: int) -> None:
    meter = Meter(computation=on_cpu(**settings)).begun()
    affordable = slowdown * SHORT_PASS_SECONDS / NOISE_SHARE
    assert meter.small_batches_after(0.88, 0.99 * affordable) == 0
    assert meter.small_batches_after(0.88, 1.01 * affordable) == slowdown * FEWEST_SMALL_BATCHES


def test_a_trial_makes_long_passes_if_it_affords_enough_for_an_interval_and_short_passes_otherwise() -> None:
    enough = FEWEST_PASSES * PASS_SECONDS / NOISE_SHARE
    for train_seconds, small_batches in ((0.99 * enough, FEWEST_SMALL_BATCHES), (1.01 * enough, SMALL_BATCHES)):
        meter = Meter().begun()
        meter.small_batches_after(0.88, train_seconds)
        assert {one.small_batches for one in meter.meter._passes} == {small_batches}


class ColdMeter(Meter):
    """A meter on a device whose first small batch takes as long as many passes, because kernels are loaded."""

    def __init__(self, **given: Any) -> None:
        self.is_cold = True
        super().__init__(**given)
        self.meter._loads_kernels = True

    def _on_loss(self) -> None:
        super()._on_loss()
        if self.is_cold:
            self.time.pass_by(100 * PASS_SECONDS)
        self.is_cold = False


def test_loading_the_kernels_of_a_first_pass_forbids_no_second_one() -> None:
    meter = ColdMeter().begun()
    enough = 1.01 * SHORT_PASS_SECONDS / NOISE_SHARE
    assert meter.small_batches_after(0.88, enough) == 1 + FEWEST_SMALL_BATCHES, "one small batch loads the kernels"
    assert meter.small_batches_after(0.88, 2 * enough) == FEWEST_SMALL_BATCHES
    found = meter.meter.result()
    assert found.passes == 2
    assert found.seconds == pytest.approx(2 * SHORT_PASS_SECONDS)


def test_kernels_are_loaded_once_in_a_process_and_leave_the_passes_as_they_are() -> None:
    budget, enough = NoiseBudget(), 1.01 * SHORT_PASS_SECONDS / NOISE_SHARE
    cold, warm, on_the_cpu = ColdMeter(budget=budget), Meter(budget=budget), Meter()
    warm.meter._loads_kernels = True
    for meter, loads in ((cold, 1), (warm, 0), (on_the_cpu, 0)):
        meter.small_batches_after(0.5, 0.0)
        assert meter.small_batches_after(0.88, enough) == loads + FEWEST_SMALL_BATCHES
    assert cold.meter._passes == warm.meter._passes == on_the_cpu.meter._passes


def test_trials_that_are_too_short_for_a_pass_take_turns_at_the_seconds_of_all() -> None:
    budget, train_seconds = NoiseBudget(), 0.4 * SHORT_PASS_SECONDS / NOISE_SHARE
    meters = [Meter(budget=budget).begun() for _ in range(10)]
    made = [meter.small_batches_after(0.95, train_seconds) // FEWEST_SMALL_BATCHES for meter in meters]
    assert made == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]
    assert sum(made) * SHORT_PASS_SECONDS <= NOISE_SHARE * 10 * train_seconds


def test_the_share_of_a_trial_far_from_its_target_pays_for_a_pass_of_another_trial() -> None:
    budget = NoiseBudget()
    Meter(budget=budget).small_batches_after(0.1, 100 * SHORT_PASS_SECONDS / NOISE_SHARE)
    meter = Meter(budget=budget).begun()
    assert meter.small_batches_after(0.88, 0.5 * SHORT_PASS_SECONDS / NOISE_SHARE) == FEWEST_SMALL_BATCHES
    assert meter.small_batches_after(0.89, 0.9 * SHORT_PASS_SECONDS / NOISE_SHARE) == 0


def test_a_pass_is_expected_to_take_the_seconds_of_the_last_pass_of_its_shape() -> None:
    seconds = 0.1 * SHORT_PASS_SECONDS
    meter = Meter(budget=NoiseBudget(100.0, seconds, {(FEWEST_SMALL_BATCHES, 4): seconds})).begun()
    assert meter.small_batches_after(0.88, 0.11 * SHORT_PASS_SECONDS / NOISE_SHARE) == FEWEST_SMALL_BATCHES


def test_a_trial_resumed_in_another_process_earns_only_its_later_train_seconds_there() -> None:
    first, second = Meter(), Meter(budget=NoiseBudget())
    first.small_batches_after(0.5, 10.0)
    second.meter.restore(first.meter.state())
    second.small_batches_after(0.88, 10.0)
    assert second.losses == 0, "what was earned before the pause is the other process's"
    second.small_batches_after(0.88, 10.0 + 1.01 * SHORT_PASS_SECONDS / NOISE_SHARE)
    assert second.losses == FEWEST_SMALL_BATCHES


@pytest.fixture
def meter() -> Meter:
    return Meter()


def test_passes_spread_over_the_window(meter: Meter) -> None:
    meter.passes_after(0.5, 0.0)
    assert meter.passes_after(0.88, 100 * ENOUGH) == PASSES_AT_ONCE
    assert meter.passes_after(0.88, 100 * ENOUGH) == PASSES_AT_ONCE


def test_nothing_is_measured_outside_of_the_window(meter: Meter) -> None:
    assert [meter.passes_after(metric, ENOUGH) for metric in (0.5, 0.6, 0.85, 0.4)] == [0] * 4
    assert meter.meter.result() == GradientNoise()
    assert meter.passes_after(0.87, ENOUGH) > 0
    assert meter.passes_after(0.8, 9 * ENOUGH) == 0


def test_for_a_loss_the_window_is_above_the_target() -> None:
    meter = Meter(target=replace(TARGET, metric="loss", value=1.0, goal="minimize"))  # type: ignore[arg-type]
    assert [meter.passes_after(metric, ENOUGH) for metric in (3.0, 2.0, 1.3)] == [0, 0, 0]
    assert meter.passes_after(1.15, ENOUGH) > 0


def test_the_evaluation_that_meets_the_target_is_the_last_one_measured(meter: Meter) -> None:
    meter.passes_after(0.5, 0.0)
    assert meter.passes_after(0.95, ENOUGH) > 0
    assert meter.passes_after(0.88, 9 * ENOUGH) == 0


def test_running_out_of_memory_in_a_pass_ends_the_passes_and_not_the_trial(meter: Meter) -> None:
    meter.passes_after(0.5, 0.0)
    meter.fails = True
    meter.passes_after(0.88, ENOUGH)
    assert meter.losses == 1
    meter.fails = False
    assert meter.passes_after(0.88, 9 * ENOUGH) == 0
    assert meter.meter.result() == GradientNoise()


def test_a_training_part_too_small_for_a_pass_is_left_alone() -> None:
    assert Meter(configuration(1), samples=FEWEST_SMALL_BATCHES - 1).small_batches_after(0.95, 9 * ENOUGH) == 0
    only_short = Meter(configuration(2), samples=SMALL_BATCHES - 1)
    only_short.small_batches_after(0.95, 9 * ENOUGH)
    assert {one.small_batches for one in only_short.meter._passes} == {FEWEST_SMALL_BATCHES}


@pytest.mark.parametrize(("micro", "ghost", "small"), [(264, 32, 32), (264, 8, 32), (264, None, 33), (264, 64, 33)])
def test_ghost_batches_are_whole_in_a_small_batch(micro: int, ghost: int | None, small: int) -> None:
    normalised = Toy(network=lambda _: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    computation, train = on_cpu(ghost_batch_size=ghost), toy_data(600).train
    with Trainer(normalised, configuration(micro), train, computation, seed=1) as trainer:
        measured = GradientPasses(trainer, seed=1).measure()
    assert measured is not None and measured.small_batch == small


SHAPES = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 2), nn.BatchNorm3d: (3, 2, 2, 2)}


def norm_and_ghost(kind: Any, ghost_batch_size: int, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return a batch norm with random weights and statistics, and the equal ghost batch norm."""
    generator = torch.Generator().manual_seed(4)
    norm: nn.Module = kind(3, dtype=torch.float64, **settings)
    for tensor in [*norm.parameters(), *norm.buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
    ghost = copy.deepcopy(norm)
    assert convert_batch_norms(ghost, GhostNorm, ghost_batch_size=ghost_batch_size) == 1
    return norm, ghost


def samples(count: int, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    inputs = 2 + 3 * torch.randn(count, *shape, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return inputs.requires_grad_()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("count", [12, 14, 3])
def test_each_group_is_normalised_as_a_batch_of_its_own(kind: Any, count: int) -> None:
    norm, ghost = norm_and_ghost(kind, 4)
    inputs = samples(count, SHAPES[kind])
    expected = torch.cat([norm(group) for group in torch.split(inputs, 4)])
    output = ghost(inputs)
    assert torch.allclose(output, expected, rtol=0, atol=1e-12)
    assert output.std() > 0.1

    weights = torch.randn(output.shape, dtype=torch.float64)
    ours = torch.autograd.grad((output * weights).sum(), [inputs, *ghost.parameters()])
    theirs = torch.autograd.grad((expected * weights).sum(), [inputs, *norm.parameters()])
    assert all(torch.allclose(one, other, rtol=0, atol=1e-11) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("count", [12, 14])
def test_the_running_statistics_move_toward_the_mean_over_the_groups(momentum: float | None, count: int) -> None:
    _, ghost = norm_and_ghost(nn.BatchNorm1d, 4, momentum=momentum)
    assert isinstance(ghost, nn.BatchNorm1d)
    assert ghost.running_mean is not None and ghost.running_var is not None and ghost.num_batches_tracked is not None
    inputs, rate = samples(count), 0.1 if momentum else 1.0
    mean = torch.stack([group.mean(0) for group in torch.split(inputs, 4)]).mean(0)
    variance = torch.stack([group.var(0, unbiased=True) for group in torch.split(inputs, 4)]).mean(0)
    expected_mean = (1 - rate) * ghost.running_mean + rate * mean
    expected_variance = (1 - rate) * ghost.running_var + rate * variance
    ghost(inputs)
    assert torch.allclose(ghost.running_mean, expected_mean)
    assert torch.allclose(ghost.running_var, expected_variance)
    assert ghost.num_batches_tracked == 1


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}])
def test_norms_without_weights_or_statistics_are_grouped_too(settings: dict[str, bool]) -> None:
    norm, ghost = norm_and_ghost(nn.BatchNorm1d, 4, **settings)
    inputs = samples(12)
    assert torch.allclose(ghost(inputs), torch.cat([norm(group) for group in torch.split(inputs, 4)]))


def test_evaluation_is_that_of_the_batch_norm() -> None:
    norm, ghost = norm_and_ghost(nn.BatchNorm1d, 4)
    inputs = samples(12)
    assert torch.equal(ghost.eval()(inputs), norm.eval()(inputs))


@pytest.mark.parametrize("count", [5, 13])
def test_a_single_sample_that_is_left_over_joins_the_last_group(count: int) -> None:
    norm, ghost = norm_and_ghost(nn.BatchNorm1d, 4)
    inputs = samples(count)
    groups = [*torch.split(inputs[: count - 5], 4), inputs[count - 5 :]] if count > 5 else [inputs]
    assert torch.allclose(ghost(inputs), torch.cat([norm(group) for group in groups]))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [(samples(1), "Expected more than 1 value per channel"), (samples(12, (3, 2, 2)), "expected 2D or 3D input")],
)
def test_an_input_is_refused_as_by_the_batch_norm(inputs: torch.Tensor, said: str) -> None:
    _, ghost = norm_and_ghost(nn.BatchNorm1d, 4)
    with pytest.raises(ValueError, match=said):
        ghost(inputs)


def test_norms_are_converted_at_any_depth_and_keep_their_state() -> None:
    model: Any = nn.Sequential(
        nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), Frozen(3)), nn.SyncBatchNorm(3), nn.LayerNorm(3)
    )
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert convert_batch_norms(model, GhostNorm, ghost_batch_size=4) == 2
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(model[0], nn.BatchNorm1d)
    assert type(model[2]) is nn.SyncBatchNorm
    assert not model.train()[1][1].training


def test_norms_of_a_kind_become_one_class() -> None:
    first, second = nn.BatchNorm2d(3), nn.BatchNorm2d(5)
    convert_batch_norms(first, GhostNorm, ghost_batch_size=4)
    convert_batch_norms(second, GhostNorm, ghost_batch_size=8)
    assert type(first) is type(second) is not nn.BatchNorm2d
