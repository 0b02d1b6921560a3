"""Steps that are recorded and replayed, by a stand-in for CUDA graphs: the same training, bit for bit."""

from __future__ import annotations

import copy
import random
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from bssearch.errors import WorkloadError
from bssearch.probes.memory import measure_memory
from bssearch.probes.step_time import measure_step_time
from bssearch.records import Branch, Configuration, MemoryRequest, Observation, StepTimeRequest, TrialState
from bssearch.training import gradient_noise
from bssearch.training.beginning.ready import ready_trainer
from bssearch.training.captured.host_random import HostGenerators
from bssearch.training.captured.optimizers import CAPTURABLE, RatesInPlace, begin_again, why_not_capturable
from bssearch.training.captured.step import NotCapturableError, StepParts, _put_back
from bssearch.training.computation import Computation
from bssearch.training.losses import LossSum
from bssearch.training.trainer import Trainer
from bssearch.workloads.base import WeightedLoss
from tests.training.fake_graphs import FakeGraphs
from tests.training.toys import Run, Toy, configuration, curve, on_cpu, request, toy_data

ACCUMULATED: dict[str, Any] = {"micro_batch_size": 5, "accumulation_steps": 4}
EVERYTHING: dict[str, Any] = {
    **ACCUMULATED,
    "dropout": 0.2,
    "label_smoothing": 0.1,
    "weight_decay": 0.01,
    "warmup_epochs": 1.0,
    "parameters": {"clip_norm": 0.5, "ema_decay": 0.9, "schedule": "cosine", "horizon_samples": 400},
}


class Normed(Toy):
    """Batch normalisation, whose statistics every step changes, and an augmentation that draws on the device."""

    def build_model(self, *, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2))

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * torch.randn_like(inputs)


class Weighted(Toy):
    """A mean over weights that differ from sample to sample."""

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float) -> Any:
        weights = 0.5 + inputs[:, 0].abs()
        losses = functional.cross_entropy(model(inputs), targets, reduction="none")
        return WeightedLoss((weights * losses).sum(), weights.sum())


def capturing(graphs: Callable[[], FakeGraphs] = FakeGraphs, **settings: Any) -> Computation:
    computation = on_cpu(fused=True, **settings)
    computation.graphs = graphs
    return computation


def trainer(computation: Computation, wanted: Configuration, workload: Any = None, seed: int = 3) -> Trainer:
    return ready_trainer(workload or Toy(), wanted, toy_data().train, computation, seed)


def figures(one: Trainer) -> list[Any]:
    """Return all that the next steps hang on, and what was measured of the last."""
    state = one.state()
    tensors = [*state["model"].values(), *(state["average"] or []), state["losses"]["total"], torch.get_rng_state()]
    optimizer = [
        (place, name, value.tolist())
        for place, values in state["optimizer"]["state"].items()
        for name, value in sorted(values.items())
    ]
    groups = [{**group, "params": len(group["params"])} for group in state["optimizer"]["param_groups"]]
    return [
        [tensor.tolist() for tensor in tensors],
        optimizer,
        groups,
        one.learning_rate,
        one.evaluate(toy_data().validation, "loss"),
        one.take_mean_loss(),
    ]


def stepped(one: Trainer, steps: int = 12) -> list[Any]:
    for _ in range(steps):
        one.step()
    return figures(one)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam"])
@pytest.mark.parametrize(
    ("workload", "changes"),
    [
        pytest.param(Toy, {}, id="one micro-batch"),
        pytest.param(Toy, EVERYTHING, id="everything"),
        pytest.param(Normed, {"dropout": 0.3, **ACCUMULATED}, id="buffers"),
        pytest.param(Weighted, {}, id="weighted"),
        pytest.param(Weighted, ACCUMULATED, id="weighted and accumulated"),
    ],
)
def test_replays_train_as_eager_steps_do_bit_for_bit(
    optimizer: str, workload: type[Toy], changes: dict[str, Any]
) -> None:
    wanted = configuration(20, optimizer=optimizer, **changes)
    with trainer(on_cpu(fused=True), wanted, workload()) as one:
        eager = stepped(one)
    computation = capturing()
    with trainer(computation, wanted, workload()) as one:
        assert stepped(one) == eager
    assert not computation.warnings


