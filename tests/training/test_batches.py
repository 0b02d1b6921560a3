import itertools
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from bssearch import LaunchError, Part, WorkloadError
from bssearch.records import BatchSchedule, Configuration, LearningRateRule, Stage, TrialState, with_batch_schedule
from bssearch.spec import TrainingSpec
from bssearch.training import batches as batches_module
from bssearch.training.batches import (
    DATA_SHARE,
    Growth,
    drawn_ahead,
    micro_batches,
    place,
    placement_of,
    rows_of_steps,
    start_method,
)
from bssearch.training.computation import Computation
from bssearch.training.trainer import Trainer, warm_up
from bssearch.training.trial_checkpoint import read_checkpoint
from tests.records.test_batch_schedule import milestones, schedules
from tests.training.test_pausing import Parts, asked, check_goes_on
from tests.training.toys import Run, Toy, batches_of, configuration, curve, growth_after, on_cpu, request, toy_data

META = torch.device("meta")
"""Replaces a device with its own memory."""


def computation_on(device: torch.device, **settings: Any) -> Computation:
    return Computation(device, TrainingSpec(**settings))


class Noisy(Toy):
    """Draws random numbers of every kind while it trains."""

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * torch.randn_like(inputs)


def state_after(steps: int, computation: Computation) -> tuple[str, list[torch.Tensor], float | None, float]:
    settings: dict[str, Any] = {"dropout": 0.3, "micro_batch_size": 6, "accumulation_steps": 5}
    data = toy_data()
    warm_up(Noisy(), configuration(30, **settings), data, computation, "loss", seed=1)
    with Trainer(Noisy(), configuration(30, **settings), data.train, computation, seed=3) as trainer:
        for _ in range(steps):
            trainer.step()
        loss, metric = trainer.take_mean_loss(), trainer.evaluate(data.validation, "loss")
        state = [nn.utils.parameters_to_vector(trainer.model.parameters()).detach(), torch.get_rng_state()]
    return trainer.data_placement, state, loss, metric


@pytest.mark.parametrize("workers", [0, 2])
def test_the_host_streams_the_trial_that_the_device_holds_bit_for_bit(workers: int) -> None:
    placement, state, loss, metric = state_after(8, on_cpu())
    streamed, streamed_state, *figures = state_after(8, on_cpu(data="host", loader_workers=workers))
    assert (placement, streamed) == ("device", "host")
    assert all(torch.equal(one, other) for one, other in zip(state, streamed_state, strict=True))
    assert figures == [loss, metric]


def loaders() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("steps", [0, 1])
def test_the_processes_that_load_are_there_before_the_first_step_and_end_with_the_trainer(steps: int) -> None:
    before = loaders()
    with Trainer(Toy(), configuration(), toy_data().train, on_cpu(data="host"), seed=3) as trainer:
        for _ in range(steps):
            trainer.step()
        assert len(loaders() - before) == 2
    assert loaders() == before
    trainer.close()
    assert 0 <= trainer.evaluate(toy_data().validation, "accuracy") <= 1


def test_warming_up_leaves_no_process_behind() -> None:
    before = loaders()
    warm_up(Toy(), configuration(), toy_data(), on_cpu(data="host"), "accuracy", 0)
    assert loaders() == before


@pytest.mark.slow  # torch waits 5 s for each process that is gone
def test_an_error_of_a_loader_process_is_raised() -> None:
    train = toy_data().train
    short = type(train)(train.inputs, train.targets[:50])
    with (
        Trainer(Toy(), configuration(), short, on_cpu(data="host"), seed=3) as trainer,
        pytest.raises(IndexError, match="out of bounds"),
    ):
        trainer.step()


@pytest.mark.parametrize(
    ("setting", "memory", "placement"),
    [
        ("device", 1, "device"),
        ("host", 10**12, "host"),
        ("auto", 1.0 / DATA_SHARE, "device"),
        ("auto", 0.99 / DATA_SHARE, "host"),
    ],
)
def test_the_training_part_is_on_the_device_if_its_share_of_the_memory_allows(
    setting: str, memory: float, placement: str
) -> None:
    data = toy_data()
    assert data.train.bytes == 100 * (6 * 4 + 8)
    placed, where = place(data, computation_on(META, data=setting), round(memory * data.train.bytes))
    assert where == placement
    assert placed.train.inputs.device.type == placed.train.targets.device.type
    assert placed.train.inputs.device.type == ("meta" if placement == "device" else "cpu")
    assert placed.validation.inputs.device == placed.test.targets.device == META


