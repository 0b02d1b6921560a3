"""`BatchAdvisor`: the noise scale of any loop, and the advice from it."""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bssearch
from bssearch.errors import UsageError
from bssearch.records import BATCH_STAGES, GradientNoise, batch_schedule_of
from bssearch.records.noise_scale import Norms, Pass
from bssearch.training.advisor import STEPS_RANGE, BatchAdvice, batch_stages, megatron_schedule
from tests.factories import make_trial

FEATURES, BATCH, NOISE = 5, 32, 3.0

Sample = tuple[torch.Tensor, torch.Tensor]
Backward = Callable[[bssearch.BatchAdvisor, nn.Module, torch.Tensor, torch.Tensor], object]


def samples(seed: int) -> Iterator[Sample]:
    """Batches of y = x·1 + noise."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, FEATURES, generator=generator)
        yield x, x.sum(dim=1, keepdim=True) + NOISE * torch.randn(BATCH, 1, generator=generator)


def at_zero() -> nn.Linear:
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, y: ((model(x) - y) ** 2).mean()


def exact_scale() -> float:
    # The gradient of a sample is −2xy, and y = x·w + ε with ‖w‖² = d: tr Cov(xy) = d(d + 1 + σ²), ‖E xy‖² = d.
    return FEATURES + 1 + NOISE**2


def often(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> bssearch.BatchAdvisor:
    """Advisor whose measurements seem to take no time, so that it measures every other step."""
    ticks = itertools.count()
    return bssearch.BatchAdvisor(model, BATCH, optimizer=optimizer, now=lambda: float(next(ticks)))


def followed(
    advisor: bssearch.BatchAdvisor, model: nn.Module, backward: Backward, steps: int = 20, seed: int = 0
) -> BatchAdvice:
    """Let an advisor follow some steps; return its report."""
    for _, (x, y) in zip(range(steps), samples(seed), strict=False):
        backward(advisor, model, x, y)
        advisor.step()
        model.zero_grad()
    advisor.close()
    return advisor.report()


def halved(advisor: bssearch.BatchAdvisor, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    torch.autograd.backward(loss_of(model)(x, y))


def accumulated(advisor: bssearch.BatchAdvisor, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    parts = torch.split(x, BATCH // 4)
    for part, targets in zip(parts, torch.split(y, BATCH // 4), strict=True):
        torch.autograd.backward(loss_of(model)(part, targets) / len(parts))


def summed(advisor: bssearch.BatchAdvisor, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    for part, targets in zip(torch.split(x, BATCH // 4), torch.split(y, BATCH // 4), strict=True):
        torch.autograd.backward(loss_of(model)(part, targets))


@pytest.mark.parametrize("backward", [halved, accumulated, summed])
def test_the_interval_holds_the_exact_noise_scale(backward: Backward) -> None:
    model = at_zero()
    found = followed(often(model), model, backward, 1500, seed=3)
    assert found.measured_steps >= 128
    assert found.samples == 1500 * BATCH
    known = found.noise_scale
    assert known.low is not None and known.high is not None
    assert known.low < exact_scale() < known.high < 2 * exact_scale()


def test_a_split_step_has_the_gradient_of_the_whole_batch_and_books_its_second_pass_aside() -> None:
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    entered = 0

    @contextmanager
    def aside() -> Iterator[None]:
        nonlocal entered
        entered += 1
        yield

    advisor = bssearch.BatchAdvisor(model, BATCH, micro_batches=1, aside=aside)
    for _, (x, y) in zip(range(20), samples(0), strict=False):
        for one in (model, twin):
            torch.manual_seed(1)
            torch.autograd.backward(loss_of(one)(x.double(), y.double()))
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)
        advisor.step()
        model.zero_grad()
        twin.zero_grad()
    assert entered == advisor.report().measured_steps > 0


LONGEST = 6  # words of a sentence


def sentences(seed: int, rows: int = 15) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches of sentences of 1 to `LONGEST` words, each as a sample of `samples`, with the words' mask."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(rows, LONGEST, FEATURES, generator=generator)
        y = x.sum(dim=2) + NOISE * torch.randn(rows, LONGEST, generator=generator)
        yield x, y, torch.arange(LONGEST) < torch.randint(1, LONGEST + 1, (rows, 1), generator=generator)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("is_flat", [False, True])
def test_the_noise_of_token_batches_is_that_of_their_tokens(micro_batches: int, is_flat: bool) -> None:
    def follow(micro_batches: int, steps: int) -> bssearch.BatchAdvisor:
        model, ticks, shares = at_zero(), itertools.count(), [[0.0]]
        advisor = bssearch.BatchAdvisor(
            model, 90, micro_batches=micro_batches, weights=lambda: shares, now=lambda: float(next(ticks))
        )
        for _, (x, y, is_word) in zip(range(steps), sentences(3), strict=False):
            cut = [7, 8] if micro_batches == 2 else [15]
            shares[:] = [[float(row.sum()) for row in part] for part in torch.split(is_word, cut)]
            for words, values, mask in zip(*(torch.split(one, cut) for one in (x, y, is_word)), strict=True):
                found = model(words.flatten(0, 1)).view(values.shape) if is_flat else model(words)[..., 0]
                torch.autograd.backward((((found - values) ** 2) * mask).sum() / is_word.sum())
            advisor.step()
            model.zero_grad()
        return advisor

    known = follow(micro_batches, 1500).report().noise_scale
    assert known.low is not None and known.high is not None
    assert known.low < exact_scale() < known.high < 2 * exact_scale()
    found, halves = (follow(count, 40)._passes for count in (micro_batches, 2))
    assert len(found) > 3
    for (_, one), (_, other) in zip(found, halves, strict=True):
        assert one.plain.small == pytest.approx(other.plain.small, rel=1e-4)
        assert (one.small_batch, one.small_batches) == pytest.approx((other.small_batch, other.small_batches))


@pytest.mark.parametrize("kind", ["plain", "penalty", "two outputs", "no rows"])
def test_a_loss_that_cannot_be_split_is_not_measured(kind: str) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kind == "penalty":
            return loss_of(model)(x, y) + model.weight.sum()
        if kind == "two outputs":
            return loss_of(lambda x: model(x) + model(x.flip(0)))(x, y)
        if kind == "no rows":
            return loss_of(lambda x: nn.functional.linear(x, model.weight))(x, y)
        return loss_of(model)(x, y)

    model = at_zero()
    found = followed(often(model), model, lambda _, __, x, y: torch.autograd.backward(loss(x, y)), 40)
    assert (found.measured_steps == 0) == (kind != "plain")
    assert "one micro-batch" in found.reason
    assert ("no output has equally many rows" in found.reason) == (kind == "no rows")


def test_gradients_clipped_before_the_advisor_s_step_do_not_change_the_noise_scale() -> None:
    def clipped(advisor: bssearch.BatchAdvisor, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        accumulated(advisor, model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    first, second = at_zero(), at_zero()
    found = followed(often(first), first, clipped, 100, seed=1).noise_scale.scale
    expected = followed(often(second), second, accumulated, 100, seed=1).noise_scale.scale
    assert found is not None and found == pytest.approx(expected, rel=1e-6)


def test_under_adam_the_noise_is_measured_as_its_update_sees_it() -> None:
    model = at_zero()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    by_kind = [often(model, one) for one in (None, optimizer)]
    scaled = torch.tensor([100.0, 1.0, 1.0, 1.0, 1.0])
    for _, (x, y) in zip(range(400), samples(2), strict=False):
        noise = y - x.sum(dim=1, keepdim=True)
        accumulated(by_kind[0], model, x * scaled, 3 * x[:, :1] + noise)
        for one in by_kind:
            one.step()
        optimizer.step()
        optimizer.zero_grad()
    plain, adam = (one.report().noise_scale.scale for one in by_kind)
    assert plain is not None and adam is not None
    assert adam > 2 * plain, "the other coordinates are noise alone, and without the division too small to count"


def test_sparse_adam_is_measured() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    advisor = often(model, optimizer)
    for _ in range(40):
        rows = torch.randint(0, 10, (BATCH,))
        torch.autograd.backward(((model(rows).sum(dim=1) - rows) ** 2).mean())
        advisor.step()
        optimizer.step()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
    assert advisor.noise.adam_low is not None


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (nn.Linear(1, 1), 0, "batch_size=0"),
        (nn.Linear(1, 1), 64.5, "batch_size=64.5"),
        (nn.Identity(), 8, "no parameter"),
    ],
)
def test_wrong_arguments_are_named(model: nn.Module, size: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bssearch.BatchAdvisor(model, size)


def advice(scale: float, batch_size: int) -> BatchAdvice:
    found = GradientNoise(scale=scale, low=0.8 * scale, high=1.2 * scale)
    return BatchAdvice(batch_size=batch_size, samples=10_000, measured_steps=64, noise_scale=found, step_seconds=0.010)


def test_a_doubling_saves_the_steps_of_the_law() -> None:
    saved = advice(256, 256).saved_steps()
    assert saved is not None and saved[0] is not None
    assert saved[0] == pytest.approx(0.25), "1 + 256/512 = 1.5 steps instead of 2"
    assert -0.1 < saved[1] < saved[0] < saved[2] < 0.52
    text = str(advice(256, 256))
    assert "saves 25 % [-9, 51] of the steps and takes 50 % more samples" in text
    assert "less than 0.0133 s; a step of batch 256 takes 0.01 s" in text


def test_an_unbounded_noise_scale_tells_the_least_saving() -> None:
    found = replace(advice(256, 256), noise_scale=GradientNoise(low=5120.0))
    share, low, high = found.saved_steps() or (0.0, 0.0, 0.0)
    assert share is None and high == pytest.approx(1 - 0.5 * math.exp(-STEPS_RANGE))
    by_law, least = (1 - (1 + b_crit / 512) / (1 + b_crit / 256) for b_crit in (5120, 5120 / 8))
    assert low < least < by_law and "saves at least 26 % of the steps" in str(found)
    small = replace(found, noise_scale=GradientNoise(low=5.0))
    assert "saves at least 0 % of the steps" in str(small)


def test_the_range_has_the_deviation_of_steps_from_the_law() -> None:
    exact = GradientNoise(scale=1e9, low=1e9, high=1e9)
    share, low, high = replace(advice(256, 256), noise_scale=exact).saved_steps() or (0.0, 0.0, 0.0)
    assert share == pytest.approx(0.5)
    assert [math.log((1 - end) / 0.5) for end in (low, high)] == pytest.approx([STEPS_RANGE, -STEPS_RANGE], rel=1e-4)


def test_the_report_offers_a_smaller_batch_above_the_noise_scale() -> None:
    assert "batch 128 takes 20 % more steps and saves 40 % of the samples" in str(advice(64, 256))
    assert "batch 128" not in str(advice(640, 256))


def test_a_smaller_last_batch_is_not_measured() -> None:
    model = at_zero()
    advisor = often(model)
    smaller = followed(advisor, model, lambda advisor, model, x, y: halved(advisor, model, x[:8], y[:8]))
    assert smaller.measured_steps == 0
    assert followed(advisor, model, halved).measured_steps > 0


def test_two_slow_measured_steps_do_not_delay_the_first_interval() -> None:
    model, step = at_zero(), itertools.count(1)
    durations = itertools.accumulate(100.0 if number in (9, 25) else 1.0 for number in step)  # of measured steps
    advisor = bssearch.BatchAdvisor(model, BATCH, now=lambda: next(durations))
    assert followed(advisor, model, accumulated, 60).measured_steps >= 8


def test_a_closed_advisor_leaves_no_hooks() -> None:
    model = at_zero()
    advisor = often(model)
    for _, (x, y) in zip(range(20), samples(0), strict=False):
        accumulated(advisor, model, x, y)
        advisor.step()
        advisor.close()
        assert not model.weight._backward_hooks and not model.weight._post_accumulate_grad_hooks
        assert not model._forward_hooks


def test_gradients_that_are_not_accumulated_are_no_micro_batches() -> None:
    model = at_zero()
    advisor = often(model)

    def penalised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = loss_of(model)(x, y)
        (gradient,) = torch.autograd.grad(found, model.weight, create_graph=True)
        return found + 0.0 * gradient.square().sum()

    found = followed(advisor, model, lambda advisor, _, x, y: torch.autograd.backward(penalised(x, y)), 100, seed=1)
    expected = followed(often(model), model, halved, 100, seed=1).noise_scale.scale
    assert expected is not None and found.noise_scale.scale == pytest.approx(expected, rel=1e-5)


def test_steps_with_another_number_of_backward_passes_are_not_measured() -> None:
    model, ticks = at_zero(), itertools.count()
    advisor = bssearch.BatchAdvisor(model, BATCH, micro_batches=2, now=lambda: float(next(ticks)))
    assert "4 backward passes instead of 2; correct micro_batches" in str(followed(advisor, model, accumulated))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([[1.0], [1.0]], "4 backward passes instead of 2; correct weights"),
        ([[1.0], [0.0], [0.0], [0.0]], "fewer than two micro-batches with a positive weight"),
    ],
)
def test_a_step_that_contradicts_its_weights_says_so(weights: list[list[float]], said: str) -> None:
    model, ticks = at_zero(), itertools.count()
    advisor = bssearch.BatchAdvisor(model, BATCH, weights=lambda: weights, now=lambda: float(next(ticks)))
    assert said in str(followed(advisor, model, accumulated))


def test_a_step_with_one_backward_pass_does_not_end_the_measurements_of_steps_with_more() -> None:
    model = at_zero()

    def one_then_four(advisor: bssearch.BatchAdvisor, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        # as with tokens as rows, the output of a micro-batch has as many rows as the batch has samples
        for _ in range(1 if advisor.report().samples < 20 * BATCH else 4):
            halved(advisor, model, x, y)

    advisor = often(model)
    followed(advisor, model, one_then_four, 60)
    assert {one.small_batches for _, one in advisor._passes} == {2, 4}


def test_a_gradient_that_is_not_finite_is_not_measured() -> None:
    model = at_zero()
    found = followed(often(model), model, lambda advisor, model, x, y: accumulated(advisor, model, x, y / 0))
    assert found.measured_steps == 0 and found.reason.startswith("a gradient was not finite")


def test_a_parameter_may_be_frozen_while_the_advisor_follows() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 3), nn.Linear(3, 1))
    advisor = often(model)
    for number, (x, y) in zip(range(60), samples(0), strict=False):
        model[0].requires_grad_(number < 20)
        halved(advisor, model, x, y)
        advisor.step()
        model.zero_grad()
    assert advisor.report().measured_steps > 15


def test_sparse_frozen_unused_and_scalar_parameters_are_measured_as_they_are() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = (self.scale * self.table(rows) * self.frozen).sum(dim=1)
            return found

    model = Odd()
    advisor = often(model)
    for _ in range(60):
        rows = torch.randint(0, 10, (BATCH,))
        torch.autograd.backward(((model(rows) - rows) ** 2).mean())
        advisor.step()
        model.zero_grad()
    found = advisor.report()
    assert found.measured_steps >= 8
    assert found.noise_scale.low is not None


def test_the_schedule_begins_a_size_once_the_noise_scale_stays_above_it() -> None:
    advisor = bssearch.BatchAdvisor(at_zero(), 32)
    rng = torch.Generator().manual_seed(0)
    for step in range(1, 4001):
        scale = 40.0 if step <= 1000 else 140.0
        trace = scale * (1 + 0.05 * float(torch.randn((), generator=rng)))
        norms = Norms(small=1 + trace / 16, big=1 + trace / 32)
        advisor._passes.append((32 * step, Pass(small_batch=16, small_batches=2, samples=10**15, plain=norms)))
    found = advisor.stages(512)
    assert [size for _, size in found] == [64, 128]
    (first, _), (second, _) = found
    assert 32_000 < first < second < 32 * 1200
    assert megatron_schedule(32, found, sequence_length=10) == f"0:32 {10 * first}:64 {10 * second}:128"
    assert advisor.stages(63) == advisor.stages(0) == []
    parameters = {"batch_schedule": "milestones", BATCH_STAGES: batch_stages(found), "batch_rate_rule": "sqrt"}
    schedule = batch_schedule_of(replace(make_trial(1, batch_size=32).configuration, parameters=parameters))
    assert schedule is not None and [one.batch_size for one in schedule.stages] == [32, 64, 128]


@pytest.mark.slow
def test_the_gradients_of_two_ranks_count_as_micro_batches_of_one_step(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "tests.training.advisor_ranks"]
        running = [
            subprocess.Popen([*command, str(rank), str(ranks), str(tmp_path / f"of{ranks}")], stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            printed = [one.communicate(timeout=120)[0] for one in running]
        finally:
            for one in running:
                one.kill()
        assert [one.returncode for one in running] == [0] * ranks
        passes, reason = json.loads(printed[0])
        found.append(torch.tensor(passes, dtype=torch.float64))
    assert reason.startswith("the ranks have different gradients after backward()")
    assert len(found[0]) > 3
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
