"""Several ranks of one trial, in threads of this process: the first leads, the others follow."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bssearch import BatchAdvisor, Trial, UsageError
from bssearch.executors.base import Assign, Program
from bssearch.executors.loops import current
from bssearch.executors.loops.passes import SeededSampler
from bssearch.executors.loops.ranks import FollowerWork, LaunchedRanks, LeaderWork, check_ranks, ranks_of
from bssearch.records import Configuration, NoiseMeasurement, NoiseRequest, Target, TrialRequest, TrialState
from tests.executors.line_workload import request_trial
from tests.executors.loops.loops import FakeLine, optimizer_of
from tests.factories import changed

T = TypeVar("T")

SPLIT = Configuration(batch_size=8, micro_batch_size=2, accumulation_steps=2, world_size=2, learning_rate=0.1)


class Group:
    """Shared by the ranks: the last word of rank 0, and a barrier that fails after a rank has left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=10)
        self.said: Any = None
        self.values: dict[int, object] = {}


class FakeRanks(LaunchedRanks):
    """One rank of a group."""

    def __init__(self, group: Group, rank: int) -> None:
        self.rank, self.size = rank, group.size
        self._group = group

    def share(self, said: T | None) -> T | None:
        if self.rank == 0:
            self._group.said = said
        self.wait()
        heard: T | None = self._group.said
        self.wait()
        return heard

    def agree(self, value: object) -> bool:
        self._group.values[self.rank] = value
        self.wait()
        return len(set(self._group.values.values())) == 1

    def wait(self) -> None:
        self._group.barrier.wait()

    def device_of(self, device: str) -> str:
        return device


def assign(*, value: float = 10.0, seconds: float = 60.0, tested: bool = False) -> Assign:
    request = changed(
        request_trial(1, seconds=seconds),
        configuration=SPLIT,
        target=Target(metric="accuracy", value=value),
        eval_every_steps=5,
        tested=tested,
    )
    return Assign(work=request, program=Program(default=SPLIT, metric="accuracy"), device="cpu", revision="0")


def trained(assigned: Assign, line: FakeLine, train: Callable[[Trial, int], None]) -> list[int]:
    """Train on two ranks; return the steps of each at its end."""
    group = Group(2)

    def steps_of(rank: int) -> int:
        ranks = FakeRanks(group, rank)
        try:
            make = FollowerWork(assigned, ranks) if rank else LeaderWork(assigned, line, ranks)
            trial = Trial(make, rank=rank)
            assert trial.accumulation_steps == SPLIT.accumulation_steps
            train(trial, rank)
            return trial.steps
        except BaseException:
            group.barrier.abort()  # as a process that ends
            raise

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(steps_of, rank) for rank in range(2)]
    for one in found:
        error = one.exception()
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [one.result() for one in found]


def loader(trial: Trial) -> list[list[int]]:
    """Return seven micro-batches."""
    return [[0] * trial.micro_batch_size] * 7


def loop(trial: Trial, rank: int) -> None:
    """Train; the metric of rank 1 would end the trial at once if it counted."""
    assert (trial.batch_size, trial.micro_batch_size, trial.accumulation_steps, trial.seed) == (8, 2, 2, 1)
    for _ in trial.batches(loader(trial), evaluate=lambda: {"accuracy": trial.steps if rank == 0 else 1e5}):
        time.sleep(0.0005)


@pytest.fixture
def line() -> FakeLine:
    return FakeLine()


def test_the_ranks_end_where_the_first_one_reaches(line: FakeLine) -> None:
    assert trained(assign(), line, loop) == [10, 10]
    assert [one.step for one in line.observations] == [0, 5, 10]
    assert [(one.state, one.steps) for one in line.outcomes] == [(TrialState.REACHED, 10)]


def test_a_limit_between_two_evaluations_ends_all_ranks_at_the_next(line: FakeLine) -> None:
    first, second = trained(assign(value=10000.0, seconds=0.008), line, loop)
    outcome = line.outcome
    assert (outcome.state, outcome.steps) == (TrialState.EXHAUSTED, line.observations[-1].step)
    assert first == second == outcome.steps and first % 5 == 0


def test_a_stop_and_a_pause_end_all_ranks_at_an_evaluation(tmp_path: Path, line: FakeLine) -> None:

    def stopped(trial: Trial, rank: int) -> None:
        for _ in trial.batches(loader(trial), evaluate=lambda: {"accuracy": 0.0}):
            if rank == 0 and trial.steps == 7:
                line.stop = lambda: (TrialState.PAUSED, "a better one first")

    asked = assign()
    assert isinstance(asked.work, TrialRequest)
    asked = replace(asked, work=replace(asked.work, checkpoint=str(tmp_path / "trial")))
    assert trained(asked, line, stopped) == [10, 10]
    assert line.outcome.state is TrialState.PRUNED and line.outcome.reason.startswith("a better one first; ")