def test_a_step_is_a_replay_of_the_first_micro_batch_then_of_the_others_then_of_the_update() -> None:
    made: list[FakeGraphs] = []

    def graphs() -> FakeGraphs:
        made.append(FakeGraphs())
        return made[-1]

    with trainer(capturing(graphs), configuration(20, **ACCUMULATED)) as one:
        for _ in range(3):
            one.step()
        one.update()
    assert [each.replays for each in made] == [[3, 9, 4]]


def test_a_step_that_is_recorded_runs_none_of_the_workloads_code() -> None:
    calls: list[int] = []
    with trainer(capturing(), configuration(), Toy(on_loss=lambda: calls.append(1))) as one:
        recorded = len(calls)
        one.step()
        assert len(calls) == recorded > 0


def test_dropout_differs_from_replay_to_replay_and_the_same_seed_gives_the_same_run() -> None:
    wanted = configuration(100, dropout=0.5, learning_rate=1e-12)
    losses = []
    for _ in range(2):
        with trainer(capturing(), wanted) as one:
            seen = []
            for _ in range(4):
                one.step()
                seen.append(one.take_mean_loss())
            losses.append(seen)
    assert len(set(losses[0])) == 4 and losses[0] == losses[1]


class OnTheHost(Toy):
    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + random.gauss(0, 0.1)


NUMPYS = np.random.default_rng(5)


class OfTheModule(Toy):
    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.001 * NUMPYS.normal()


class OfTheClass(Toy):
    rng = random.Random(5)

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.001 * self.rng.random()


class OfItsOwn(Toy):
    """Draws from generators that an object of its own holds; the second is made in the first step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.jitter: dict[str, Any] = {}
        if kind == "RandomState":
            self.jitter["given"] = np.random.RandomState(5)

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self.jitter.setdefault("given", np.random.default_rng(5))
        return inputs + 0.001 * float(made.normal())


class JitteryModel(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.bits = np.random.Generator(np.random.MT19937(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + 0.001 * self.bits.normal())


class OfTheModel(Toy):
    def build_model(self, *, dropout: float) -> nn.Module:
        return nn.Sequential(JitteryModel(), nn.Tanh())


class DrawsNothing(Toy):
    """Has generators that it drew from before."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [random.Random(1), random.SystemRandom(), np.random.default_rng(1), torch.Generator()]

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.0 * len([*self.generators, NUMPYS])


@pytest.mark.parametrize(
    ("workload", "named"),
    [
        (OfTheModule, "from workload.augment (NUMPYS)"),
        (OfTheClass, "from workload.rng"),
        (lambda: OfItsOwn("RandomState"), "from workload.jitter['given']"),
        (lambda: OfItsOwn("made late"), "from workload.jitter['given']"),
        (OfTheModel, "from model.0.bits"),
    ],
)
def test_a_step_that_draws_from_a_generator_of_the_users_own_is_refused(
    workload: Callable[[], Any], named: str
) -> None:
    graphs = FakeGraphs()
    with pytest.raises(NotCapturableError, match=re.escape(named)):
        trainer(capturing(lambda: graphs), configuration(), workload())
    assert graphs.replays == []


def test_generators_that_no_step_draws_from_are_no_hindrance() -> None:
    with trainer(capturing(), configuration(), DrawsNothing()) as one:
        one.step()


def test_pytorchs_generator_of_the_host_counts_where_the_step_is_a_gpus() -> None:
    owner = DrawsNothing()
    looked = [HostGenerators({"workload": owner}, torch.device(kind)) for kind in ("cpu", "meta")]
    drawn_from: Any = owner.generators[3]
    torch.rand(1, generator=drawn_from)
    assert [one.drawn() for one in looked] == [None, "workload.generators[3]"]
    assert [one.drawn() for one in looked] == [None, None]


class Waiting(Toy):
    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs.sum().item() > 0 else -inputs


class HostWeight(Toy):
    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float) -> Any:
        return WeightedLoss(functional.cross_entropy(model(inputs), targets, reduction="sum"), float(len(inputs)))


class Replacing(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + 1
        found: torch.Tensor = self.linear(inputs)
        return found


class ReplacesBuffers(Toy):
    def build_model(self, *, dropout: float) -> nn.Module:
        return Replacing()


class OwnStep(Toy):
    def training_step(self, step: Any) -> torch.Tensor:
        total = torch.zeros(())
        for inputs, targets in step.micro_batches:
            loss = functional.cross_entropy(step.model(inputs), targets)
            step.backward(loss)
            total += loss.detach()
        step.update(step.optimizers)
        return total


class PlainSGD(Toy):
    def build_optimizer(self, model: nn.Module, wanted: Configuration) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=wanted.learning_rate)


