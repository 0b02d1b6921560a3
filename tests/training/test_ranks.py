"""Ranks of a trial train as one process does."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from bssearch.errors import UsageError, WorkloadError
from bssearch.executors.base import ExecutorSettings, Load
from bssearch.executors.rank_workers import RankProcesses
from bssearch.records import (
    Configuration,
    Goal,
    Observation,
    Target,
    TrialOutcome,
    TrialRequest,
    TrialState,
    with_batch_schedule,
)
from bssearch.spec import TrainingSpec
from bssearch.training import course, gradient_noise
from bssearch.training.batches import micro_batches
from bssearch.training.clock import Clock
from bssearch.training.loop import TrialLoop
from bssearch.training.ranks import GradientSum, Ranks
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import WeightedLoss, resolve
from bssearch.workloads.data import BatchStream, DatasetPart, Part, TokenPart
from tests.factories import changed, not_none
from tests.records.test_batch_schedule import milestones
from tests.training.toys import CPU, Toy, batches_of, configuration, growth_after, on_cpu, request, run_trial, toy_data

ROOT = Path(__file__).parents[2]

SHARED = """
import torch
from torch import nn
from torch.nn import functional

from bssearch import WeightedLoss
from bssearch.records import MetricInfo
from tests.training.toys import toy_data


class Network(nn.Module):
    def __init__(self, norm, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh())
        self.head = nn.Linear(16, 2)
        self.rare = nn.Linear(16, 2)  # without a gradient if no sample of a batch is rare
        self.unused = nn.Parameter(torch.ones(3))

    def logits(self, inputs):  # the loss calls no forward, so that a wrapper around the model would miss it
        hidden = self.dropout(self.body(inputs))
        is_rare = inputs[:, :1] > 2.0
        return self.head(hidden) + (is_rare * self.rare(hidden) if is_rare.any() else 0.0)


class Shared:
    metrics = {"accuracy": MetricInfo(low=0.0, high=1.0, chance=0.5), "loss": MetricInfo(low=0.0)}

    def load(self, device):
        return toy_data(dtype=torch.float64)

    def build_model(self, *, dropout, norm=False, double=False):
        model = Network(norm, dropout)
        return model.double() if double else model

    def augment(self, inputs, *, noise=0.0):
        return inputs + noise * torch.randn_like(inputs) if noise else inputs

    def loss(self, model, inputs, targets, *, label_smoothing, weighted=False):
        inputs = inputs.to(model.head.weight.dtype)
        if not weighted:
            return functional.cross_entropy(model.logits(inputs), targets, label_smoothing=label_smoothing)
        losses = functional.cross_entropy(
            model.logits(inputs), targets, label_smoothing=label_smoothing, reduction="none"
        )
        weights = 1 + (inputs[:, 0] > 0.5).to(losses.dtype) * 3
        return WeightedLoss(total=(losses * weights).sum(), weight=weights.sum())

    def evaluate(self, model, part):
        logits = model.logits(part.inputs.to(model.head.weight.dtype))
        correct = (logits.argmax(1) == part.targets).double().mean().item()
        return {"accuracy": correct, "loss": functional.cross_entropy(logits, part.targets).item()}
