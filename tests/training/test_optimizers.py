"""Every named optimizer trains as its library does; a workload has its own optimizers, schedule and step."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bssearch.errors import LaunchError, UsageError, WorkloadError
from bssearch.records import Configuration, TrialState
from bssearch.spec import OPTIMIZERS, TrainingSpec
from bssearch.training.gradient_norms import adam_divisors
from bssearch.training.optimizers import OF_TIMM, build_optimizer, check_libraries
from bssearch.training.trainer import Trainer, own_training_step
from bssearch.workloads.base import TrainingStep, WeightedLoss, resolve
from tests.torchvision import import_timm
from tests.training.test_trainer import weights_after
from tests.training.toys import Run, Toy, configuration, on_cpu, request, toy_data

RATE, DECAY = 0.01, 0.05
Optimizers = list[torch.optim.Optimizer]


class Signs(nn.Module):
    """A network with every kind of parameter: an embedding, filters, a norm, matrices and biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 4)
        self.filters = nn.Conv1d(4, 3, 3)
        self.norm = nn.LayerNorm(12)
        self.layers = nn.Sequential(nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 2))
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        filtered = self.filters(self.embedding((inputs > 0).long()).transpose(1, 2)).flatten(1)
        scores: torch.Tensor = self.layers(torch.cat([self.norm(filtered), inputs], 1))
        return scores


def groups(parameters: Iterable[nn.Parameter], **of_decayed: Any) -> list[dict[str, Any]]:
    every = list(parameters)
    return [
        {"params": [one for one in every if one.ndim > 1], "weight_decay": DECAY, **of_decayed},
        {"params": [one for one in every if one.ndim == 1], "weight_decay": 0.0},
    ]


def muon(model: Signs) -> Optimizers:
    matrices = [model.layers[0].weight, model.layers[2].weight]
    rest = [one for one in model.parameters() if not any(one is matrix for matrix in matrices)]
    first = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")  # type: ignore[arg-type]
    return [first, torch.optim.AdamW(groups(rest), lr=RATE)]


def of_timm(name: str, **options: Any) -> Callable[[Signs], Optimizers]:
    def build(model: Signs) -> Optimizers:
        kind = getattr(importlib.import_module("timm.optim"), name)
        return [kind(groups(model.parameters(), always_adapt=True), lr=RATE, **options)]

    return build


def of_torch(kind: Any, **options: Any) -> Callable[[Signs], Optimizers]:
    return lambda model: [kind(groups(model.parameters()), lr=RATE, **options)]


