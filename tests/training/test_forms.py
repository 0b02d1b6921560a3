"""Every form of data, and a workload's own training step, train, pause and are measured like plain tensors;
batches of tokens equal one padded batch."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from bssearch import (
    BSSearchError,
    Configuration,
    Data,
    MetricInfo,
    TrainingStep,
    Trial,
    UsageError,
    WeightedLoss,
    WorkloadError,
)
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.passes import TokenSampler
from bssearch.records import MemoryRequest, NoiseRequest, StepTimeRequest, Target, TrialState
from bssearch.training.batches import TokenBatches, place, placement_of, tokens_trained
from bssearch.training.gradient_noise import GradientPasses
from bssearch.training.loop import describe_model, tokens_per_sample
from bssearch.training.probes import measure_memory, measure_noise, measure_step_time
from bssearch.training.trainer import Trainer
from bssearch.workloads.char_lm import CharLM
from bssearch.workloads.data import Part, TokenPart, check_data
from tests.executors.loops.loops import Started, asked
from tests.factories import changed, make_spec
from tests.training.test_batches import META, computation_on
from tests.training.toys import (
    CPU,
    FakeTime,
    Frozen,
    Run,
    Toy,
    batches_of,
    configuration,
    on_cpu,
    request,
    toy_data,
    two_layers,
)

# A two-class problem in every form of data, and with its own training steps -------------------------------------------

TOKENS = 12


class Classifier(nn.Module):
    """Scores the mean of the tokens' embeddings."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(8, 2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.unsqueeze(2)
        scores: torch.Tensor = self.head((self.embedding(ids) * kept).sum(1) / kept.sum(1))
        return scores


def texts(samples: int, seed: int, longest: int = 6) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    found = [[rng.randrange(1, TOKENS) for _ in range(rng.randint(2, longest))] for _ in range(samples)]
    return [(ids, int(sum(ids) > 6 * len(ids))) for ids in found]


def padded(samples: list[Any], longest: int | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    """Return {"text": {"ids", "mask"}}, padded to the longest sample, and the labels."""
    longest = longest or max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in samples])
    return {"text": {"ids": ids, "mask": ids != 0}}, torch.tensor([label for _, label in samples])


class Texts:
    """Nested dicts of tensors; subclasses have other forms."""

    metrics: Mapping[str, MetricInfo] = {"accuracy": MetricInfo(low=0.0, high=1.0), "loss": MetricInfo(low=0.0)}

    def load(self, device: torch.device) -> Data:
        return Data(*(self.part(texts(samples, seed)) for samples, seed in ((100, 1), (40, 2), (40, 3))))

    def part(self, samples: list[Any]) -> Any:
        return Part(*padded(samples, 6))

    def build_model(self, *, dropout: float) -> nn.Module:
        return Classifier(dropout)

    def loss(self, model: nn.Module, inputs: Any, targets: Any, *, label_smoothing: float) -> Any:
        return functional.cross_entropy(model(**inputs["text"]), targets, label_smoothing=label_smoothing)

    def evaluate(self, model: nn.Module, part: Part) -> Mapping[str, float]:
        pairs = [(model(**inputs["text"]), targets) for inputs, targets in part.chunks(16)]
        scores, targets = (torch.cat(column) for column in zip(*pairs, strict=True))
        return {
            "accuracy": (scores.argmax(1) == targets).float().mean().item(),
            "loss": functional.cross_entropy(scores, targets).item(),
        }


class Listed(Texts):
    """Lists of samples of unequal lengths."""

    def part(self, samples: list[Any]) -> Any:
        return samples

    def collate(self, samples: list[Any]) -> Any:
        return padded(samples, 6)