@pytest.mark.parametrize(
    ("workload", "settings", "changes", "reason"),
    [
        (OnTheHost, {}, {}, "the step draws random numbers on the host"),
        (Waiting, {}, {}, "called a synchronizing operation"),
        (HostWeight, {}, {}, "whose weight is a number on the host"),
        (ReplacesBuffers, {}, {}, "the model puts new tensors in the place of its buffers"),
        (OwnStep, {}, {}, "the workload has a training_step of its own"),
        (PlainSGD, {}, {}, "the optimizer SGD has its learning rate on the host unless it is fused"),
        (Toy, {"data": "host", "loader_workers": 0}, {}, "the training part does not lie on the device"),
        (Toy, {}, {"optimizer": "muon"}, "the optimizer muon waits for the device"),
        (Toy, {}, {"optimizer": "adafactor"}, "the optimizer Adafactor waits for the device"),
        (Toy, {}, {"optimizer": "adagrad"}, "the optimizer Adagrad waits for the device"),
    ],
)
def test_a_trial_whose_step_cannot_be_recorded_fails_and_runs_no_eager_ones(
    workload: type[Toy], settings: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    asked = request(configuration(20, **changes), target=0.9)
    seen: list[Observation] = []
    with pytest.raises(WorkloadError, match=f"the step cannot be captured: .*{reason}"):
        Run(asked, workload(), computation=capturing(**settings), keep=seen)
    assert not seen


def test_a_step_that_waits_is_refused_before_anything_is_recorded() -> None:
    graphs = FakeGraphs()
    with pytest.raises(NotCapturableError, match="synchronizing"):
        trainer(capturing(lambda: graphs), configuration(), Waiting())
    assert graphs.replays == [] and graphs.is_closed


def test_the_graphs_of_a_trainer_are_let_go_when_it_is_closed_whoever_still_holds_it() -> None:
    graphs = FakeGraphs()
    with trainer(capturing(lambda: graphs), configuration()) as one:
        one.step()
        assert not graphs.is_closed
    assert graphs.is_closed


def test_the_loss_scaling_of_fp16_is_not_recorded() -> None:
    computation = capturing()
    one = Trainer(Toy(), configuration(), toy_data().train, computation, seed=3)
    one._updates.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(NotCapturableError, match="the loss scaling of fp16"):
        one.capture()


def test_momentum_that_is_dampened_from_the_second_step_on_is_not_recorded() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    for dampening, refused in ((0.0, False), (0.5, True)):
        optimizer = torch.optim.SGD([parameter], momentum=0.9, dampening=dampening, fused=True)
        assert (why_not_capturable(optimizer) is not None) == refused


def test_the_users_own_errors_and_a_lack_of_memory_are_no_reason_to_run_eager() -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def raised() -> None:
            raise error

        return raised

    for error in (torch.OutOfMemoryError("CUDA out of memory"), WorkloadError("no")):
        computation = capturing()
        with pytest.raises(type(error)):
            trainer(computation, configuration(), Toy(on_loss=fail(error)))
        assert not computation.warnings


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("saves", "goes_on"), [(True, True), (True, False), (False, True)])
def test_a_saved_state_goes_on_recorded_or_eager(optimizer: str, saves: bool, goes_on: bool, tmp_path: Path) -> None:
    wanted = configuration(20, optimizer=optimizer, **{**EVERYTHING, "dropout": 0.0})

    def made(recorded: bool) -> Trainer:
        return trainer(capturing() if recorded else on_cpu(fused=True), wanted)

    with made(False) as one:
        whole = stepped(one, 14)
    with made(saves) as one:
        for _ in range(7):
            one.step()
        torch.save(one.state(), tmp_path / "state")
        drawn = torch.get_rng_state()
    with made(goes_on) as one:
        one.restore(torch.load(tmp_path / "state", weights_only=True))
        torch.set_rng_state(drawn)
        assert stepped(one, 7) == whole