LIBRARY: dict[str, Callable[[Signs], Optimizers]] = {
    "sgd": of_torch(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adam": of_torch(torch.optim.Adam),
    "adamw": of_torch(torch.optim.AdamW),
    "adamax": of_torch(torch.optim.Adamax),
    "nadam": of_torch(torch.optim.NAdam),
    "radam": of_torch(torch.optim.RAdam),
    "rmsprop": of_torch(torch.optim.RMSprop),
    "adagrad": of_torch(torch.optim.Adagrad),
    "adafactor": of_torch(torch.optim.Adafactor),
    "muon": muon,
    "lamb": of_timm("Lamb"),
    "lars": of_timm("Lars", momentum=0.9),
}
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({"momentum": 0.8, "nesterov": False},) * 2,
    "adamw": ({"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "adamax": ({"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}, {"betas": (0.8, 0.9), "eps": 1e-3}),
    "nadam": ({"momentum_decay": 0.1, "decoupled_weight_decay": True},) * 2,
    "radam": ({"decoupled_weight_decay": True},) * 2,
    "rmsprop": (
        {"alpha": 0.8, "epsilon": 1e-3, "momentum": 0.5, "centered": True},
        {"alpha": 0.8, "eps": 1e-3, "momentum": 0.5, "centered": True},
    ),
    "adagrad": (
        {"epsilon": 1e-3, "initial_accumulator_value": 0.1},
        {"eps": 1e-3, "initial_accumulator_value": 0.1},
    ),
    "adafactor": (
        {"beta2_decay": -0.5, "epsilon2": 1e-2, "clipping_threshold": 2.0},
        {"beta2_decay": -0.5, "eps": (None, 1e-2), "d": 2.0},
    ),
    "lamb": (
        {"epsilon": 1e-3, "max_gradient_norm": 0.1, "trust_clip": True},
        {"eps": 1e-3, "max_grad_norm": 0.1, "trust_clip": True},
    ),
    "lars": (
        {"nesterov": True, "trust_coefficient": 0.01, "epsilon": 1e-3, "trust_clip": True},
        {"nesterov": True, "trust_coeff": 0.01, "eps": 1e-3, "trust_clip": True, "momentum": 0.9},
    ),
    "muon": (
        {"momentum": 0.5, "nesterov": False, "newton_schulz_steps": 3, "adjustment": "original"},
        {"momentum": 0.5, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"},
    ),
}
"""Options by their names in a space, and by their names in the library."""


@pytest.fixture(scope="module", autouse=True)
def timm() -> None:
    import_timm()


def wanted(name: str, **changes: Any) -> Any:
    return configuration(optimizer=name, learning_rate=RATE, weight_decay=DECAY, **changes)


def trained(build: Callable[[Signs], Optimizers], steps: int = 30) -> torch.Tensor:
    """Return a model's weights after a plain loop whose second half has a lower rate."""
    torch.manual_seed(0)
    model = Signs(torch.float32)
    optimizers = build(model)
    for step in range(steps):
        if step == steps // 2:
            for group in (group for one in optimizers for group in one.param_groups):
                group["lr"] *= 0.3
        for one in optimizers:
            one.zero_grad()
        inputs = torch.randn(20, 6)
        nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long()).backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_thirty_steps_equal_the_librarys(name: str) -> None:
    ours = trained(lambda model: [build_optimizer(model, wanted(name))])
    assert torch.equal(ours, trained(LIBRARY[name]))
    assert not torch.equal(ours, trained(LIBRARY[name], steps=29))


BEFORE_AND_AFTER_THE_COMPILER = """
import sys, torch
from bssearch.executors.base import ExecutorSettings, Load
from bssearch.executors.worker import _workload_class
from bssearch.records import Configuration, StepTimeRequest
from bssearch.training.optimizers import KINDS, build_optimizer
from tests.training.test_optimizers import trained, wanted

def all_trained():
    return [trained(lambda model: [build_optimizer(model, wanted(name))], steps=4) for name in KINDS]

loaded = _workload_class()(Load(settings=ExecutorSettings(workload="digits", device="cpu"), slot=0))
configuration = Configuration(batch_size=64, micro_batch_size=64, learning_rate=0.1)
loaded.measure(StepTimeRequest(configuration=configuration, trial_train_seconds=1.0, seconds_limit=0.01))
before = all_trained()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert all(map(torch.equal, before, all_trained()))
"""


def test_a_worker_trains_without_the_compiler_until_something_imports_it() -> None:
    subprocess.run([sys.executable, "-c", BEFORE_AND_AFTER_THE_COMPILER], check=True)