@dataclass(eq=False)
class Rows(Dataset[Any]):
    """A Dataset whose samples are augmented at random: a token is left out."""

    samples: list[Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        ids, label = self.samples[row]
        left_out = int(torch.randint(len(ids), ())) if random.random() < 0.5 else None
        return [one for place, one in enumerate(ids) if place != left_out], label


class Datasets(Listed):
    """A Subset of a Dataset, which draws random numbers."""

    def part(self, samples: list[Any]) -> Any:
        return Subset(Rows(samples), range(len(samples)))


@dataclass(eq=False)
class Stream(IterableDataset[Any]):
    """Samples in an order that the global generator draws."""

    samples: list[Any]

    def __iter__(self) -> Iterator[Any]:
        yield from random.sample(self.samples, len(self.samples))


class Streams(Listed):
    """Training batches of the workload's DataLoader; the last batch is shorter."""

    train_samples = 100

    def load(self, device: torch.device) -> Data:
        data = super().load(device)
        return Data(None, data.validation, data.test)

    def train_batches(self, batch_size: int, seed: int) -> Iterable[Any]:
        return DataLoader(Stream(texts(100, 1)), batch_size=batch_size, collate_fn=self.collate)


class TwoOptimizers(Texts):
    """An own training step: two optimizers, and a penalty as a second loss."""

    def build_optimizer(self, model: nn.Module, configuration: Configuration) -> Any:
        assert isinstance(model, Classifier)
        rate = configuration.learning_rate
        return {
            "embedding": torch.optim.Adam(model.embedding.parameters(), lr=rate),
            "head": torch.optim.SGD(model.head.parameters(), lr=10 * rate, momentum=0.9),
        }

    def training_step(self, step: TrainingStep) -> Any:
        total = torch.zeros(())
        for inputs, targets in step.micro_batches:
            loss = functional.cross_entropy(step.model(**inputs["text"]), targets) / step.accumulation_steps
            step.backward(loss)
            total = total + loss.detach()
        step.backward(1e-3 * torch.stack([one.square().sum() for one in step.model.parameters()]).sum())
        for optimizer in step.optimizers.values():
            step.update(optimizer)
        return total


class Weighed(Listed):
    """A loss per token; micro-batches have unequal numbers of tokens."""

    def loss(self, model: nn.Module, inputs: Any, targets: Any, *, label_smoothing: float) -> Any:
        weights = inputs["text"]["mask"].sum(1)
        losses = functional.cross_entropy(model(**inputs["text"]), targets, reduction="none")
        return WeightedLoss((losses * weights).sum(), weights.sum())


FORMS: list[type[Texts]] = [Texts, Listed, Datasets, Streams, TwoOptimizers, Weighed]


def loaded(workload: Texts) -> Data:
    """Return the data as a worker loads them."""
    return check_data(workload.load(torch.device("cpu")), workload)


# Tests ----------------------------------------------------------------------------------------------------------------


ACCUMULATED = configuration(24, micro_batch_size=8, accumulation_steps=3, learning_rate=0.05, dropout=0.2)
every_form = pytest.mark.parametrize("form", FORMS)


def weights_after(workload: Texts, steps: int, settings: dict[str, Any], split: Any = ACCUMULATED) -> torch.Tensor:
    with Trainer(workload, split, loaded(workload).train, on_cpu(**settings), seed=3) as trainer:
        for _ in range(steps):
            trainer.step()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def run(form: type[Texts], data: Data, folder: Path, stop_after: int | None = None, **changes: Any) -> Run:
    """Train for 25 calls of ``on_progress``, a second each, or pause after ``stop_after`` calls."""
    time = FakeTime()
    asked = request(ACCUMULATED, train_seconds_limit=25.0, checkpoint=str(folder / "trial"), **changes)

    def stop() -> tuple[TrialState, str] | None:
        late = stop_after is not None and time.seconds > stop_after
        return (TrialState.PAUSED, "later") if late else None

    return Run(
        changed(asked, target=Target(metric="loss", value=1e9), stop_at_target=False),
        form(),
        data,
        clock=time.clock(),
        computation=on_cpu(loader_workers=0),
        on_progress=lambda: time.pass_by(1.0),
        stop=stop,
    )


@every_form
def test_the_metric_of_training_samples_is_measured_in_every_form_with_samples(
    form: type[Texts], tmp_path: Path
) -> None:
    outcome = run(form, loaded(form()), tmp_path, tested=True).outcome
    assert (set(outcome.further_test_metrics or {}) == {"training loss"}) == (form is not Streams), outcome.warnings


@every_form
def test_a_trial_of_every_form_learns_and_resumes_like_an_unpaused_trial(form: type[Texts], tmp_path: Path) -> None:
    data = loaded(form())
    whole = run(form, data, tmp_path)
    paused = run(form, data, tmp_path, stop_after=11)
    rest = run(form, data, tmp_path, resumes=True)
    seen = [(one.step, one.metric, one.loss) for one in [*paused.observations, *rest.observations]]
    assert paused.outcome.state is TrialState.PAUSED and 0 < paused.outcome.steps < whole.outcome.steps
    assert seen == [(one.step, one.metric, one.loss) for one in whole.observations][: len(seen)]
    assert seen[-1][0] > paused.outcome.steps
    assert whole.observations[-1].metric < whole.observations[0].metric
    assert (whole.outcome.dropped_samples_per_epoch is None) == (form is Streams)


@pytest.mark.parametrize(
    ("one", "other", "loader_workers"),
    [(Listed(), Texts(), 0), (Datasets(), Datasets(), 2)],
    ids=["collated samples and tensors", "random samples from this process and from loader processes"],
)
def test_equal_batches_train_equal_weights(one: Texts, other: Texts, loader_workers: int) -> None:
    found = weights_after(one, 9, {"loader_workers": 0})
    assert torch.equal(found, weights_after(other, 9, {"loader_workers": loader_workers}))


def test_accumulation_is_exact_if_micro_batches_have_unequal_numbers_of_tokens() -> None:
    split = replace(ACCUMULATED, dropout=0.0)
    whole = replace(split, micro_batch_size=24, accumulation_steps=1)
    settings = {"loader_workers": 0}
    one, other = (weights_after(Weighed(), 6, settings, each) for each in (split, whole))
    assert torch.allclose(one, other, atol=1e-6)


@every_form
def test_every_form_is_described_and_measured(form: type[Texts]) -> None:
    workload, computation = form(), on_cpu(loader_workers=0)
    data, _ = place(loaded(workload), computation)
    assert describe_model(workload, data, computation).initial_metrics["accuracy"] is not None
    assert len(data.train) == 100
    assert measure_memory(MemoryRequest(configuration=ACCUMULATED), workload, data, computation).fits
    times = measure_step_time(
        StepTimeRequest(configuration=ACCUMULATED, seconds_limit=0.05), workload, data, computation
    )
    assert times.step_seconds is not None and times.update_seconds is not None


@every_form
def test_the_noise_scale_is_measured_if_samples_can_be_drawn_and_refused_otherwise(form: type[Texts]) -> None:
    workload, computation = form(), on_cpu(loader_workers=0)
    data = loaded(workload)
    asked = NoiseRequest(
        configuration=ACCUMULATED,
        seed=0,
        target=Target(metric="accuracy", value=0.7),
        train_seconds_limit=0.2,
        noise_seconds_limit=0.1,
        eval_every_steps=3,
    )
    has_noise = form not in (Streams, TwoOptimizers)
    with Trainer(workload, ACCUMULATED, data.train, computation, seed=0) as trainer:
        assert trainer.has_noise == has_noise
    refused = pytest.raises(WorkloadError, match=r"train_batches|training_step")
    with nullcontext() if has_noise else refused:
        assert measure_noise(asked, workload, data, computation).noise.passes


def test_a_pass_takes_the_gradients_of_the_same_rows_in_every_form() -> None:
    def norms(workload: Texts) -> Any:
        train, computation = loaded(workload).train, on_cpu(loader_workers=0)
        split = replace(ACCUMULATED, dropout=0.0)
        with Trainer(workload, split, train, computation, seed=3) as trainer:
            return GradientPasses(trainer, seed=5).measure(2)

    assert norms(Texts()) == norms(Listed())


def test_a_nesting_is_on_the_device_and_samples_stay_on_the_host() -> None:
    for form, where in ((Texts, "device"), (Listed, "host")):
        placed, placement = place(loaded(form()), computation_on(META), memory_bytes=10**12)
        inputs, targets = next(placed.validation.chunks(7))
        assert placement == where
        assert inputs["text"]["ids"].device == targets.device == META
        assert len(inputs["text"]["mask"]) == len(targets) == 7
    assert loaded(Texts()).train.bytes == 100 * (6 * 8 + 6 * 1 + 8)
    assert placement_of(loaded(Streams()).train, on_cpu()) == "host"


class Sized(Streams):
    """Makes batches of the given sizes; ``seeds`` are the seeds of the epochs."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.seeds: list[int] = []

    def train_batches(self, batch_size: int, seed: int) -> Any:
        assert batch_size == 8
        self.seeds.append(seed)
        return ((torch.zeros(size, 3), torch.zeros(size)) for size in self.sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 8, 9), "a batch of 9 samples; give 8"),
        ((8, 5, 8), "a batch of 5 samples; give 8"),
        ((5,), "no batch of 8 samples"),
        ((), "no batch of 8 samples"),
    ],
)
def test_a_batch_of_another_size_is_an_error_with_both_sizes(sizes: tuple[int, ...], said: str) -> None:
    batches = batches_of(loaded(Sized(*sizes)).train, ACCUMULATED, on_cpu(), seed=0)
    with pytest.raises(WorkloadError, match=said):
        list(itertools.islice(batches, 4))


def test_a_short_last_batch_is_left_out_and_each_epoch_has_another_seed() -> None:
    workload = Sized(8, 8, 3)
    batches = batches_of(loaded(workload).train, ACCUMULATED, on_cpu(), seed=0)
    assert [len(targets) for _, targets in itertools.islice(batches, 5)] == [8] * 5
    assert len(workload.seeds) == len(set(workload.seeds)) == 3


def toy_with(*layers: nn.Module) -> Any:
    """Return a workload whose model has these layers before the toy's layers."""
    return Toy(network=lambda dropout: nn.Sequential(*layers, two_layers(dropout)))


def test_the_trainable_parameters_are_counted_once_each() -> None:
    assert describe_model(Toy(), toy_data(), on_cpu()).parameters == 6 * 16 + 16 + 16 * 2 + 2
    shared = nn.Linear(6, 6, bias=False)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    assert describe_model(toy_with(shared, shared, frozen), toy_data(), on_cpu()).parameters == 36 + 146


@pytest.mark.parametrize(
    ("layer", "counted"),
    [
        (lambda: nn.BatchNorm1d(6), 1),
        (lambda: nn.SyncBatchNorm(6), 1),
        (lambda: nn.BatchNorm1d(6, track_running_stats=False), 1),
        (lambda: Frozen(6), 0),
        (lambda: Frozen(6, track_running_stats=False), 1),
        (lambda: nn.LayerNorm(6), 0),
        (lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6), nn.Flatten()), 0),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten()), 0),
        (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6))), 2),
    ],
)
def test_only_layers_that_normalise_over_the_batch_are_counted(layer: Callable[[], nn.Module], counted: int) -> None:
    assert describe_model(toy_with(layer()), toy_data(), on_cpu()).batch_norm_layers == counted


