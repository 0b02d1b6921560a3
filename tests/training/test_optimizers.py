"""Every named optimizer trains as its library does, with and without micro-batches."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bssearch.errors import LaunchError, UsageError
from bssearch.spec import OPTIMIZERS
from bssearch.training.gradient_norms import adam_divisors
from bssearch.training.optimizers import OF_TIMM, build_optimizer, check_libraries
from tests.torchvision import import_timm
from tests.training.test_trainer import weights_after
from tests.training.toys import Toy, configuration

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