@pytest.mark.parametrize("name", OTHER)
def test_every_option_reaches_the_library(name: str) -> None:
    options, of_library = OTHER[name]
    optimizer = build_optimizer(Signs(torch.float32), wanted(name, parameters=options))
    assert {option: optimizer.param_groups[0][option] for option in of_library} == of_library


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_add_up_to_the_batch(name: str) -> None:
    toy = Toy(dtype=torch.float64, network=lambda _: Signs(torch.float64))
    whole, parts = (
        weights_after(30, replace(wanted(name), micro_batch_size=20 // count, accumulation_steps=count), toy)
        for count in (1, 4)
    )
    assert (whole - parts).abs().max() < 1e-9


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_biases_and_norms_alone(name: str) -> None:
    model = Signs(torch.float32)
    optimizer = build_optimizer(model, wanted(name))
    decay = {id(one): group["weight_decay"] for group in optimizer.param_groups for one in group["params"]}
    assert [decay[id(one)] for one in model.parameters()] == [DECAY * (one.ndim > 1) for one in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers_take_the_same_steps(name: str) -> None:
    def build(fused: bool) -> Callable[[Signs], Optimizers]:
        return lambda model: [build_optimizer(model, wanted(name), fused=fused)]

    groups = build_optimizer(Signs(torch.float32), wanted(name), fused=True).param_groups
    is_fused = [group.get("fused") for group in groups if name != "muon" or "betas" in group]
    assert all(is_fused) if name in {"sgd", "adam", "adamw", "muon"} else not any(is_fused)
    assert torch.allclose(trained(build(True)), trained(build(False)), atol=1e-4)


@pytest.mark.parametrize("name", OF_TIMM)
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_the_trust_ratio_is_on_matrices_with_and_without_weight_decay_and_never_on_biases(
    name: str, decay: float
) -> None:
    def moved(size: float) -> tuple[float, float]:
        """Return the changes of a matrix and a bias of this size in a step with gradients of one."""
        layer = nn.Linear(3, 3)
        for one in layer.parameters():
            nn.init.constant_(one, size)
            one.grad = torch.ones_like(one)
        before = [one.detach().clone() for one in layer.parameters()]
        build_optimizer(layer, replace(wanted(name), weight_decay=decay)).step()
        weight, bias = ((one - was).abs().max().item() for one, was in zip(layer.parameters(), before, strict=True))
        return weight, bias

    (small, small_bias), (large, large_bias) = moved(0.001), moved(0.002)
    assert large == pytest.approx(2 * small, rel=0.01)
    assert large_bias == pytest.approx(small_bias)


def test_muons_adamw_for_the_rest_has_a_separate_rate() -> None:
    model = Signs(torch.float32)
    optimizer = build_optimizer(model, wanted("muon", parameters={"adamw_learning_rate_scale": 0.1}))
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert {name for name, one in model.named_parameters() if rates[id(one)] == RATE} == {
        "layers.0.weight",
        "layers.2.weight",
    }
    assert set(rates.values()) == {RATE, RATE * 0.1} and len(rates) == len(list(model.parameters()))


def test_muon_needs_no_adamw_for_a_model_of_matrices() -> None:
    assert isinstance(build_optimizer(nn.Linear(3, 2, bias=False), wanted("muon")), torch.optim.Muon)


def test_muon_refuses_a_model_without_matrices() -> None:
    with pytest.raises(UsageError, match="'muon' trains weight matrices outside embeddings, but the model has"):
        build_optimizer(nn.Sequential(nn.Embedding(3, 2), nn.Conv2d(1, 1, 3)), wanted("muon"))


def test_muons_gradients_are_not_divided_as_adams() -> None:
    model = Signs(torch.float32)
    optimizer = build_optimizer(model, wanted("muon"))
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    assert any("exp_avg_sq" in state for state in optimizer.state.values())
    assert adam_divisors([optimizer]) is None


def test_a_timm_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.9")
    with pytest.raises(LaunchError, match=r"'lars' needs timm >= 1.0.13; 1.0.9 is installed") as caught:
        check_libraries(Toy(), ["sgd", "lars"])
    assert caught.value.hint == "pip install 'bssearch[optimizers]'"


def test_only_timm_optimizers_need_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    check_libraries(Toy(), [name for name in OPTIMIZERS if name not in OF_TIMM])
    check_libraries(Toy(build_optimizer=lambda model, configuration: None), OF_TIMM)
    with pytest.raises(LaunchError, match="'lamb' needs timm"):
        check_libraries(Toy(), ["adamw", "lamb"])


def test_sgd_without_momentum_can_be_built() -> None:
    optimizer = build_optimizer(Toy().build_model(dropout=0.0), configuration(parameters={"momentum": 0.0}))
    assert not optimizer.defaults["nesterov"]


def test_frozen_parameters_are_left_out() -> None:
    with pytest.raises(UsageError, match="no parameter to train"):
        build_optimizer(Toy().build_model(dropout=0.0).requires_grad_(False), configuration())


Build = Callable[[nn.Module, Configuration], Any]
DATA = toy_data()


def weights_of_own(
    workload: Any, split: Configuration, steps: int = 7, *, scaled: bool = False, **settings: Any
) -> torch.Tensor:
    """Return the weights after some steps; ``scaled`` with the loss scaling of fp16."""
    computation: Any = on_cpu(**settings)
    if scaled:
        computation.new_scaler = lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Trainer(workload, split, DATA.train, computation, seed=3) as trainer:
        for _ in range(steps):
            trainer.step()
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def sgd(model: nn.Module, configuration: Configuration) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=configuration.learning_rate, momentum=0.9, nesterov=True)


WARMED = configuration(20, warmup_epochs=1.0, parameters={"clip_norm": 0.5})


@pytest.mark.parametrize("build", [sgd, lambda model, given: [sgd(model[0], given), sgd(model[3], given)]])
def test_own_optimizers_step_and_are_clipped_as_the_same_optimizer_of_bssearch(build: Build) -> None:
    assert torch.equal(weights_of_own(Toy(build_optimizer=build), WARMED), weights_of_own(Toy(), WARMED))


def test_an_optimizer_may_clear_gradients_its_own_way() -> None:
    cleared = list[bool]()

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            cleared.append(set_to_none)

    weights_of_own(Toy(build_optimizer=lambda model, configuration: Own(model.parameters(), lr=0.1)), WARMED)
    assert cleared == [True] * 7


def test_groups_keep_their_ratio_to_the_learning_rate_of_the_schedule() -> None:
    def two_rates(model: Any, configuration: Configuration) -> torch.optim.Optimizer:
        rate = configuration.learning_rate
        groups = [{"params": model[0].parameters(), "lr": rate / 10}, {"params": model[3].parameters()}]
        return torch.optim.SGD(groups, lr=rate)

    with Trainer(Toy(build_optimizer=two_rates), WARMED, DATA.train, on_cpu(), seed=3) as trainer:
        for step in range(7):
            trainer.step()
            low, high = (group["lr"] for group in trainer.optimizers[0].param_groups)
            factor = min(1.0, (step + 1) / 6)
            assert (low, high) == (pytest.approx(0.002 * factor), pytest.approx(0.02 * factor))
            assert trainer.learning_rate == pytest.approx(high)


def test_a_trial_warns_of_an_optimizer_that_does_not_use_the_learning_rate() -> None:
    def fixed(model: nn.Module, configuration: Configuration) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def warns(build: Build) -> bool:
        warnings = Run(request(), Toy(build_optimizer=build)).outcome.warnings
        return any("a doubled rate does not change the rates [0.5]" in w for w in warnings)

    assert (warns(fixed), warns(sgd)) == (True, False)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda model, _: model, "returned a Sequential; return a torch.optim.Optimizer"),
        (lambda model, _: None, "returned a NoneType"),
        (lambda model, configuration: [sgd(model, configuration), 1], r"\[1\] is a int"),
        (lambda model, _: {}, r"returned a dict \(\)"),
        (
            lambda model, configuration: sgd(nn.Linear(2, 2), configuration),
            "SGD over parameters outside the model",
        ),
    ],
)
def test_a_wrong_optimizer_is_named(build: Build, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        Trainer(Toy(build_optimizer=build), WARMED, DATA.train, on_cpu(), seed=3)


def test_a_workloads_schedule_replaces_warmup_and_schedule_until_the_horizon_ends_the_trial() -> None:
    asked: list[Any] = []

    def build(configuration: Configuration, steps_per_epoch: int) -> Callable[[int], float]:
        asked.append((configuration.parameters["horizon_samples"], steps_per_epoch))
        return lambda step: 1 / (1 + step)

    split = configuration(20, warmup_epochs=2.0, parameters={"horizon_samples": 300})
    run = Run(request(split, target=1.0, eval_every_steps=4), Toy(build_schedule=build))
    assert set(asked) == {(300, 5)}
    assert (run.outcome.state, run.outcome.steps) == (TrialState.EXHAUSTED, 15)
    rates = [one.learning_rate for one in run.observations]
    assert rates == pytest.approx([0.02 / (1 + step) for step in (0, 3, 7, 11, 14)])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda *_: 0.5, "build_schedule\\(\\) returned float"),
        (lambda *_: lambda step: None, "returned None at step 0"),
        (lambda *_: lambda step: torch.ones(2), "returned tensor.* at step 0"),
        (lambda *_: lambda step: float("nan"), "returned nan at step 0"),
        (lambda *_: lambda step: -1.0, "returned -1.0 at step 0; return a finite number >= 0"),
    ],
)
def test_a_wrong_schedule_is_named(build: Any, said: str) -> None:
    with (
        pytest.raises(WorkloadError, match=said),
        Trainer(Toy(build_schedule=build), WARMED, DATA.train, on_cpu(), seed=3) as trainer,
    ):
        trainer.step()