def test_the_described_metrics_are_of_the_validation_part_before_the_first_step() -> None:
    found = describe_model(Toy(), toy_data(), on_cpu(), seed=5).initial_metrics
    torch.manual_seed(5)
    toy = Toy()
    with torch.no_grad():
        assert found == toy.evaluate(toy.build_model(dropout=0.0).eval(), toy_data().validation)
    assert found == describe_model(Toy(), toy_data(), on_cpu(), seed=5).initial_metrics
    assert found != describe_model(Toy(), toy_data(), on_cpu(), seed=6).initial_metrics


def test_the_model_is_built_once_with_the_dropout_given() -> None:
    network = Mock(side_effect=two_layers)
    describe_model(Toy(network=network), toy_data(), on_cpu(), dropout=0.25)
    network.assert_called_once_with(0.25)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_none(value: float) -> None:
    metrics = {"accuracy": MetricInfo(), "loss": MetricInfo()}
    toy = Toy(on_evaluate=lambda metrics: {"accuracy": 0.5, "loss": value}, metrics=metrics)
    assert describe_model(toy, toy_data(), on_cpu()).initial_metrics == {"accuracy": 0.5, "loss": None}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": 1.0}, "no metric 'accuracy', only loss"),
        ({}, "no metric 'accuracy', only an empty mapping"),
        ({"accuracy": 0.5, "loss": "low"}, "returned 'low' as 'loss'; return a number"),
        ({"accuracy": 1.5, "loss": 1.0}, r"accuracy = 1.5, outside the declared range \[0.0, 1.0\]"),
        (0.5, "returned float; return a mapping"),
    ],
)
def test_an_evaluation_without_the_declared_metrics_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe_model(Toy(on_evaluate=lambda metrics: returned), toy_data(), on_cpu())