def test_a_trial_that_is_paused_goes_on_with_recorded_steps(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"target": 1.0, "train_seconds_limit": 1e9, "stop_at_target": False}
    wanted = configuration(20, optimizer="adamw", **EVERYTHING)
    asked = request(wanted, **limits, checkpoint=str(tmp_path / "trial"))
    whole = Run(asked, computation=capturing(measure_noise=False))
    counted: list[int] = []

    def stop() -> tuple[TrialState, str] | None:
        counted.append(1)
        return (TrialState.PAUSED, "later") if len(counted) > 8 else None

    first = Run(asked, computation=capturing(measure_noise=False), stop=stop)
    second = Run(replace(asked, resumes=True), computation=capturing(measure_noise=False))
    assert first.outcome.state is TrialState.PAUSED
    assert [*curve(first), *curve(second)] == curve(whole) and second.outcome.steps == whole.outcome.steps


def eager_and_recorded(asked: Any, workload: Callable[[], Any] = Toy, **settings: Any) -> tuple[Run, Run]:
    return tuple(  # type: ignore[return-value]
        Run(asked, workload(), computation=one) for one in (on_cpu(fused=True, **settings), capturing(**settings))
    )


def test_a_whole_trial_is_the_same_with_its_noise_passes_between_recorded_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_noise, "NOISE_SHARE", 1e9)
    asked = request(configuration(20, optimizer="adamw", learning_rate=0.005), target=0.95, train_seconds_limit=1e9)
    eager, recorded = eager_and_recorded(asked)
    assert eager.outcome.state is TrialState.REACHED and curve(eager) == curve(recorded)
    assert recorded.outcome.noise.passes is not None


def test_a_first_step_that_is_not_finite_ends_a_trial_with_recorded_steps() -> None:
    class Infinite(Toy):
        def loss(self, *arguments: Any, **settings: Any) -> torch.Tensor:
            return super().loss(*arguments, **settings) * float("inf")

    _, recorded = eager_and_recorded(request(), Infinite)
    assert recorded.outcome.state is TrialState.DIVERGED and "first non-finite" in recorded.outcome.reason


def test_a_branch_goes_on_with_the_optimizers_state_in_recorded_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    wanted = configuration(20, optimizer="adamw", learning_rate=0.005)
    with trainer(on_cpu(fused=True), wanted, seed=1) as one:
        stepped(one, 9)
        saved = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict(), "samples": 180}
        torch.save(saved, path)
    branch = Branch(checkpoint=str(path), samples=200, start_samples=180)
    limits: dict[str, Any] = {"stop_at_target": False, "limit_state": TrialState.CAPPED, "eval_every_steps": 1}
    eager, recorded = eager_and_recorded(request(wanted, metric="loss", target=100.0, branch=branch, **limits))
    assert curve(eager) == curve(recorded) and recorded.outcome.steps == 10


def test_the_peak_has_what_was_held_up_to_the_recording_and_what_the_graphs_keep_idle() -> None:
    computation = capturing(lambda: FakeGraphs(peak_bytes=900, idle_bytes=500))
    with trainer(computation, configuration()) as one:
        assert [one.peak_bytes(seen) for seen in (None, 100, 700)] == [None, 900, 1200]
    with trainer(on_cpu(), configuration()) as one:
        assert one.peak_bytes(700) == 700


class CopiesOnTheDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the copies that stay on the device of a tensor; one that is brought to the host is another operation."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_no_copy_of_the_training_lies_on_the_device_while_the_step_is_recorded() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    parts = StepParts(
        workload=None,
        model=model,
        optimizers=(optimizer,),
        tensors=[*model.parameters()],
        losses=LossSum(torch.device("cpu")),
        micro_batch=lambda rows: rows,
        divide=lambda whole: None,
        update=lambda: None,
    )
    before = copy.deepcopy([*model.parameters(), optimizer.state_dict()["state"]])
    with CopiesOnTheDevice() as seen, _put_back(parts, torch.device("cpu")):  # type: ignore[no-untyped-call]
        optimizer.step()
    assert seen.copies == 0
    torch.testing.assert_close([*model.parameters(), optimizer.state_dict()["state"]], before, rtol=0, atol=0)


@pytest.mark.parametrize("measure_noise", [True, False])
def test_the_peak_of_a_trial_and_of_a_memory_probe_has_the_memory_of_the_graphs(measure_noise: bool) -> None:
    idle = 2**40
    asked = request(stop_at_target=False, limit_state=TrialState.CAPPED, train_seconds_limit=0.05)
    computation = capturing(lambda: FakeGraphs(idle_bytes=idle), measure_noise=measure_noise)
    found = Run(asked, computation=computation).outcome
    assert found.peak_memory_bytes is not None and idle <= found.peak_memory_bytes < 2 * idle
    probe = capturing(lambda: FakeGraphs(idle_bytes=idle))
    use = measure_memory(MemoryRequest(configuration=configuration()), Toy(), toy_data(), probe)
    assert use.fits and use.peak_memory_bytes is not None and idle <= use.peak_memory_bytes < 2 * idle