class Stepping(Toy):
    """Takes the step of bssearch by itself."""

    def training_step(self, step: TrainingStep) -> Any:
        total = torch.zeros(())
        for inputs, targets in step.micro_batches:
            loss = functional.cross_entropy(step.model(inputs), targets) / step.accumulation_steps
            step.backward(loss)
            total += loss.detach()
        step.update(step.optimizers)
        return total


ACCUMULATED = configuration(
    30, micro_batch_size=10, accumulation_steps=3, warmup_epochs=1.0, parameters={"clip_norm": 0.5, "ema_decay": 0.9}
)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"scaled": True}])
def test_a_training_step_equal_to_bssearchs_trains_the_same_weights(settings: dict[str, Any]) -> None:
    own, usual = (weights_of_own(toy, ACCUMULATED, **settings) for toy in (Stepping(), Toy()))
    assert torch.allclose(own, usual, rtol=0, atol=1e-7)  # the norm of the gradients is summed in another order


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda step: next(step.micro_batches)[0].sum(), "took 1 of 3 micro-batches"),
        (lambda step: list(step.micro_batches) and None, "returned NoneType; expected the loss to log"),
        (lambda step: next(zip(*step.micro_batches, strict=True))[0], "returned Tensor of shape \\(10, 6\\)"),
    ],
)
def test_a_wrong_training_step_is_named(step: Any, said: str) -> None:
    with (
        pytest.raises(WorkloadError, match=said),
        Trainer(Toy(training_step=step), ACCUMULATED, DATA.train, on_cpu(), seed=3) as trainer,
    ):
        trainer.step()