def test_tokens_are_counted_only_if_the_workload_has_their_number() -> None:
    assert (tokens_per_sample(Toy()), tokens_per_sample(Toy(tokens_per_sample=32))) == (None, 32)


@pytest.mark.parametrize("value", [0, -3, 1.5, "64", True])
def test_tokens_that_are_no_count_are_refused(value: object) -> None:
    with pytest.raises(WorkloadError, match=r"tokens_per_sample = .* must be an integer >= 1"):
        tokens_per_sample(Toy(tokens_per_sample=value))


# Token batches --------------------------------------------------------------------------------------------------------


SIZE, MICRO, SEED = 256, 64, 3
TOKEN_BATCHES = Configuration(batch_size=SIZE, micro_batch_size=MICRO, accumulation_steps=4, learning_rate=0.01)


@pytest.fixture
def workload(tmp_path: Path) -> CharLM:
    lines = ("abcdefghijklmnop"[: 2 + 5 * number % 13] for number in range(400))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return CharLM(str(tmp_path / "text.txt"), context=16, heads=2, width=16, lines=True)


@pytest.fixture
def data(workload: CharLM) -> Data:
    return check_data(workload.load(CPU), workload, counts_tokens=True)


def steps_of(data: Data, micro_batches: int = 4) -> Iterator[list[list[int]]]:
    batches = TokenBatches(data.train.lengths, MICRO, micro_batches, SEED)
    return itertools.chain.from_iterable(batches.epoch() for _ in itertools.count())