@pytest.mark.parametrize(("setting", "placement"), [("auto", "device"), ("device", "device"), ("host", "host")])
def test_on_the_cpu_the_data_stay_and_only_the_setting_decides_the_placement(setting: str, placement: str) -> None:
    data = toy_data()
    placed, where = place(data, on_cpu(data=setting), memory_bytes=1)
    assert where == placement == placement_of(data.train, on_cpu(data=setting))
    assert placed.train.inputs is data.train.inputs


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpu_is_fed_the_same_batches_from_the_host(workers: int) -> None:
    device = torch.device("cuda:0")
    batch = configuration(32, micro_batch_size=16, accumulation_steps=2)
    seen = []
    for setting in ("device", "host"):
        computation = computation_on(device, data=setting, loader_workers=workers)
        data, _ = place(toy_data(4096), computation)
        batches = batches_of(data.train, batch, computation, seed=5)
        # Work on the device that reads each batch long after the host has prepared the next one.
        busy = torch.randn(2048, 2048, device=device)
        sums = []
        for inputs, targets in islice(batches, 300):
            busy = busy @ busy / 2048
            sums.append(torch.cat([inputs.flatten(), targets.to(inputs.dtype)]))
        seen.append(torch.stack(sums).cpu())
        batches.close()
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    ("setting", "after_steps"), [("device", 0), ("device", 1), ("device", 3), ("device", 7), ("host", 2), ("host", 30)]
)
def test_batches_after_some_steps_continue_the_same_order(setting: str, after_steps: int) -> None:
    train = toy_data(100).train
    split = configuration(30, micro_batch_size=10, accumulation_steps=3)
    computation = on_cpu(data=setting, loader_workers=0)
    whole = batches_of(train, split, computation, seed=5)
    later = batches_of(train, split, computation, seed=5, after_steps=after_steps)
    rest = islice(whole, 3 * after_steps, 3 * after_steps + 20)
    for (inputs, targets), (expected, labels) in zip(islice(later, 20), rest, strict=True):
        assert torch.equal(inputs, expected) and torch.equal(targets, labels)
    whole.close()
    later.close()


def test_the_samples_of_the_steps_before_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gather, gathered = Part.gather, list[int]()
    monkeypatch.setattr(Part, "gather", lambda part, rows: gathered.append(len(rows)) or gather(part, rows))  # type: ignore[func-returns-value]
    next(batches_of(toy_data().train, configuration(30), on_cpu(), seed=5, after_steps=1000))
    assert gathered == [30]


def gpus_rows(monkeypatch: pytest.MonkeyPatch, after_steps: int) -> Generator[torch.Tensor, None, None]:
    """Return the rows as a GPU has them, pinning and copying left out."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(batches_module, "_on_device", lambda epochs, device: epochs)
    wanted = configuration(30, micro_batch_size=10, accumulation_steps=3)
    train, growth = toy_data().train, growth_after(after_steps, wanted, toy_data().train)
    epochs = batches_module._epochs(len(train), 5, growth.epoch)
    on_a_gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    return rows_of_steps(batches_module._ready(epochs, on_a_gpu), growth, ahead=True)


@pytest.mark.parametrize("after_steps", [0, 2, 3, 7])
def test_the_order_that_a_thread_draws_ahead_for_a_gpu_is_that_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, after_steps: int
) -> None:
    train = toy_data().train
    wanted = configuration(30, micro_batch_size=10, accumulation_steps=3)
    with closing(batches_of(train, wanted, on_cpu(), 5, after_steps=after_steps)) as expected:
        on_cpu_inputs = [inputs for inputs, _ in islice(expected, 25)]
    with closing(gpus_rows(monkeypatch, after_steps)) as rows:
        found = [train.gather(one)[0] for one in islice(rows, 25)]
    assert all(torch.equal(one, other) for one, other in zip(found, on_cpu_inputs, strict=True))


def order_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("epoch-order")]


def test_the_next_order_is_drawn_while_one_is_used_and_its_thread_ends_with_the_order() -> None:
    drawn: list[str] = []
    coming = threading.Semaphore(0)

    def prepare(order: torch.Tensor) -> torch.Tensor:
        drawn.append(threading.current_thread().name)
        coming.release()
        return order

    epochs = drawn_ahead(iter([torch.arange(3), torch.arange(4), torch.arange(5)]), prepare)
    assert len(next(epochs)) == 3
    assert coming.acquire(timeout=10) and coming.acquire(timeout=10)  # the first and, unasked, the second
    assert len(drawn) == 2 and all(name.startswith("epoch-order") for name in drawn)
    epochs.close()
    for thread in order_threads():
        thread.join(timeout=10)
    assert not order_threads()


def test_an_error_in_drawing_an_order_ahead_is_raised_with_that_order() -> None:
    def orders() -> Iterator[torch.Tensor]:
        yield torch.arange(3)
        raise MemoryError("no pinned memory")

    epochs = drawn_ahead(orders(), torch.Tensor.clone)
    assert len(next(epochs)) == 3
    with pytest.raises(MemoryError, match="no pinned memory"):
        next(epochs)


FIRST: Any = object()


class OwnTuple(tuple[torch.Tensor, ...]):
    """A container of the user's own."""


