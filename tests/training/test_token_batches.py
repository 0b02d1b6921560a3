"""Batches of tokens: loss and gradient equal those of one padded batch; mistakes are refused."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import DataLoader

from bssearch import BSSearchError, Configuration, Trial, UsageError, WeightedLoss, WorkloadError
from bssearch.executors.loops.assignment import Alone
from bssearch.executors.loops.passes import TokenSampler
from bssearch.training.batches import TokenBatches, tokens_trained
from bssearch.training.trainer import Trainer
from bssearch.workloads.char_lm import CharLM
from bssearch.workloads.data import Data, TokenPart, check_data
from tests.executors.loops.loops import Started, asked
from tests.factories import make_spec
from tests.training.toys import CPU, Toy, on_cpu, toy_data

SIZE, MICRO, SEED = 256, 64, 3
TOKENS = Configuration(batch_size=SIZE, micro_batch_size=MICRO, accumulation_steps=4, learning_rate=0.01)


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


def padded(workload: CharLM, model: nn.Module, data: Data, rows: list[int]) -> tuple[float, list[torch.Tensor]]:
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
    with Trainer(workload, TOKENS, data.train, computation, SEED) as trainer:
        trainer.model.double()
        trainer.updates.apply = lambda only=None: None  # type: ignore[method-assign]
        for step in itertools.islice(steps_of(data), 5):
            expected = padded(workload, trainer.model, data, flat(step))
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
    assert_equal(averaged, padded(workload, model, data, flat(next(steps_of(data))))[1])


class Resumed(Alone):
    """A loop that resumes after two steps and a step that loss scaling skipped."""

    def keep(self, objects: Mapping[str, Any]) -> tuple[int, int]:
        return 2, 3 * SIZE


def test_a_loop_that_skipped_a_step_before_a_pause_divides_by_the_tokens_of_its_own_batch(data: Data) -> None:
    trial = Trial(Resumed(TOKENS, SEED, {}, steps=9))
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
    with Trainer(workload, TOKENS, part, on_cpu(batch_unit="tokens", loader_workers=0), SEED) as trainer:
        trainer.step()


def counted_in_samples(workload: CharLM) -> None:
    Started(asked()).trial.token_batches([4, 8])


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (unmeasured, WorkloadError, "sample_tokens"),
        (too_few, WorkloadError, "sample_tokens has"),
        (short, UsageError, "64 tokens must hold the longest training sample, 90"),
        (hungry, UsageError, "a step needs 3"),
        (mean_loss, WorkloadError, "WeightedLoss"),
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