def flat(step: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(step))


def loss_of(workload: CharLM, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> WeightedLoss:
    loss = workload.loss(model, inputs, targets, label_smoothing=0.0)
    assert isinstance(loss, WeightedLoss)
    return loss


def padded_batch(workload: CharLM, model: nn.Module, data: Data, rows: list[int]) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradient of all rows in one batch, padded to the longest."""
    inputs, targets = data.train.samples.gather(torch.tensor(rows))
    loss = loss_of(workload, model, inputs, targets)
    mean = loss.total / loss.weight
    return mean.item(), list(torch.autograd.grad(mean, list(model.parameters())))


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    apart, size = (
        torch.stack([one.norm() for one in each]).norm()
        for each in ([one - other for one, other in zip(found, expected, strict=True)], expected)
    )
    assert apart <= 1e-6 * size


def test_a_step_of_token_batches_has_the_loss_and_gradient_of_the_padded_batch(workload: CharLM, data: Data) -> None:
    computation = on_cpu(batch_unit="tokens", loader_workers=0)
    with Trainer(workload, TOKEN_BATCHES, data.train, computation, SEED) as trainer:
        trainer.model.double()
        trainer.updates.apply = lambda only=None: None  # type: ignore[method-assign]
        for step in itertools.islice(steps_of(data), 5):
            expected = padded_batch(workload, trainer.model, data, flat(step))
            trainer.step()
            assert trainer.take_mean_loss() == pytest.approx(expected[0], rel=1e-6)
            assert_equal([one.grad for one in trainer.model.parameters() if one.grad is not None], expected[1])
        real = sum(data.train.lengths[row] for step in itertools.islice(steps_of(data), 5) for row in flat(step))
        assert tokens_trained(data.train, SEED, trainer.growth) == real
        assert trainer.growth.samples == 5 * SIZE


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_own_loop_s_gradient_is_that_of_the_padded_batch(workload: CharLM, data: Data, ranks: int) -> None:
    model = workload.build_model(dropout=0.0).double()
    shares: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        split = Configuration(
            batch_size=SIZE, micro_batch_size=MICRO, accumulation_steps=4 // ranks, world_size=ranks, learning_rate=0.01
        )
        trial = Trial(Alone(split, SEED, {}, steps=1))
        trial.rank = rank
        loader = DataLoader(
            data.train.samples.samples,
            batch_sampler=trial.token_batches(data.train.lengths),
            collate_fn=workload.collate,
        )
        model.zero_grad()
        for inputs, targets in itertools.islice(trial.batches(loader), 4 // ranks):
            total = loss_of(workload, model, inputs, targets).total
            torch.autograd.backward(total / trial.batch_tokens())
        shares.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    averaged = [torch.stack(each).mean(0) for each in zip(*shares, strict=True)]  # as DistributedDataParallel does
    assert_equal(averaged, padded_batch(workload, model, data, flat(next(steps_of(data))))[1])


class Resumed(Alone):
    """A loop that resumes after two steps and a step that loss scaling skipped."""

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        return 2, 3 * SIZE


def test_a_loop_that_skipped_a_step_before_a_pause_divides_by_the_tokens_of_its_own_batch(data: Data) -> None:
    trial = Trial(Resumed(TOKEN_BATCHES, SEED, {}, steps=9))
    trial.state(model=nn.Linear(1, 1))
    sampler = trial.token_batches(data.train.lengths)
    rows = next(iter(trial.batches(DataLoader(range(400), batch_sampler=sampler, collate_fn=list))))  # type: ignore[arg-type]
    fourth = next(itertools.islice(steps_of(data), 3, None))
    assert rows == fourth[0]
    assert trial.batch_tokens() == sum(data.train.lengths[row] for row in flat(fourth))


def test_micro_batches_keep_the_budget_and_an_epoch_has_each_sample_once(data: Data) -> None:
    lengths = data.train.lengths
    step = TokenBatches(lengths, MICRO, 1, SEED)
    first, second = (list(itertools.chain.from_iterable(step.epoch())) for _ in range(2))
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(len(lengths)))
    assert first != second
    padding = 0
    for rows in first:
        longest = max(lengths[row] for row in rows)
        assert longest * len(rows) <= MICRO
        padding += longest * len(rows) - sum(lengths[row] for row in rows)
    assert padding < 0.1 * sum(lengths)


def test_a_resumed_loop_continues_with_the_next_step(data: Data) -> None:
    whole = TokenSampler(TokenBatches(data.train.lengths, MICRO, 4, SEED), 0, 1, 0)
    epoch = list(whole)
    steps = len(epoch) // 4
    expected = [*epoch, *whole, *whole]
    for done in (0, 2, steps - 1, steps, steps + 2):
        later = TokenSampler(TokenBatches(data.train.lengths, MICRO, 4, SEED), 0, 1, done)
        assert [*later, *later, *later][: 2 * steps - 8] == expected[4 * done :][: 2 * steps - 8]
        assert later.tokens(steps + 5) == whole.tokens(steps + 5) != []


def unmeasured(workload: CharLM) -> None:
    check_data(toy_data(), Toy(), counts_tokens=True)


def too_few(workload: CharLM) -> None:
    found = workload.load(CPU)
    workload.sample_tokens = workload.sample_tokens[1:]
    check_data(found, workload, counts_tokens=True)


def short(workload: CharLM) -> None:
    TokenBatches([4, 90], 64, 1, SEED)


def hungry(workload: CharLM) -> None:
    list(TokenBatches([4, 60], 64, 3, SEED).epoch())


def mean_loss(workload: CharLM) -> None:
    part = check_data(workload.load(CPU), workload, counts_tokens=True).train
    workload.lines = False
    with Trainer(workload, TOKEN_BATCHES, part, on_cpu(batch_unit="tokens", loader_workers=0), SEED) as trainer:
        trainer.step()


def large(workload: CharLM) -> None:
    part = check_data(workload.load(CPU), workload, counts_tokens=True).train
    Trainer(workload, replace(TOKEN_BATCHES, batch_size=10**9), part, on_cpu(batch_unit="tokens"), SEED)


def counted_in_samples(workload: CharLM) -> None:
    Started(asked()).trial.token_batches([4, 8])


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (unmeasured, WorkloadError, "sample_tokens"),
        (too_few, WorkloadError, "sample_tokens has .* numbers >= "),
        (short, UsageError, "64 tokens must hold the longest training sample, 90"),
        (hungry, UsageError, "of a step's 3 micro-batches of 64 tokens"),
        (mean_loss, WorkloadError, "WeightedLoss"),
        (large, WorkloadError, "the number of training tokens"),
        (counted_in_samples, UsageError, "count samples"),
    ],
)
def test_a_training_that_cannot_count_tokens_is_refused(
    mistake: Callable[[CharLM], None], error: type[BSSearchError], said: str, workload: CharLM
) -> None:
    with pytest.raises(error, match=said):
        mistake(workload)


GROWING: dict[str, Any] = {"batch_schedule": {"name": "geometric"}}


@pytest.mark.parametrize("changes", [{"space": GROWING}, {"training": {"ghost_batch_size": 16}}])
def test_growing_and_ghost_batches_count_samples(changes: dict[str, Any]) -> None:
    spec = make_spec().model_dump(mode="json")
    changed = {name: {**spec[name], **changes.get(name, {})} for name in ("space", "training")}
    make_spec(**{**spec, **changed, "training": {**changed["training"], "batch_unit": "samples"}})
    with pytest.raises(ValidationError, match="batch_unit = tokens"):
        make_spec(**{**spec, **changed, "training": {**changed["training"], "batch_unit": "tokens"}})


def test_the_unit_is_part_of_the_question_only_if_it_is_tokens() -> None:
    plain, compiled = make_spec(), make_spec(training={"compile": "default"})
    for spec in (plain, compiled):
        training = spec.training.model_dump()
        same, other = (make_spec(training={**training, "batch_unit": unit}) for unit in ("samples", "tokens"))
        assert same.question_hash == spec.question_hash != other.question_hash


def test_a_program_s_batches_may_count_tokens() -> None:
    spec = make_spec(workload="train.py", training={"batch_unit": "tokens"}, workload_settings={})
    assert spec.training.counts_tokens
    with pytest.raises(ValidationError, match="precision"):
        make_spec(workload="train.py", training={"batch_unit": "tokens", "precision": "bf16"}, workload_settings={})


def test_a_token_part_counts_tokens(data: Data) -> None:
    assert isinstance(data.train, TokenPart) and len(data.train) == sum(data.train.lengths) > len(data.validation)