@pytest.mark.parametrize(
    ("inputs", "free", "method"),
    [
        (torch.zeros(100, 10), 16_000, "forkserver"),
        ({"a": [torch.zeros(50, 10)], "b": (torch.zeros(50, 10),)}, 16_000, "forkserver"),
        (torch.zeros(100, 10), 8_000, None),
        (torch.zeros(100, 10), None, None),
        (OwnTuple([torch.zeros(100, 10)]), 16_000, None),
    ],
    ids=["fits", "nested", "too large", "no shared memory", "the user's own class"],
)
def test_beside_cuda_plain_tensors_are_loaded_by_processes_that_are_not_forked(
    inputs: Any, free: int | None, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "SHARED_MEMORY", Path("/absent" if free is None else "/dev/shm"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    train = Part(inputs, torch.zeros(100))
    assert start_method(train, torch.device("cuda")) == method
    assert start_method(train, torch.device("cpu")) is None
    assert start_method(Part.of([1, 2, 3]), torch.device("cuda")) is None


@pytest.mark.slow
def test_processes_that_are_not_forked_load_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for method in (None, "forkserver"):
        monkeypatch.setattr(batches_module, "start_method", lambda train, device, method=method: method)
        made = batches_of(toy_data().train, configuration(30), on_cpu(data="host", loader_workers=1), seed=0)
        found.append([inputs.clone() for inputs, _ in islice(made, 5)])
        made.close()
    forkserver._forkserver._stop()  # type: ignore[attr-defined] # it would end with this process only
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


FULL = (LaunchError, r"/dev/shm has [\d,]+ MiB.*--shm-size.*loader_workers = 0")


@pytest.mark.parametrize(
    ("sentence", "error", "said"),
    [
        ("DataLoader worker (pid 41) is killed by signal: Bus error. It is possible that dataloader's", *FULL),
        ("unable to write to file </torch_41_0>: No space left on device (28)", *FULL),
        ("unable to mmap 4096 bytes from file </torch_41_0>: Cannot allocate memory (12)", *FULL),
        ("the user's own", RuntimeError, "the user's own"),
    ],
)
def test_shared_memory_that_is_too_small_is_named_with_its_size_and_the_remedy_and_other_errors_stay(
    sentence: str, error: type[Exception], said: str
) -> None:
    def broken() -> Iterator[Any]:
        yield FIRST
        raise RuntimeError(sentence)

    made = batches_module._until_closed(broken())
    assert next(made) is FIRST
    with pytest.raises(error, match=said):
        next(made)


# Batches that grow ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (
            lambda: Trainer(Toy(), grows((0, 20), (60, 128)), toy_data().train, on_cpu(), 3),
            "batch_size = 128 must be <= 100, the number of training samples",
        ),
        (
            lambda: Trainer(Toy(), by_noise(20, 40), toy_data().train, on_cpu(data="host", loader_workers=0), 3),
            "'noise_scale' needs the training data on the device",
        ),
        (
            lambda: Run(request(by_noise(2, 4)), data=toy_data(train_samples=6)),
            "the gradient noise scale, which needs at least 8 training samples; the workload has 6",
        ),
        (lambda: Growth(grows((0, 20), (60, 40)), None), "keep micro-batches of 20"),
    ],
)
def test_impossible_growth_is_refused(begin: Callable[[], object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        begin()


def test_a_stage_in_micro_batches_of_the_first_size_may_begin() -> None:
    assert Growth(grows((0, 20), (60, 40, 20)), None).next_size == 40


def test_the_warm_up_meets_every_size() -> None:
    met: set[int] = set()

    class Noted(Toy):
        def loss(self, model: nn.Module, inputs: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            met.add(len(inputs))
            return super().loss(model, inputs, *rest, **more)

    warm_up(Noted(), grows((0, 20), (60, 40, 10), (200, 80)), toy_data(), on_cpu(), "accuracy", seed=3)
    assert met == {20, 10, 80}