def test_step_times_are_those_of_recorded_steps() -> None:
    made: list[FakeGraphs] = []

    def graphs() -> FakeGraphs:
        made.append(FakeGraphs())
        return made[-1]

    asked = StepTimeRequest(configuration=configuration(), seconds_limit=0.05)
    time = measure_step_time(asked, Toy(), toy_data(), capturing(graphs))
    [[first, update]] = [each.replays for each in made]
    assert first >= time.steps_timed and update > first


def test_the_graphs_and_their_gradients_go_with_the_trainer() -> None:
    with trainer(capturing(), configuration()) as one:
        one.step()
        kept = weakref.ref(one._captured[0])
        assert kept() is not None
    assert kept() is None and all(parameter.grad is None for parameter in one.model.parameters())


def test_on_a_cpu_there_is_nothing_to_record() -> None:
    computation = on_cpu(compile="capture")
    assert computation.graphs is None and not computation.compiles and computation.compile_mode == "none"
    assert computation.warnings == ["compile = 'capture' is no more than 'none' on cpu, which has no CUDA graphs"]


class HalfTheRate(Toy):
    def build_schedule(self, wanted: Configuration, steps_per_epoch: int) -> Callable[[int], float]:
        return lambda step: 0.5


def test_a_restored_step_has_the_rate_of_its_schedule_and_nothing_of_the_steps_before() -> None:
    wanted = configuration(20, optimizer="adamw")
    with trainer(on_cpu(fused=True), wanted, HalfTheRate()) as one:
        fresh, drawn = copy.deepcopy(one.state()), torch.get_rng_state()
        whole = stepped(one, 4)
        state, drawn_then = copy.deepcopy(one.state()), torch.get_rng_state()
        further = stepped(one, 3)
    for goes_on_from, random_state, steps, expected in ((fresh, drawn, 4, whole), (state, drawn_then, 3, further)):
        with trainer(capturing(), wanted, HalfTheRate()) as one:
            one.restore(copy.deepcopy(state))
            one.step()
            one.restore(copy.deepcopy(goes_on_from))
            torch.set_rng_state(random_state)
            assert stepped(one, steps) == expected
    with trainer(capturing(), wanted, HalfTheRate()) as one:
        one.restore(state)
        torch.set_rng_state(drawn_then)
        assert stepped(one, 3) == further


def test_counters_that_lie_on_the_host_move_to_the_device_of_their_parameter() -> None:
    device = torch.device("meta")
    parameter = nn.Parameter(torch.zeros(3, device=device))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    optimizer.state[parameter]["step"] = torch.tensor(4.0)
    RatesInPlace((optimizer,), [[0.1]], device)
    assert optimizer.state[parameter]["step"].device == optimizer.param_groups[0]["lr"].device == device
    assert optimizer.param_groups[0]["capturable"]


@pytest.mark.parametrize("kind", CAPTURABLE)
def test_an_optimizer_begins_again_as_it_was_made(kind: type[torch.optim.Optimizer]) -> None:
    """Against a new optimizer's own steps: NAdam's product of momenta begins at 1, all else at 0."""

    def steps(begun_again: bool) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(3))
        momentum: dict[str, Any] = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
        optimizer = kind([parameter], lr=0.1, **momentum)  # type: ignore[call-arg]
        for first in (False, True) if begun_again else (True,):
            with torch.no_grad():
                parameter.fill_(1.0)
            if first:
                begin_again((optimizer,))
            for step in range(3):
                parameter.grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
                optimizer.step()
        return parameter.detach()

    assert torch.equal(steps(begun_again=True), steps(begun_again=False))


def test_weights_add_up_in_double_precision_whatever_the_first_one_is() -> None:
    losses = LossSum(torch.device("cpu"))
    for weight in (torch.tensor([3], dtype=torch.int64), torch.tensor(0.1, dtype=torch.float64), 1.5):
        losses.add(WeightedLoss(torch.tensor(4.6), weight))
    assert losses.mean() == pytest.approx(3 * 4.6 / 4.6)