def test_weights_that_are_not_finite_end_the_trial_as_diverged(line: FakeLine) -> None:

    def broken(trial: Trial, rank: int) -> None:
        model = torch.nn.Linear(1, 1)
        trial.state(model=model)
        for _ in trial.batches(loader(trial), evaluate=lambda: {"accuracy": 0.0}):
            model.bias.data.fill_(float("nan"))

    assert trained(assign(), line, broken) == [5, 5]
    assert line.outcome.state is TrialState.DIVERGED and "bias of model is not finite" in line.outcome.reason


@pytest.mark.parametrize("widths", [(3, 3), (3, 2)])
def test_the_noise_is_measured_if_all_ranks_train_the_same_parameters(
    widths: tuple[int, int], line: FakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[BatchAdvisor] = []
    monkeypatch.setattr(BatchAdvisor, "step", lambda self: measured.append(self))

    def training(trial: Trial, rank: int) -> None:
        model = torch.nn.Linear(widths[rank], 1)
        trial.state(model=model)
        evaluate = lambda: {"accuracy": 9.9 if 0 < trial.steps < 60 else trial.steps}  # noqa: E731
        for _ in trial.batches(loader(trial), evaluate=evaluate):
            torch.autograd.backward(model(torch.randn(2, widths[rank])).square().mean())

    assert trained(assign(), line, training) == [60, 60]
    assert len(measured) == (2 * 55 if widths[0] == widths[1] else 0), "after the evaluation of step 5"


@pytest.mark.parametrize("widths", [(3, 3), (3, 2)])
def test_the_ranks_measure_the_noise_at_one_point_and_end_together(
    widths: tuple[int, int], line: FakeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[BatchAdvisor] = []
    monkeypatch.setattr(BatchAdvisor, "step", lambda self: measured.append(self))
    request = NoiseRequest(
        configuration=SPLIT,
        seed=1,
        target=Target(metric="accuracy", value=10.0),
        train_seconds_limit=1e9,
        noise_seconds_limit=0.0,
        eval_every_steps=5,
    )
    asked = Assign(work=request, program=Program(default=SPLIT, metric="accuracy"), device="cpu", revision="0")
    weights: dict[int, list[float]] = {0: [], 1: []}

    def training(trial: Trial, rank: int) -> None:
        assert trial.seed == 1
        model = torch.nn.Linear(widths[rank], 1)
        trial.state(model=model)
        evaluate = lambda: {"accuracy": 9.9 if trial.steps else 0.0}  # noqa: E731
        for _ in trial.batches(loader(trial), evaluate=evaluate):
            with torch.no_grad():
                weights[rank].append(float(model.bias))
                model.bias.add_(1)

    if widths[0] != widths[1]:
        with pytest.raises(UsageError, match="ranks train different parameters"):
            trained(asked, line, training)
        return
    assert trained(asked, line, training) == [10, 10]
    assert len(measured) == 2 * 5, "from the evaluation of step 5 on"
    of_steps = [one[5 * SPLIT.accumulation_steps :: SPLIT.accumulation_steps] for one in weights.values()]
    assert all(len(set(one)) == 1 for one in of_steps), "each measured step begins at the same point"
    (found,) = line.replies
    assert isinstance(found, NoiseMeasurement) and (found.step, found.reason) == (5, None)


def test_ranks_that_skip_all_steps_from_some_step_on_have_diverged(line: FakeLine) -> None:

    def skipping(trial: Trial, rank: int) -> None:
        optimizer = optimizer_of()
        trial.state(optimizer=optimizer)
        for number, _ in enumerate(trial.batches(loader(trial), evaluate=lambda: {"accuracy": 0.0})):
            if number < 7 and number % 2:
                optimizer.step()

    assert trained(assign(), line, skipping) == [3, 3]
    assert (line.outcome.state, line.outcome.steps) == (TrialState.DIVERGED, 3)


def test_a_ranks_batches_are_its_share_and_none_is_warned_of(line: FakeLine) -> None:

    def sampled(trial: Trial, rank: int) -> None:
        rows = torch.zeros(40, 1)
        batches = DataLoader(TensorDataset(rows), batch_size=trial.micro_batch_size, sampler=trial.sampler(rows))
        for _ in trial.batches(batches, evaluate=lambda: {"accuracy": trial.steps}):
            pass

    assert trained(assign(), line, sampled) == [10, 10]
    assert not any("first batch" in one for one in line.outcomes[0].warnings)


def test_a_rank_that_ignores_accumulation_is_refused() -> None:
    def ignores(trial: Trial, rank: int) -> None:
        trial._asked.fields.discard("accumulation_steps")
        batches = DataLoader(
            TensorDataset(torch.zeros(40, 1)), trial.micro_batch_size, sampler=trial.sampler(range(40))
        )
        for _ in trial.batches(batches, evaluate=lambda: {"accuracy": 0.0}):
            pass

    with pytest.raises(UsageError, match=r"does not read trial\.accumulation_steps"):
        trained(assign(), FakeLine(), ignores)


def test_a_loop_that_asks_in_its_body_passes_over_the_evaluation_before_its_first_step(line: FakeLine) -> None:

    def asking(trial: Trial, rank: int) -> None:
        trial.state()
        for _ in trial.batches(loader(trial)):
            if trial.evaluation_due:
                trial.report(accuracy=trial.steps + 1)

    assert trained(assign(), line, asking) == [10, 10]
    assert [one.step for one in line.observations] == [5, 10]


def test_an_evaluation_that_is_passed_over_is_an_error_on_every_rank() -> None:
    def silent(trial: Trial, rank: int) -> None:
        for _ in trial.batches(loader(trial)):
            pass

    with pytest.raises(UsageError, match="no evaluation after step 5"):
        trained(assign(), FakeLine(), silent)


@pytest.mark.parametrize("tested", [False, True])
def test_the_test_part_is_evaluated_by_all_ranks_or_by_none(tested: bool, line: FakeLine) -> None:
    calls: list[int] = []

    def testing(trial: Trial, rank: int, calls: list[int] = calls) -> None:
        def test() -> dict[str, float]:
            calls.append(rank)
            return {"accuracy": 0.5 if rank == 0 else 99}

        for _ in trial.batches(loader(trial), evaluate=lambda: {"accuracy": trial.steps}, test=test):
            pass

    trained(assign(tested=tested), line, testing)
    assert sorted(calls) == ([0, 1] if tested else [])
    assert [one.test_metric for one in line.outcomes] == [0.5 if tested else None]


def test_no_rank_tests_after_a_loop_that_all_have_left_before_its_end() -> None:
    line, calls = FakeLine(), []

    def left_early(trial: Trial, rank: int) -> None:
        assert trial.micro_batch_size
        while not trial.should_stop and trial.steps < 1:
            if trial.evaluation_due:
                trial.report(accuracy=0.0)
            trial.step()

        def test() -> dict[str, float]:
            calls.append(rank)
            return {"accuracy": 0.5}

        trial.test(test)

    trained(assign(tested=True), line, left_early)
    assert calls == []


@pytest.mark.parametrize(("ranks", "devices", "wanted"), [(2, 1, 2), (1, 4, 4), (4, 2, 4)])
def test_a_program_has_one_rank_for_each_device_of_its_trial(ranks: int, devices: int, wanted: int) -> None:
    check_ranks(ranks, ranks)
    with pytest.raises(UsageError, match=rf"has {ranks} ranks?, but the trial needs {devices} ") as raised:
        check_ranks(ranks, devices)
    assert f"executor.devices: {wanted} " in str(raised.value.hint)


@pytest.mark.parametrize(("size", "devices"), [(2, 1), (1, 2)])
def test_a_script_asks_for_its_trial_on_other_ranks_in_vain(
    size: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = FakeRanks(Group(1), 0)
    ranks.size = size
    work = assign().work
    assert isinstance(work, TrialRequest)
    asked = replace(assign(), work=changed(work, configuration=SPLIT.on_devices(devices, 2)))
    monkeypatch.setattr(current, "ranks_of", lambda environment: ranks if size > 1 else None)
    monkeypatch.setattr(current, "session", lambda: SimpleNamespace(assign=asked))
    with pytest.raises(UsageError, match=rf"has {size} ranks?, but the trial needs {devices} "):
        current.current_trial(batch_size=8, learning_rate=0.1)


class Reduced(torch.nn.Linear):
    """A model that counts how often its reduction is put off."""

    put_off = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.put_off += 1
        yield


def test_gradients_are_reduced_at_a_steps_last_micro_batch_alone(line: FakeLine) -> None:
    models = [Reduced(1, 1), Reduced(1, 1)]
    seen: list[list[int]] = [[], []]

    def putting_off(trial: Trial, rank: int) -> None:
        for _ in trial.batches(loader(trial), evaluate=lambda: {"accuracy": trial.steps}):
            with trial.no_sync(models[rank]), trial.no_sync(torch.nn.Linear(1, 1)):
                assert (trial.rank, trial.world_size) == (rank, 2)
                seen[rank].append(models[rank].put_off)
        with pytest.raises(UsageError, match="outside the body of batches"):
            trial.no_sync(models[rank])

    assert trained(assign(), line, putting_off) == [10, 10]
    assert seen == [[number // 2 + 1 for number in range(20)]] * 2


def test_the_shares_of_the_ranks_are_the_micro_batches_of_one_process() -> None:
    whole = SeededSampler(53, 12, 3)
    shares = [SeededSampler(53, 12, 3, share=2, rank=rank, ranks=3) for rank in range(3)]
    assert [len(one) for one in shares] == [16] * 3
    for _ in range(2):
        rows, parts = list(whole), [list(one) for one in shares]
        assert rows == [row for start in range(0, 16, 2) for part in parts for row in part[start : start + 2]]


def test_ranks_need_torch_distributed_and_numbers() -> None:
    assert ranks_of({}) is None and ranks_of({"WORLD_SIZE": "1", "RANK": "0"}) is None
    with pytest.raises(UsageError, match=r"WORLD_SIZE = 2, but the script has not initialised torch"):
        ranks_of({"WORLD_SIZE": "2", "RANK": "0"})