"""


def _fail(error: Exception) -> NoReturn:
    pytest.fail(str(error))


class Together:
    """Trainers of `Shared` on any number of ranks, which stay alive between trainers."""

    def __init__(self, folder: Path, **training: Any) -> None:
        (folder / "shared.py").write_text(f"import sys\n\nsys.path.append({str(ROOT)!r})\n{SHARED}")
        settings = ExecutorSettings(
            workload="shared.py:Shared", folder=folder, device="cpu", training=TrainingSpec(**training)
        )
        self.computation = on_cpu(**training)
        self.workload = resolve("shared.py:Shared", {}, folder)
        self.data = self.workload.load(CPU)
        self.processes = RankProcesses(Load(settings=settings, slot=0), self.computation, _fail)

    @contextmanager
    def trainer(self, configuration: Configuration, size: int = 1, **settings: Any) -> Iterator[Trainer]:
        """Yield a trainer of a configuration whose micro-batches ``size`` ranks share."""
        shared = replace(configuration, world_size=size, micro_batch_size=configuration.micro_batch_size // size)
        with (
            nullcontext() if size == 1 else self.processes.together(size),
            Trainer(self.workload, shared, self.data.train, self.computation, 0) as trainer,
        ):
            yield trainer

    def after(self, steps: int, configuration: Configuration, size: int) -> tuple[dict[str, torch.Tensor], float]:
        """Return parameters and buffers after ``steps`` steps, and the mean loss."""
        with self.trainer(configuration, size) as trainer:
            for _ in range(steps):
                trainer.step()
            loss = trainer.take_mean_loss()
            trainer.evaluate(self.data.validation, "loss")
            assert loss is not None
            return {name: one.detach().clone() for name, one in trainer.model.state_dict().items()}, loss

    def close(self) -> None:
        self.processes.kill()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with closing(Together(tmp_path_factory.mktemp("together"))) as made:
        yield made


SGD = configuration(32, learning_rate=0.2, parameters={"momentum": 0.9, "clip_norm": 0.5})
ADAMW = configuration(32, learning_rate=0.01, optimizer="adamw", weight_decay=0.1, label_smoothing=0.1)
IN_FOUR: dict[str, Any] = {"micro_batch_size": 8, "accumulation_steps": 4}
WEIGHTED = {"loss.weighted": True, "clip_norm": 0.3}


ALONE = {
    "sgd": SGD,
    "sgd in micro-batches": replace(SGD, **IN_FOUR),
    "adamw": ADAMW,
    "weighted": replace(ADAMW, parameters=WEIGHTED),
    "weighted in micro-batches": replace(ADAMW, **IN_FOUR, parameters=WEIGHTED),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "double"),
    [(name, size, (size == 4) is bool(row % 2)) for row, name in enumerate(ALONE) for size in (2, 4)],
)
def test_ranks_reach_the_parameters_of_one_process(together: Together, name: str, size: int, double: bool) -> None:
    within = 1e-12 if double else 1e-6
    alone = replace(ALONE[name], parameters={**ALONE[name].parameters, "model.double": double})
    expected, expected_loss = together.after(50, alone, 1)
    found, loss = together.after(50, alone, size)
    assert loss == pytest.approx(expected_loss, rel=within)
    for parameter, one in expected.items():
        torch.testing.assert_close(found[parameter], one, rtol=0, atol=within)


NORMED = replace(SGD, parameters={**SGD.parameters, "model.norm": True, "model.double": True, "ema_decay": 0.9})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "settings_alone"),
    [
        ({"sync_batch_norm": True}, {}),
        # the shares of 4 ranks are whole ghost batches; the loader streams the data
        ({"ghost_batch_size": 8, "data": "host", "loader_workers": 0}, {"ghost_batch_size": 8}),
    ],
    ids=["synchronised", "ghost batches"],
)
def test_batch_normalisation_and_its_running_statistics_equal_one_process(
    tmp_path: Path, training: dict[str, Any], settings_alone: dict[str, Any]
) -> None:
    with closing(Together(tmp_path, **settings_alone)) as alone:
        expected, expected_loss = alone.after(20, NORMED, 1)
    with closing(Together(tmp_path, **training)) as together:
        for size in (2, 4):
            found, loss = together.after(20, NORMED, size)
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            for name, one in expected.items():
                torch.testing.assert_close(found[name], one, rtol=0, atol=1e-7 if "running" in name else 1e-12)


@pytest.mark.slow
def test_the_first_rank_draws_the_random_numbers_of_one_process_and_the_others_draw_their_own(
    together: Together,
) -> None:
    with together.trainer(SGD):
        alone = torch.get_rng_state()
    with together.trainer(SGD, 4):
        assert torch.equal(torch.get_rng_state(), alone)
        others = [state["random"]["torch"] for state in not_none(together.computation.ranks).ask("state")]
        assert len({tuple(state.tolist()) for state in (alone, *others)}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_the_noise_scale_follows_from_the_gradients_of_the_ranks_before_their_sum(
    together: Together, weighted: bool
) -> None:
    own = {"model.double": True, "loss.weighted": weighted}
    split = replace(ADAMW, micro_batch_size=16, accumulation_steps=2, label_smoothing=0.0, parameters=own)
    with together.trainer(split, 2) as trainer:
        trainer.step()
        trainer.measure_noise(2)
        states = []
        for _ in range(5):
            states.append({name: one.detach().clone() for name, one in trainer.model.state_dict().items()})
            trainer.step()
        found = trainer.take_passes()
        assert not trainer.take_passes()
    assert len(found) == 2

    # the last measured step is the fifth, whose weights are states[3]
    whole = replace(split, micro_batch_size=8, accumulation_steps=4)
    batches = list(islice(batches_of(together.data.train, whole, on_cpu(), 0), 20))[16:]
    with together.trainer(whole) as alone:
        alone.model.load_state_dict(states[3])
        gradients, weights = [], []
        for share in (batches[:2], batches[2:]):
            losses = [alone.loss(*one) for one in share]
            parts = [one if isinstance(one, WeightedLoss) else WeightedLoss(one, 1.0) for one in losses]
            weights.append(sum(float(one.weight) for one in parts))
            summed = torch.stack([one.total for one in parts]).sum()
            found_by_hand = torch.autograd.grad(summed, list(alone.model.parameters()), materialize_grads=True)
            gradients.append(torch.cat([one.flatten() for one in found_by_hand]))
    squared, weight = sum(one**2 for one in weights), sum(weights)
    last = found[-1]
    assert last.small_batches == pytest.approx(weight**2 / squared)
    assert last.small_batch * last.small_batches == pytest.approx(32)
    assert last.plain.small == pytest.approx(sum(float(one.square().sum()) for one in gradients) / squared)
    assert last.plain.big == pytest.approx(float(torch.stack(gradients).sum(0).square().sum()) / weight**2)
    assert last.adam is not None and last.adam.small > 10 * last.plain.small


class Counting(Clock):
    """Counts steps."""

    steps = 0

    def pace(self, micro_batches: int = 1) -> None:
        self.steps += 1


def run_on_two(together: Together, asked: TrialRequest, stop_after: int) -> tuple[TrialOutcome, list[Observation]]:
    """Run a trial on two ranks until it pauses after ``stop_after`` steps."""
    clock, seen = Counting(), list[Observation]()

    def stop() -> tuple[TrialState, str] | None:
        return (TrialState.PAUSED, "later") if clock.steps >= stop_after else None

    with together.processes.together(2):
        trial = TrialLoop(asked, together.workload, together.data, together.computation, clock=clock, stop=stop)
        outcome = run_trial(trial, seen.append)
    assert outcome.state is TrialState.PAUSED, outcome.reason
    return outcome, seen


@pytest.mark.slow
def test_a_paused_trial_resumes_with_the_random_numbers_and_statistics_of_each_rank(
    together: Together, tmp_path: Path
) -> None:
    own = {**ADAMW.parameters, "model.norm": True, "augmentation.noise": 0.3}
    random = replace(ADAMW, dropout=0.3, parameters=own, world_size=2, micro_batch_size=16)
    asked = changed(request(random, target=2.0, checkpoint=str(tmp_path / "trial")), eval_every_steps=5)

    def curve(stop_after: int, *, resumes: bool = False) -> list[tuple[int, float, float | None]]:
        _, seen = run_on_two(together, changed(asked, resumes=resumes), stop_after)
        return [(one.step, one.metric, one.loss) for one in seen]

    whole = curve(42)
    assert len(whole) == 9 and [*curve(13), *curve(10, resumes=True), *curve(19, resumes=True)] == whole


@pytest.mark.slow
def test_a_trial_on_ranks_measures_the_noise_scale_near_its_target_in_all_its_parts(
    together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "WINDOW_SHARE", 0.05)
    monkeypatch.setattr(gradient_noise, "RANK_NOISE_SHARE", 1e9)
    monkeypatch.setattr(gradient_noise, "RANKS_LEAST_EVERY", 2)
    split = replace(ADAMW, world_size=2, micro_batch_size=16)
    asked = changed(request(split, checkpoint=str(tmp_path / "trial")), eval_every_steps=5)
    asked = replace(asked, target=Target(metric="loss", value=0.0, goal=Goal.MINIMIZE))
    whole, first, both = (
        run_on_two(together, changed(asked, resumes=resumes), steps)[0].noise
        for steps, resumes in ((40, False), (23, False), (17, True))
    )
    assert whole.passes is not None and first.passes is not None and whole.adam_low is not None
    assert 0 < first.passes < whole.passes < 20
    assert replace(both, seconds=None) == replace(whole, seconds=None)
    assert 0 < (first.seconds or 0) < (both.seconds or 0)


class Rank(Ranks):
    """A rank without a connection."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Dataset(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with random noise, as augmented images have."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return row + torch.rand(2), torch.tensor(row)


