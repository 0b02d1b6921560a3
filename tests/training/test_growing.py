"""Trials whose batch grows: samples and learning rate of each step, pausing, and refusals."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from bssearch.errors import WorkloadError
from bssearch.records import BatchSchedule, Configuration, LearningRateRule, Stage, TrialState, with_batch_schedule
from bssearch.training.batches import Growth, micro_batches
from bssearch.training.trainer import Trainer, warm_up
from bssearch.training.trial_checkpoint import read_checkpoint
from bssearch.workloads.data import Part
from tests.records.test_batch_schedule import milestones, schedules
from tests.training.test_pausing import Parts, asked, check_goes_on
from tests.training.toys import Run, Toy, configuration, curve, on_cpu, request, toy_data

TRAIN_SAMPLES = 100


def grows(*stages: tuple[int, ...], rule: LearningRateRule = LearningRateRule.SQRT, **changes: Any) -> Configuration:
    return with_batch_schedule(configuration(**changes), milestones(*stages, rule=rule))


def by_noise(*sizes: int, share: float = 1.0, **changes: Any) -> Configuration:
    stages = tuple(Stage(0, size, size) for size in sizes)
    schedule = BatchSchedule(name="noise_scale", stages=stages, rate_rule=LearningRateRule.SQRT, noise_share=share)
    return with_batch_schedule(configuration(**changes), schedule)


def rows_of(one: Configuration, steps: int, **training: Any) -> list[list[list[int]]]:
    """Return the rows of each micro-batch of each step; an input is its row."""
    part = Part(torch.arange(TRAIN_SAMPLES).float(), torch.zeros(TRAIN_SAMPLES))
    growth = Growth(one, TRAIN_SAMPLES)
    found = []
    batches = micro_batches(part, on_cpu(**training), 3, growth)
    for _ in range(steps):
        count = growth.stage.accumulation_steps
        found.append([[int(row) for row in inputs] for inputs, _ in itertools.islice(batches, count)])
        growth.stepped()
    batches.close()
    return found


def test_each_step_has_the_next_samples_and_an_epoch_ends_before_an_incomplete_batch() -> None:
    steps = rows_of(grows((0, 20), (60, 40, 10)), 6)
    assert [[len(one) for one in step] for step in steps] == [[20], [20], [20], [10] * 4, [10] * 4, [10] * 4]
    flat = [list(itertools.chain(*step)) for step in steps]
    first, second = list(itertools.chain(*flat[:4])), list(itertools.chain(*flat[4:]))
    assert sorted(first) == list(range(100)), "one whole epoch"
    assert len(set(second)) == 80, "two batches of the next epoch; its last 20 samples are dropped"


@given(schedules(), st.integers(1, 40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_loader_gathers_the_same_rows_and_all_are_different_within_an_epoch(
    schedule: BatchSchedule, steps: int
) -> None:
    stages = tuple(one for one in schedule.stages if one.batch_size <= TRAIN_SAMPLES)
    if not stages:
        return
    one = configuration(stages[0].batch_size, micro_batch_size=stages[0].micro_batch_size)
    one = replace(one, accumulation_steps=stages[0].accumulation_steps)
    if len(stages) > 1:
        one = with_batch_schedule(one, replace(schedule, stages=stages))
        found = rows_of(one, steps)
        assert found == rows_of(one, steps, data="host", loader_workers=0)
    else:
        found = rows_of(one, steps)
    samples, epoch = 0, list[int]()
    for step in found:
        stage = next(stage for stage in reversed(stages) if stage.start_samples <= samples)
        assert [len(rows) for rows in step] == [stage.micro_batch_size] * stage.accumulation_steps
        if len(epoch) + stage.batch_size > TRAIN_SAMPLES:
            epoch = []
        epoch += itertools.chain(*step)
        assert len(set(epoch)) == len(epoch)
        samples += stage.batch_size


def test_a_batch_that_has_not_grown_yet_trains_as_one_that_stays_bit_for_bit() -> None:
    plain = configuration(20, dropout=0.3, warmup_epochs=1.0, parameters={"schedule": "cosine", "horizon_samples": 900})
    growing = with_batch_schedule(plain, milestones((0, 20), (10**6, 40)))
    runs = [Run(request(one, target=1.0, train_seconds_limit=1e9)) for one in (plain, growing)]
    assert curve(runs[0]) == curve(runs[1])
    assert runs[0].outcome.steps == runs[1].outcome.steps == 45
    rates = [[seen.learning_rate for seen in run.observations] for run in runs]
    assert rates[0] == rates[1]


def test_steps_samples_and_rates_are_counted_as_they_are() -> None:
    limits: dict[str, Any] = {"target": 1.0, "train_seconds_limit": 1e9, "eval_every_steps": 2}
    one = grows((0, 20), (60, 40), (200, 80), parameters={"schedule": "linear", "horizon_samples": 400})
    run = Run(request(one, **limits))
    seen = [(one.step, one.samples) for one in run.observations]
    # Three steps of 20, four of 40 (to 220), three of 80: evaluated wherever another 40 samples have been seen.
    assert seen == [(0, 0), (2, 40), (4, 100), (5, 140), (6, 180), (7, 220), (8, 300), (9, 380), (10, 460)]
    assert (run.outcome.steps, run.outcome.samples, run.outcome.dropped_samples_per_epoch) == (10, 460, None)
    rates = {one.step: one.learning_rate for one in run.observations}
    assert rates[2] == pytest.approx(0.02 * (1 - 1 / 20))
    assert rates[4] == pytest.approx(0.02 * 2**0.5 * (1 - 3 / 20))
    assert rates[10] == pytest.approx(0.02 * 2 * (1 - 19 / 20))


def test_the_rate_follows_its_rule_and_the_micro_batches_make_no_difference() -> None:
    def trainer(rule: LearningRateRule, *stages: tuple[int, ...]) -> Trainer:
        one = Trainer(Toy(torch.float64), grows(*stages, rule=rule), toy_data(dtype=torch.float64).train, on_cpu(), 3)
        for _ in range(4):
            one.step()
        return one

    for rule, factor in ((LearningRateRule.LINEAR, 4.0), (LearningRateRule.SQRT, 2.0), (LearningRateRule.NONE, 1.0)):
        whole, split = trainer(rule, (0, 20), (40, 80)), trainer(rule, (0, 20), (40, 80, 8))
        assert whole.learning_rate == pytest.approx(0.02 * factor)
        assert (whole.now.accumulation_steps, split.now.accumulation_steps) == (1, 10)
        for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
            torch.testing.assert_close(one, other)


WHERE = [
    pytest.param({"stop_after": 2}, id="inside the first stage"),
    pytest.param({"stop_after": 3}, id="at a change"),
    pytest.param({"stop_after": 4}, id="after a change"),
    pytest.param({"stop_after": 8}, id="in the last stage"),
    pytest.param({"stop_seen": 0}, id="before the first step"),
]


@pytest.mark.slow
@pytest.mark.parametrize("data", ["device", "host"])
@pytest.mark.parametrize("where", WHERE)
def test_a_resumed_trial_repeats_an_unpaused_trial(where: dict[str, int], data: str, tmp_path: Path) -> None:
    one = grows((0, 20), (60, 40, 20), (200, 80), dropout=0.3, warmup_epochs=1.0, optimizer="adamw")
    settings = {"data": data, "loader_workers": 0}
    check_goes_on(lambda: Parts(asked(one, tmp_path), settings), where)


def test_a_checkpoint_has_the_samples_of_batches_that_grew(tmp_path: Path) -> None:
    Parts(asked(grows((0, 20), (60, 40)), tmp_path)).run(stop_after=5)
    saved = read_checkpoint(tmp_path / "trial")
    assert (saved.step, saved.samples) == (5, 3 * 20 + 2 * 40)


@pytest.mark.parametrize("stop_seen", [0, 10, 15])
def test_a_resumed_trial_that_grows_with_the_noise_repeats_an_unpaused_trial(stop_seen: int, tmp_path: Path) -> None:
    one = by_noise(10, 20, 40, 80, share=2.0)
    whole, _ = check_goes_on(lambda: Parts(asked(one, tmp_path, train_seconds_limit=260.0)), {"stop_seen": stop_seen})
    assert whole.observations[-1].samples > 10 * whole.observations[-1].step, "the batch has grown"


def test_it_grows_with_the_noise_scale_as_far_as_its_share_goes() -> None:
    def sizes(share: float) -> list[float]:
        asked = request(by_noise(10, 20, 40, 80, share=share), target=1.0, train_seconds_limit=1e9, eval_every_steps=5)
        counted: list[int] = []
        stop = lambda: (TrialState.PRUNED, "enough") if counted.append(1) or len(counted) > 60 else None  # type: ignore[func-returns-value]  # noqa: E731
        seen = Run(asked, stop=stop).observations
        return [
            (after.samples - before.samples) / (after.step - before.step) for before, after in itertools.pairwise(seen)
        ]

    assert set(sizes(1e-6)) == {10.0}, "no size is within a millionth of the noise scale"
    found = sizes(1.0)
    assert found == sorted(found) and found[0] < found[-1]
    assert max(sizes(1e6)) == 80.0


def test_impossible_growth_is_refused() -> None:
    with pytest.raises(WorkloadError, match="batch_size = 128 must be <= 100, the number of training samples"):
        Trainer(Toy(), grows((0, 20), (60, 128)), toy_data().train, on_cpu(), 3)
    with pytest.raises(WorkloadError, match="'noise_scale' needs the training part on the device"):
        Trainer(Toy(), by_noise(20, 40), toy_data().train, on_cpu(data="host", loader_workers=0), 3)
    with pytest.raises(WorkloadError, match="'noise_scale' measures the gradient noise scale: the training part has"):
        Run(request(by_noise(2, 4)), data=toy_data(train_samples=6))
    with pytest.raises(WorkloadError, match="keep 20"):
        Growth(grows((0, 20), (60, 40)), None)
    assert Growth(grows((0, 20), (60, 40, 20)), None).next_size == 40


def test_the_warm_up_meets_every_size() -> None:
    met: set[int] = set()

    class Noted(Toy):
        def loss(self, model: nn.Module, inputs: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            met.add(len(inputs))
            return super().loss(model, inputs, *rest, **more)

    warm_up(Noted(), grows((0, 20), (60, 40, 10), (200, 80)), toy_data(), on_cpu(), "accuracy", seed=3)
    assert met == {20, 10, 80}