def test_a_forward_pass_uses_weights_changed_within_the_training_step() -> None:
    outputs: list[torch.Tensor] = []

    class Twice(Toy):
        def training_step(self, step: TrainingStep) -> Any:
            ((inputs, targets),) = step.micro_batches
            for _ in range(2):
                scores = step.model(inputs)
                outputs.append(scores.detach())
                loss = functional.cross_entropy(scores, targets)
                step.backward(loss)
                step.update(step.optimizers)
            return loss

    weights_of_own(Twice(), configuration(20, learning_rate=0.5), 1, precision="bf16")
    assert outputs[0].dtype is torch.bfloat16
    assert not torch.equal(*outputs)


def test_a_first_loss_that_is_not_finite_ends_the_trial() -> None:
    toy = Toy(training_step=lambda step: WeightedLoss(torch.tensor(float(len(list(step.micro_batches)))), 0.0))
    outcome = Run(request(ACCUMULATED), toy).outcome
    assert outcome.state is TrialState.DIVERGED and "the loss of the first step is inf" in outcome.reason


def test_a_training_step_is_refused_with_cuda_graphs() -> None:
    replaying: Any = SimpleNamespace(replays_graphs=True, settings=TrainingSpec(compile="max-autotune"))
    with pytest.raises(UsageError, match="'max-autotune' must be 'default' or 'none'"):
        own_training_step(Stepping(), replaying)


WITHOUT_LOSS = """
class Task:
    metrics = {}
    def load(self, device): ...
    def build_model(self, *, dropout): ...
    def evaluate(self, model, part): ...
    def training_step(self, step): ...

class Neither(Task):
    training_step = None
"""


def test_a_workload_with_a_training_step_needs_no_loss(tmp_path: Any) -> None:
    (tmp_path / "task.py").write_text(WITHOUT_LOSS)
    assert resolve("task.py:Task", {}, tmp_path)
    with pytest.raises(WorkloadError, match="lacks loss"):
        resolve("task.py:Neither", {}, tmp_path)