def made_batches(batch_size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for first in range(0, 100 - batch_size + 1, batch_size):
        yield torch.arange(first, first + batch_size) + torch.rand(batch_size), torch.zeros(batch_size)


@pytest.mark.parametrize(
    ("train", "training"),
    [
        (toy_data().train, {}),
        (toy_data().train, {"data": "host", "loader_workers": 0}),
        (DatasetPart(Dataset()), {"data": "host", "loader_workers": 0}),
        (BatchStream(made_batches, 100), {}),
        (TokenPart(DatasetPart(Dataset()), [1 + row % 3 for row in range(100)]), {"loader_workers": 0}),
    ],
    ids=["on the device", "streamed", "dataset", "made by the workload", "tokens"],
)
@pytest.mark.parametrize("steps_before", [0, 7])
def test_the_ranks_together_take_the_micro_batches_of_one_process(
    train: Part, training: dict[str, Any], steps_before: int
) -> None:
    def batches(rank: int, size: int) -> list[torch.Tensor]:
        computation = on_cpu(**training)
        computation.ranks = None if size == 1 else Rank(rank, size)
        shared = configuration(24, micro_batch_size=4, accumulation_steps=6 // size, world_size=size)
        growth = growth_after(steps_before, shared, train)
        found = []
        with closing(micro_batches(train, computation, 3, growth)) as made:
            for _ in range(10):
                found += [inputs for inputs, _ in islice(made, 6 // size)]
                growth.stepped()
        return found

    alone = batches(0, 1)
    for size in (2, 3):
        shares = [iter(batches(rank, size)) for rank in range(size)]
        together = [one for _ in range(10) for share in shares for one in islice(share, 6 // size)]
        assert len(together) == len(alone)
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize(
    ("workload", "precision", "grows", "what"),
    [
        (Toy(), "fp16", False, "fp16"),
        (Toy(training_step=None), "fp32", False, r"its own training_step\(\)"),
        (Toy(), "fp32", True, "a batch_schedule"),
    ],
)
def test_trials_that_ranks_cannot_train_are_refused(workload: Toy, precision: str, grows: bool, what: str) -> None:
    computation = on_cpu()
    computation.ranks, computation.precision = Rank(0, 2), precision
    asked = configuration(20, micro_batch_size=10, world_size=2)
    if grows:
        asked = with_batch_schedule(asked, milestones((0, 20), (10**6, 40)))
    with pytest.raises(UsageError, match=f"world_size = 2 must be 1 for a trial with {what}"):
        Trainer(workload, asked, toy_data().train, computation, 0)
    computation.ranks = None
    with pytest.raises(UsageError, match="world_size = 2 must be 1, the number of this trial's processes"):
        Trainer(workload, asked, toy_data().train, computation, 0)


def test_a_parameter_whose_requires_grad_changed_after_the_model_was_built_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    gradients = GradientSum(model, Rank(0, 2))
    model.bias.grad = torch.zeros(2)
    with pytest.raises(WorkloadError, match="requires_grad of bias has changed"):
        gradients.end()
